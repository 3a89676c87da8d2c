"""The communication that `pipelined` hides across steps on GPUs, by the GPU's own compiler, without a GPU.

    JAX_PLATFORMS=cpu python benchmarks/pipelined_plan.py --out benchmarks/reports/NAME

Needs JAX's CUDA plugin (`pip install 'jaxdist[gpu-plan]'`). Compiles the train step of a GPT with unrolled blocks for
32 H100s in four nodes: plain data parallelism with buckets, and `pipelined` with several numbers of deferred layers.
Then `analysis.overlap` goes through each schedule with the α-β model of `analysis.cost`.
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

import jax
import optax

import jaxdist as jd
from jaxdist import analysis, schedule
from jaxdist._cli.models import gpt
from jaxdist.analysis import base, cost, pods

TX = optax.adamw(3e-4)
# The scheduler that moves starts up and ends down; XLA's default order leaves pairs together. Products by cuBLAS, since
# Triton's kernels take most of the time to compile.
OPTIONS = {"xla_gpu_enable_latency_hiding_scheduler": True, "xla_gpu_enable_triton_gemm": False}


class TrainState(NamedTuple):
    params: Any
    opt: Any


def plain(loss, reducer):
    tx = optax.chain(jd.all_reduce(reducer), TX)

    def step(state, batch):
        value, gradients = jd.local_value_and_grad(loss)(state.params, batch)
        updates, opt = tx.update(gradients, state.opt, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt), jax.lax.pmean(value, "data")

    return step, lambda params: TrainState(params, tx.init(params))


def crossing(loss, layers, defer):
    pipeline = jd.overlap.pipelined(loss, TX, defer=defer, layers=layers)
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


def weigh(name, made, params, batch, mesh, where, options):
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    given = parser.parse_args()

    options = OPTIONS | {name: json.loads(value) for name, value in (option.split("=") for option in given.xla)}
    mesh = pods.gpu(given.topology)
    where = cost.of_mesh(given.topology.partition(":")[0].lower(), mesh)
    config = gpt.GPTConfig(given.layers, given.width, given.width // 64, given.context)
    loss = functools.partial(gpt.loss, config)
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
        row, compiled = weigh(name, made, params, batch, mesh, where, options)
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
    seconds = add("plain, buckets", plain(loss, jd.reducers.bucketed(jd.exact())))["compute_seconds"]
    found, link = profile(config, params, layers, given.sequences * given.context, where, seconds)
    chosen = record["chosen_defer"] = schedule.choose_defer(found, **link)
    record["model"] = {k: schedule.pipelined_time(found, defer=k, **link) for k in range(len(layers) + 1)}
    for defer in dict.fromkeys((chosen, 0, len(layers) // 2, len(layers)) if given.defer is None else given.defer):
        add(f"pipelined, defer={defer}", crossing(loss, layers, defer))
    if given.defer is None:
        add("plain, one all-reduce", plain(loss, jd.exact()))


if __name__ == "__main__":
    main()
