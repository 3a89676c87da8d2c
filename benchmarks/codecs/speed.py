"""The speed of the codes, relative to a copy of the array, and to PyTorch if it has the operation.

    python benchmarks/codecs speed --torch-python PYTHON --out benchmarks/reports/NAME

The yardstick is a warm copy in place, `jit(lambda x: -x)` with a donated argument: it reads and writes the array once.
A ratio is the seconds of the copy over those of the code, so 1 is the speed of memory. The contestants take turns, and
the fastest of all turns counts, since noise only adds time.

Freed memory stays mapped for all contestants: results of 64 MiB would otherwise be mapped and cleared in every call,
which takes longer than most codes. With a GPU (`JAX_PLATFORMS=cuda`) it measures that, and the record names the device;
128 MiB is `--size 33554432`.
"""

import argparse
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from common import KEEP_MEMORY, run_process, write_record
from timing import make_copy, time_call

from jaxdist import compressors as jc

# What the codes are held to on CPU: ratio to the copy, of compressing.
TARGETS = {"sign()": 0.5, "int8()": 0.25, "qsgd(4)": 0.1}


def codes() -> dict[str, jc.Compressor]:
    return {
        "cast(bfloat16)": jc.cast(jnp.bfloat16),
        "sign()": jc.sign(),
        "scaled_sign()": jc.scaled_sign(),
        "scaled_sign(bucket=1024)": jc.scaled_sign(bucket=1024),
        "drive()": jc.drive(),
        "terngrad()": jc.terngrad(),
        "natural()": jc.natural(),
        "int8()": jc.int8(),
        "int8(stochastic)": jc.int8(rounding="stochastic"),
        "int4()": jc.int4(),
        "fp8()": jc.fp8(),
        "mxfp8()": jc.mxfp8(),
        "mxfp4()": jc.mxfp4(),
        "min_max_uint8()": jc.min_max_uint8(),
        "qsgd(8)": jc.qsgd(8),
        "qsgd(4)": jc.qsgd(4),
        "qsgd(2)": jc.qsgd(2),
    }


# Run by the other Python: the same yardstick and the same operations, written as its users do.
IN_TORCH = """
import json, sys, time, torch
size, turns = int(sys.argv[1]), int(sys.argv[2])
x = torch.randn(size, generator=torch.Generator().manual_seed(0))
powers = 2 ** torch.arange(8, dtype=torch.uint8)

def int8(x):
    blocks = x.view(-1, 256)
    scales = blocks.abs().amax(1, keepdim=True) / 127
    return torch.round(blocks / scales).to(torch.int8), scales

def int4_at_random(x):
    buckets = x.view(-1, 512)
    norms = buckets.abs().amax(1, keepdim=True)
    levels = torch.floor(buckets / norms * 7 + torch.rand_like(buckets)).to(torch.int8) + 8
    levels = levels.view(-1, 2).to(torch.uint8)
    return levels[:, 0] | (levels[:, 1] << 4), norms

def fp8(x):
    blocks = x.view(-1, 128)
    scales = blocks.abs().amax(1, keepdim=True) / 448
    return (blocks / scales).to(torch.float8_e4m3fn), scales

runs = {
    "copy": lambda: x.neg_(),
    "sign()": lambda: ((x >= 0).view(-1, 8) * powers).sum(1, dtype=torch.uint8),
    "int8()": lambda: int8(x),
    "qsgd(4)": lambda: int4_at_random(x),
    "fp8()": lambda: fp8(x),
    "cast(bfloat16)": lambda: x.bfloat16(),
}
best = {}
for turn in range(turns + 1):
    for name, run in runs.items():
        start = time.perf_counter()
        run()
        seconds = time.perf_counter() - start
        if turn:
            best[name] = min(best.get(name, seconds), seconds)
print(json.dumps(best))
"""


def best_times(contestants: dict[Any, Callable[[], Any]], turns: int) -> dict[Any, float]:
    best = {}
    for turn in range(turns + 1):
        for name, run in contestants.items():
            seconds = time_call(run)
            if turn:  # the first compiles
                best[name] = min(best.get(name, seconds), seconds)
    return best


def contestants(x: jax.Array, key: jax.Array) -> tuple[dict[tuple[str, str], Callable[[], Any]], dict[str, float]]:
    """The functions to run, and the compression factor of each payload."""
    found, smaller = {}, {}
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    for name, code in codes().items():
        compress = jax.jit(code.compress)
        decompress = jax.jit(lambda payload, code=code: code.decompress(payload, like))
        payload = compress(x, key)
        smaller[name] = x.nbytes / sum(part.nbytes for part in jax.tree.leaves(payload))
        found[name, "compress"] = functools.partial(compress, x, key)
        found[name, "decompress"] = functools.partial(decompress, payload)
    return found, smaller


def table(found: dict[str, Any]) -> str:
    copy = found["copy_seconds"]
    rate = 2 * found["bytes"] / copy / 1e9
    device, turns = found["device"], found["turns"]
    lines = [
        f"{found['bytes'] / 2**20:.0f} MiB of float32 on {device}, jax {found['jax']}, the fastest of {turns} turns.",
        f"The copy in place takes {1e3 * copy:.2f} ms, {rate:.0f} GB/s read and written.",
        "",
        "| code | smaller by | compress ms | of copy | decompress ms | of copy | torch compress ms |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in found["codes"]:
        there, back = row["compress_seconds"], row["decompress_seconds"]
        torch = f"{1e3 * row['torch_seconds']:.1f}" if "torch_seconds" in row else ""
        lines.append(
            f"| {row['code']} | {row['smaller']:.1f}x | {1e3 * there:.1f} | {copy / there:.2f} | {1e3 * back:.1f} | "
            f"{copy / back:.2f} | {torch} |"
        )
    return "\n".join(lines) + "\n"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=int, default=2**24, help="elements, a multiple of 4096")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--torch-python", help="a Python with PyTorch, to measure beside")
    parser.add_argument("--out", type=Path, help="the folder of the report")


def main(given: argparse.Namespace) -> None:
    # Of glibc, which reads them when a process starts.
    if not KEEP_MEMORY.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEP_MEMORY)
    key = jax.random.key(0)
    x = jax.random.normal(key, (given.size,))
    runs, smaller = contestants(x, key)
    times = best_times({"copy": make_copy(x), **runs}, given.turns)
    torch = {}
    if given.torch_python:
        torch = run_process([given.torch_python, "-c", IN_TORCH, str(given.size), str(given.turns)])
    rows = []
    for name, ratio in smaller.items():
        row = {"code": name, "smaller": ratio}
        row |= {f"{way}_seconds": times[name, way] for way in ("compress", "decompress")}
        rows.append(row | ({"torch_seconds": torch[name]} if name in torch else {}))
    device = jax.devices()[0]
    found = {
        "device": device.device_kind if device.platform != "cpu" else f"cpu, {os.cpu_count()} cores",
        "jax": jax.__version__,
        "bytes": x.nbytes,
        "turns": given.turns,
        "copy_seconds": times["copy"],
        "torch_copy_seconds": torch.get("copy"),
        "codes": rows,
    }
    print(table(found))
    if device.platform == "cpu":
        for name, target in TARGETS.items():
            reached = times["copy"] / times[name, "compress"]
            print(f"{name}: {reached:.2f} of the copy, {target} wanted: {'reached' if reached >= target else 'missed'}")
    write_record(given.out, "codecs", found, table(found))
