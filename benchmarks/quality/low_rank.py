"""The cost of compression in accuracy: real digits, four simulated workers, equal seeds and batches.

    python benchmarks/quality low_rank --out benchmarks/reports/NAME

A small convolutional network is trained with momentum and a learning rate that falls twice. Every reducer sees the same
initial values and the same batches; only what the workers send differs. Bytes are what one worker sends in a step, mean
over the run.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import write_record

import jaxdist as jd
from jaxdist._cli.models.digits import digits_workload
from jaxdist.reducers import CriticalRegimeState

WORKERS = 4
BATCH = 64
EPOCH_STEPS = 22  # 1437 images
EPOCHS = 20
DROPS = (12, 17)  # epochs after which the learning rate is divided by ten
RATE = 0.05
STEPS = EPOCHS * EPOCH_STEPS
SETTINGS = {"epoch_steps": EPOCH_STEPS, "interval_steps": 2 * EPOCH_STEPS}


class State(NamedTuple):
    params: Any
    opt: Any


def schedule(count):
    return RATE * 0.1 ** sum(jnp.where(count >= drop * EPOCH_STEPS, 1.0, 0.0) for drop in DROPS)


def top(density: float) -> jd.reducers.Reducer:
    return jd.compressed(jd.top_k(density))


def one_sided(rank: int) -> jd.reducers.Reducer:
    return jd.power_sgd(rank, one_sided=True)


def accordion(low: jd.reducers.Reducer, high: jd.reducers.Reducer) -> jd.reducers.Reducer:
    return jd.reducers.accordion(low, high, schedule=schedule, **SETTINGS)


def fed_back(reducer: jd.reducers.Reducer) -> jd.reducers.Reducer:
    return jd.error_feedback(jd.reducers.with_stats(reducer))


def reducers() -> dict[str, Callable[[], jd.reducers.Reducer]]:
    """Each of them with a count of its bytes."""
    return {
        "exact": lambda: jd.reducers.with_stats(jd.exact()),
        **{f"PowerSGD rank {r}, feedback": lambda r=r: fed_back(jd.power_sgd(r)) for r in (1, 2, 4)},
        **{f"PowerSGD rank {r}": lambda r=r: jd.reducers.with_stats(jd.power_sgd(r)) for r in (1, 2, 4)},
        **{f"one-sided rank {r}, feedback": lambda r=r: fed_back(one_sided(r)) for r in (1, 2, 4)},
        "one-sided rank 2": lambda: jd.reducers.with_stats(one_sided(2)),
        "Accordion rank 2/1, feedback": lambda: fed_back(accordion(jd.power_sgd(2), jd.power_sgd(1))),
        **{f"top-k {d:.0%}, feedback": lambda d=d: fed_back(top(d)) for d in (0.99, 0.1, 0.01)},
        "top-k 1%": lambda: jd.reducers.with_stats(top(0.01)),
        "Accordion top-k 99%/10%, feedback": lambda: fed_back(accordion(top(0.99), top(0.1))),
        "sign, feedback": lambda: fed_back(jd.compressed(jd.compressors.scaled_sign())),
        "sign": lambda: jd.reducers.with_stats(jd.compressed(jd.compressors.scaled_sign())),
    }


def verdict(state: Any) -> jax.Array:
    """1 in a critical regime and 0 otherwise; -1 if the reducer has no detector."""
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, CriticalRegimeState))
    found = [node.critical for node in nodes if isinstance(node, CriticalRegimeState)]
    return found[0].astype(jnp.int32) if found else jnp.int32(-1)


def make_run(make: Callable[[], jd.reducers.Reducer], workload: Any) -> Callable:
    """`run(state, batches)`: all steps in one program."""
    tx = optax.chain(jd.all_reduce(make()), optax.sgd(schedule, momentum=0.9))

    def step(state, batch):
        loss, gradients = jd.local_value_and_grad(workload.loss)(state.params, batch)
        updates, opt = tx.update(gradients, state.opt, state.params)
        return State(optax.apply_updates(state.params, updates), opt), jax.lax.pmean(loss, "data")

    simulated = jd.simulate(step, WORKERS)

    def train_step(state, batch):
        state, loss = simulated(state, batch)
        return state, (loss, verdict(state.opt))

    def initial(seed):
        def make_state():
            params = workload.init(jax.random.key(seed))
            return State(params, tx.init(params))

        return jd.init_state(make_state, WORKERS)

    run = jax.jit(lambda state, batches: jax.lax.scan(train_step, state, batches))
    return lambda seed, batches: run(initial(seed), batches)


def train(name: str, make: Callable[[], jd.reducers.Reducer], workload: Any, seeds: int) -> dict:
    start, run, rows = time.perf_counter(), make_run(make, workload), []
    held = workload.held_out(360)[0]
    levels: list[list[int]] = []
    for seed in range(seeds):
        batches = jax.tree.map(lambda *rows: np.stack(rows), *[workload.batch(seed, n, BATCH) for n in range(STEPS)])
        state, (losses, verdicts) = run(seed, batches)
        metrics = workload.metrics(state.params, held)
        rows.append(
            {
                "accuracy": float(metrics["accuracy"]),
                "held_out_loss": float(metrics["loss"]),
                "training_loss": float(losses[-EPOCH_STEPS:].mean()),
                "bytes_per_step": float(jd.transforms.stats(state.opt)["bytes"]) / STEPS,
            }
        )
        if int(verdicts[0]) >= 0:  # the level of an epoch is the verdict of its steps, known after the first of them
            levels.append([int(v) for v in verdicts[::EPOCH_STEPS]])
    found = {key: [row[key] for row in rows] for key in rows[0]}
    return {"reducer": name, **found, "low_compression": levels, "seconds": time.perf_counter() - start}


def table(results: list[dict]) -> str:
    lines = [
        "| reducer | held-out accuracy | lowest to highest | training loss | bytes a step | smaller by |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    whole = statistics.mean(results[0]["bytes_per_step"])
    for row in results:
        accuracy, sent = row["accuracy"], statistics.mean(row["bytes_per_step"])
        lines.append(
            f"| {row['reducer']} | {statistics.mean(accuracy):.2%} | {min(accuracy):.2%} to {max(accuracy):.2%} | "
            f"{statistics.mean(row['training_loss']):.4f} | {sent:,.0f} | {whole / sent:.1f}x |"
        )
    lines += ["", "Epochs with low compression, one line for each seed (`-` low, `#` high):", ""]
    for row in results:
        for seed, levels in enumerate(row["low_compression"]):
            lines.append(f"    {row['reducer']:36} seed {seed}  {''.join('-' if low else '#' for low in levels)}")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--width", type=int, default=16, help="channels of the first convolution")
    parser.add_argument("--only", help="reducers whose name contains this")
    parser.add_argument("--out", type=Path, help="the folder of the report")


def main(given: argparse.Namespace) -> None:
    workload, results = digits_workload(given.width), []
    for name, make in reducers().items():
        if given.only is None or given.only in name:
            results.append(train(name, make, workload, given.seeds))
            row = results[-1]
            print(f"{name:36} {row['accuracy']} {row['seconds']:.0f} s", flush=True)
    print(table(results))
    write_record(given.out, "quality_low_rank", results, table(results))
