"""The speed of the virtual clock: events per second without a model, and gradients per second with one.

    python benchmarks/asynchronous events --out benchmarks/reports/NAME

Timing alone is measured on one core in processor time, the median of three stretches of a run that is warm; links take
time and gradients are exponential. With a model (a convolutional net of 5 thousand parameters on handwritten digits) it
is wall time, of a thousand workers.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import optax
from common import write_record

from jaxdist._cli.commands.replay import make_task
from jaxdist._cli.spellings import parse
from jaxdist.asynchronous import Rule, durations, links, replay, rules

SGD = optax.sgd(0.02)
LAW = durations.exponential(1.0)
STRETCHES = 3


def timing(name: str, rule: Rule, workers: int, gradients: int) -> dict[str, Any]:
    """Events per second, after each worker's first gradient."""
    clock = replay.simulator(rule, workers=workers, durations=LAW, links=links.alpha_beta(1e-3, 1e9))
    state = clock.advance(clock.init(), gradients=workers)
    found = []
    for _ in range(STRETCHES):
        before, began = len(clock.result(state).trace.events), time.process_time()
        after = clock.advance(state, gradients=len(state.gradients) // 5 + gradients)
        seconds = time.process_time() - began
        found.append((len(clock.result(after).trace.events) - before) / seconds)
        state = after
    row = {"rule": name, "workers": workers, "events a second": round(statistics.median(found))}
    print(json.dumps(row), flush=True)
    return row


def real(name: str, rule: Rule, workers: int, each: int, batch: int) -> dict[str, Any]:
    """Times a run in which every worker computes about `each` gradients, from compilation to the last evaluation."""
    task = make_task(parse.parse_workload("digits", "convnet:8"), batch=batch, seed=0, workers=workers)
    began = time.perf_counter()
    run = replay.run(rule, task, durations=LAW, workers=workers, gradients=workers * each, evaluate_every=each / 20)
    seconds = time.perf_counter() - began
    row = {"rule": name, "workers": workers, "batch": batch, "gradients": len(run.trace.gradients)}
    row |= {"steps": len(run.trace.steps), "virtual seconds": round(run.seconds, 1), "wall seconds": round(seconds, 1)}
    row |= {"microseconds a gradient": round(1e6 * seconds / (workers * each)), "loss": round(float(run.losses[-1]), 3)}
    print(json.dumps(row), flush=True)
    return row


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"| {' | '.join(rows[0])} |", f"|---|{'--:|' * (len(rows[0]) - 1)}"]
    return "\n".join(lines + [f"| {' | '.join(f'{value}' for value in row.values())} |" for row in rows])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, nargs="*", default=[16, 128, 1000])
    parser.add_argument("--gradients", type=int, default=50_000, help="of each stretch without a model")
    parser.add_argument("--each", type=int, default=50, help="gradients of each of the thousand workers with a model")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--out", type=Path, help="the folder of the report")


def main(given: argparse.Namespace) -> None:
    made = {
        "bsp": rules.bsp(SGD),
        "asgd": rules.asgd(SGD),
        "ringmaster:64": rules.ringmaster(64, SGD),
        "ssp:8": rules.ssp(8, SGD),
        "ringleader": rules.ringleader(SGD),
        "dude": rules.dude(SGD),
    }
    fast = [timing(name, rule, n, given.gradients) for n in given.workers for name, rule in made.items()]
    # Old gradients want a smaller rate: a thousand workers are a thousand versions late.
    trained = {
        "bsp": rules.bsp(optax.sgd(0.2)),
        "asgd": rules.asgd(optax.sgd(0.002)),
        "ringmaster:100": rules.ringmaster(100, optax.sgd(0.01)),
    }
    slow = [real(name, rule, 1000, given.each, given.batch) for name, rule in trained.items()]
    print(table(fast), table(slow), sep="\n\n")
    write_record(given.out, "events", {"timing": fast, "real": slow})
