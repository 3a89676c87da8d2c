"""Two processes save, and one cannot do its part: the other knows within seconds, and the next save works.

What is tested by default runs in the two processes of `tests/processes/test_processes.py`.
"""

import pytest
from two_processes import run_two_processes

LIMIT = 300  # seconds
SECONDS = 60  # generous: on a busy machine; it was 20 minutes
FAILURES = {
    "the disk of 0": (0, "CheckpointFullError"),
    "the disk of 1": (1, "CheckpointFullError"),
    "the copy of 0": (0, "PermissionError"),
    "the copy of 1": (1, "PermissionError"),
    "the state of 1": (1, "PermissionError"),
    "the lock": (0, "PermissionError"),
    "the folder": (0, "PermissionError"),
    "the commit": (0, "PermissionError"),
}


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each process printed."""
    return run_two_processes("failing.py", tmp_path_factory.mktemp("failing"), timeout=LIMIT)


@pytest.mark.parametrize("failure", FAILURES)
def test_a_save_that_one_cannot_do_is_known_to_both(results, failure):
    whose, kind = FAILURES[failure]
    own, other = results[whose][failure], results[1 - whose][failure]
    for now_or_beside in range(2):
        assert own[now_or_beside][0] == kind
        name, process, text, seconds = other[now_or_beside]
        assert (name, process) == ("CheckpointPeerError", whose)
        assert f"process {whose} could not" in text
        assert kind in text
        assert seconds < SECONDS
    assert own[2] == other[2] == 1  # nothing was committed
    assert own[3][0] == other[3][0] == ""  # and the next save works


def test_a_step_beyond_32_bits_is_resumed(results):
    assert results[0]["large"] == results[1]["large"] == [3_000_000_000, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]


def test_processes_that_share_no_disk_are_refused(results):
    """Process 0 would commit a checkpoint without the parts of the others."""
    first, second = (result["own disks"] for result in results)
    assert (second[0], second[4]) == ("ValueError", None)
    assert "process 1 does not see" in second[2]
    assert (first[0], first[1], first[4]) == ("CheckpointPeerError", 1, None)
