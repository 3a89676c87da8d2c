"""Islands: the loss under churn, bytes on a shaped link, and kills of processes.

    python benchmarks/islands.py quality --seed 0 --out benchmarks/reports/NAME     # and seeds 1, 2
    sudo python benchmarks/islands.py bytes --out benchmarks/reports/NAME           # and with --overlap
    python benchmarks/islands.py host --out benchmarks/reports/NAME
    python benchmarks/islands.py kills --kills 10 --stops 3 --pace 0.25 --out benchmarks/reports/NAME

`quality` trains the small GPT of the command line on three islands of one process, undisturbed and with kills, late
ones and joins that are drawn, and beside them `local_steps` on a mesh. `bytes` compares what the interfaces of network
namespaces count with what the library reports, and how long meetings take with what the link and the processor need;
the store is a server of files (`links/files.py`), or with `--s3 PYTHON` moto's S3 server of that Python
(`pip install 'moto[s3,server]'`), which is so slow that it hides the link. `host` has the processor time of the parts
of a meeting, for 10.5 million parameters on one core. `kills` plays the slow test of processes for figures. Records of
runs add up in a file.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
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

import jaxdist as jd

ROOT = Path(__file__).parents[1]
LINKS = ROOT / "benchmarks" / "links"
PERIOD = 20
TRIO = ("a", "b", "c")
# What Ethernet, IPv4 and TCP with its timestamps add to each frame.
HEADER_BYTES = 14 + 20 + 32
SHAPE = (3000, 3500)
PORT = 5000


class KilledError(BaseException):
    """As by SIGKILL: nothing after it reaches the store."""


class MortalStore:
    """A store whose user dies before so many more calls; `None`: never."""

    def __init__(self, store):
        self.calls_left = None
        self.store = jd.islands.SharedStore(*(self._wrap(function) for function in store))

    def _wrap(self, function):
        def call(*arguments):
            if self.calls_left is not None:
                if self.calls_left <= 0:
                    raise KilledError
                self.calls_left -= 1
            return function(*arguments)

        return call


class Trainer:
    """An island of this process, from its first `enter` to its end.

    There are no checkpoints: its inner optimizer begins anew, which is the worst case.
    """

    def __init__(self, store, tx, run, *, name, seed, timeout, begin_with):
        # Its own batches, and a copy of the first parameters, since a step donates its state.
        self.mortal, self._run, self.state = (
            MortalStore(store),
            run._replace(seed=seed),
            jax.tree.map(jnp.copy, run.state),
        )
        self._context = jd.islands.join(
            self.mortal.store, tx, name=name, round_timeout=timeout, begin_with=begin_with, keep_every=10
        )
        self.island, self.steps = self._context.__enter__(), 0

    def enter(self):
        self.state = self.island.enter(self.state)

    def train(self):
        for _ in range(PERIOD):
            self.state, _ = self._run.step(self.state, self._run.batch(self.steps))
            self.steps += 1

    def meet(self):
        """Returns the members of the round, none if the island died in it."""
        try:
            self.state, report = self.island.meet(self.state)
        except KilledError:
            return ()
        return report.members

    def die(self):
        self.mortal.calls_left = 0
        with contextlib.suppress(KilledError):
            self._context.__exit__(None, None, None)

    def leave(self):
        self.island.leave()
        self._context.__exit__(None, None, None)


def make_method(inner, *, learning_rate=0.7, **where):
    """DiLoCo with 4 bits and error feedback."""
    outer = optax.sgd(learning_rate, momentum=0.9, nesterov=True)
    reducer = jd.error_feedback(jd.compressed(jd.qsgd(4)))
    return jd.local_steps(inner, outer, sync_period=PERIOD, reducer=reducer, **where)


def draw_churn(rng, rounds):
    """What happens in which round: a kill in every ten, a late island in every ten, a fourth island for a third.

    A kill strikes before a drawn call of the store, so before or after the drift is sent; one or two rounds later the
    island is back.
    """
    churn = {}
    for first in range(0, rounds - 9, 10):
        victim, straggler = (str(name) for name in rng.choice(TRIO, 2, replace=False))
        churn[first + int(rng.integers(1, 4))] = ("kill", victim, int(rng.integers(0, 20)), int(rng.integers(1, 3)))
        churn[first + int(rng.integers(6, 9))] = ("late", straggler)
    churn[rounds // 30 * 10] = ("join", "d")
    churn[rounds // 15 * 10 - 1] = ("leave", "d")
    return churn


def train_islands(tx, run, *, rounds, timeout, churn):
    """Trains three islands by turns; only their meetings are side by side, so that a loaded machine makes none late.

    Returns:
      The loss of the last global parameters, and what happened.
    """
    store, trainers, starts, drifting = jd.islands.memory(), {}, dict.fromkeys(TRIO, 0), {}
    members, happened, sessions, ended = [], dict.fromkeys(("none", "kill", "late", "join", "leave"), 0), 0, []
    with ThreadPoolExecutor(8) as pool:
        for number in range(rounds):
            kind, *event = churn.get(number, ("none", ""))
            name = event[0]
            happened[kind] += 1
            if kind == "join":
                starts[name] = number
            if kind == "leave":
                ended.append(trainers.pop(name))
                ended[-1].leave()
            beginning = [one for one, start in starts.items() if start == number]
            for one in beginning:
                sessions += 1
                settings = {"seed": 1000 * (run.seed + 1) + sessions, "begin_with": 1 if number else len(TRIO)}
                trainers[one] = Trainer(store, tx, run, name=one, timeout=timeout, **settings)
            # The first ones wait for each other.
            list(pool.map(lambda one: trainers[one].enter(), beginning))
            # An island that was late in the round before is still in its meeting, and counts in this one.
            punctual = [one for one in trainers if one not in drifting]
            for one in punctual:
                trainers[one].train()
            if kind == "kill":
                trainers[name].mortal.calls_left = event[1]
            late = [name] if kind == "late" and name in punctual else []
            meetings = [pool.submit(trainers[one].meet) for one in punctual if one not in late]
            members.append(max(len(meeting.result()) for meeting in [*meetings, *drifting.values()]))
            drifting = {one: pool.submit(trainers[one].meet) for one in late}
            if kind == "kill":
                ended.append(trainers.pop(name))
                ended[-1].die()
                starts[name] = number + event[2]
        list(map(lambda meeting: meeting.result(), drifting.values()))
    newest = max(trainers.values(), key=lambda trainer: trainer.steps)
    steps = sum(trainer.steps for trainer in [*ended, *trainers.values()])
    loss = run.evaluate(newest.state)["loss"]
    for trainer in trainers.values():
        trainer.die()
    del happened["none"]
    return {"held_out_loss": loss, "steps": steps, "mean_members": statistics.mean(members), **happened}


def measure_quality(options):
    """One seed: `local_steps` on a mesh of three, three islands undisturbed, and the same with churn."""
    jd.runtime.use_cpu_devices(len(TRIO))
    from jaxdist._cli.spellings import parse
    from jaxdist._cli.training import train

    workload, rows = parse.parse_workload("text", options.model), []
    # Always the same windows, whatever the batch is.
    held_out = workload.held_out(240)[:20]
    workload = workload._replace(held_out=lambda size: held_out)
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(options.rate, b2=0.99))

    def note(condition, found):
        rows.append({"condition": condition, "seed": options.seed, "rounds": options.rounds, **found})
        print(json.dumps(rows[-1]), flush=True)

    # The step averages gradients over the devices of an island, of which there is one here.
    alone = optax.chain(jd.all_reduce(jd.exact(), axis="data"), inner)
    tx = make_method(alone, learning_rate=options.outer_rate, axis=None)
    settings = {"seed": options.seed, "batch_size": options.batch}
    run = train.prepare(workload, None, tx, mesh=jd.make_mesh({"data": 1}), island=True, **settings)
    churn = draw_churn(np.random.default_rng(options.seed), options.rounds)
    common = {"rounds": options.rounds, "timeout": options.timeout}
    note("undisturbed", train_islands(tx, run, churn={}, **common))
    note("churn", train_islands(tx, run, churn=churn, **common))
    settings["batch_size"] *= len(TRIO)
    mesh = jd.make_mesh({"data": len(TRIO)})
    whole_tx = make_method(inner, learning_rate=options.outer_rate)
    whole = train.prepare(workload, None, whole_tx, mesh=mesh, sync_period=PERIOD, **settings)
    state = whole.state
    for step in range(options.rounds * PERIOD):
        state, _ = whole.step(state, whole.batch(step))
    steps = options.rounds * PERIOD * len(TRIO)
    note("local_steps", {"held_out_loss": whole.evaluate(state)["loss"], "steps": steps})
    return rows


def measure_bytes(options):
    """Three islands and a store in namespaces, each behind a shaped link; what interfaces and islands count."""
    sys.path.insert(0, str(LINKS))
    import cluster

    keys = {"AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none", "AWS_REGION": "us-east-1"}
    environment = os.environ | keys | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    with cluster.hosts(1 + len(TRIO), options.rate_mbit) as hosts, contextlib.ExitStack() as stack:
        server, *others = hosts
        # A bucket serves all of its users at once.
        server.set_rate(options.store_mbit)
        moto = [options.s3, "-m", "moto.server", "-H", server.address, "-p", str(PORT)]
        files = [sys.executable, str(LINKS / "files.py"), server.address, str(PORT)]
        serve = [*server.command, *(moto if options.s3 else files)]
        process = stack.enter_context(subprocess.Popen(serve, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        stack.callback(process.kill)
        jobs = []
        for name, host in zip(TRIO, others, strict=True):
            command = [*host.command, sys.executable, __file__, "island", "--name", name, "--address", server.address]
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
    tx = make_method(optax.sgd(0.1), axis=None)
    move = jax.jit(lambda x, key: x + 0.01 * jax.random.normal(key, x.shape))
    params, key = jnp.zeros(SHAPE), jax.random.key(sum(options.name.encode()))
    limits = {"round_timeout": 300, "begin_with": len(TRIO), "keep_every": 1000, "overlap": options.overlap}
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
    from jaxdist.islands import exchange, records
    from jaxdist.local_sgd.base import config_of

    tx, params = make_method(optax.sgd(0.1), axis=None), jnp.zeros(SHAPE)
    config, local, one = config_of(tx), tx.init(params), np.float32(1)
    method, moved = exchange.RoundMethod(config.reducer, config.outer), jax.random.normal(jax.random.key(0), SHAPE)
    drift, state = exchange.measure_drift(local.anchor, moved), local.reducer[0]
    encode = lambda: exchange.encode_drift(method, np.int32(1), drift, state, None)  # noqa: E731
    arrays = [exchange.to_host(x) for x in encode()[0]]
    body, shared = records.pack("x", arrays), exchange.select_shared(local)
    zeros = exchange.zeros_like(shared.anchor)
    parts = {
        "code": encode,
        "pack": lambda: records.pack("x", arrays),
        "hash of the payload": lambda: records.hash_of(body),
        "decode and add one member": lambda: exchange.add_member(method, zeros, arrays, one, state, None),
        "outer step": lambda: exchange.take_outer_step(method, shared, drift, one, shared.reducer, None),
        "digest of parameters and momentum": lambda: exchange.digest_of(shared),
    }
    row = {"parameters": int(np.prod(SHAPE)), "payload_bytes": len(body)}
    for name, function in parts.items():
        seconds = []
        for _ in range(1 + options.repeat):  # the first one compiles
            started = time.process_time()
            jax.block_until_ready(function())
            seconds.append(time.process_time() - started)
        row[f"{name}, ms"] = round(1e3 * min(seconds[1:]), 1)
    print(json.dumps(row), flush=True)
    return [row]


def measure_kills(options):
    """Kills and stops of processes over a folder, as in the slow test."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    import tempfile

    from island_jobs import play_events

    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "JAX_COMPILATION_CACHE_DIR": str(options.cache or Path(folder, "cache")),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        counts = {"kills": options.kills, "stops": options.stops, "pace": options.pace, "seed": options.seed}
        before, started = os.getloadavg()[0], time.monotonic()
        found = play_events(Path(folder, "run"), Path(folder), **counts)
    found |= {"seconds": time.monotonic() - started, "load_before": before, "load_after": os.getloadavg()[0]}
    print(json.dumps(found), flush=True)
    return [found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    quality, links, host, kills = map(commands.add_parser, ("quality", "bytes", "host", "kills"))
    quality.add_argument("--model", default="gpt:tiny,layers=1,width=32,context=32,heads=2")
    quality.add_argument("--rounds", type=int, default=40)
    quality.add_argument("--batch", type=int, default=16)
    quality.add_argument("--rate", type=float, default=4e-3)
    quality.add_argument("--outer-rate", type=float, default=0.4)
    quality.add_argument("--timeout", type=float, default=2.0)
    links.add_argument("--s3", metavar="PYTHON", help="a Python that has moto[s3,server]")
    links.add_argument("--rate-mbit", type=float, default=100)
    links.add_argument("--store-mbit", type=float, default=1000, help="of the store's own link")
    links.add_argument("--limit", type=float, default=800, help="seconds")
    kills.add_argument("--kills", type=int, default=50)
    kills.add_argument("--stops", type=int, default=15)
    kills.add_argument("--pace", type=float, default=0.0, help="seconds of a step; a round has four")
    kills.add_argument("--cache", type=Path, help="a folder for compiled programs")
    island = commands.add_parser("island", help="what `bytes` starts")
    for one in (links, island):
        one.add_argument("--rounds", type=int, default=4)
        one.add_argument("--overlap", action="store_true")
        one.add_argument("--train", type=float, default=1, help="seconds between two meetings")
    for one in (quality, kills):
        one.add_argument("--seed", type=int, default=0)
    host.add_argument("--repeat", type=int, default=5)
    for one in (quality, links, host, kills):
        one.add_argument("--out", type=Path)
    island.add_argument("--name")
    island.add_argument("--address")
    island.add_argument("--s3", action="store_true")
    options = parser.parse_args()
    if options.command == "island":
        return take_part(options)
    measure = {"quality": measure_quality, "bytes": measure_bytes, "host": measure_host, "kills": measure_kills}
    rows = measure[options.command](options)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        with open(options.out / f"{options.command}.jsonl", "a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
