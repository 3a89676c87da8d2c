"""Islands: peak memory, bytes and seconds of meetings of large models.

    python benchmarks/islands size memory --parameters 50e6 --out benchmarks/reports/NAME
    python benchmarks/islands size run --parameters 1e9 --fragments 16 --s3 PYTHON --out benchmarks/reports/NAME

`memory` has what a meeting and `enter` need beside the training state: two islands in two processes over a folder, for
each number of fragments without a code and with one of 4 bits. `run` is one model over moto's S3 server of that Python
(`pip install 'moto[s3,server]'`), with bytes as reports count them. Peaks are those of the kernel, `VmHWM`, set back
before each call. Records of runs add up in a file.
"""

import argparse
import gc
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from common import append_rows, memory_of

import jaxdist as jd

NAMES = ("a", "b")
INNERS = {"sgd": lambda: optax.sgd(0.1), "adam": lambda: optax.adam(1e-3)}
REDUCERS = {
    "exact": jd.exact,
    "4 bits": lambda: jd.compressed(jd.qsgd(4)),
    "4 bits with feedback": lambda: jd.error_feedback(jd.compressed(jd.qsgd(4))),
}
# So that large arrays are given back to the kernel at once, and peaks are those of arrays that live.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "JAX_PLATFORMS": "cpu"}
# Fragments of equal shapes have the same programs, in both processes.
ENVIRONMENT |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
KEYS = {"AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none", "AWS_REGION": "us-east-1"}
PORT = 5011


def make_method(options):
    outer = optax.sgd(0.7, momentum=options.momentum or None, nesterov=bool(options.momentum))
    settings = {"sync_period": options.fragments, "fragments": options.fragments, "axis": None}
    return jd.local_steps(INNERS[options.inner](), outer, reducer=REDUCERS[options.reducer](), **settings)


@partial(jax.jit, donate_argnums=0)
def move(x, number):
    """A step of training: another one for each island and number, of entries that differ."""
    where = jax.lax.iota(jnp.float32, x.size).reshape(x.shape)
    return (x + 0.01 * jnp.sin(where * (1 + number))).astype(x.dtype)


def take_part(options):
    """One island in its process: prints a row for `enter`, and one for each meeting."""
    store = jd.islands.folder(options.place)
    if options.endpoint:
        store = jd.islands.bucket(options.place, endpoint=options.endpoint, timeout=120)
    # One enters after the other, so that the peaks of that do not add up.
    before = f"rounds/{0:08d}/here/{NAMES[NAMES.index(options.name) - 1]}"
    while options.name != NAMES[0] and before not in store.list("rounds/"):
        time.sleep(0.5)
    tx, size = make_method(options), options.parameters // options.leaves
    # Two pieces of what islands keep are seldom equal, and equal ones would be sent once.
    params = [move(jnp.zeros((size,), options.dtype), 1000 + number) for number in range(options.leaves)]
    state = {"params": params, "opt": tx.init(params)}
    del params
    row = {"name": options.name, "state_bytes": sum(x.nbytes for x in jax.tree.leaves(state))}
    settings = {"begin_with": len(NAMES), "round_timeout": options.timeout, "keep_every": options.keep_every}
    with jd.islands.join(store, tx, name=options.name, **settings) as island:
        with measured(row | {"call": "enter"}):
            state = island.enter(state)
        for number in range(options.meetings or 2 * options.fragments):
            state["params"] = [move(x, number + len(NAMES) * ord(options.name)) for x in state["params"]]
            jax.block_until_ready(state)
            with measured(row | {"call": "meet"}) as found:
                state, report = island.meet(state, examples=1)
                jax.block_until_ready(state)
                fields = ("round", "members", "counted", "sent_bytes", "received_bytes", "requests", "digest")
                found.update({name: getattr(report, name) for name in fields})


@contextmanager
def measured(row):
    """Prints a row with the peak beside what was there before, the peak of the process, and seconds."""
    gc.collect()
    # Sets the peak back to what is in use now.
    Path("/proc/self/clear_refs").write_text("5")
    before, started, found = memory_of("self", "VmRSS"), time.monotonic(), {}
    yield found
    seconds, peak = time.monotonic() - started, memory_of("self", "VmHWM")
    most = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found |= {"seconds": seconds, "before_bytes": before, "peak_bytes": peak, "process_peak_bytes": most}
    print(json.dumps(row | found | {"load": os.getloadavg()[0]}), flush=True)


def start_islands(options, place, *more):
    """The rows of all islands, each in its process."""
    names = (
        "parameters",
        "fragments",
        "reducer",
        "inner",
        "dtype",
        "momentum",
        "leaves",
        "meetings",
        "timeout",
        "keep_every",
    )
    chosen = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
    command = [sys.executable, str(Path(__file__).parent), "size", "island", f"--place={place}", *chosen, *more]
    with ExitStack() as stack:
        programs, jobs = stack.enter_context(tempfile.TemporaryDirectory()), []
        for name in NAMES:
            given = os.environ | KEYS | ENVIRONMENT | {"JAX_COMPILATION_CACHE_DIR": programs}
            jobs.append(subprocess.Popen([*command, f"--name={name}"], stdout=subprocess.PIPE, text=True, env=given))
            stack.enter_context(jobs[-1])
            stack.callback(jobs[-1].kill)
        with ThreadPoolExecutor(len(jobs)) as pool:
            return [row for found in pool.map(read_rows, jobs) for row in found]


