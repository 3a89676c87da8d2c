"""Islands as processes over a folder, and what happens to them: kills, stops, and how the others fare."""

import collections
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

from real_processes import flags_without_devices

SCRIPT = Path(__file__).parent / "scripts" / "island.py"
TIMEOUT = 5.0
NAMES = ("a", "bb", "ccc")
# Where an island is stopped: in each part of a round, before and after what others see of it.
POINTS = (
    "step",
    "before put bodies/",
    "after put bodies/",
    "before create drift/",
    "after create drift/",
    "before create commit",
    "after create commit",
    "before get bodies/",
    "after get bodies/",
    "before delete_many",
    "after delete_many",
)
# With owners an island reads pieces of bodies, and creates pieces of the mean.
OWNERS_POINTS = (
    *(point for point in POINTS if " get " not in point),
    "before get_range bodies/",
    "after get_range bodies/",
    "before create means/",
    "after create means/",
    "before get means/",
    "after get means/",
)


class Job:
    """A running island and the reports that it has printed; `process` is the first of its processes."""

    def __init__(
        self,
        folder,
        name,
        rounds,
        begin_with,
        *,
        log,
        processes=1,
        overlap=0,
        fragments=1,
        owners=0,
        timeout=TIMEOUT,
        grace=None,
        pace=0.0,
        patience=3600.0,
        points=(),
    ):
        self.name, self.processes = name, []
        self.logs = [log / f"{name}-{time.monotonic_ns()}-{number}" for number in range(processes)]
        integers, seconds = (
            (rounds, begin_with, overlap, fragments, owners),
            (timeout, timeout if grace is None else grace, pace, patience),
        )
        arguments = [str(x) for x in (folder, name, *integers, *seconds)]
        arguments += [",".join(points)] if points else []
        environment = os.environ | {"XLA_FLAGS": flags_without_devices(), "JAX_PLATFORMS": "cpu"}
        if processes > 1:
            address = f"127.0.0.1:{free_port()}"
            environment |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(processes)}
        for number, path in enumerate(self.logs):
            own = environment | ({"JAX_PROCESS_ID": str(number)} if processes > 1 else {})
            with open(path, "w") as output, open(f"{path}.err", "w") as errors:
                self.processes.append(
                    subprocess.Popen([sys.executable, str(SCRIPT), *arguments], stdout=output, stderr=errors, env=own)
                )
        self.process = self.processes[0]

    def reports(self, number=0):
        lines = self.logs[number].read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.startswith('{"round"') and line.endswith("\n")]

    def is_stopped(self):
        """Whether its process has stopped itself."""
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def errors(self, number=0):
        return Path(f"{self.logs[number]}.err").read_text()

    def has_failed(self):
        return any(process.poll() not in (None, 0) for process in self.processes)

    def kill(self):
        for process in self.processes:
            process.kill()
            process.wait()


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def wait_until(condition, jobs, seconds=240):
    """Waits, and fails if one of these jobs fails or the condition takes too long."""
    end = time.monotonic() + seconds
    while not condition():
        for job in jobs:
            assert not job.has_failed(), [job.errors(number) for number in range(len(job.processes))]
        assert time.monotonic() < end, [(job.name, job.reports()[-1:], job.errors()[-500:]) for job in jobs]
        time.sleep(0.02)


def check_digests(jobs):
    """All islands have the same global parameters, bit for bit, after each round that they saw."""
    digests = collections.defaultdict(set)
    for job in jobs:
        for report in job.reports():
            digests[report["round"]].add(report["digest"])
    assert {number: found for number, found in digests.items() if len(found) > 1} == {}
    return digests


def newest_round(jobs):
    return max(reports[-1]["round"] for job in jobs if (reports := job.reports()))


def protocol_seconds(report):
    """How long a meeting took, without what the machine took itself: a loaded one wakes a process late."""
    return report["wait_seconds"] - report["machine_seconds"]


