"""The speed of selecting the largest entries: `top_k` and its peers, relative to a copy of the same bytes in place.

    python benchmarks/codecs selection --torch-python PYTHON --out benchmarks/reports/NAME

Milliseconds to compress, the fastest of all turns, since noise only ever adds time; the contestants take turns. `copy`
is `x -> -x` into a buffer that is given away, warm: what the hardware needs to read and write the array once. The last
column is its time divided by theirs: the part of that bandwidth which is reached.
"""

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from common import run_process, write_record
from timing import make_copy, time_call

import jaxdist as jd
from jaxdist.compressors import block_top_k

TORCH = """
import json, sys, time, numpy, torch
size, kept, turns = map(int, sys.argv[1:])
x = torch.from_numpy(numpy.random.default_rng(0).standard_normal(size, numpy.float32))
best = float("inf")
for turn in range(turns + 1):
    start = time.perf_counter()
    torch.topk(x.abs(), kept)
    if turn:
        best = min(best, time.perf_counter() - start)
print(json.dumps(best))
"""


def contestants(size: int, density: float) -> dict[str, Callable[[Any], Any]]:
    kept = round(density * size)
    key = jax.random.key(0)
    codes = {
        f"top_k({density})": jd.top_k(density),
        f'top_k({density}, method="exact")': jd.top_k(density, method="exact"),
        "block_top_k(64 / 4096)": block_top_k(64 / 4096),
        f"random_k({density})": jd.compressors.random_k(density),
    }
    runs = {name: jax.jit(partial(lambda code, x: code.compress(x, key), code)) for name, code in codes.items()}
    runs["lax.top_k"] = jax.jit(lambda x: jax.lax.top_k(jnp.abs(x), kept))
    runs["lax.approx_max_k"] = jax.jit(lambda x: jax.lax.approx_max_k(jnp.abs(x), kept))
    return runs


def measure(size: int, density: float, turns: int, torch_python: str | None) -> dict[str, float]:
    x = jnp.asarray(np.random.default_rng(0).standard_normal(size, np.float32))
    runs = contestants(size, density)
    copy = make_copy(x)
    jax.block_until_ready(copy())  # compiles
    best: dict[str, float] = {}
    for turn in range(turns + 1):
        for _ in range(5):
            best["copy"] = min(best.get("copy", 1e9), time_call(copy))
        for name, run in runs.items():
            seconds = time_call(partial(run, x))
            if turn:  # the first compiles
                best[name] = min(best.get(name, 1e9), seconds)
    if torch_python:
        arguments = [torch_python, "-c", TORCH, str(size), str(round(density * size)), str(turns)]
        best["torch.topk"] = run_process(arguments)
    return best


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| entries | | ms | GB/s of float32 | of a copy's bandwidth |", "|--:|---|--:|--:|--:|"]
    for row in rows:
        cells = f"{row['ms']:.2f} | {row['gigabytes_per_second']:.2f} | {row['of_copy']:.3f}"
        lines.append(f"| 2^{row['entries'].bit_length() - 1} | {row['name']} | {cells} |")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=int, nargs="+", default=[2**20, 2**24], help="entries, powers of two")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--torch-python", help="a Python with PyTorch, for torch.topk")
    parser.add_argument("--out", type=Path, help="the folder of the report")


def main(given: argparse.Namespace) -> None:
    rows = []
    for size in given.sizes:
        best = measure(size, given.density, given.turns, given.torch_python)
        for name, seconds in sorted(best.items(), key=lambda item: item[1]):
            rate = 4 * size / seconds / 1e9
            row = {"entries": size, "name": name, "ms": 1e3 * seconds, "gigabytes_per_second": rate}
            rows.append(row | {"of_copy": best["copy"] / seconds})
    found = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "density": given.density, "rows": rows}
    print(table(rows))
    heading = f"# Finding the largest {given.density:.0%}\n\n{found['device']}, jax {found['jax']}.\n\n"
    write_record(given.out, "selection", found, heading + table(rows))
