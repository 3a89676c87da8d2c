"""Compile and step times of two checkouts of jaxdist, in turns: the one before the redesign and this one.

    git worktree add /tmp/before 9198646
    python benchmarks/reports/2026-11-redesign/before_after.py /tmp/before --out benchmarks/reports/2026-11-redesign

Each turn starts one fresh process for each checkout. A process builds five training steps on four simulated devices,
with names that both checkouts have, and reports the seconds to trace and lower, to compile, and the median step. The
figures are medians over the turns, and the ratio is that of the medians.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve()
WIDTHS = (64, *[256] * 12, 10)
STEPS = 40


def measure_all() -> dict[str, dict[str, float]]:
    """The times of this process's jaxdist, by method."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import jaxdist as jd

    def make_params():
        keys = jax.random.split(jax.random.key(0), len(WIDTHS))
        return [
            {"w": jax.random.normal(key, size) * size[0] ** -0.5, "b": jnp.zeros(size[1])}
            for key, size in zip(keys, itertools.pairwise(WIDTHS), strict=False)
        ]

    def loss(params, batch):
        x, labels = batch
        for layer in params[:-1]:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        x = x @ params[-1]["w"] + params[-1]["b"]
        return optax.softmax_cross_entropy_with_integer_labels(x, labels).mean()

    adam = optax.adam(1e-3)
    methods = {
        "all_reduce(exact())": optax.chain(jd.all_reduce(jd.exact()), adam),
        "all_reduce(power_sgd(4))": optax.chain(jd.all_reduce(jd.error_feedback(jd.power_sgd(rank=4))), adam),
        "all_reduce(qsgd(4))": optax.chain(jd.all_reduce(jd.compressed(jd.qsgd(4))), adam),
        "zero_redundancy": jd.zero_redundancy(adam),
        "local_steps": jd.local_steps(adam, optax.sgd(0.7, momentum=0.9), sync_period=4),
    }
    mesh = jd.make_mesh({"data": 4})
    random = np.random.default_rng(0)
    inputs = random.standard_normal((128, WIDTHS[0])).astype(np.float32)
    batch = jd.global_batch((inputs, random.integers(0, 10, 128)), mesh)

    def measure(name, tx):
        def make_state():
            params = make_params()
            # Workers of local steps have models of their own between rounds.
            return jd.PerWorker(params) if name == "local_steps" else params, tx.init(params)

        def step(state, batch):
            params, opt_state = state
            value, gradients = jd.local_value_and_grad(loss)(params, batch)
            updates, opt_state = tx.update(gradients, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), {"loss": jax.lax.pmean(value, "data")}

        run = jd.distribute(step, mesh)
        state = jd.init_state(make_state, mesh)
        start = time.perf_counter()
        lowered = run.lower(state, batch)
        traced = time.perf_counter()
        lowered.compile()
        compiled = time.perf_counter()
        times = []
        for _ in range(STEPS + 4):
            begin = time.perf_counter()
            state, metrics = run(state, batch)
            jax.block_until_ready((state, metrics))
            times.append(time.perf_counter() - begin)
        return {"trace_s": traced - start, "compile_s": compiled - traced, "step_s": statistics.median(times[4:])}

    return {name: measure(name, tx) for name, tx in methods.items()}


def run_child(checkout: Path) -> dict[str, dict[str, float]]:
    """The times of a checkout, from a fresh process."""
    environment = os.environ | {
        "PYTHONPATH": str(checkout),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "NPROC": "16",
    }
    command = [sys.executable, str(HERE), "--child"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, nargs="?", help="a checkout of the commit to compare with")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, help="the folder of the report")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(measure_all()))
        return
    if given.before is None:
        parser.error("name the checkout to compare with")
    checkouts = {"before": given.before, "after": HERE.parents[3]}
    found: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in checkouts}
    for turn in range(given.turns):
        for name in list(checkouts)[:: 1 if turn % 2 else -1]:
            found[name].append(run_child(checkouts[name]))
    rows = {}
    for method, kinds in found["after"][0].items():
        for kind in kinds:
            times = {name: [turn[method][kind] for turn in turns] for name, turns in found.items()}
            medians = {name: statistics.median(values) for name, values in times.items()}
            rows[f"{method} {kind}"] = times | {"ratio": medians["after"] / medians["before"]}
            shown = f"{medians['before'] * 1e3:8.1f} {medians['after'] * 1e3:8.1f} ms"
            print(f"{method:26} {kind:10} {shown} {rows[f'{method} {kind}']['ratio']:.2f}")
    if given.out:
        (given.out / "before_after.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
