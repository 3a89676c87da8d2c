"""Islands: what a meeting costs, in bytes and seconds on a shaped link, and in processor time.

    sudo python benchmarks/islands cost bytes --out benchmarks/reports/NAME           # and with --overlap
    python benchmarks/islands cost host --out benchmarks/reports/NAME
    python benchmarks/islands cost fragments --out benchmarks/reports/NAME
    python benchmarks/islands cost owners --out benchmarks/reports/NAME

`bytes` compares what the interfaces of network namespaces count with what the library reports, and how long meetings
take with what the link and the processor need; the store is a server of files (`links/files.py`), or with
`--s3 PYTHON` moto's S3 server of that Python (`pip install 'moto[s3,server]'`), which is so slow that it hides the
link. `host` has the processor time of the parts of a meeting. Both have 10.5 million parameters; `host` has one core.
`fragments` has the pauses of meetings with and without fragments side by side: two islands in threads of one process,
each behind a link of its own that a sleep stands for. `owners` has the bytes and requests of an island and round as
reports count them, without and with owners: many islands in threads of one process, over a folder. Records of runs add
up in a file.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import append_rows

import jaxdist as jd

LINKS = Path(__file__).parents[1] / "links"
NAMES = ("a", "b", "c")
# What Ethernet, IPv4 and TCP with its timestamps add to each frame.
HEADER_BYTES = 14 + 20 + 32
SHAPE = (3000, 3500)
PORT = 5000


def make_method(fragments=1):
    """DiLoCo with 4 bits and error feedback."""
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    reducer = jd.error_feedback(jd.compressed(jd.qsgd(4)))
    return jd.local_steps(optax.sgd(0.1), outer, sync_period=20, fragments=fragments, reducer=reducer, axis=None)


def measure_bytes(options):
    """Three islands and a store in namespaces, each behind a shaped link; what interfaces and islands count."""
    sys.path.insert(0, str(LINKS))
    import cluster

    keys = {"AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none", "AWS_REGION": "us-east-1"}
    environment = os.environ | keys | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    with cluster.hosts(1 + len(NAMES), options.rate_mbit) as hosts, contextlib.ExitStack() as stack:
        server, *others = hosts
        # A bucket serves all of its users at once.
        server.set_rate(options.store_mbit)
        moto = [options.s3, "-m", "moto.server", "-H", server.address, "-p", str(PORT)]
        files = [sys.executable, str(LINKS / "files.py"), server.address, str(PORT)]
        serve = [*server.command, *(moto if options.s3 else files)]
        process = stack.enter_context(subprocess.Popen(serve, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        stack.callback(process.kill)
        jobs = []
        for name, host in zip(NAMES, others, strict=True):
            command = [
                *host.command,
                sys.executable,
                str(Path(__file__).parent),
                "cost",
                "island",
                "--name",
                name,
                "--address",
                server.address,
            ]
            command += ["--rounds", str(options.rounds), "--train", str(options.train)]
            command += ["--overlap"] * options.overlap + ["--s3"] * bool(options.s3)
            job = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
            stack.callback(job.kill)
            jobs.append(job)
            timer = threading.Timer(options.limit, job.kill)
            timer.start()
            stack.callback(timer.cancel)
        # Together, or a full pipe of one would hold the others.
        with ThreadPoolExecutor(len(jobs)) as pool:
            return [row for found in pool.map(partial(read_rows, options), jobs) for row in found]


def read_rows(options, job):
    """The rows that an island prints, until its end."""
    rows = []
    for line in job.stdout:
        row = json.loads(line)
        on_link = 8e-6 * (row["sent_bytes"] + row["received_bytes"]) / options.rate_mbit
        rows.append(row | {"rate_mbit": options.rate_mbit, "link_seconds": on_link})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def connect_to_store(options):
    """The store of `measure_bytes`, when its server answers."""
    address = f"http://{options.address}:{PORT}"
    for _ in range(600):
        with contextlib.suppress(OSError):
            # Of a bucket, whoever is first makes it; for the others it is there.
            method = "PUT" if options.s3 else "GET"
            urllib.request.urlopen(
                urllib.request.Request(f"{address}/bench?prefix=", method=method), timeout=30
            ).close()
            break
        time.sleep(0.2)
    if options.s3:
        client = {"allow_http": True, "timeout": "120s"}
        return jd.islands.bucket("s3://bench/run", endpoint=address, client_options=client)
    sys.path.insert(0, str(LINKS))
    import files

    return jd.islands.SharedStore(*files.connect(options.address, PORT))


def take_part(options):
    """One island of `measure_bytes`, in its namespace: prints a row for each meeting."""
    store = connect_to_store(options)
    tx = make_method()
    move = jax.jit(lambda x, key: x + 0.01 * jax.random.normal(key, x.shape))
    params, key = jnp.zeros(SHAPE), jax.random.key(sum(options.name.encode()))
    limits = {"round_timeout": 300, "begin_with": len(NAMES), "keep_every": 1000, "overlap": options.overlap}
    with jd.islands.join(store, tx, name=options.name, **limits) as island:
        state = island.enter({"params": params, "opt": tx.init(params)})
        for number in range(options.rounds):
            state["params"] = jax.block_until_ready(move(state["params"], jax.random.fold_in(key, number)))
            before, started = read_counters(), time.process_time()
            state, report = island.meet(state)
            jax.block_until_ready(state)
            processor, after = time.process_time() - started, read_counters()
            counted = {name: after[name] - before[name] for name in before}
            fields = ("round", "members", "counted", "wait_seconds", "sent_bytes", "received_bytes", "digest")
            row = {"name": options.name, "overlap": options.overlap, **{name: getattr(report, name) for name in fields}}
            print(json.dumps(row | counted | {"processor_seconds": processor, "load": os.getloadavg()[0]}), flush=True)
            # Interfaces count what is left of this round's acknowledgements before the next one begins.
            time.sleep(options.train)


def read_counters():
    """What the interface has counted so far, without its headers too."""
    folder, found = Path("/sys/class/net/eth0/statistics"), {}
    for short, name in (("tx", "sent"), ("rx", "received")):
        count, packets = (int((folder / f"{short}_{what}").read_text()) for what in ("bytes", "packets"))
        found |= {f"interface_{name}": count, f"interface_{name}_payload": count - HEADER_BYTES * packets}
    return found


def measure_host(options):
    """Processor seconds of the parts of a meeting, the least of a few, on one core."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    from jaxdist.islands import exchange, protocol
    from jaxdist.local_sgd.local_steps import method_of

    tx, params = make_method(), jnp.zeros(SHAPE)
    config, local, one = method_of(tx), tx.init(params), np.float32(1)
    method, moved = exchange.RoundMethod(config.reducer, config.outer), jax.random.normal(jax.random.key(0), SHAPE)
    drift, state = exchange.measure_drift(local.anchor, moved), local.reducer[0]
    encode = lambda: exchange.encode_drift(method, np.int32(1), local.anchor, moved, state, one)  # noqa: E731
    arrays = [exchange.to_host(x) for x in encode()[0]]
    body, shared = protocol.pack("x", arrays), exchange.select_shared(local)
    # Sums are used up.
    copy = lambda: jax.block_until_ready(jax.tree.map(jnp.copy, drift))  # noqa: E731
    parts = {
        "code": (encode, ()),
        "pack": (lambda: protocol.pack("x", arrays), ()),
        "hash of the payload": (lambda: protocol.hash_of(body), ()),
        "decode and add one member": (lambda total: exchange.add_member(method, total, arrays, one, state), (copy,)),
        "outer step": (
            lambda total: exchange.take_outer_step(method, shared, total, one, shared.reducer, None),
            (copy,),
        ),
        "digest of parameters and momentum": (lambda: exchange.digest_of(shared), ()),
    }
    row = {"parameters": int(np.prod(SHAPE)), "payload_bytes": len(body)}
    for name, (function, makes) in parts.items():
        seconds = []
        for _ in range(1 + options.repeat):  # the first one compiles
            arguments = [make() for make in makes]
            started = time.process_time()
            jax.block_until_ready(function(*arguments))
            seconds.append(time.process_time() - started)
        row[f"{name}, ms"] = round(1e3 * min(seconds[1:]), 1)
    print(json.dumps(row), flush=True)
    return [row]


