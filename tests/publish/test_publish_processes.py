"""Real processes of a job publish parts of what is split over them, and followers see it whole."""

import subprocess

import jax
import jax.numpy as jnp
import pytest
from real_processes import LIMIT
from two_processes import run_two_processes

from jaxdist import publish

# Bytes in bfloat16 of a leaf of 16 x 24 entries: two are cut over all processes, and one is published by process 1, as
# process 0 has a leaf of 24 entries for itself.
LEAF, SMALL = 2 * 16 * 24, 2 * 24


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_processes_publish_what_is_split_over_them(tmp_path, count):
    results = run_two_processes("publishing.py", tmp_path, "all", timeout=LIMIT, count=count)
    for place in ("host", "device"):
        states = [[number, True] for number in range(4)]
        assert all(found[place]["seen"] == found[place]["together"] == states for found in results)
        # Two anchors, of which each process has sent a share.
        shares = [2 * LEAF // count] * count
        shares[0] += SMALL
        shares[1] += LEAF
        assert [found[place]["sent"]["anchors"] for found in results] == [2 * (share + 8) for share in shares]
        assert all(found[place]["sent"]["patches"] > 0 for found in results)


@pytest.mark.slow
@pytest.mark.parametrize(("process", "call", "states"), [(0, 10, 0), (1, 1, 0), (1, 2, 1)])
def test_a_job_goes_on_after_one_process_was_killed(tmp_path, process, call, states):
    """Before process 0 creates the first record; and before process 1 puts its part of the first or second state."""
    with pytest.raises(subprocess.CalledProcessError):
        run_two_processes("publishing.py", tmp_path, "kill", str(process), str(call), timeout=LIMIT)
    like = {"rows": (16, 24), "columns": (24, 16), "copies": (16, 24), "own": (24,)}
    like = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in like.items()}
    seen = [step for _, step in publish.follow(tmp_path / "policy-host", like=like, start="oldest", timeout=0)]
    assert seen == [*range(states)]
    results = run_two_processes("publishing.py", tmp_path, "last", timeout=LIMIT)
    for found in results:
        assert found["host"]["seen"][-1] == [3, True]
        assert all(is_same for _, is_same in found["host"]["seen"])
