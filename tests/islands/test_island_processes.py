"""Islands as processes over a folder: one is killed and comes back, and the others go on; many kills with `--slow`."""

import collections
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "scripts" / "island.py"
TIMEOUT = 5.0


class Job:
    """A running island and the reports that it has printed."""

    def __init__(self, folder, name, rounds, begin_with, *, log, processes=1, timeout=TIMEOUT, pace=0.0):
        self.name, self.log = name, log / f"{name}-{time.monotonic_ns()}"
        launcher = ["-m", "jaxdist.processes.launch", "-n", str(processes), "--logs", str(log / "logs")]
        arguments = [str(folder), name, str(rounds), str(begin_with), str(timeout), str(pace)]
        with open(self.log, "w") as output, open(f"{self.log}.err", "w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, *(launcher if processes > 1 else []), str(SCRIPT), *arguments],
                stdout=output,
                stderr=errors,
                env=os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"},
            )

    def reports(self):
        lines = self.log.read_text().splitlines(keepends=True)
        # A launcher writes the number of the process before each line.
        lines = [line.removeprefix("[0] ") for line in lines if line.endswith("\n")]
        return [json.loads(line) for line in lines if line.startswith("{")]

    def errors(self):
        return Path(f"{self.log}.err").read_text()


def wait_until(condition, jobs, seconds=240):
    end = time.monotonic() + seconds
    while not condition():
        for job in jobs:
            assert job.process.poll() in (None, 0), job.errors()
        assert time.monotonic() < end, [(job.name, job.reports()[-1:], job.errors()[-500:]) for job in jobs]
        time.sleep(0.02)


def end_all(jobs):
    for job in jobs:
        job.process.kill()
        job.process.wait()


def check_digests(jobs):
    """All islands have the same global parameters, bit for bit, after each round that they saw."""
    digests = collections.defaultdict(set)
    for job in jobs:
        for report in job.reports():
            digests[report["round"]].add(report["digest"])
    assert {number: found for number, found in digests.items() if len(found) > 1} == {}
    return digests


def test_an_island_is_killed_and_comes_back_and_the_others_go_on(tmp_path):
    folder, rounds = tmp_path / "run", 30
    jobs = [Job(folder, name, 10**6, 3, log=tmp_path) for name in ("a", "bb", "ccc")]
    try:
        wait_until(lambda: all(len(job.reports()) >= 3 for job in jobs), jobs)
        killed = jobs.pop()
        killed.process.kill()
        killed.process.wait()
        before = jobs[0].reports()[-1]["round"]
        wait_until(lambda: all(job.reports()[-1]["round"] >= before + 3 for job in jobs), jobs)
        back = Job(folder, "ccc", 10**6, 3, log=tmp_path)
        jobs.append(back)
        wait_until(lambda: len(back.reports()) >= 3 and back.reports()[-1]["round"] >= rounds, jobs)
        digests = check_digests([*jobs, killed])
        assert sum(len(found) for found in digests.values()) >= rounds - 5
        assert any("ccc" in report["members"] for report in jobs[0].reports()[-20:])
        assert any("ccc" in report["missing"] for report in jobs[0].reports())
    finally:
        end_all(jobs)


@pytest.mark.slow
def test_an_island_of_two_processes_beside_one_of_one(tmp_path):
    pair = Job(tmp_path / "run", "pair", 4, 2, log=tmp_path, processes=2, timeout=60)
    single = Job(tmp_path / "run", "single", 4, 2, log=tmp_path, timeout=60)
    try:
        wait_until(lambda: all(job.process.poll() == 0 for job in (pair, single)), [pair, single])
        assert sorted(check_digests([pair, single])) == [1, 2, 3, 4]
        for report in pair.reports() + single.reports():
            assert report["members"] == ["pair", "single"]
            assert report["counted"]
    finally:
        end_all([pair, single])


@pytest.mark.slow
@pytest.mark.parametrize("pace", [0.0, 0.25])
def test_fifty_kills_and_fifteen_stops(tmp_path, pace):
    """No survivor ends or restarts, and the protocol holds none for longer than the timeout and a second."""
    rng, folder = random.Random(0), tmp_path / "run"
    names = ["a", "bb", "ccc"]
    jobs, all_jobs = {}, []

    def start(name):
        jobs[name] = Job(folder, name, 10**9, 1, log=tmp_path, pace=pace)
        all_jobs.append(jobs[name])

    for name in names:
        start(name)
    try:
        wait_until(lambda: all(job.reports() for job in jobs.values()), jobs.values())
        events = ["kill"] * 50 + ["stop"] * 15
        rng.shuffle(events)
        for event in events:
            job = jobs[rng.choice(names)]
            # One at a time: the others are survivors, and each has met since it began.
            wait_until(lambda job=job: len(job.reports()) > 2, jobs.values())
            time.sleep(rng.random())
            if event == "kill":
                job.process.kill()
                job.process.wait()
                start(job.name)
            else:
                os.kill(job.process.pid, signal.SIGSTOP)
                time.sleep(2 * TIMEOUT)
                os.kill(job.process.pid, signal.SIGCONT)
        wait_until(lambda: any(job.reports() and job.reports()[-1]["round"] >= 400 for job in all_jobs), jobs.values())
        digests = check_digests(all_jobs)
        assert len(digests) >= 300
        for job in all_jobs:
            assert "Traceback" not in job.errors()
        # Without what the machine took itself: a loaded one wakes a process late, and a stopped one not at all.
        waits = [report["wait_seconds"] - report["machine_seconds"] for job in all_jobs for report in job.reports()]
        print(f"{len(waits)} meetings in {len(digests)} rounds, longest wait {max(waits):.2f} s")
        assert max(waits) <= TIMEOUT + 1
    finally:
        end_all(jobs.values())
