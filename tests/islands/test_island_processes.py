"""Islands as processes over a folder: one is killed and comes back, and the others go on; many kills with `--slow`."""

import contextlib
import re
import signal
import time

import pytest
from buckets import s3_server
from island_jobs import TIMEOUT, Job, check_digests, play_events, play_stops, protocol_seconds, wait_until


def kill_all(jobs):
    for job in jobs:
        job.kill()


def test_an_island_is_killed_and_comes_back_and_the_others_go_on(tmp_path):
    folder, rounds = tmp_path / "run", 20
    # One that trains without a pause would take the processor from those that start.
    options = {"log": tmp_path, "timeout": 2.0, "pace": 0.02}
    jobs = [Job(folder, name, 10**6, 2, **options) for name in ("a", "ccc")]
    try:
        wait_until(lambda: all(len(job.reports()) >= 3 for job in jobs), jobs)
        killed = jobs.pop()
        killed.kill()
        before = jobs[0].reports()[-1]["round"]
        wait_until(lambda: all(job.reports()[-1]["round"] >= before + 3 for job in jobs), jobs)
        back, after = Job(folder, "ccc", 10**6, 2, **options), len(jobs[0].reports())
        jobs.append(back)
        wait_until(lambda: len(back.reports()) >= 3 and back.reports()[-1]["round"] >= rounds, jobs)
        # On a busy machine it may be late at first.
        wait_until(lambda: any("ccc" in report["members"] for report in jobs[0].reports()[after:]), jobs)
        digests = check_digests([*jobs, killed])
        assert sum(len(found) for found in digests.values()) >= rounds - 5
        assert any("ccc" in report["missing"] for report in jobs[0].reports())
    finally:
        kill_all(jobs)


@pytest.mark.slow
def test_an_island_leaves_at_sigterm_and_nobody_waits_for_it(tmp_path):
    # A timeout that would be noticed, however slow the machine is.
    options = {"log": tmp_path, "timeout": 100.0, "pace": 0.01}
    jobs = [Job(tmp_path / "run", name, 10**6, 2, **options) for name in ("a", "bb")]
    stays, leaves = jobs
    try:
        wait_until(lambda: all(len(job.reports()) >= 3 for job in jobs), jobs)
        leaves.process.send_signal(signal.SIGTERM)
        wait_until(lambda: leaves.process.poll() is not None, jobs)
        after = len(stays.reports())
        wait_until(lambda: len(stays.reports()) >= after + 3, [stays])
        reports = stays.reports()
        assert leaves.process.returncode == 0, leaves.errors()
        assert not any(report["missing"] for report in reports)
        # Its last drift, of the steps up to the signal, counts after those of its last meeting.
        assert max(report["round"] for report in reports if "bb" in report["members"]) > leaves.reports()[-1]["round"]
        assert reports[-1]["members"] == ["a"]
        assert max(protocol_seconds(report) for report in reports[3:]) <= options["timeout"] / 2
    finally:
        kill_all(jobs)


@pytest.mark.slow
@pytest.mark.parametrize(("overlap", "fragments", "owners"), [(0, 1, 0), (1, 1, 0), (0, 2, 0), (0, 1, 3)])
def test_an_island_of_two_processes_beside_one_of_one(tmp_path, overlap, fragments, owners):
    options = {"log": tmp_path, "overlap": overlap, "fragments": fragments, "owners": owners, "timeout": 60}
    pair = Job(tmp_path / "run", "pair", 4, 2, processes=2, **options)
    single = Job(tmp_path / "run", "single", 4, 2, **options)
    jobs = [pair, single]
    try:
        wait_until(lambda: all(process.poll() == 0 for job in jobs for process in job.processes), jobs)
        # With overlap the first meeting sends, and takes no round; and none waits for a drift that is on its way.
        assert sorted(check_digests(jobs)) == [*range(1 - overlap, 5)]
        met = [report for report in pair.reports() + single.reports() if report["members"]]
        assert len(met) >= 8
        for report in met:
            assert report["members"] == ["pair", "single"]
            assert report["counted"]
    finally:
        kill_all(jobs)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_kill_of_one_of_the_two_processes_of_an_island_ends_that_island_alone(tmp_path, number):
    """Without a launcher, which would end the other one: it must notice by itself."""
    # Long enough for collectives of a loaded machine: an island that is late again and again is not waited for.
    timeout = 20.0
    options = {"log": tmp_path, "timeout": timeout, "pace": 0.1}
    pair = Job(tmp_path / "run", "pair", 10**6, 2, processes=2, **options)
    single = Job(tmp_path / "run", "single", 10**6, 2, **options)
    jobs = [pair, single]
    try:
        wait_until(lambda: all(len(job.reports()) >= 3 for job in jobs), jobs)
        pair.processes[number].kill()
        other, started = pair.processes[1 - number], time.monotonic()
        # JAX's service misses a heartbeat after 20 s in this job, where no collective fails before.
        wait_until(lambda: other.poll() is not None, [single], seconds=200)
        print(f"the other process ended {time.monotonic() - started:.1f} s later:\n{pair.errors(1 - number)[-3000:]}")
        after = len(single.reports())
        wait_until(lambda: len(single.reports()) >= after + 3, [single])
        assert other.returncode != 0
        # In a meeting, in a step, or by JAX's service.
        assert re.search(
            "one of them has ended|Gloo .* failed|coordination service|heartbeat", pair.errors(1 - number), re.I
        )
        assert max(protocol_seconds(report) for report in single.reports()) <= timeout + 1
        assert single.reports()[-1]["members"] == ["single"]
    finally:
        kill_all(jobs)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("patience", [3600.0, 5.0], ids=["a_while", "for_good"])