def read_rows(job):
    rows = []
    for line in job.stdout:
        print(line, end="", file=sys.stderr, flush=True)
        rows.append(json.loads(line))
    return rows


def summarize(options, rows):
    """One row for both islands: the first meeting of each fragment is left out, since it compiles what is left."""
    meetings = [row for row in rows if row["call"] == "meet"]
    entered = [row for row in rows if row["call"] == "enter"]
    counted = [row for row in meetings if row["counted"] and len(row["members"]) == len(NAMES)]
    beside = [row["peak_bytes"] - row["before_bytes"] for row in meetings]
    entries = options.parameters // options.fragments
    parts = options.leaves // options.fragments
    formula = 4 * entries
    if options.reducer != "exact":
        formula = entries // 2 + 4 * parts * -(-(options.parameters // options.leaves) // 512)
    names = ("parameters", "fragments", "reducer", "inner", "dtype", "momentum")
    return {name: getattr(options, name) for name in names} | {
        "meetings": len(meetings),
        "counted": len(counted),
        "equal": len({(row["round"], row["digest"]) for row in counted}) == len({row["round"] for row in counted}),
        "state_bytes": rows[0]["state_bytes"],
        "fragment_bytes": rows[0]["state_bytes"] // options.fragments,
        "peak_beside_state_bytes": max(beside),
        "median_beside_state_bytes": int(statistics.median(beside)),
        "enter_beside_state_bytes": max(row["peak_bytes"] - row["before_bytes"] for row in entered),
        "peak_bytes": max(row["process_peak_bytes"] for row in rows),
        "sent_bytes": statistics.median(row["sent_bytes"] for row in counted),
        "received_bytes": statistics.median(row["received_bytes"] for row in counted),
        "formula_bytes": formula,
        "requests": statistics.mean(row["requests"] for row in counted),
        "median_seconds": statistics.median(row["seconds"] for row in meetings),
        "enter_seconds": max(row["seconds"] for row in entered),
        "load": os.getloadavg()[0],
    }


def measure_memory(options):
    rows = []
    for reducer, fragments in itertools.product(options.reducers, options.numbers):
        chosen = argparse.Namespace(**vars(options) | {"reducer": reducer, "fragments": fragments})
        with tempfile.TemporaryDirectory() as folder:
            rows.append(summarize(chosen, start_islands(chosen, folder)))
        print(json.dumps(rows[-1]), flush=True)
    return rows


def measure_run(options):
    """Both islands over moto's server, which keeps large objects on the disk."""
    address = f"http://127.0.0.1:{PORT}"
    serve = [options.s3, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(PORT)]
    with subprocess.Popen(serve, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | KEYS) as server:
        try:
            for _ in range(600):
                with suppress(OSError):
                    asked = urllib.request.Request(f"{address}/bench", method="PUT")
                    urllib.request.urlopen(asked, timeout=30).close()
                    break
                time.sleep(0.2)
            rows = start_islands(options, "s3://bench/run", f"--endpoint={address}")
            row = summarize(options, rows) | {"store_peak_bytes": memory_of(server.pid, "VmHWM")}
        finally:
            server.kill()
    print(json.dumps(row), flush=True)
    return [row]


def add_options(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="command", required=True)
    memory, run = map(commands.add_parser, ("memory", "run"))
    island = commands.add_parser("island", help="what the others start")
    for one in (memory, run, island):
        one.add_argument("--parameters", type=lambda text: int(float(text)), default=50_000_000)
        one.add_argument("--inner", choices=INNERS, default="adam" if one is memory else "sgd")
        one.add_argument("--dtype", default="float32" if one is memory else "bfloat16")
        one.add_argument("--momentum", type=float, default=0.9 if one is memory else 0.0)
        one.add_argument("--leaves", type=int, default=16)
        one.add_argument("--meetings", type=int, default=0, help="two of each fragment by default")
        one.add_argument("--timeout", type=float, default=600)
        one.add_argument("--keep-every", type=int, default=1000)
    for one in (run, island):
        one.add_argument("--fragments", type=int, default=16)
        one.add_argument("--reducer", choices=REDUCERS, default="4 bits")
    memory.add_argument("--numbers", type=int, nargs="+", default=[1, 4, 16], help="of fragments")
    memory.add_argument("--reducers", nargs="+", choices=REDUCERS, default=["exact", "4 bits with feedback"])
    run.add_argument("--s3", metavar="PYTHON", default=sys.executable, help="a Python that has moto[s3,server]")
    for one in (memory, run):
        one.add_argument("--out", type=Path)
    for name in ("name", "place", "endpoint"):
        island.add_argument(f"--{name}")


def main(options: argparse.Namespace) -> None:
    if options.command == "island":
        return take_part(options)
    rows = {"memory": measure_memory, "run": measure_run}[options.command](options)
    append_rows(options.out, f"size_{options.command}", rows)
