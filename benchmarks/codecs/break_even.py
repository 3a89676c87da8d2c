"""The break-even bandwidth of each code, below which it beats a plain all-reduce, from its speed on this machine.

    python benchmarks/codecs break_even --out benchmarks/reports/NAME

A code saves bytes and costs time. With `E = 2(W-1)/W 4n` bytes for the plain mean of `n` float32 entries over `W`
workers, `S` bytes sent with the code and `t` seconds for coding and decoding, it wins if the link moves fewer than
`(E - S) / t` bytes per second. Gathered payloads are decoded `W` times over; a two-shot codes and decodes everything
once and a `W`-th of it again. Hiding communication behind computation moves the line in favor of the plain mean.
"""

import argparse
import os
import statistics
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from common import write_record
from timing import time_call

from jaxdist._cli.spellings import parse

CODES = (
    "f16",
    "qsgd:8",
    "qsgd:4",
    "qsgd:2",
    "int8",
    "mxfp4",
    "sign",
    "random_k:0.01",
    "top_k:0.01",
    "top_k:0.01+qsgd:4",
)
WORKERS = (2, 8, 64)


class Cost(NamedTuple):
    """Seconds to encode and to decode, and the bytes of the payload."""

    compress: float
    decompress: float
    bytes: int
    summable: bool


def measure(spelling: str, x: jax.Array, turns: int) -> Cost:
    code = parse.parse_code(spelling)
    key = jax.random.key(0)
    compress = jax.jit(code.compress)
    decompress = jax.jit(lambda payload: code.decompress(payload, jax.ShapeDtypeStruct(x.shape, x.dtype)))
    payload = jax.block_until_ready(compress(x, key))
    jax.block_until_ready(decompress(payload))
    times: list[list[float]] = [[], []]
    for _ in range(turns):
        for found, run in zip(times, (lambda: compress(x, key), lambda: decompress(payload)), strict=True):
            found.append(time_call(run))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(payload))
    return Cost(*(statistics.median(found) for found in times), size, code.summable)


def break_even(cost: Cost, elements: int, workers: int, *, two_shot: bool) -> float | None:
    """Bytes per second; None if the code sends more than the plain mean."""
    ring = 2 * (workers - 1) / workers
    plain = ring * 4 * elements
    if cost.summable or two_shot:
        sent = ring * cost.bytes
        again = 0 if cost.summable else (cost.compress + cost.decompress) / workers
        seconds = cost.compress + cost.decompress + again
    else:
        sent = (workers - 1) * cost.bytes
        seconds = cost.compress + workers * cost.decompress
    return (plain - sent) / seconds if sent < plain else None


def _gbit(rate: float) -> str:
    return f"{8e-9 * rate:.0f}" if rate >= 1.25e9 else f"{8e-9 * rate:.1f}"


def table(rows: list[dict[str, Any]]) -> str:
    heads = [f"{how}, {workers} workers" for workers in WORKERS for how in ("gather", "two-shot")]
    lines = ["| code | smaller by | " + " | ".join(heads) + " |", "|---|--:|" + "--:|" * len(heads)]
    for row in rows:
        cells = []
        for workers in WORKERS:
            for how in ("gather", "two_shot"):
                found = row["break_even"][str(workers)].get(how, "same")
                cells.append("never" if found is None else "" if found == "same" else _gbit(found))
        lines.append(f"| `{row['code']}` | {row['ratio']:.1f}x | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=int, default=2**22, help="elements")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--out", type=Path, help="the folder of the report")


def main(given: argparse.Namespace) -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal(given.size, np.float32))
    rows = []
    for spelling in CODES:
        cost = measure(spelling, x, given.turns)
        ways = {False: "gather"} if cost.summable else {False: "gather", True: "two_shot"}
        found = {
            str(workers): {how: break_even(cost, x.size, workers, two_shot=way) for way, how in ways.items()}
            for workers in WORKERS
        }
        rows.append({"code": spelling, "ratio": x.nbytes / cost.bytes, **cost._asdict(), "break_even": found})
        print(f"{spelling:16} {1e3 * cost.compress:8.1f} ms, {1e3 * cost.decompress:8.1f} ms", flush=True)
    print(table(rows))
    about = {"elements": given.size, "device": jax.devices()[0].device_kind, "jax": jax.__version__, "rows": rows}
    write_record(given.out, "break_even", about, table(rows))
