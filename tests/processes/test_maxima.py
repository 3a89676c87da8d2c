"""`Comm.max` between three processes: `lax.pmax` of floats depends on the rank that has NaN."""

import numpy as np
import pytest
from real_processes import LIMIT
from two_processes import run_two_processes

# The columns of `scripts/maxima.py`.
WANTED = [np.inf, np.nan, -1.0, 0.0, 5e4, np.nan]


@pytest.mark.slow
def test_three_processes_agree_with_the_simulation_and_with_numpy(tmp_path):
    results = run_two_processes("maxima.py", tmp_path, timeout=LIMIT, count=3)
    assert results[0] == results[1] == results[2]
    assert len(results[0]) == 15
    for name, (found, simulated) in results[0].items():
        assert found == simulated, name
        if name.startswith("float64"):
            np.testing.assert_array_equal(np.array(found, np.uint64).view(np.float64), WANTED)
            assert not np.signbit(np.array(found, np.uint64).view(np.float64)[3])
