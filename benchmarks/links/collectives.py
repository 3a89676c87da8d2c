"""Seconds of single collectives of XLA over gloo, by size, beside what `jaxdist.analysis.step_time` predicts.

    sudo python benchmarks/links collectives --rate 100 --rate 1000 --delay 10 --out benchmarks/reports/NAME

Each process has one device and one thread, on a host of its own. A collective is timed alone, in a program of its own.
`exchange` is the library's all-to-all, of bytes. What each process receives is compared with what the others sent; a
difference ends the run.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import cluster
import compare

KINDS = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "exchange")
SIZES = (2**10, 2**15, 2**17, 2**20, 2**22, 19_543_040)  # the last is the language model
PAYLOAD = 1448 / 1514  # the share of a link that is payload: segments of 1448 bytes in frames of 1514
FILE = "collectives.json"


class Timers(compare.System):
    """The processes, which time what they are asked to."""

    def time(self, kind: str, size: int, turns: int) -> dict[str, Any]:
        answers = self.ask(kind=kind, size=size, turns=turns)
        if not all(answer["right"] for answer in answers):
            raise RuntimeError(f"wrong values after {kind} of {size} bytes")
        # A collective is over when the slowest process is done.
        return answers[0] | {"seconds": [max(times) for times in zip(*(answer["seconds"] for answer in answers))]}


def measure(given: argparse.Namespace) -> None:
    records = []
    with cluster.hosts(given.hosts, max(given.rate), given.delay) as places:
        timers = Timers("collectives.py", sys.executable, "", places)
        try:
            for rate in given.rate:
                for place in places:
                    place.set_rate(rate)
                for kind, size in ((kind, size) for kind in given.kinds for size in given.sizes):
                    turns = max(3, min(given.turns, round(0.5 * rate * 1e6 / 8 / size)))
                    setting = {"hosts": given.hosts, "rate_mbit": rate, "delay_ms": given.delay}
                    before = sum(place.dropped() for place in places)
                    timed = timers.time(kind, size, turns)
                    # The first run counts, too.
                    drops = (sum(place.dropped() for place in places) - before) / (turns + 1)
                    records.append(setting | {"kind": kind, "size": size, "dropped": drops} | timed)
        finally:
            timers.close()
    path = given.out / FILE
    given.out.mkdir(parents=True, exist_ok=True)
    before = json.loads(path.read_text()) if path.exists() else []
    path.write_text(json.dumps([*before, *records]) + "\n")
    text = table([*before, *records])
    path.with_suffix(".md").write_text(f"{text}\n")
    print(text)


def table(records: list[dict[str, Any]]) -> str:
    """A row for each collective; the smallest all-reduce over the same link tells how long a hop takes."""
    from jaxdist.analysis.cost import Link
    from jaxdist.analysis.step_time import StepCost, Traffic, network_seconds

    lines = [
        "| hosts | link | collective | MB | ms | hops | predicted ms | error | packets dropped |",
        "|--:|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    hops: dict[tuple, float] = {}
    for record in records:
        link = (record["hosts"], record["rate_mbit"], record["delay_ms"])
        median = statistics.median(record["seconds"])
        traffic = Traffic(*record["traffic"])
        # The first record of a link is its smallest all-reduce, of which only the hops take time.
        latency = hops.setdefault(link, median / traffic.hops)
        name = f"{record['rate_mbit']:g} Mbit/s, {record['delay_ms']:g} ms each way"
        predicted = network_seconds(
            StepCost(0.0, 0.0, traffic), Link(name, latency, record["rate_mbit"] * 1e6 / 8 * PAYLOAD)
        )
        cells = [str(record["hosts"]), name, record["kind"], f"{record['size'] / 1e6:.3f}", f"{1e3 * median:.1f}"]
        cells += [f"{traffic.hops:g}", f"{1e3 * predicted:.1f}", f"{100 * (predicted / median - 1):+.0f} %"]
        cells += [f"{record['dropped']:.0f}" if "dropped" in record else ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def answer_requests() -> None:
    """The loop of one process: compiles a collective, and times it."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["NPROC"] = "2"
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxdist import analysis
    from jaxdist.analysis import step_time
    from jaxdist.comm import over

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    workers = int(os.environ["WORLD_SIZE"])
    jax.distributed.initialize(
        f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", workers, int(os.environ["RANK"])
    )
    mesh = jax.make_mesh((workers,), ("data",))
    ring = [(i, (i + 1) % workers) for i in range(workers)]
    run = {
        "all-reduce": lambda x: jax.lax.psum(x, "data"),
        "all-gather": lambda x: jax.lax.all_gather(x, "data"),
        "all-to-all": lambda x: jax.lax.all_to_all(x.reshape(workers, -1), "data", 0, 0),
        "collective-permute": lambda x: jax.lax.ppermute(x, "data", ring),
        # Codes are integers; floats go another way.
        "exchange": lambda x: over("data").all_to_all(x.reshape(workers, -1)),
    }
    rank = jax.process_index()
    # What this process receives, of what all send. Sums of whole numbers are exact.
    received = {
        "all-reduce": sum,
        "all-gather": np.stack,
        "all-to-all": lambda sent: [x.reshape(workers, -1)[rank] for x in sent],
        "collective-permute": lambda sent: sent[rank - 1],
    }
    received["exchange"] = received["all-to-all"]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    answers.write(json.dumps({"ready": {"jax": jax.__version__}}) + "\n")
    cut = PartitionSpec("data")
    for line in sys.stdin:
        asked = json.loads(line)
        whole = PartitionSpec() if asked["kind"] == "all-reduce" else cut
        step = jax.jit(jax.shard_map(run[asked["kind"]], mesh=mesh, in_specs=cut, out_specs=whole))
        count, dtype = (asked["size"], np.uint8) if asked["kind"] == "exchange" else (asked["size"] // 4, np.float32)
        sent = [np.random.default_rng(i).integers(0, 256, count // workers * workers) for i in range(workers)]
        local = jnp.asarray(sent[rank].astype(dtype))
        x = jax.make_array_from_process_local_data(NamedSharding(mesh, cut), local)
        compiled = step.lower(x).compile()
        traffic = step_time.traffic(analysis.collectives(compiled), workers=workers, gloo=True)
        seconds = []
        for _ in range(asked["turns"] + 1):
            start = time.perf_counter()
            found = jax.block_until_ready(compiled(x))
            seconds.append(time.perf_counter() - start)
        got = np.asarray(found.addressable_data(0)).ravel()
        right = np.array_equal(got, np.ravel(received[asked["kind"]](sent)))
        # The first run also allocates.
        answers.write(json.dumps({"seconds": seconds[1:], "traffic": traffic, "right": right}) + "\n")
    jax.distributed.shutdown()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", type=float, action="append", help="Mbit/s of each link, 100 by default")
    parser.add_argument("--delay", type=float, default=0.0, help="ms from host to host; a round trip takes two")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), help="bytes of a worker's operand")
    parser.add_argument("--turns", type=int, default=7, help="the most runs of each")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the report")


def main(given: argparse.Namespace) -> None:
    if reason := cluster.refusal():
        sys.exit(f"cannot make hosts here: {reason}")
    given.rate = given.rate or [100.0]
    measure(given)


if __name__ == "__main__":
    answer_requests()