def play_stops(place, log, *, seconds=10.0, overlap=0, fragments=1, owners=0, pace=0.1):
    """Three islands, of which one is stopped for so many seconds at each of these points.

    None may end, all must have the same bits, and the one that was stopped must count again.

    Returns:
      How long the others waited, and for how many of its meetings the stopped one did not count.
    """
    points = OWNERS_POINTS if owners else POINTS
    options = {"log": log, "pace": pace, "overlap": overlap, "fragments": fragments, "owners": owners}
    jobs = [Job(place, name, 10**9, len(NAMES), points=points if name == NAMES[0] else (), **options) for name in NAMES]
    stopped, others = jobs[0], jobs[1:]
    meetings = []
    try:
        for _ in points:
            wait_until(stopped.is_stopped, jobs, seconds=600)
            before = len(stopped.reports())
            time.sleep(seconds)
            os.kill(stopped.process.pid, signal.SIGCONT)
            wait_until(lambda start=before: any(r["counted"] for r in stopped.reports()[start + 1 :]), jobs)
            # The meeting in which it was stopped is not one of them.
            found = [report["counted"] for report in stopped.reports()[before + 1 :]]
            meetings.append(found.index(True))
        check_digests(jobs)
        for job in jobs:
            assert "Traceback" not in job.errors()
        reports = [report for job in others for report in job.reports()]
    finally:
        for job in jobs:
            job.kill()
    return {
        "points": list(points),
        "stop_seconds": seconds,
        "overlap": overlap,
        "fragments": fragments,
        "owners": owners,
        "pace": pace,
        "timeout_seconds": TIMEOUT,
        "rounds": newest_round(jobs),
        "meetings_of_the_others": len(reports),
        "longest_wait_seconds": max(map(protocol_seconds, reports)),
        "longest_wait_seconds_with_the_machine": max(report["wait_seconds"] for report in reports),
        "waits_above_half_the_timeout": sum(protocol_seconds(report) > TIMEOUT / 2 for report in reports),
        "meetings_until_it_counts": meetings,
    }


def play_events(folder, log, *, kills, stops, pace, seed=0, last_round=0, **options):
    """Three islands, of which a random one is killed and started again, or stopped for two timeouts, again and again.

    No survivor may end, and all must have the same bits. `options` are those of each `Job`.

    Returns:
      What happened, and how long meetings took: all of them, and those that waited for an island in vain.
    """
    rng, jobs, all_jobs = random.Random(seed), {}, []

    def start(name):
        jobs[name] = Job(folder, name, 10**9, 1, log=log, pace=pace, **options)
        all_jobs.append(jobs[name])

    try:
        for name in NAMES:
            start(name)
        wait_until(lambda: all(job.reports() for job in jobs.values()), jobs.values())
        events = ["kill"] * kills + ["stop"] * stops
        rng.shuffle(events)
        for event in events:
            job = jobs[rng.choice(NAMES)]
            # One at a time: the others are survivors, and this one has met since it began.
            wait_until(lambda job=job: len(job.reports()) > 2, jobs.values())
            time.sleep(rng.random())
            if event == "kill":
                job.kill()
                start(job.name)
            else:
                os.kill(job.process.pid, signal.SIGSTOP)
                time.sleep(2 * TIMEOUT)
                os.kill(job.process.pid, signal.SIGCONT)
        # Round by round, so that the limit of a wait does not depend on how many rounds are left.
        while (reached := newest_round(all_jobs)) < last_round:
            wait_until(lambda before=reached: newest_round(all_jobs) > before, jobs.values())
        digests = check_digests(all_jobs)
        for job in all_jobs:
            assert "Traceback" not in job.errors()
        reports = [report for job in all_jobs for report in job.reports()]
    finally:
        for job in all_jobs:
            job.kill()
    in_vain = [report for report in reports if report["missing"]]
    seen = collections.Counter(report["round"] for report in reports)
    return {
        "pace": pace,
        "fragments": options.get("fragments", 1),
        "overlap": options.get("overlap", 0),
        "owners": options.get("owners", 0),
        "seed": seed,
        "kills": kills,
        "stops": stops,
        "processes": len(all_jobs),
        "rounds": len(digests),
        "rounds_seen_by_two_or_more": sum(count > 1 for count in seen.values()),
        "meetings": len(reports),
        "late": sum(report["late"] for report in reports),
        "offline": sum(report["offline"] for report in reports),
        "waits_for_a_dead_or_stopped_island": len(in_vain),
        "timeout_seconds": TIMEOUT,
        "grace_seconds": options.get("grace", TIMEOUT),
        "longest_wait_seconds": max(map(protocol_seconds, reports)),
        "longest_wait_seconds_with_the_machine": max(report["wait_seconds"] for report in reports),
        "median_wait_seconds": statistics.median(report["wait_seconds"] for report in reports),
        "median_wait_in_vain_seconds": statistics.median([report["wait_seconds"] for report in in_vain] or [0.0]),
        "waits_in_vain_seconds": sorted(round(protocol_seconds(report), 3) for report in in_vain),
    }
