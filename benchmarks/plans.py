"""The communication that overlap hides on GPUs and TPUs that are not attached, by their own compilers.

    JAX_PLATFORMS=cpu python benchmarks/plans.py pipelined --out benchmarks/reports/NAME
    JAX_PLATFORMS=cpu python benchmarks/plans.py late [h100:4x8] [v5e:2x4]
    JAX_PLATFORMS=cpu python benchmarks/plans.py tick_tock [v5e:2x4]

GPUs need JAX's CUDA plugin, TPUs `libtpu` (`pip install 'jaxdist[gpu-plan,tpu-plan]'`). Each plan compiles train steps
for the topology, and `analysis.overlap` goes through the schedules with the α-β model of `analysis.cost` and a
the speed of the chips: seconds are for comparison only.

- `pipelined`: a GPT with unrolled blocks, by default on 32 H100s in four nodes: plain data parallelism with buckets,
  and `pipelined` with several numbers of deferred layers.
- `late`: a residual MLP with and without `all_reduce(delay=1)`, with the mean of the loss in the metrics or without.
- `tick_tock`: a stack of residual MLP layers in bfloat16, by a plain loop, by `wavelet` in pairs and rolling, and
  rolling with the reduction in the loop.
"""

import argparse
import functools
import importlib.metadata
import json
import math
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import jax.numpy as jnp
import optax

import jaxdist as jd
from jaxdist import analysis, schedule
from jaxdist._cli.models import gpt
from jaxdist._cli.models.base import LayerRunner
from jaxdist.analysis import base, cost, pods
from jaxdist.overlap import Layered

ADAMW = optax.adamw(3e-4)
# The scheduler that moves starts up and ends down; XLA's default order leaves pairs together. Products by cuBLAS, since
# Triton's kernels take most of the time to compile.
OPTIONS = {"xla_gpu_enable_latency_hiding_scheduler": True, "xla_gpu_enable_triton_gemm": False}


class TrainState(NamedTuple):
    params: Any
    opt: Any


# `pipelined`


def by_bucket(loss, reducer):
    tx = optax.chain(jd.all_reduce(reducer), ADAMW)

    def step(state, batch):
        value, gradients = jd.local_value_and_grad(loss)(state.params, batch)
        updates, opt = tx.update(gradients, state.opt, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt), jax.lax.pmean(value, "data")

    return step, lambda params: TrainState(params, tx.init(params))


def crossing(loss, layers, defer):
    pipeline = jd.overlap.pipelined(loss, ADAMW, defer=defer, layers=layers)
    return pipeline.step, pipeline.init


def profile(config, params, layers, tokens, where, compute_seconds):
    """Seconds of each layer, and of its all-reduce: a share of a step's computation as its products have in all."""
    devices = len(where.coordinates)

    def reduction(nbytes):
        op = base.make_collective("all-reduce", [("float32", nbytes)], devices=devices, where="")
        return cost.seconds(cost.crossings(op, where))

    entries = [layer if isinstance(layer, tuple) else (layer,) for layer in layers]
    sizes = [sum(4 * leaf.size for name in layer for leaf in jax.tree.leaves(params[name])) for layer in entries]
    flops = [0 if "tokens" in layer else 2 * tokens * size / 4 for layer, size in zip(entries, sizes, strict=True)]
    # Scores and their weighted sums.
    flops = [
        count + 4 * tokens * config.context * config.width * layer[0].startswith("block")
        for count, layer in zip(flops, entries, strict=True)
    ]
    # A third is forward. Products at their peak would be too short: most of a step is memory traffic.
    forward = [compute_seconds / 3 * count / sum(flops) for count in flops]
    found = schedule.profile_of(forward=forward, backward=[2 * seconds for seconds in forward], sizes=sizes)
    overhead = reduction(4)
    return found, {"overhead": overhead, "bandwidth": max(sizes) / (reduction(max(sizes)) - overhead)}