def measure_fragments(options):
    """Pauses and bytes of meetings: without fragments, with overlap, and with overlap and fragments, in turn."""
    rows = []
    for _ in range(options.repeat):
        for fragments, overlap in ((1, False), (1, True), (options.fragments, True)):
            row = meet_behind_links(options, fragments, overlap=overlap)
            print(json.dumps(row), flush=True)
            rows.append(row)
    return rows


def meet_behind_links(options, fragments, *, overlap):
    """What the meetings of two islands cost, of a model of `--fragments` equal leaves."""
    tx, base = make_method(fragments), jd.islands.memory()
    size = options.parameters // options.fragments
    params = [jnp.zeros(size) for _ in range(options.fragments)]
    move = jax.jit(lambda params, key: [x + 0.01 * jax.random.normal(key, x.shape) for x in params])

    def cross_link(body):
        time.sleep(8e-6 * len(body or b"") / options.rate_mbit)
        return body

    link = base._replace(
        put=lambda name, body: base.put(name, cross_link(body)), get=lambda name: cross_link(base.get(name))
    )

    def take_part(name):
        reports, settings = [], {"round_timeout": 300, "begin_with": 2, "keep_every": 10_000}
        with jd.islands.join(link, tx, name=name, overlap=overlap, **settings) as island:
            state = island.enter({"params": params, "opt": tx.init(params)})
            for number in range(1 + fragments * options.rounds):
                moved = move(state["params"], jax.random.fold_in(jax.random.key(ord(name)), number))
                state["params"] = jax.block_until_ready(moved)
                # So many steps of training as a fragment has.
                time.sleep(options.train / fragments)
                state, report = island.meet(state)
                jax.block_until_ready(state)
                reports.append(report)
        # With overlap the first one sends, and takes no round.
        return reports[1:]

    with ThreadPoolExecutor(2) as pool:
        reports = [report for found in pool.map(take_part, "ab") for report in found]
    counted = [report for report in reports if report.members == ("a", "b")]
    entries = options.parameters // fragments
    return {
        "fragments": fragments,
        "overlap": overlap,
        "parameters": options.parameters,
        "rate_mbit": options.rate_mbit,
        "train_seconds": options.train,
        "meetings": len(reports),
        "counted": len(counted),
        "median_pause_seconds": statistics.median(report.wait_seconds for report in counted),
        "least_pause_seconds": min(report.wait_seconds for report in counted),
        "sent_bytes": statistics.median(report.sent_bytes for report in counted),
        "received_bytes": statistics.median(report.received_bytes for report in counted),
        "formula_bytes": entries // 2 + 4 * (options.fragments // fragments) * -(-size // 512),
        "load": os.getloadavg()[0],
    }


