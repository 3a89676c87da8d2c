"""Batches of grain: each process has its part of them, and a run that resumes continues with the next one."""

import os
import runpy
import subprocess
import sys

import grain
import jax
import numpy as np
import pytest
from paths import REPOSITORY
from real_processes import flags_without_devices

import jaxdist as jd

EXAMPLE = REPOSITORY / "examples" / "grain_data.py"
STEPS, LOST_AFTER = 24, 13  # the last checkpoint before the cut is that of step 10
LIMIT = 400  # seconds


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(EXAMPLE))


def ids_of_batches(example, processes, count, position=None):
    """The numbers of the records of global batches, in the order of the processes."""
    parts = []
    for process in range(processes):
        batches = example["read_batches"](grain.sharding.ShardOptions(process, processes))
        if position is not None:
            batches.set_state(position)
        parts.append([next(batches)["id"] for _ in range(count)])
    return [np.concatenate(part) for part in zip(*parts, strict=True)]


@pytest.mark.slow
def test_a_resumed_run_sees_the_same_batches_and_ends_with_the_same_bits(example, tmp_path):
    whole = example["train"](tmp_path / "whole", STEPS)
    first = example["train"](tmp_path / "parts", LOST_AFTER)
    assert jd.checkpoint.load(tmp_path / "parts").data == {"batches": {"next_index": 10}}
    rest = example["train"](tmp_path / "parts", STEPS)
    assert first == whole[:LOST_AFTER]
    assert rest == whole[10:]
    # Records repeat in the second epoch alone, in another order.
    seen = np.concatenate(whole)
    assert len(set(seen[:1000].tolist())) == 1000
    assert seen[:1000].tolist() != seen[1000:2000].tolist()

    saved = [jd.checkpoint.load(tmp_path / name, step=20).state for name in ("whole", "parts")]
    assert saved[0].keys() == saved[1].keys()
    for own, other in zip(*map(jax.tree.leaves, saved), strict=True):
        assert own.tobytes() == other.tobytes()


@pytest.mark.parametrize("processes", [3, *(pytest.param(even, marks=pytest.mark.slow) for even in (2, 4))])
def test_any_number_of_processes_sees_the_same_global_batches(example, processes):
    alone = ids_of_batches(example, 1, 16)
    split = ids_of_batches(example, processes, 16)
    assert [sorted(batch) for batch in split] == [sorted(batch) for batch in alone]
    # The position counts global batches, which any other number of processes continues.
    batches = example["read_batches"](grain.sharding.ShardOptions(0, 1))
    for _ in range(11):
        next(batches)
    moved = ids_of_batches(example, processes, 5, batches.get_state())
    assert [sorted(batch) for batch in moved] == [sorted(batch) for batch in alone[11:]]


@pytest.mark.slow
def test_two_processes_resume_where_they_were(tmp_path):
    command = [sys.executable, "-m", "jaxdist.processes.launch", "-n", "2", "--logs", str(tmp_path / "logs")]
    run = subprocess.run(
        [*command, str(EXAMPLE), str(tmp_path / "run")],
        env={**os.environ, "XLA_FLAGS": flags_without_devices(), "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert "the same 40 batches, and the same bits at the end" in run.stdout, run.stdout + run.stderr
