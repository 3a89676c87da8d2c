"""Two processes and a damaged checkpoint: whatever one of them sees, both do the same."""

import pytest
from two_processes import run_two_processes

pytestmark = pytest.mark.slow
LIMIT = 150  # seconds; processes that do not agree would wait for each other
NAMES = {
    "a file for both": None,  # one of orbax's
    "the checksums for both": "SHA256SUMS",
    "the checksums for 0": "SHA256SUMS",
    "the checksums for 1": "SHA256SUMS",
    "the folder for 1": "SHA256SUMS",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each process printed."""
    return run_two_processes("damaged.py", tmp_path_factory.mktemp("damaged"), *NAMES, timeout=LIMIT)


@pytest.mark.parametrize("damage", NAMES)
def test_both_raise_the_same_or_take_the_same_older_one(results, damage):
    (refused, taken), other = results[0][damage], results[1][damage]
    assert refused[:2] == other[0][:2]
    assert refused[0] == "CheckpointDamagedError"
    assert refused[1] == (NAMES[damage] or refused[1])
    assert taken == other[1] == [2, [3], [2.0, 2.0, 2.0]]


def test_a_step_that_is_not_there(results):
    for result in results:
        assert result["no such step"][0] == "FileNotFoundError"


def test_what_one_process_cannot_read_both_refuse(results):
    """It may be whole: nothing is passed over, and no run begins anew."""
    for found in results[0]["unreadable"] + results[1]["unreadable"]:
        assert found[0] == "CheckpointUnreadableError"
        assert "Input/output error: checkpoint 2 cannot be read" in found[2]


@pytest.mark.parametrize(("what", "whose"), [("unread", 1), ("unlisted", 0)])
def test_what_one_process_meets_later_both_hear_of(results, what, whose):
    for own, other in zip(results[whose][what], results[1 - whose][what], strict=True):
        assert own[0] in ("CheckpointUnreadableError", "OSError")
        assert other[0] == "CheckpointPeerError"
        assert f"process {whose} could not" in other[2]
        assert "Input/output error" in other[2]


def test_none_left_is_an_error_in_both_unless_they_may_begin_anew(results):
    for result in results:
        refused, anew = result["none left"]
        assert refused[0] == "NoCheckpointLeftError"
        assert anew == [0, [2], [0.0, 0.0, 0.0]]