def test_all_processes_of_an_island_report_the_same_problem_of_process_0(patience, overlap, tmp_path):
    """It loses the store in the middle of rounds: for a while, or for longer than the patience."""
    folder, away = tmp_path / "run", tmp_path / "unmounted"
    options = {"log": tmp_path, "processes": 2, "timeout": 2.0, "pace": 0.1, "overlap": overlap, "patience": patience}
    pair = Job(folder, "pair", 10**6, 1, **options)
    try:
        wait_until(lambda: len(pair.reports()) >= 3, [pair])
        folder.rename(away)
        if patience < 3600:
            wait_until(lambda: all(process.poll() is not None for process in pair.processes), [])
            for number in (0, 1):
                assert "OfflineError: 'pair' has been offline for" in pair.errors(number)
        else:
            wait_until(lambda: sum(report["offline"] for report in pair.reports()) >= 2, [pair])
            away.rename(folder)
            wait_until(lambda: pair.reports()[-1]["counted"], [pair])
            met = len(pair.reports())
            wait_until(lambda: len(pair.reports(1)) >= met, [pair])
            pair.kill()
        told = [[{**report, "machine_seconds": 0} for report in pair.reports(number)] for number in (0, 1)]
        # One of them may have been killed before the other.
        both = min(map(len, told))
        assert told[0][:both] == told[1][:both]
        problems = [report["problem"] for report in told[0][:both] if report["offline"]]
        assert all(problems)
        assert any("is gone; mount its disk again" in problem for problem in problems)
    finally:
        kill_all([pair])


@pytest.mark.slow
def test_all_processes_of_an_island_are_told_that_it_cannot_join(tmp_path):
    (tmp_path / "run").write_text("no folder")
    pair = Job(tmp_path / "run", "pair", 1, 1, log=tmp_path, processes=2)
    try:
        wait_until(lambda: all(process.poll() is not None for process in pair.processes), [])
        for number in (0, 1):
            assert "StoreUnusableError: the store cannot be used (" in pair.errors(number)
    finally:
        kill_all([pair])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "overlap", "fragments", "owners"),
    [
        ("folder", 0, 1, 0),
        ("folder", 1, 2, 0),
        ("folder", 1, 1, 3),
        ("bucket", 1, 1, 0),
        ("bucket", 0, 1, 3),
    ],
)
def test_a_stop_in_any_part_of_a_round_holds_the_others_once(kind, overlap, fragments, owners, tmp_path):
    """For ten seconds, of two timeouts; then the island comes back."""
    with s3_server() if kind == "bucket" else contextlib.nullcontext(str(tmp_path / "run")) as place:
        found = play_stops(place, tmp_path, overlap=overlap, fragments=fragments, owners=owners)
    print(found)
    assert found["longest_wait_seconds"] <= TIMEOUT + 1
    # What it had under way when it was stopped may count in the meeting after that.
    assert max(found["meetings_until_it_counts"]) <= 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pace", "fragments", "overlap", "owners", "grace"),
    [
        (0.0, 1, 0, 0, TIMEOUT),
        (0.25, 1, 0, 0, 0.5),
        (0.0, 2, 0, 0, 0.5),
        (0.25, 2, 0, 0, TIMEOUT),
        (0.0, 1, 0, 3, TIMEOUT),
        (0.25, 2, 1, 3, 0.5),
    ],
)
def test_fifty_kills_and_fifteen_stops(tmp_path, pace, fragments, overlap, owners, grace):
    """No survivor ends or restarts, and the protocol holds none for longer than the timeout and a second."""
    options = {"fragments": fragments, "overlap": overlap, "owners": owners, "grace": grace, "last_round": 400}
    found = play_events(tmp_path / "run", tmp_path, kills=50, stops=15, pace=pace, **options)
    print(found)
    assert found["rounds"] >= 300
    # Where two islands are away, the third one waits for a quorum.
    assert found["median_wait_in_vain_seconds"] <= grace + 1
    assert found["longest_wait_seconds"] <= TIMEOUT + 1