def measure_owners(options):
    """Bytes and requests of so many islands, without owners and with as many of them as islands, in turn."""
    rows = []
    for count in options.islands:
        for owners in (0, count):
            with tempfile.TemporaryDirectory() as folder:
                rows.append(meet_in_folder(options, folder, count, owners))
            print(json.dumps(rows[-1]), flush=True)
    return rows


def meet_in_folder(options, folder, count, owners):
    """The mean of all rounds but the first, in which all islands read all drifts to commit."""
    tx, size = jd.local_steps(optax.sgd(0.1), optax.sgd(0.7), sync_period=1, axis=None), options.parameters

    def take_part(number):
        settings = {"begin_with": count, "round_timeout": 120, "owners": owners, "keep_every": 1000}
        with jd.islands.join(folder, tx, name=f"{number:02d}", **settings) as island:
            state, reports = island.enter({"params": jnp.zeros(size), "opt": tx.init(jnp.zeros(size))}), []
            for _ in range(1 + options.rounds):
                state["params"] = state["params"] + 0.01 * number
                state, report = island.meet(state)
                reports.append(report)
            return reports[1:]

    with ThreadPoolExecutor(count) as pool:
        reports = [report for found in pool.map(take_part, range(count)) for report in found]
    payload = 4 * size
    fields = ("sent_bytes", "received_bytes", "requests", "wait_seconds")
    means = {name: statistics.mean(getattr(report, name) for report in reports) for name in fields}
    return {
        "islands": count,
        "owners": owners,
        "parameters": size,
        "payload_bytes": payload,
        "rounds": options.rounds,
        "fewest_members": min(len(report.members) for report in reports),
        "sent_payloads": means["sent_bytes"] / payload,
        "received_payloads": means["received_bytes"] / payload,
        "most_received_payloads": max(report.received_bytes for report in reports) / payload,
        "requests": means["requests"],
        "mean_pause_seconds": means["wait_seconds"],
        "load": os.getloadavg()[0],
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="command", required=True)
    links, host = map(commands.add_parser, ("bytes", "host"))
    links.add_argument("--s3", metavar="PYTHON", help="a Python that has moto[s3,server]")
    links.add_argument("--rate-mbit", type=float, default=100)
    links.add_argument("--store-mbit", type=float, default=1000, help="of the store's own link")
    links.add_argument("--limit", type=float, default=800, help="seconds")
    island = commands.add_parser("island", help="what `bytes` starts")
    for one in (links, island):
        one.add_argument("--rounds", type=int, default=4)
        one.add_argument("--overlap", action="store_true")
        one.add_argument("--train", type=float, default=1, help="seconds between two meetings")
    host.add_argument("--repeat", type=int, default=5)
    parts = commands.add_parser("fragments")
    parts.add_argument("--fragments", type=int, default=4)
    parts.add_argument("--parameters", type=int, default=10_500_000)
    parts.add_argument("--rate-mbit", type=float, default=100)
    parts.add_argument("--rounds", type=int, default=3, help="of each fragment")
    parts.add_argument("--train", type=float, default=8, help="seconds between two rounds of a fragment")
    parts.add_argument("--repeat", type=int, default=2)
    owners = commands.add_parser("owners")
    owners.add_argument("--islands", type=int, nargs="+", default=[4, 12, 24])
    owners.add_argument("--parameters", type=int, default=480_000)
    owners.add_argument("--rounds", type=int, default=2)
    for one in (links, host, parts, owners):
        one.add_argument("--out", type=Path)
    island.add_argument("--name")
    island.add_argument("--address")
    island.add_argument("--s3", action="store_true")


def main(options: argparse.Namespace) -> None:
    if options.command == "island":
        return take_part(options)
    measures = {
        "bytes": measure_bytes,
        "host": measure_host,
        "fragments": measure_fragments,
        "owners": measure_owners,
    }
    rows = measures[options.command](options)
    append_rows(options.out, options.command, rows)
