"""The communication that two waves of data hide for each other on TPU, by the TPU's own compiler, without a TPU.

    JAX_PLATFORMS=cpu python benchmarks/tick_tock_plan.py [v5e:2x4]

Needs `libtpu` (`pip install 'jaxdist[tpu-plan]'`). Compiles one step of a stack of residual MLP layers in bfloat16,
by a plain loop, by `wavelet` in pairs and rolling, and rolling with the reduction in the loop; then
`analysis.overlap` goes through each schedule. Seconds are of the α-β model and a roofline, for comparison only.
"""

import os
import sys
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import jax.numpy as jnp
import optax

import jaxdist as jd
from jaxdist import analysis
from jaxdist.analysis import cost, pods
from jaxdist.overlap import Layered

LAYERS, WIDTH, EXAMPLES = 16, 2048, 4096  # examples of one wave on one worker


class TrainState(NamedTuple):
    params: Any
    opt: Any


def layer(p, x):
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


def head(p, x, batch):
    return jnp.mean(jnp.square(x @ p - batch[1]).astype(jnp.float32))


def loss(params, batch):
    x, _ = jax.lax.scan(lambda x, p: (jax.checkpoint(layer)(p, x), None), batch[0], params.layers)
    return head(params.head, x, batch)


def make_params():
    weights = {name: jnp.zeros((LAYERS, WIDTH, WIDTH), jnp.bfloat16) for name in ("up", "down")}
    return Layered((), weights, jnp.zeros((WIDTH, 1), jnp.bfloat16))


def wave(examples):
    return tuple(jax.ShapeDtypeStruct((examples, width), jnp.bfloat16) for width in (WIDTH, 1))


def by_gradient(value_and_grad, tx):
    def step(state, batch):
        _, grads = value_and_grad(state.params, batch)
        updates, opt = tx.update(grads, state.opt, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt), {}

    return step, lambda: TrainState(make_params(), tx.init(make_params()))


def rolling(tx, **options):
    made = jd.overlap.wavelet(layer, head, tx, mode="rolling", **options)
    step = lambda state, batch: ({"wave": made.step(state["wave"], batch)[0]}, {})  # noqa: E731
    return step, lambda: {"wave": made.init(make_params(), wave(EXAMPLES))}


def main(topology):
    mesh = pods.tpu(topology)
    sgd = optax.sgd(1e-3)
    tx = optax.chain(jd.all_reduce(jd.exact()), sgd)
    one, double = wave(EXAMPLES * mesh.size), wave(2 * EXAMPLES * mesh.size)
    variants = {
        "one wave": (by_gradient(jd.local_value_and_grad(loss), tx), one, 1),
        "double batch": (by_gradient(jd.local_value_and_grad(loss), tx), double, 2),
        "micro_batches=2": (by_gradient(jd.local_value_and_grad(loss, micro_batches=2), tx), double, 2),
        "pair": (by_gradient(jd.overlap.wavelet(layer, head), tx), (one, one), 2),
        "rolling": (rolling(tx), one, 1),
        "rolling, reducer=": (rolling(sgd, reducer=jd.exact()), one, 1),
    }
    print(f"{'':18} MiB in temp | ms a wave, of it waiting | MiB sent, asynchronous, over nothing")
    for name, ((step, make_state), batch, waves) in variants.items():
        plan = pods.plan(jd.distribute(step, mesh), make_state, batch, mesh)
        found = analysis.overlap(plan.compiled, cost.of_mesh(topology.split(":")[0], mesh))
        mib = [x / 2**20 for x in (plan.memory.arguments, plan.memory.temporary)]
        wire = [x / waves / 2**20 for x in (found.wire_bytes, found.asynchronous_bytes, found.exposed_bytes)]
        times = [1e3 * x / waves for x in (found.seconds, found.exposed_seconds)]
        print(
            f"{name:18} {mib[0]:6.0f} {mib[1]:5.0f} | {times[0]:6.2f} {times[1]:6.2f} | "
            + " ".join(f"{x:6.1f}" for x in wire)
        )


if __name__ == "__main__":
    main(*sys.argv[1:] or ["v5e:2x4"])
