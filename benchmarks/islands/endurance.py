"""Islands as processes that run for hundreds of rounds over what fails: do they stay equal, in time, and complete?

    python benchmarks/islands endurance storm --rounds 200 --kills 20 --stops 5 --out benchmarks/reports/NAME
    python benchmarks/islands endurance slow --out benchmarks/reports/NAME
    python benchmarks/islands endurance many --islands 12 --rounds 20 --out benchmarks/reports/NAME
    python benchmarks/islands endurance requests --islands 4 --rounds 30 --out benchmarks/reports/NAME

`storm` has a bucket of moto's S3 server behind a proxy that delays all answers by 20 to 100 ms, refuses a fifth of the
requests, cuts some answers, keeps some to itself, and is silent for a minute once, while islands are killed, started
again under their names, and stopped. In `slow` the upload of an island takes longer than a round, twice: without and
with `overlap`. `many` has a folder, and `requests` the bucket with 20 ms a request and no disturbance. The status is 1
if a bar is missed. Records of runs add up in a file.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, append_rows

sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "support" / "scripts")]

STEPS = 4
# Of a step. A power of two, so that sums are exact.
EXAMPLES = 8.0
STOP_SECONDS = 6.0


# An island


def train(settings):
    """Trains until a round has come, then until all of its progress counts; prints a line for each meeting."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from island import MachineClock

    import jaxdist as jd

    reducer = jd.error_feedback(jd.compressed(jd.qsgd(4)))
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    tx = jd.local_steps(optax.adam(0.05), outer, sync_period=STEPS, reducer=reducer, axis=None)
    goal = np.random.default_rng(list(settings["name"].encode())).normal(size=(16, 16)).astype(np.float32)

    @jax.jit
    def step(params, opt):
        updates, opt = tx.update(params - goal, opt, params, sync=(), examples=EXAMPLES)
        return optax.apply_updates(params, updates), opt

    def take_step(state):
        time.sleep(settings["pace"])
        return dict(zip(("params", "opt"), step(state["params"], state["opt"])))

    def meet(meeting=None):
        before, began = clock.seconds(), time.time()
        state_after, report = (meeting or island.meet)(state)
        times = {"began": began, "ended": time.time(), "stalled": clock.seconds() - before}
        print(json.dumps(report._asdict() | times), flush=True)
        return state_after, report

    params = jnp.zeros((16, 16))
    state = {"params": params, "opt": tx.init(params)}
    take_step(state)  # compiled before the others wait
    clock, trained, counted = MachineClock(), 0.0, 0.0
    store = delay_uploads(open_store(settings), settings["upload_seconds"])
    options = {name: settings[name] for name in ("name", "round_timeout", "begin_with", "overlap", "patience")}
    with jd.islands.join(store, tx, keep_every=5, **options) as island:
        state, is_over = island.enter(state), False
        while not is_over:
            for _ in range(STEPS):
                state, trained = take_step(state), trained + EXAMPLES
            state, report = meet()
            counted += report.examples
            # Where this island's end is a file, it trains until that is there.
            end = settings["end"]
            is_over = os.path.exists(end) if end else report.round >= settings["rounds"]
        tries = 0
        while counted < trained and tries < settings["last_meetings"]:
            # With `overlap` a meeting does not wait.
            time.sleep(STEPS * settings["pace"])
            state, report = meet()
            counted, tries = counted + report.examples, tries + 1
        meet(island.leave)
        print(json.dumps({"trained": trained, "counted": counted}), flush=True)


def open_store(settings):
    """The folder, or the bucket of a server."""
    from buckets import s3_bucket

    from jaxdist import islands

    return s3_bucket(settings["endpoint"]) if settings["endpoint"] else islands.folder(settings["folder"])


def delay_uploads(store, seconds):
    """A store into which a drift takes so long."""

    def put(name, body):
        time.sleep(seconds)
        store.put(name, body)

    return store._replace(put=put) if seconds else store


# The processes


