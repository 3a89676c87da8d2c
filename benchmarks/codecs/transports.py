"""The overhead of reducers over their codes: processor time of every code in every transport, beside its parts alone.

    python benchmarks/codecs transports --out benchmarks/reports/NAME

Four simulated workers reduce one array; the time is the processor's, of one worker and one step. *Parts* is the work of
the transport, from the codes timed alone, and one plain mean of the array for moving the data:

- `compressed`: compress `n`, decompress `W n`
- `two_shot`: compress `n` and `n / W`, decompress `2 n`

A transport that takes more than `BOUND` times its parts makes the compiler compute something again and again: the codes
and their scales share one message, and a fusion across the concatenation once computed them element by element, which
took 2.6 times as long. Ends with 1 if one does.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# More threads than devices, or those that wait in a collective keep those that they wait for from running.
os.environ.setdefault("NPROC", "32")

import jax
import jax.numpy as jnp
from common import write_record
from jax.sharding import NamedSharding, PartitionSpec
from timing import time_call

import jaxdist as jd
from jaxdist import compressors as jc

WORKERS = 4
BOUND = 1.2
CODES = {
    "scaled_sign()": jc.scaled_sign(),
    "qsgd(2)": jc.qsgd(2),
    "qsgd(4)": jc.qsgd(4),
    "qsgd(8)": jc.qsgd(8),
    "nuqsgd(4)": jc.nuqsgd(4),
    "int8()": jc.int8(),
    "int4()": jc.int4(),
    "fp8()": jc.fp8(),
    "mxfp4()": jc.mxfp4(),
    "natural()": jc.natural(),
    "terngrad(clip=None)": jc.terngrad(clip=None),
    "drive()": jc.drive(),
    "min_max_uint8()": jc.min_max_uint8(),
    "top_k(0.01)": jc.top_k(0.01),
    "random_k(0.01)": jc.random_k(0.01),
}
TRANSPORTS = {"compressed": jd.compressed, "two_shot": jd.two_shot}


def processor_seconds(run: Callable[[], Any], turns: int) -> float:
    """The median, after one run that compiles."""
    seconds = []
    for turn in range(turns + 1):
        taken = time_call(run, time.process_time)
        if turn:
            seconds.append(taken)
    return statistics.median(seconds)


def reducing(reducer: jd.reducers.Reducer, x: jax.Array, mesh: jax.sharding.Mesh) -> Callable[[], Any]:
    def step(state, x):
        reduced, state = reducer.reduce(x, state, jd.comm.over("data"))
        return state, reduced.mean

    state = jd.place(reducer.init(jax.ShapeDtypeStruct((x.size // WORKERS,), x.dtype)), mesh)
    run = jd.distribute(step, mesh, donate=False, batch_specs=PartitionSpec("data"))
    return lambda: run(state, x)


def parts(code: jc.Compressor, rows: jax.Array, turns: int) -> tuple[float, float]:
    """Seconds to compress and to decompress the array, a row for each worker."""
    like = jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype)
    keys = jax.random.split(jax.random.key(0), WORKERS)
    compress = jax.jit(jax.vmap(code.compress))
    decompress = jax.jit(jax.vmap(lambda payload: code.decompress(payload, like)))
    payload = compress(rows, keys)
    return processor_seconds(lambda: compress(rows, keys), turns), processor_seconds(lambda: decompress(payload), turns)


def table(found: dict[str, Any]) -> str:
    lines = [
        f"{found['entries']:,} float32 entries, {WORKERS} simulated workers, {found['cores']} cores, jax "
        f"{found['jax']}; processor milliseconds of one worker, median of {found['turns']} steps. A plain mean takes "
        f"{1e3 * found['mean_seconds']:.0f} ms.",
        "",
        f"| code | transport | ms | parts ms | ratio (at most {BOUND}) |",
        "|---|---|--:|--:|--:|",
    ]
    for row in found["rows"]:
        there, alone = 1e3 * row["seconds"], 1e3 * row["parts_seconds"]
        lines.append(f"| {row['code']} | {row['transport']} | {there:.0f} | {alone:.0f} | {there / alone:.2f} |")
    return "\n".join(lines) + "\n"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=int, default=10_500_000, help="entries, a multiple of 4")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--codes", nargs="*", default=list(CODES), choices=list(CODES))
    parser.add_argument("--out", type=Path, help="the folder of the report")


def main(given: argparse.Namespace) -> int:
    mesh = jd.make_mesh({"data": WORKERS})
    values = jax.random.normal(jax.random.key(1), (WORKERS * given.size,))
    x = jax.device_put(values, NamedSharding(mesh, PartitionSpec("data")))
    rows = jnp.asarray(values[: given.size]).reshape(WORKERS, -1)
    mean = processor_seconds(reducing(jd.exact(), x, mesh), given.turns) / WORKERS
    found = []
    for name in given.codes:
        code = CODES[name]
        there, back = parts(code, rows, given.turns)
        alone = {
            "compressed": mean + there + WORKERS * back,
            "two_shot": mean + there * (1 + 1 / WORKERS) + 2 * back,
        }
        for transport, make in TRANSPORTS.items():
            seconds = processor_seconds(reducing(make(code), x, mesh), given.turns) / WORKERS
            row = {"code": name, "transport": transport, "seconds": seconds, "parts_seconds": alone[transport]}
            found.append(row)
            print(f"{name} {transport}: {seconds / alone[transport]:.2f} of its parts", flush=True)
    record = {
        "entries": given.size,
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "turns": given.turns,
        "mean_seconds": mean,
        "rows": found,
    }
    print(table(record))
    write_record(given.out, "transports", record, table(record))
    over = [row for row in found if row["seconds"] > BOUND * row["parts_seconds"]]
    for row in over:
        print(f"{row['code']} by {row['transport']} takes more than {BOUND} times its parts")
    return bool(over)
