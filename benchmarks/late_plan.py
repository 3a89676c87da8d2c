"""The communication that `all_reduce(delay=1)` hides, by the compilers of GPU and TPU, without either.

    JAX_PLATFORMS=cpu python benchmarks/late_plan.py [h100:4x8] [v5e:2x4]

Needs JAX's CUDA plugin and `libtpu` (`pip install 'jaxdist[gpu-plan,tpu-plan]'`). Compiles a step of a residual MLP,
with and without the delay, and with the mean of the loss in the metrics or without; `analysis.overlap` goes through
each schedule. Seconds are of the α-β model and a roofline, for comparison only.
"""

import os
import sys
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax

import jaxdist as jd
from jaxdist import analysis
from jaxdist.analysis import cost, pods

LAYERS, WIDTH, EXAMPLES = 8, 2048, 2048  # examples on one worker
# As in pipelined_plan.py: XLA's default order leaves pairs together.
OPTIONS = {"xla_gpu_enable_latency_hiding_scheduler": True, "xla_gpu_enable_triton_gemm": False}


class TrainState(NamedTuple):
    params: Any
    opt: Any


def loss(params, batch):
    x = batch
    for p in params:
        x = x + jnp.tanh(x @ p)
    return jnp.mean(jnp.square(x).astype(jnp.float32))


def make_params():
    return [jnp.zeros((WIDTH, WIDTH), jnp.bfloat16) for _ in range(LAYERS)]


def weigh(topology, name, reducer, delay, metrics):
    gpu = topology.startswith("h")
    mesh = pods.gpu(topology) if gpu else pods.tpu(topology)
    tx = optax.chain(jd.all_reduce(reducer, delay=delay), optax.sgd(1e-3))

    def step(state, batch):
        value, gradients = jd.local_value_and_grad(loss)(state.params, batch)
        updates, opt = tx.update(gradients, state.opt, state.params)
        new = TrainState(optax.apply_updates(state.params, updates), opt)
        return new, {"loss": jax.lax.pmean(value, "data")} if metrics else {}

    batch = jax.ShapeDtypeStruct((EXAMPLES * mesh.size, WIDTH), jnp.bfloat16)
    planned = pods.plan(
        jd.distribute(step, mesh),
        lambda: TrainState(make_params(), tx.init(make_params())),
        batch,
        mesh,
        compiler_options=OPTIONS if gpu else {},
    )
    found = analysis.overlap(planned.compiled, cost.of_mesh(topology.split(":")[0], mesh))
    reduces = [op for op in found.ops if op.collective.kind in ("all-reduce", "reduce-scatter", "all-gather")]
    mib = [x / 2**20 for x in (found.wire_bytes, found.asynchronous_bytes, found.exposed_bytes)]
    times = [1e3 * x for x in (found.communication_seconds, found.exposed_seconds, found.compute_seconds)]
    print(
        f"| {topology} | {name}, `delay={delay}` | {'yes' if metrics else 'no'} | {len(reduces)} | "
        f"{' | '.join(f'{x:.1f}' for x in mib)} | {' | '.join(f'{x:.2f}' for x in times)} |",
        flush=True,
    )


def main(topologies):
    print(
        "| target | step | loss averaged | collectives | MiB sent | asynchronous | over nothing | "
        "communication, ms | exposed | computation |"
    )
    reducers = {"`exact`": jd.exact(), "buckets of 16 MiB": jd.reducers.bucketed(jd.exact(), bucket_bytes=16 << 20)}
    for topology in topologies:
        for name, reducer in reducers.items():
            for delay in (0, 1):
                for metrics in (False, True):
                    weigh(topology, name, reducer, delay, metrics)


if __name__ == "__main__":
    main(sys.argv[1:] or ["h100:4x8", "v5e:2x4"])