def weigh_pipelined(name, made, params, batch, mesh, where, options):
    step, make_state = made
    began = time.perf_counter()
    planned = pods.plan(
        jd.distribute(step, mesh),
        lambda: make_state(jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), params)),
        batch,
        mesh,
        compiler_options=options,
    )
    compiling = time.perf_counter() - began
    seen = analysis.overlap(planned.compiled, where)
    reduces = [op for op in seen.ops if op.collective.kind == "all-reduce"]
    return {
        "step": name,
        "all_reduces": len(reduces),
        "asynchronous": sum(op.asynchronous for op in reduces),
        "wire_bytes": seen.wire_bytes,
        "communication_seconds": seen.communication_seconds,
        "exposed_seconds": seen.exposed_seconds,
        "compute_seconds": seen.compute_seconds,
        "seconds": seen.seconds,
        "arguments": planned.memory.arguments,
        "temporary": planned.memory.temporary,
        "compile_seconds": compiling,
        "each": [
            [op.collective.bytes, op.asynchronous, op.operations, op.seconds, op.exposed_seconds] for op in reduces
        ],
        "warnings": seen.warnings,
    }, planned.compiled


def unrolled(f, layers, x):
    return functools.reduce(lambda x, params: f(params, x), layers, x)


def add_pipelined_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--topology", default="h100:4x8")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--sequences", type=int, default=1, help="on each device")
    parser.add_argument(
        "--defer", type=int, nargs="*", help="default: what `schedule.choose_defer` says, 0, half and all"
    )
    parser.add_argument("--xla", nargs="*", default=[], help="further options of the compiler, NAME=VALUE")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--hlo", type=Path, help="a folder for the compiled programs")


