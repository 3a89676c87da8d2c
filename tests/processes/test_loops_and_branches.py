"""Loops and branches that communicate, between two processes with two threads each.

Without the order of `_core/in_order.py` the case "branch" ends both processes, with jax 0.10 and with 0.12.
"""

import pytest
from real_processes import LIMIT
from two_processes import run_two_processes


@pytest.mark.parametrize(
    "names",
    [
        ("branch", "streaming"),
        pytest.param(("averaged buffers", "accordion", "gathered_scan"), marks=pytest.mark.slow),
    ],
)
def test_they_take_the_steps_of_the_simulation(tmp_path, monkeypatch, names):
    monkeypatch.setenv("NPROC", "2")
    for found in run_two_processes("branches.py", tmp_path, *names, timeout=LIMIT):
        assert set(found) == set(names)
        assert max(found.values()) < 1e-5, found
