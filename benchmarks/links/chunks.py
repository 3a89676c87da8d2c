"""Whether XLA computes while it communicates, and codes one chunk of a gradient while another one travels, on CPU.

    sudo python benchmarks/links chunks --rate 100 --out benchmarks/reports/NAME

Two hosts, each with one device. *Both* is one program with an all-reduce and a computation that do not depend on each
other. The others reduce a gradient with `compressed(qsgd(4))`, as a whole and in equal chunks with an all-reduce each,
which XLA is told not to merge.
"""

import argparse
import json
import os
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import cluster
import compare
from server import Way, serve

SIZE, WIDTH, PRODUCTS = 2**23, 1000, 12
PARTS = ("computation", "all-reduce", "both")
CHUNKS = ("1", "2", "4", "8")


def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    wanted = {"jaxdist": ("chunks.py", sys.executable)}
    with cluster.hosts(2, given.rate) as places, compare.systems(wanted, "", places) as running:
        workers, records = running["jaxdist"], []
        for name in [*PARTS, *CHUNKS]:
            workers.run(name, 0)  # compiles
            # A program is over when the slower process is done.
            seconds = [max(pair) for pair in zip(*(each["seconds"] for each in workers.run(name, given.turns)))]
            records.append({"rate_mbit": given.rate, **workers.about, "program": name, "seconds": seconds})
        return records


def table(records: list[dict[str, Any]]) -> str:
    lines = ["| jax | program | ms | from to |", "|---|---|--:|--:|"]
    for record in records:
        name = record["program"]
        name = name if name in PARTS else f"4 bits, {name} chunk{'s' * (name != '1')}"
        ms = sorted(1e3 * seconds for seconds in record["seconds"])
        lines.append(f"| {record['jax']} | {name} | {statistics.median(ms):.0f} | {ms[0]:.0f}-{ms[-1]:.0f} |")
    return "\n".join(lines)


def run_process() -> None:
    """One of the two processes."""
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "NPROC": "2",
        "XLA_FLAGS": "--xla_disable_hlo_passes=cpu-all-reduce-combiner",
    }
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    import jaxdist as jd

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", 2, int(os.environ["RANK"]))
    mesh, cut = jd.make_mesh(), PartitionSpec("data")
    x = jax.make_array_from_process_local_data(
        NamedSharding(mesh, cut), jax.random.normal(jax.random.key(0), SIZE) / WIDTH
    )

    def compute(x):
        square = y = x[: WIDTH**2].reshape(WIDTH, WIDTH)
        for _ in range(PRODUCTS):
            y = jnp.tanh(y @ square)
        return y

    def communicate(x):
        return jax.lax.psum(x[: SIZE // 8], "data")

    def reduce_chunks(count, x):
        transformation = jd.all_reduce(jd.compressed(jd.qsgd(4)))
        return [transformation.update(chunk, transformation.init(chunk))[0] for chunk in jnp.split(x, count)]

    programs = {
        "computation": (0, compute),
        "all-reduce": (1, communicate),
        "both": (1, lambda x: (compute(x), communicate(x))),
        **{name: (int(name), partial(reduce_chunks, int(name))) for name in CHUNKS},
    }

    def build(name):
        all_reduces, program = programs[name]
        run = jax.shard_map(program, mesh=mesh, in_specs=cut, out_specs=cut)
        compiled = jax.jit(run).lower(x).compile()
        if (found := compiled.as_text().count(" all-reduce(")) != all_reduces:
            raise RuntimeError(f"{name}: {found} all-reduces instead of {all_reduces}: XLA has merged some")

        def step(number):
            jax.block_until_ready(compiled(x))
            return 0.0

        return Way(step)

    serve(build, {"jax": jax.__version__})
    jax.distributed.shutdown()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", type=float, default=100.0, help="Mbit/s of each link")
    parser.add_argument("--turns", type=int, default=7, help="runs of each program")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the report")


def main(given: argparse.Namespace) -> None:
    if reason := cluster.refusal():
        sys.exit(f"cannot make hosts here: {reason}")
    path = given.out / "chunks.json"
    given.out.mkdir(parents=True, exist_ok=True)
    records = [*(json.loads(path.read_text()) if path.exists() else []), *measure(given)]
    path.write_text(json.dumps(records) + "\n")
    path.with_suffix(".md").write_text(f"{table(records)}\n")
    print(table(records))


if __name__ == "__main__":
    run_process()
