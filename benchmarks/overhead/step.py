"""The overhead over a hand-written step: `all_reduce(exact())` under `distribute` against one `lax.pmean`.

    python benchmarks/overhead step --out benchmarks/reports/NAME

Eight simulated devices run the same small multilayer perceptron. The two steps take turns; the ratio is that of their
medians, and its spread that of the ratios of the single rounds. The opponents: one `pmean` of the concatenated
gradients, and a `pmean` for each leaf, which sends as many messages as there are leaves.
"""

import argparse
import itertools
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# More threads than devices, or those that wait in a collective keep those that they wait for from running.
os.environ.setdefault("NPROC", "32")

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import write_record
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import jaxdist as jd

DIMENSIONS = (64, 256, 256, 256, 10)
EXAMPLES = 256


def make_params():
    keys = jax.random.split(jax.random.key(0), len(DIMENSIONS))
    sizes = list(itertools.pairwise(DIMENSIONS))
    return {
        f"layer_{i}": {"weight": jax.random.normal(keys[i], size) * size[0] ** -0.5, "bias": jnp.zeros(size[1])}
        for i, size in enumerate(sizes)
    }


def loss(params, batch):
    x, labels = batch
    for i in range(len(params)):
        x = x @ params[f"layer_{i}"]["weight"] + params[f"layer_{i}"]["bias"]
        x = jax.nn.relu(x) if i < len(params) - 1 else x
    return optax.softmax_cross_entropy_with_integer_labels(x, labels).mean()


def with_the_library(mesh):
    tx = optax.chain(jd.all_reduce(jd.exact()), optax.adam(1e-3))

    def step(state, batch):
        params, opt_state = state
        value, gradients = jd.local_value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": lax.pmean(value, "data")}

    return jd.distribute(step, mesh), jd.init_state(lambda: (make_params(), tx.init(make_params())), mesh)


def by_hand(mesh, flat):
    tx = optax.adam(1e-3)

    def mean(gradients):
        if not flat:
            return lax.pmean(gradients, "data")
        leaves, structure = jax.tree.flatten(gradients)
        whole = lax.pmean(jnp.concatenate([leaf.ravel() for leaf in leaves]), "data")
        parts = jnp.split(whole, np.cumsum([leaf.size for leaf in leaves])[:-1])
        return structure.unflatten([part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)])

    @partial(jax.jit, donate_argnums=(0,))
    @partial(jax.shard_map, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("data")), out_specs=PartitionSpec())
    def run(state, batch):
        params, opt_state = state
        local = jax.tree.map(lambda x: lax.pcast(x, "data", to="varying"), params)
        value, gradients = jax.value_and_grad(loss)(local, batch)
        updates, opt_state = tx.update(mean(gradients), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": lax.pmean(value, "data")}

    everywhere = NamedSharding(mesh, PartitionSpec())
    return run, jax.jit(lambda: (make_params(), tx.init(make_params())), out_shardings=everywhere)()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=10, help="of each contestant in a round")
    parser.add_argument("--out", type=Path, help="the folder of the report")


def main(given: argparse.Namespace) -> None:
    mesh = jd.make_mesh({"data": 8})
    random = np.random.default_rng(0)
    inputs = random.standard_normal((EXAMPLES, DIMENSIONS[0])).astype(np.float32)
    batch = jd.global_batch((inputs, random.integers(0, 10, EXAMPLES)), mesh)
    contestants = {
        "library": with_the_library(mesh),
        "hand_flat": by_hand(mesh, flat=True),
        "hand_leaf": by_hand(mesh, flat=False),
    }
    runs = {name: run for name, (run, _) in contestants.items()}
    states = {name: state for name, (_, state) in contestants.items()}
    medians: dict[str, list[float]] = {name: [] for name in runs}
    losses = {}
    for turn in range(given.rounds + 1):
        for name in runs if turn % 2 else reversed(runs):
            times = []
            for _ in range(given.steps):
                start = time.perf_counter()
                states[name], metrics = runs[name](states[name], batch)
                jax.block_until_ready((states[name], metrics))
                times.append(time.perf_counter() - start)
            losses[name] = float(metrics["loss"])
            if turn:  # the first compiles
                medians[name].append(statistics.median(times))
    whole = {name: statistics.median(times) for name, times in medians.items()}
    ratios = {}
    for other in ("hand_flat", "hand_leaf"):
        single = sorted(a / b for a, b in zip(medians["library"], medians[other], strict=True))
        quartiles = [round(single[len(single) * i // 4], 3) for i in (1, 3)]
        ratios[other] = {"ratio": round(whole["library"] / whole[other], 3), "quartiles_of_rounds": quartiles}
        print(f"library / {other}: {ratios[other]['ratio']:.3f}, middle half of the rounds {quartiles}")
    print({name: f"{seconds * 1e3:.2f} ms" for name, seconds in whole.items()}, losses)
    found = {
        "median_seconds": whole,
        "ratios": ratios,
        "losses": losses,
        "rounds": given.rounds,
        "jax": jax.__version__,
    }
    write_record(given.out, "overhead", found)
