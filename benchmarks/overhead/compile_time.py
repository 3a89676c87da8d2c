"""Compile time against the number of leaves: about four million parameters in all, two devices.

    python benchmarks/overhead compile_time --out benchmarks/reports/NAME

`equal`: all matrices of one shape, which PowerSGD stacks into one batch. `mixed`: 40 different shapes. Each program is
compiled in a separate process, so that nothing is cached, `--repetitions` times; the fastest counts.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from common import run_process, write_record

LEAVES = (10, 100, 400)
PARAMETERS = 4 * 2**20
MIXED_SHAPES = 40
# A bias for every matrix, as models have them.
REDUCERS = ("exact", "qsgd", "top_k", "power_sgd")
TARGET_SECONDS = 15.0


def compile_one(reducer: str, leaves: int, shapes: str) -> dict:
    """Measures, in a fresh process, the seconds to trace and lower, and to compile."""
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp

    import jaxdist as jd

    reducers = {
        "exact": jd.exact,
        "qsgd": lambda: jd.compressed(jd.qsgd(4)),
        "top_k": lambda: jd.error_feedback(jd.compressed(jd.top_k(0.01))),
        "power_sgd": lambda: jd.error_feedback(jd.power_sgd(rank=4)),
    }
    matrices = leaves // 2
    side = int((PARAMETERS / matrices) ** 0.5)
    params = {}
    for i in range(matrices):
        rows = side + 2 * (i % MIXED_SHAPES) if shapes == "mixed" else side
        params[f"weight_{i}"] = jnp.zeros((rows, side))
        params[f"bias_{i}"] = jnp.zeros(side)
    tx = jd.all_reduce(reducers[reducer]())
    mesh = jd.make_mesh({"data": 2})

    def step(state, batch):
        params, opt_state = state
        # Gradients that differ between workers and cost nothing to compile.
        gradients = jax.tree.map(lambda p: p + batch[0], params)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (jax.tree.map(lambda p, u: p - u, params, updates), opt_state), ()

    state = jd.init_state(lambda: (params, tx.init(params)), mesh)
    run = jd.distribute(step, mesh)
    start = time.perf_counter()
    lowered = run.lower(state, jnp.ones(2))
    middle = time.perf_counter()
    compiled = lowered.compile()
    return {
        "reducer": reducer,
        "leaves": leaves,
        "shapes": shapes,
        "trace_seconds": middle - start,
        "compile_seconds": time.perf_counter() - middle,
        "collectives": len(jd.analysis.collectives(compiled).ops),
        "jax": jax.__version__,
    }


def measure(reducer: str, leaves: int, shapes: str, repetitions: int) -> dict:
    command = [sys.executable, str(Path(__file__).parent), "compile_time", "--one", reducer, str(leaves), shapes]
    found = [run_process(command) for _ in range(repetitions)]
    return min(found, key=lambda one: one["trace_seconds"] + one["compile_seconds"])


def table(results: list[dict]) -> str:
    """Seconds to trace and compile, one row for each reducer and kind of shapes."""
    rows = {(one["reducer"], one["shapes"]): {} for one in results}
    for one in results:
        rows[one["reducer"], one["shapes"]][one["leaves"]] = one["trace_seconds"] + one["compile_seconds"]
    lines = [
        "| reducer | shapes | "
        + " | ".join(f"{n} leaves" for n in LEAVES)
        + " | growth for 4x the leaves (linear: 4) |",
        "|---|---|" + "--:|" * (len(LEAVES) + 1),
    ]
    for (reducer, shapes), seconds in rows.items():
        growth = seconds[LEAVES[-1]] / seconds[LEAVES[-2]]
        cells = " | ".join(f"{seconds[n]:.2f} s" for n in LEAVES)
        lines.append(f"| {reducer} | {shapes} | {cells} | {growth:.2f} |")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path, help="the folder of the report")


def main(given: argparse.Namespace) -> None:
    if given.one:
        print(json.dumps(compile_one(given.one[0], int(given.one[1]), given.one[2])))
        return
    results = []
    for reducer in REDUCERS:
        for shapes in ("equal", "mixed"):
            for leaves in LEAVES:
                results.append(measure(reducer, leaves, shapes, given.repetitions))
                one = results[-1]
                total = one["trace_seconds"] + one["compile_seconds"]
                print(f"{reducer:10}{shapes:6}{leaves:5} leaves {total:7.2f} s", flush=True)
    write_record(given.out, "compile_time", results)
    print(table(results))
    slowest = max(one["trace_seconds"] + one["compile_seconds"] for one in results if one["reducer"] == "power_sgd")
    print(f"PowerSGD at most {slowest:.1f} s; the target is {TARGET_SECONDS:g} s")
