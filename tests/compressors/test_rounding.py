import math

import numpy as np
import pytest
from reference import blocks as reference

from jaxdist.compressors import int4, qsgd
from jaxdist.compressors.rounding import largest_error


@pytest.mark.parametrize(("bits", "size"), [(4, 32), (4, 1024), (8, 2), (8, 256), (8, 2**20)])
def test_integers_have_closed_forms(bits, size):
    most = 2 ** (bits - 1) - 1
    found = largest_error(np.arange(most + 1.0), float(most), size, "nearest")
    assert found == pytest.approx((size - 1) / (4 * most**2 + size - 1), rel=1e-12)
    found = largest_error(np.arange(most + 1.0), float(most), size, "stochastic")
    assert found == pytest.approx(qsgd(bits, bucket=size).variance((size,)), rel=1e-9)


def test_one_entry_is_exact_and_more_entries_are_worse():
    grid = reference.GRIDS["e2m1"]
    for rounding in ("nearest", "stochastic"):
        assert largest_error(grid, 6.0, 1, rounding) < 1e-15
        assert largest_error(grid, 6.0, 0, rounding) < 1e-15
        found = [largest_error(grid, 6.0, 2**k, rounding) for k in range(12)]
        assert (np.diff(found) > 0).all()


def search(name, lowest, highest, size, error, rng):
    """The worst block that a random search finds: all entries but the largest alike."""
    grid = reference.GRIDS[name]
    halfway = (grid[1:] + grid[:-1]) / 2
    others = (grid[:-1, None] + np.linspace(0, 1, 21) * (grid[1:] - grid[:-1])[:, None]).ravel()
    tops = np.concatenate([rng.uniform(lowest, highest, 30), [lowest, highest], halfway, grid])
    tops = tops[(tops >= lowest) & (tops <= highest)]
    top, other = np.meshgrid(tops, np.minimum(others, lowest))
    lost = error(top, grid) + (size - 1) * error(other, grid)
    return (lost / (top**2 + (size - 1) * other**2)).max()


def to_nearest(x, grid):
    return (x - reference.nearest(x, grid)) ** 2


def at_random(x, grid):
    above = np.clip(np.searchsorted(grid, x), 1, len(grid) - 1)
    return (x - grid[above - 1]) * (grid[above] - x)


@pytest.mark.parametrize("size", [2, 32, 1000])
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1"])
def test_no_block_is_worse_and_some_are_as_bad(name, size):
    grid, rng = reference.GRIDS[name], np.random.default_rng(size)
    most, above = grid[-1], 2.0 ** math.ceil(math.log2(grid[-1]))
    for highest, lowest, values, rounding, error in [
        (most, most, grid, "nearest", to_nearest),
        (above, above / 2, np.append(grid, 2 * above - most), "nearest", to_nearest),
        (most, most, grid, "stochastic", at_random),
        (most, most / 2, grid, "stochastic", at_random),
    ]:
        found = search(name, lowest, highest, size, error, rng)
        bound = largest_error(values, lowest, size, rounding)
        assert 0.97 * bound <= found <= bound * (1 + 1e-9)


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="block must be at least 1, got 0"):
        int4(block=0)
