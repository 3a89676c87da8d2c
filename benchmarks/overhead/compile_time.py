"""Seconds to trace and compile a step with Adam against the number of leaves, beside a `psum` of the tree by hand.

    python benchmarks/overhead compile_time --out benchmarks/reports/NAME
    python benchmarks/overhead compile_time --target v5e:2x2 --leaves 400 --side 256 --out benchmarks/reports/NAME

Half of the leaves are matrices `[side, side]`, half are vectors `[side]`. Each program is compiled in a process of its
own, so that nothing is cached, `--repetitions` times; the medians count. Seconds are those of the processor, which do
not depend on what else the machine does, beside those of the clock. TPUs need `libtpu` and are not attached.

- `plain`: the step of one worker, which communicates nothing.
- `psum`: `jax.lax.psum` of the tree of gradients, written by hand in `shard_map`: what the others are compared with.
- the others: `all_reduce` of that reducer, `local_steps` as in DiLoCo, and `zero_redundancy`.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import run_process, write_record

PROGRAMS = ("plain", "psum", "exact", "power_sgd", "two_shot", "diloco", "zero")


def lower_by_hand(name: str, like: Any, mesh: Any) -> Callable[[], Any]:
    """A step without the library."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import PartitionSpec as P

    adam = optax.adam(1e-3)

    def step(params: Any, state: Any, batch: Any) -> Any:
        gradients = jax.tree.map(lambda p: jnp.sin(p) * batch[0], params)
        if name == "psum":
            gradients = jax.tree.map(lambda x: x / mesh.size, jax.lax.psum(gradients, "data"))
        updates, state = adam.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    specs = (P(), P(), P("data"))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    place = lambda tree, spec: jax.tree.map(  # noqa: E731
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec)), tree
    )
    batch = place(jax.ShapeDtypeStruct((mesh.size,), jnp.float32), P("data"))
    state = place(jax.eval_shape(adam.init, like), P())
    return lambda: jax.jit(mapped, donate_argnums=(0, 1)).lower(place(like, P()), state, batch)


def lower_ours(name: str, like: Any, mesh: Any) -> Callable[[], Any]:
    """The same step with a transformation of the library."""
    import jax
    import jax.numpy as jnp
    import optax

    import jaxdist as jd
    from jaxdist.analysis import pods

    adam = optax.adam(1e-3)
    reducers = {
        "exact": jd.exact,
        "power_sgd": lambda: jd.error_feedback(jd.power_sgd(rank=4)),
        "two_shot": lambda: jd.two_shot(
            jd.compressors.int8() if mesh.devices.flat[0].platform == "tpu" else jd.qsgd(4)
        ),
    }
    if name == "diloco":
        outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
        tx = jd.local_steps(adam, outer, sync_period=100)
    elif name == "zero":
        tx = jd.zero_redundancy(adam)
    else:
        tx = optax.chain(jd.all_reduce(reducers[name]()), adam)

    def step(state: Any, batch: Any) -> Any:
        params, optimizer = state
        gradients = jax.tree.map(lambda p: jnp.sin(p) * batch[0], params)
        updates, optimizer = tx.update(gradients, optimizer, params)
        return (optax.apply_updates(params, updates), optimizer), ()

    def init() -> Any:
        params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        return (jd.PerWorker(params) if name == "diloco" else params), tx.init(params)

    batch = jax.ShapeDtypeStruct((mesh.size,), jnp.float32)
    state, batch = pods.abstract(init, batch, mesh)
    return lambda: jd.distribute(step, mesh).lower(state, batch)


def compile_one(name: str, target: str, leaves: int, side: int) -> dict[str, Any]:
    """Measures, in a fresh process, the seconds to trace and lower, and to compile."""
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp
    from compiled import mesh_of

    import jaxdist as jd

    mesh = jd.make_mesh({"data": 4}) if target == "cpu" else mesh_of(target)
    like = {}
    for i in range(leaves // 2):
        like[f"weight_{i}"] = jax.ShapeDtypeStruct((side, side), jnp.float32)
        like[f"bias_{i}"] = jax.ShapeDtypeStruct((side,), jnp.float32)
    lower = (lower_by_hand if name in ("plain", "psum") else lower_ours)(name, like, mesh)
    times = [(time.perf_counter(), time.process_time())]
    lowered = lower()
    times.append((time.perf_counter(), time.process_time()))
    program = lowered.compile()
    times.append((time.perf_counter(), time.process_time()))
    memory, found = program.memory_analysis(), jd.analysis.collectives(program)
    return {
        "program": name,
        "target": target,
        "leaves": leaves,
        "side": side,
        "trace": times[1][1] - times[0][1],
        "compile": times[2][1] - times[1][1],
        "compile_clock": times[2][0] - times[1][0],
        "messages": sum(op.messages for op in found.ops),
        "wire_bytes": found.wire_bytes,
        "temporary": memory.temp_size_in_bytes,
        "jax": jax.__version__,
    }


def measure(name: str, given: argparse.Namespace, leaves: int) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).parent), "compile_time"]
    command += ["--target", given.target, "--side", str(given.side), "--one", name, str(leaves)]
    found = [run_process(command) for _ in range(given.repetitions)]
    medians = {key: statistics.median(one[key] for one in found) for key in ("trace", "compile", "compile_clock")}
    return found[0] | medians


def table(results: list[dict[str, Any]]) -> str:
    """A row for each program and number of leaves, with the ratio to `psum`."""
    lines = [
        "| target | leaves | program | trace, s | compile, s (clock) | to `psum` | messages | temporary, MB |",
        "|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    for one in results:
        base = next(x for x in results if x["program"] == "psum" and x["leaves"] == one["leaves"])
        lines.append(
            f"| {one['target']} | {one['leaves']} | {one['program']} | {one['trace']:.1f} "
            f"| {one['compile']:.1f} ({one['compile_clock']:.1f}) | {one['compile'] / base['compile']:.2f} "
            f"| {one['messages']:g} | {one['temporary'] / 1e6:.1f} |"
        )
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--target", default="cpu", help="cpu, or a topology such as v5e:2x2")
    parser.add_argument("--leaves", type=int, nargs="+", default=(20, 400, 1600))
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--programs", nargs="+", default=PROGRAMS, choices=PROGRAMS)
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--out", type=Path, help="the folder of the report")


def main(given: argparse.Namespace) -> None:
    if given.one:
        print(json.dumps(compile_one(given.one[0], given.target, int(given.one[1]), given.side)))
        return
    results = []
    for leaves in given.leaves:
        # Their ratios are to it.
        for name in ("psum", *(name for name in given.programs if name != "psum")):
            results.append(measure(name, given, leaves))
            print({key: results[-1][key] for key in ("program", "leaves", "trace", "compile", "messages")}, flush=True)
    write_record(given.out, f"compile_time_{given.target.replace(':', '_')}", results)
    print(table(results))