class Job:
    """A process of an island, what it has printed, and when it was stopped."""

    def __init__(self, log, **settings):
        self.name, self.stops = settings["name"], []
        self.log = log / f"{self.name}-{time.monotonic_ns()}"
        defaults = {"endpoint": None, "folder": None, "upload_seconds": 0.0, "overlap": False, "end": None}
        settings = {**defaults, "patience": 240.0, "last_meetings": 0, **settings}
        command = [sys.executable, str(Path(__file__).parent), "endurance", "child", "--settings", json.dumps(settings)]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
        with open(self.log, "w") as output, open(f"{self.log}.err", "w") as errors:
            self.process = subprocess.Popen(command, stdout=output, stderr=errors, env=environment)

    def lines(self):
        found = self.log.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in found if line.endswith("\n")]

    def reports(self):
        """Those of meetings; `disturbed` if the process was stopped in it."""
        found = [line for line in self.lines() if "round" in line]
        for report in found:
            spans = [(begin, end) for begin, end in self.stops if begin < report["ended"] and end > report["began"]]
            report["disturbed"] = bool(spans)
        return found

    def sums(self):
        """Examples that it was trained on, and that were counted as its reports say."""
        return next(line for line in self.lines() if "trained" in line)

    def errors(self):
        return Path(f"{self.log}.err").read_text()

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self, seconds):
        began = time.time()
        os.kill(self.process.pid, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(self.process.pid, signal.SIGCONT)
        # It takes a moment until it runs.
        self.stops.append((began, time.time() + 0.1))


def wait_until(condition, jobs, seconds=600):
    """Waits until it holds; raises where a job fails or it takes too long."""
    end = time.monotonic() + seconds
    while not condition():
        for job in jobs:
            if job.process.poll() not in (None, 0):
                raise RuntimeError(f"{job.name} ended with status {job.process.returncode}: {job.errors()[-3000:]}")
        if time.monotonic() > end:
            raise TimeoutError([(job.name, job.reports()[-1:], job.errors()[-500:]) for job in jobs])
        time.sleep(0.1)


def wait_for_ends(jobs):
    wait_until(lambda: all(job.process.poll() is not None for job in jobs), jobs)
    wait_until(lambda: True, jobs)


@contextlib.contextmanager
def ended_at_last(jobs):
    """Ends the jobs of this list in any case."""
    try:
        yield
    finally:
        for job in jobs:
            job.kill()


def summarize(jobs, round_timeout):
    """What all runs measure."""
    digests = collections.defaultdict(set)
    reports = [report for job in jobs for report in job.reports()]
    for report in reports:
        digests[report["round"]].add(report["digest"])
    seen = collections.Counter(report["round"] for report in reports)
    running = [report for report in reports if not report["disturbed"]]
    requests = [report["requests"] for job in jobs for report in job.reports()[1:-1]]
    offline = [report for report in reports if report["offline"]]
    return {
        "islands": len({job.name for job in jobs}),
        "processes": len(jobs),
        "rounds": max(digests),
        "meetings": len(reports),
        "rounds_seen_by_two_or_more": sum(count > 1 for count in seen.values()),
        "unequal_digests": sum(len(found) > 1 for found in digests.values()),
        "round_timeout_seconds": round_timeout,
        "longest_wait_seconds": max(report["wait_seconds"] for report in running),
        "longest_wait_without_stalls_seconds": max(report["wait_seconds"] - report["stalled"] for report in running),
        "median_wait_seconds": statistics.median(report["wait_seconds"] for report in running),
        "meetings_of_stopped_processes": len(reports) - len(running),
        "offline": len(offline),
        "offline_without_a_problem": sum(report["problem"] is None for report in offline),
        "problems": dict(collections.Counter(sort_problem(report["problem"]) for report in offline)),
        "late": sum(report["late"] for report in reports),
        "uploading": sum(report["uploading"] for report in reports),
        "retries": sum(report["retries"] for report in reports),
        "mean_members": statistics.mean(len(report["members"]) for report in reports if report["members"]),
        "mean_requests": statistics.mean(requests),
        "median_requests": statistics.median(requests),
        "most_requests": max(requests),
        "tracebacks": sum("Traceback" in job.errors() for job in jobs),
    }


def sort_problem(problem):
    """The beginning of a problem, without names of one request."""
    for known in ("has not answered", "SlowDown", "timed out", "out of reach"):
        if problem and known in problem:
            return known
    return str(problem)[:80]


# The runs


class Weather:
    """What the proxy of a storm does to a request: `fail`."""

    def __init__(self, seed):
        from buckets import Fault, refusal

        self._chance, self._fault = random.Random(seed), Fault
        self._busy = refusal(503, "SlowDown")._replace(seconds=0.02)
        self.away_until = 0.0

    def fail(self, number, method, path):
        left = self.away_until - time.monotonic()
        if left > 0:
            return self._fault(seconds=left)
        kind, delay = self._chance.random(), 0.02 + 0.08 * self._chance.random()
        if kind < 0.2:
            return self._busy
        if kind < 0.22:
            return self._fault(cut=0, seconds=delay)
        return self._fault(cut=100 if kind < 0.25 and method == "GET" else None, seconds=delay)


class Storm:
    """Islands over a bucket that fails, and what happens to them."""

    def __init__(self, options, log, endpoint, weather):
        self._options, self._log, self._endpoint, self._weather = options, log, endpoint, weather
        self.jobs, self._current, self._draw = [], {}, random.Random(options.seed)

    def play(self):
        names = [f"island-{number}" for number in range(self._options.islands)]
        for name in names:
            self._start(name, len(names))
        events = ["kill"] * self._options.kills + ["stop"] * self._options.stops
        self._draw.shuffle(events)
        if self._options.away:
            events.insert(len(events) // 2, "away")
        for number, event in enumerate(events):
            reached = (number + 1) * self._options.rounds // (len(events) + 1)
            self._wait_until(lambda reached=reached: self._newest() >= reached)
            job = self._current[self._draw.choice(names)]
            if event != "away":
                # It has met since it began, and takes part.
                self._wait_until(lambda job=job: len(job.reports()) > 1)
                time.sleep(self._draw.random())
            print(f"round {self._newest()}: {event} {job.name}", flush=True)
            self._happen(event, job)
        wait_for_ends(self._current.values())

    def _happen(self, event, job):
        if event == "away":
            self._weather.away_until = time.monotonic() + self._options.away
        elif event == "stop":
            job.stop(STOP_SECONDS)
        else:
            job.kill()
            self._start(job.name)

    def _start(self, name, begin_with=1):
        options = self._options
        settings = {"round_timeout": options.timeout, "rounds": options.rounds, "pace": options.pace}
        job = Job(self._log, name=name, endpoint=self._endpoint, begin_with=begin_with, **settings)
        self._current[name] = job
        self.jobs.append(job)

    def _newest(self):
        return max((report["round"] for job in self.jobs for report in job.reports()[-1:]), default=0)

    def _wait_until(self, condition):
        wait_until(condition, self._current.values())


def play_storm(options, folder):
    """Kills, stops, and a server that fails."""
    from buckets import Proxy, s3_server

    weather = Weather(options.seed)
    with s3_server() as server, contextlib.closing(Proxy(server, weather.fail)) as proxy:
        storm = Storm(options, folder, proxy.url, weather)
        with ended_at_last(storm.jobs):
            storm.play()
        return summarize(storm.jobs, options.timeout) | {
            "kills": options.kills,
            "stops": options.stops,
            "away_seconds": options.away,
            "requests_of_the_proxy": len(proxy.requests),
        }


def check_storm(found):
    """The bars that it misses."""
    limit = found["round_timeout_seconds"] + 1
    return {
        "unequal digests": found["unequal_digests"],
        "waits": found["longest_wait_without_stalls_seconds"] > limit,
        "offline without a problem": found["offline_without_a_problem"],
        "tracebacks": found["tracebacks"],
    }


def play_slow(options, folder):
    """An island whose drifts take several rounds into the store."""
    jobs, end, store = [], folder / "end", folder / "run"
    settings = {"folder": str(store), "begin_with": 3, "round_timeout": 1.0, "pace": 0.25, "last_meetings": 60}
    with ended_at_last(jobs):
        for name in ("fast-1", "fast-2"):
            jobs.append(Job(folder, name=name, rounds=0, end=str(end), **settings))
        slow = {"upload_seconds": options.upload_seconds, "overlap": options.overlap}
        jobs.append(Job(folder, name="slow", rounds=options.rounds, **slow, **settings))
        wait_until(lambda: jobs[-1].process.poll() is not None, jobs)
        end.touch()
        wait_for_ends(jobs)
        found = summarize(jobs, 1.0) | {"overlap": options.overlap, "upload_seconds": options.upload_seconds}
        members = read_members(store)
        for job in jobs:
            own = [member[-2] for names in members for member in names if member[0] == job.name]
            found[job.name] = {"drifts": len(own), "committed": sum(own), **job.sums()}
    return found


def read_members(store):
    """The members of all commits: name, body, weight, rate, examples and bytes of each."""
    return [json.loads(path.read_bytes())["members"] for path in sorted(store.glob("rounds/*/commit"))]


def check_slow(found):
    return check_storm(found) | {
        name: found[name]["committed"] != found[name]["trained"] for name in ("fast-1", "fast-2", "slow")
    }


def play_many(options, folder):
    """Many islands over a folder."""
    return play_undisturbed(options, folder, folder=str(folder / "run"))


def play_requests(options, folder):
    """Islands over a bucket with 20 ms a request."""
    from buckets import Fault, Proxy, s3_server

    with s3_server() as server, contextlib.closing(Proxy(server, lambda *_: Fault(seconds=0.02))) as proxy:
        return play_undisturbed(options, folder, endpoint=proxy.url)


def play_undisturbed(options, log, **place):
    settings = {"round_timeout": options.timeout, "rounds": options.rounds, "pace": options.pace} | place
    names, jobs = [f"island-{number:02d}" for number in range(options.islands)], []
    with ended_at_last(jobs):
        for name in names:
            jobs.append(Job(log, name=name, begin_with=len(names), **settings))
        wait_for_ends(jobs)
        found = summarize(jobs, options.timeout)
        rounds = collections.Counter()
        for job in jobs:
            for report in job.reports()[:-1]:
                rounds[report["round"]] = max(rounds[report["round"]], len(report["members"]))
        return found | {"members_by_round": [count for _, count in sorted(rounds.items())]}


def check_many(found):
    return check_storm(found)


def check_requests(found):
    return check_storm(found) | {"requests": found["mean_requests"] > 10}


RUNS = {
    "storm": (play_storm, check_storm),
    "slow": (play_slow, check_slow),
    "many": (play_many, check_many),
    "requests": (play_requests, check_requests),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", choices=[*RUNS, "child"], metavar="|".join(RUNS))
    parser.add_argument("--settings", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--islands", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--stops", type=int, default=1)
    parser.add_argument("--away", type=float, default=60.0, help="seconds for which the server is silent, once")
    parser.add_argument("--timeout", type=float, default=4.0, help="round_timeout")
    parser.add_argument("--pace", type=float, default=0.1, help="seconds of a step; a round has four")
    parser.add_argument("--upload-seconds", type=float, default=3.5, help="of the slow island")
    parser.add_argument("--overlap", action="store_true", help="of the slow island")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=Path, help="a folder for compiled programs")
    parser.add_argument("--log", type=Path, help="a folder for what islands print, instead of a temporary one")
    parser.add_argument("--out", type=Path)


def main(given: argparse.Namespace) -> int | None:
    if given.run == "child":
        train(given.settings)
        return None
    play, check = RUNS[given.run]
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.log or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        os.environ |= {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(given.cache or Path(temporary, "cache")),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        before, started = os.getloadavg()[0], time.monotonic()
        found = play(given, folder)
    found = {"run": given.run, "seed": given.seed, "pace": given.pace} | found
    found |= {"seconds": time.monotonic() - started, "load_before": before, "load_after": os.getloadavg()[0]}
    missed = [name for name, value in check(found).items() if value]
    print(json.dumps(found, indent=1), "missed:", missed, flush=True)
    append_rows(given.out, "endurance", [found | {"missed": missed}])
    return 1 if missed else 0
