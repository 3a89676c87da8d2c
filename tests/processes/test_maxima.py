"""`Comm.max` between three processes: `lax.pmax` of floats depends on the rank that has NaN."""

import jax.numpy as jnp
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
    for name, bits in results[0].items():
        dtype = jnp.dtype(name.split()[0])
        found, simulated = (np.array(x, f"uint{8 * dtype.itemsize}").view(dtype).astype(np.float64) for x in bits)
        # Which of its bits a NaN has is up to the compiler's effort.
        np.testing.assert_array_equal(found, simulated, err_msg=name)
        np.testing.assert_array_equal(np.signbit(found[2:5]), np.signbit(simulated[2:5]), err_msg=name)
        if name.startswith("float64"):
            np.testing.assert_array_equal(found, WANTED)
            assert not np.signbit(found[3])
