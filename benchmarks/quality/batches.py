"""Accordion's batches as training: small in the first critical regime and large after it, on real digits.

    python benchmarks/quality batches --out benchmarks/reports/NAME

Four simulated workers train a small convolutional network with momentum for the same number of epochs, and a rate that
is divided by ten after ten of sixteen; it is in proportion to the batch. Compared are small batches, large ones (with a
warm-up, as in the paper), Accordion, which decides by the norm of the gradients of an epoch, and
as a control the sizes of Accordion's epochs in the opposite order: as many updates, and small batches at the end.
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

WORKERS = 4
IMAGES = 1437
EPOCHS = 16
DROP = 10  # the epochs before the rate is divided by ten
WARM_UP = 3
RATE = 0.02  # of the small batch
MOMENTUM = 0.9


class State(NamedTuple):
    params: Any
    opt: Any
    rate: jax.Array


class Settings(NamedTuple):
    small: int
    large: int
    interval: int  # epochs

    def steps(self, size: int) -> int:
        """The updates in an epoch."""
        return IMAGES // size


def make_epoch(workload: Any, settings: Settings) -> tuple[Callable, Callable]:
    """`initial(seed)`, and `run(state, batches, rates)`: an epoch in one program, compiled once for each batch size."""
    steps = settings.steps(settings.small)
    reducer = jd.reducers.with_regime(jd.exact(), epoch_steps=steps, interval_steps=settings.interval * steps)
    tx = optax.chain(jd.all_reduce(reducer), optax.trace(MOMENTUM))

    def step(state, batch):
        loss, gradients = jd.local_value_and_grad(workload.loss)(state.params, batch)
        updates, opt = tx.update(gradients, state.opt, state.params)
        params = jax.tree.map(lambda x, u: x - state.rate * u, state.params, updates)
        return State(params, opt, state.rate), jax.lax.pmean(loss, "data")

    simulated = jd.simulate(step, WORKERS)

    def train_step(state, given):
        batch, rate = given
        return simulated(state._replace(rate=rate), batch)

    def initial(seed):
        def make_state():
            params = workload.init(jax.random.key(seed))
            return State(params, tx.init(params), jnp.zeros(()))

        return jd.init_state(make_state, WORKERS)

    return initial, jax.jit(lambda state, batches, rates: jax.lax.scan(train_step, state, (batches, rates)))


def rates_of(settings: Settings, size: int, epoch: int, *, warm_up: bool) -> np.ndarray:
    """The rates of the updates of an epoch, in proportion to the batch."""
    rate = RATE * size / settings.small * (1.0 if epoch < DROP else 0.1)
    done = epoch + np.arange(settings.steps(size)) / settings.steps(size)
    if not warm_up or epoch >= WARM_UP:
        return np.full(done.shape, rate, np.float32)
    # From the rate of the small batch up to that of the large one.
    return (RATE + done / WARM_UP * (rate - RATE)).astype(np.float32)


def train(
    program: tuple[Callable, Callable], workload: Any, settings: Settings, seed: int, choose: Callable, *, warm_up: bool
) -> dict:
    """Trains with the sizes that `choose(epoch, size, state)` gives before each epoch."""
    initial, run = program
    state, size, sizes, updates = initial(seed), settings.small, [], 0
    for epoch in range(EPOCHS):
        size = choose(epoch, size, state)
        sizes.append(size)
        count = settings.steps(size)
        batches = [workload.batch(seed, 10_000 * epoch + n, size) for n in range(count)]
        rates = rates_of(settings, size, epoch, warm_up=warm_up)
        state, losses = run(state, jax.tree.map(lambda *rows: np.stack(rows), *batches), jnp.asarray(rates))
        updates += count
    metrics = workload.metrics(state.params, workload.held_out(360)[0])
    return {
        "accuracy": float(metrics["accuracy"]),
        "held_out_loss": float(metrics["loss"]),
        "training_loss": float(losses.mean()),
        "updates": updates,
        "sizes": sizes,
    }


def compare(settings: Settings, width: int, seeds: int) -> list[dict]:
    workload = digits_workload(width)
    program = make_epoch(workload, settings)
    grow = jd.reducers.accordion_batch(settings.small, settings.large)
    results: dict[str, list[dict]] = {}

    def add(name: str, seed: int, choose: Callable, *, warm_up: bool = False) -> dict:
        begin = time.perf_counter()
        row = train(program, workload, settings, seed, choose, warm_up=warm_up)
        results.setdefault(name, []).append(row | {"seconds": time.perf_counter() - begin})
        print(f"{name:20} {row['accuracy']:.2%} {row['updates']} updates", flush=True)
        return row

    for seed in range(seeds):
        add("small", seed, lambda epoch, size, state: settings.small)
        add("large", seed, lambda epoch, size, state: settings.large, warm_up=True)
        sizes = add("Accordion", seed, lambda epoch, size, state: grow(size, state.opt))["sizes"]
        add("opposite order", seed, lambda epoch, size, state, sizes=sizes: sizes[-1 - epoch], warm_up=True)
    return [{"name": name, **{key: [row[key] for row in rows] for key in rows[0]}} for name, rows in results.items()]


def table(results: list[dict]) -> str:
    lines = [
        "| batches | held-out accuracy | lowest to highest | held-out loss | training loss | updates | fewer by |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    most = statistics.mean(results[0]["updates"])
    for row in results:
        accuracy, updates = row["accuracy"], statistics.mean(row["updates"])
        lines.append(
            f"| {row['name']} | {statistics.mean(accuracy):.2%} | {min(accuracy):.2%} to {max(accuracy):.2%} | "
            f"{statistics.mean(row['held_out_loss']):.4f} | {statistics.mean(row['training_loss']):.4f} | "
            f"{updates:,.0f} | {most / updates:.1f}x |"
        )
    lines += ["", "The batch of each epoch, one line for each seed (`-` small, `#` large):", ""]
    for row in results:
        for seed, sizes in enumerate(row["sizes"]):
            marks = "".join("-" if size == results[0]["sizes"][0][0] else "#" for size in sizes)
            lines.append(f"    {row['name']:16} seed {seed}  {marks}")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--width", type=int, default=8, help="channels of the first convolution")
    parser.add_argument("--small", type=int, default=32)
    parser.add_argument("--large", type=int, default=256)
    parser.add_argument("--interval", type=int, default=2, help="epochs from one verdict to the next")
    parser.add_argument("--out", type=Path, help="the folder of the report")


def main(given: argparse.Namespace) -> None:
    results = compare(Settings(given.small, given.large, given.interval), given.width, given.seeds)
    print(table(results))
    write_record(given.out, "accordion_batch", results, table(results))
