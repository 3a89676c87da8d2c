"""Parameters that are split over the processes of a job are published whole."""

import pytest
from real_processes import LIMIT
from two_processes import run_two_processes


@pytest.mark.slow
def test_processes_publish_what_is_split_over_them(tmp_path):
    results = run_two_processes("publishing.py", tmp_path, timeout=LIMIT)
    states = [[number, True] for number in range(4)]
    assert results == [{"host": states, "device": states}] * 2