def pipelined(given: argparse.Namespace) -> None:
    options = OPTIONS | {name: json.loads(value) for name, value in (option.split("=") for option in given.xla)}
    mesh = pods.gpu(given.topology)
    where = cost.of_mesh(given.topology.partition(":")[0].lower(), mesh)
    config = gpt.GPTConfig(given.layers, given.width, given.width // 64, given.context)
    # In a loop all gradients would come at its end.
    loss = functools.partial(gpt.loss, config, layers=LayerRunner(lambda f: f, unrolled))
    params = jax.eval_shape(lambda: gpt.init(config, jax.random.key(0)))
    batch = jax.ShapeDtypeStruct((given.sequences * mesh.size, given.context + 1), jax.numpy.uint8)
    layers = (("tokens", "positions"), *(f"block_{i}" for i in range(given.layers)), ("final_norm", "out"))
    record: dict[str, Any] = {
        "topology": given.topology,
        "config": config._asdict(),
        "sequences": given.sequences,
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "jax-cuda13-plugin")},
        "options": options,
        "steps": [],
    }

    def add(name, made):
        row, compiled = weigh_pipelined(name, made, params, batch, mesh, where, options)
        record["steps"].append(row)
        milliseconds = [1e3 * row[f"{what}seconds"] for what in ("communication_", "exposed_", "compute_", "")]
        print(
            f"| {name} | {row['all_reduces']} ({row['asynchronous']}) | "
            f"{' | '.join(f'{x:.2f}' for x in milliseconds)} | {row['temporary'] / 2**20:.0f} | "
            f"{row['compile_seconds']:.0f} |",
            flush=True,
        )
        for folder in (given.out, given.hlo):
            if folder:
                folder.mkdir(parents=True, exist_ok=True)
        if given.hlo:
            (given.hlo / f"{name.replace(' ', '_')}.hlo").write_text(compiled.as_text())
        if given.out:
            (given.out / "pipelined_plan.json").write_text(json.dumps(record, indent=1) + "\n")
        return row

    size = record["parameters"] = math.fsum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"{size / 1e6:.1f} million parameters, {given.topology}, {given.sequences} sequences a device")
    print(
        "| step | all-reduces (asynchronous) | communication, ms | exposed | computation | step | temporary MiB | "
        "compile s |"
    )
    seconds = add("plain, buckets", by_bucket(loss, jd.reducers.bucketed(jd.exact())))["compute_seconds"]
    found, link = profile(config, params, layers, given.sequences * given.context, where, seconds)
    chosen = record["chosen_defer"] = schedule.choose_defer(found, **link)
    record["model"] = {k: schedule.pipelined_time(found, defer=k, **link) for k in range(len(layers) + 1)}
    for defer in dict.fromkeys((chosen, 0, len(layers) // 2, len(layers)) if given.defer is None else given.defer):
        add(f"pipelined, defer={defer}", crossing(loss, layers, defer))
    if given.defer is None:
        add("plain, one all-reduce", by_bucket(loss, jd.exact()))


# `late`

LATE_LAYERS, WIDTH, EXAMPLES = 8, 2048, 2048  # examples on one worker


def late_loss(params, batch):
    x = batch
    for p in params:
        x = x + jnp.tanh(x @ p)
    return jnp.mean(jnp.square(x).astype(jnp.float32))


def late_params():
    return [jnp.zeros((WIDTH, WIDTH), jnp.bfloat16) for _ in range(LATE_LAYERS)]


def weigh_late(topology, name, reducer, delay, metrics):
    gpu = topology.startswith("h")
    mesh = pods.gpu(topology) if gpu else pods.tpu(topology)
    tx = optax.chain(jd.all_reduce(reducer, delay=delay), optax.sgd(1e-3))

    def step(state, batch):
        value, gradients = jd.local_value_and_grad(late_loss)(state.params, batch)
        updates, opt = tx.update(gradients, state.opt, state.params)
        new = TrainState(optax.apply_updates(state.params, updates), opt)
        return new, {"loss": jax.lax.pmean(value, "data")} if metrics else {}

    batch = jax.ShapeDtypeStruct((EXAMPLES * mesh.size, WIDTH), jnp.bfloat16)
    planned = pods.plan(
        jd.distribute(step, mesh),
        lambda: TrainState(late_params(), tx.init(late_params())),
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


def late(given: argparse.Namespace) -> None:
    print(
        "| target | step | loss averaged | collectives | MiB sent | asynchronous | over nothing | "
        "communication, ms | exposed | computation |"
    )
    reducers = {"`exact`": jd.exact(), "buckets of 16 MiB": jd.reducers.bucketed(jd.exact(), bucket_bytes=16 << 20)}
    for topology in given.topologies:
        for name, reducer in reducers.items():
            for delay in (0, 1):
                for metrics in (False, True):
                    weigh_late(topology, name, reducer, delay, metrics)


# `tick_tock`

TICK_LAYERS, WAVE = 16, 4096  # examples of one wave on one worker


def layer(p, x):
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


def head(p, x, batch):
    return jnp.mean(jnp.square(x @ p - batch[1]).astype(jnp.float32))


def tick_loss(params, batch):
    x, _ = jax.lax.scan(lambda x, p: (jax.checkpoint(layer)(p, x), None), batch[0], params.layers)
    return head(params.head, x, batch)


def tick_params():
    weights = {name: jnp.zeros((TICK_LAYERS, WIDTH, WIDTH), jnp.bfloat16) for name in ("up", "down")}
    return Layered((), weights, jnp.zeros((WIDTH, 1), jnp.bfloat16))


def wave(examples):
    return tuple(jax.ShapeDtypeStruct((examples, width), jnp.bfloat16) for width in (WIDTH, 1))


def by_gradient(value_and_grad, tx):
    def step(state, batch):
        _, gradients = value_and_grad(state.params, batch)
        updates, opt = tx.update(gradients, state.opt, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt), {}

    return step, lambda: TrainState(tick_params(), tx.init(tick_params()))


def rolling(tx, **options):
    made = jd.overlap.wavelet(layer, head, tx, mode="rolling", **options)
    step = lambda state, batch: ({"wave": made.step(state["wave"], batch)[0]}, {})  # noqa: E731
    return step, lambda: {"wave": made.init(tick_params(), wave(WAVE))}


def tick_tock(given: argparse.Namespace) -> None:
    topology = given.topology
    mesh = pods.tpu(topology)
    sgd = optax.sgd(1e-3)
    tx = optax.chain(jd.all_reduce(jd.exact()), sgd)
    one, double = wave(WAVE * mesh.size), wave(2 * WAVE * mesh.size)
    variants = {
        "one wave": (by_gradient(jd.local_value_and_grad(tick_loss), tx), one, 1),
        "double batch": (by_gradient(jd.local_value_and_grad(tick_loss), tx), double, 2),
        "micro_batches=2": (by_gradient(jd.local_value_and_grad(tick_loss, micro_batches=2), tx), double, 2),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    plans = parser.add_subparsers(dest="plan", required=True)
    add_pipelined_options(plans.add_parser("pipelined"))
    plans.add_parser("late").add_argument("topologies", nargs="*", default=["h100:4x8", "v5e:2x4"])
    plans.add_parser("tick_tock").add_argument("topology", nargs="?", default="v5e:2x4")
    given = parser.parse_args()
    {"pipelined": pipelined, "late": late, "tick_tock": tick_tock}[given.plan](given)


if __name__ == "__main__":
    main()
