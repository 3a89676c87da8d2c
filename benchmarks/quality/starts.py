"""Which values of a method's own numbers are good ones to start from, on a small language model?

    python benchmarks/quality starts --out benchmarks/reports/NAME

The model, the data, the seeds and the search of a rate are those of `feedback`. Compared are the step of CHOCO towards
the neighbors and the weight of the new gradient in EF21. Rows are appended to `starts.jsonl`; `starts.md` has the
table.

`messages.md` has the size of messages: a simulated step of 24 layers, whose computation takes as long as its
communication, over links from 1 to 400 Gbit/s.
"""

import argparse
import itertools
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from common import append_rows
from feedback import (
    Setting,
    best_rate,
    inner_optimizer,
    program_of_training,
    read_rows,
    rows_of_rates,
    try_rates,
)

import jaxdist as jd

WORKERS = 4
CODES = {"top_k(0.1)": jd.top_k(0.1)}


class Start(NamedTuple):
    """A method, the code that it has, and its own number; `exact` has neither."""

    method: str
    code: str
    value: float


def starts() -> list[Start]:
    """All rows, the baselines first."""

    def cross(method, codes, values):
        return [Start(method, *pair) for pair in itertools.product(codes, values)]

    rows = [Start("exact steps", "", 0), Start("exact gossip", "", 0)]
    return [*rows, *cross("ef21", ["top_k(0.1)"], [1.0, 0.3, 0.1]), *cross("choco", ["top_k(0.1)"], [0.1, 0.2, 0.5])]


def make_transformation(row: Start, setting: Setting) -> Any:
    inner = inner_optimizer(setting.rate, setting.is_adam)
    if row.method in ("choco", "exact gossip"):
        method = jd.decentralized.d_psgd()
        if row.code:
            method = jd.decentralized.choco(CODES[row.code], step_size=row.value)
        return jd.gossip(inner, jd.topology.ring(WORKERS), method=method)
    reducer = jd.exact()
    if row.code:
        reducer = jd.compressed(CODES[row.code])
    if row.method == "ef21":
        reducer = jd.reducers.ef21(reducer, eta=row.value)
    return optax.chain(jd.all_reduce(reducer), inner)


def measure(row: Start, seeds: list[int]) -> list[dict[str, Any]]:
    place = "gossip" if row.method in ("choco", "exact gossip") else "steps"
    began = time.perf_counter()
    program = program_of_training(place, WORKERS, lambda setting: make_transformation(row, setting))
    found = try_rates(program, place, seeds)
    took = {"seconds": round(time.perf_counter() - began, 1), "jax": jax.__version__}
    return [row._asdict() | each | took for each in rows_of_rates(found, seeds)]


def make_table(rows: list[dict[str, Any]]) -> str:
    """Losses at the best rate of each row: of `exact` as they are, of others how much they are above it."""
    at_best = {}
    for row in rows:
        found = dict(zip(row["rates"], row["losses"], strict=True))
        at_best[Start(row["method"], row["code"], row["value"]), row["optimizer"]] = found[best_rate(found)]
    lines = ["| method | code | value | AdamW | momentum |", "|---|---|--:|--:|--:|"]
    for start in dict.fromkeys(start for start, _ in at_best):
        base = Start("exact gossip" if start.method in ("choco", "exact gossip") else "exact steps", "", 0)
        cells = []
        for optimizer in ("adamw", "momentum"):
            own, exact = at_best[start, optimizer], at_best[base, optimizer]
            cells.append(f"{np.mean(own):.3f}" if start == base else above(own, exact))
        lines.append(f"| {start.method} | {start.code} | {start.value if start.code else ''} | {' | '.join(cells)} |")
    return "\n".join(lines)


def above(own: list[float | None], base: list[float]) -> str:
    """The mean of the ratios of equal seeds, and half of their range."""
    if None in own or np.mean(own) > 2 * np.mean(base):
        return "diverges"
    ratios = 100 * (np.array(own) / np.array(base) - 1)
    return f"{ratios.mean():+.1f} ±{np.ptp(ratios) / 2:.1f} %"


MESSAGES = (0.5, 1, 2, 4, 8, 16, 25, 32, 64)  # MiB


def make_message_table(workers: int = 8, layers: int = 24) -> str:
    """Seconds of a step above the best order within a step, by link and size; a credit of four messages."""
    lines = [f"| parameters | Gbit/s | {' | '.join(f'{size} MiB' for size in MESSAGES)} | whole layers |"]
    lines.append("|--:|--:|" + "--:|" * (len(MESSAGES) + 1))
    share = 2 * (workers - 1) / workers
    for parameters, gigabits in itertools.product((125e6, 1.3e9), (1, 10, 100, 400)):
        bandwidth = gigabits * 1e9 / 8 / share
        seconds = 4 * parameters / bandwidth / layers
        profile = jd.schedule.profile_of(
            forward=[seconds / 3] * layers,
            backward=[2 * seconds / 3] * layers,
            sizes=[4 * parameters / layers] * layers,
        )
        link = {"bandwidth": bandwidth, "overhead": 50e-6, "latency": 2 * (workers - 1) * 20e-6}
        best = jd.schedule.optimum(profile, bandwidth=bandwidth, barrier=True)
        cells = []
        for size in (*MESSAGES, None):
            cut = {} if size is None else {"partition_bytes": size * 2**20, "credit_bytes": 4 * size * 2**20}
            cells.append(f"{100 * (jd.schedule.step_timeline(profile, **cut, **link).makespan / best - 1):+.1f} %")
        lines.append(f"| {parameters / 1e6:,.0f} M | {gigabits} | {' | '.join(cells)} |")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=Path("runs/starts"))


def main(given: argparse.Namespace) -> None:
    path = given.out / "starts.jsonl"
    for start in starts():
        if start in {Start(*(row[name] for name in Start._fields)) for row in read_rows(path)}:
            continue
        rows = measure(start, given.seeds)
        append_rows(given.out, "starts", rows)
        print(*start, *(row["seconds"] for row in rows[:1]), flush=True)
    table = make_table(read_rows(path))
    path.with_suffix(".md").write_text(table + "\n")
    (given.out / "messages.md").write_text(make_message_table() + "\n")
    print(table)
