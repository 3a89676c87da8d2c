"""Whether XLA computes while it communicates, and codes one chunk of a gradient while another one travels, on CPU.

    sudo python benchmarks/links chunks --rate 100 --out benchmarks/reports/NAME

Two hosts, each with one device. *Both* is one program with an all-reduce and a computation that do not depend on each
other. The others reduce a gradient with `compressed(qsgd(4))`, as a whole and in equal chunks with a reduction each,
which XLA is told not to merge.
"""

import argparse
import json
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import cluster
import compare
from collectives import join

SIZE, WIDTH, PRODUCTS = 2**23, 1000, 12
CHUNKS = (1, 2, 4, 8)
PARTS = ("computation", "all-reduce", "both")


def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    with cluster.hosts(2, given.rate) as places:
        workers = compare.System("chunks.py", sys.executable, "", places)
        try:
            records = []
            for name in [*PARTS, *map(str, CHUNKS)]:
                first, second = workers.ask(name=name, turns=given.turns)
                # A program is over when the slower process is done.
                seconds = [max(pair) for pair in zip(first["seconds"], second["seconds"], strict=True)]
                setting = {"rate_mbit": given.rate, **workers.about, "program": name}
                records.append(setting | {"all_reduces": first["all_reduces"], "seconds": seconds})
            return records
        finally:
            workers.close()


def table(records: list[dict[str, Any]]) -> str:
    lines = ["| jax | program | all-reduces | ms | from to |", "|---|---|--:|--:|--:|"]
    for record in records:
        name = record["program"]
        name = name if name in PARTS else f"4 bits, {name} chunk{'s' * (name != '1')}"
        ms = sorted(1e3 * seconds for seconds in record["seconds"])
        times = f"{statistics.median(ms):.0f} | {ms[0]:.0f}-{ms[-1]:.0f}"
        lines.append(f"| {record['jax']} | {name} | {record['all_reduces']} | {times} |")
    return "\n".join(lines)


def answer_requests() -> None:
    """The loop of one process: compiles a program, and times it."""
    os.environ["XLA_FLAGS"] = "--xla_disable_hlo_passes=cpu-all-reduce-combiner"
    mesh, answers = join()
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    import jaxdist as jd

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
        "computation": compute,
        "all-reduce": communicate,
        "both": lambda x: (compute(x), communicate(x)),
        **{str(count): partial(reduce_chunks, count) for count in CHUNKS},
    }
    cut = PartitionSpec("data")
    x = jax.make_array_from_process_local_data(
        NamedSharding(mesh, cut), jax.random.normal(jax.random.key(0), SIZE) / WIDTH
    )
    for line in sys.stdin:
        asked = json.loads(line)
        run = jax.shard_map(programs[asked["name"]], mesh=mesh, in_specs=cut, out_specs=cut, check_vma=False)
        compiled = jax.jit(run).lower(x).compile()
        seconds = []
        for _ in range(asked["turns"] + 1):
            start = time.perf_counter()
            jax.block_until_ready(compiled(x))
            seconds.append(time.perf_counter() - start)
        count = compiled.as_text().count(" all-reduce(")
        # The first run also allocates.
        answers.write(json.dumps({"seconds": seconds[1:], "all_reduces": count}) + "\n")
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
    answer_requests()
