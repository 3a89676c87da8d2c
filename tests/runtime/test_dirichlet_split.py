"""Divisions of labeled examples among workers."""

import numpy as np
import pytest

from jaxdist.runtime import dirichlet_split


@pytest.mark.parametrize("concentration", [0.01, 0.1, 1, 1000.0])
@pytest.mark.parametrize("workers", [1, 7, 16, 103])
def test_every_example_has_one_worker_and_every_worker_an_equal_share(workers, concentration):
    labels = np.random.default_rng(0).choice(["a", "b", "c"], 103, p=[0.7, 0.2, 0.1])
    parts = dirichlet_split(labels, workers, concentration=concentration)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(103))
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_concentration():
    labels = np.arange(1000) % 10

    def largest(concentration):
        parts = dirichlet_split(labels, 16, concentration=concentration)
        return np.median([np.bincount(labels[part]).max() / len(part) for part in parts])

    assert largest(0.1) > 0.5
    assert largest(1000.0) < 0.25


def test_seeds():
    labels = np.arange(200) % 10
    first, again, other = (dirichlet_split(labels, 8, concentration=0.3, seed=seed) for seed in (0, 0, 1))
    for x, y in zip(first, again, strict=True):
        np.testing.assert_array_equal(x, y)
    assert any(set(x) != set(y) for x, y in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("workers", "concentration", "message"),
    [
        (0, 1.0, "workers must be between 1 and the 8 examples, got 0"),
        (9, 1.0, "workers must be between 1 and the 8 examples, got 9"),
        (4, 0.0, "concentration must be positive, got 0.0"),
        (4, float("nan"), "concentration must be positive, got nan"),
    ],
)
def test_splits_that_cannot_be(workers, concentration, message):
    with pytest.raises(ValueError, match=message):
        dirichlet_split(np.arange(8), workers, concentration=concentration)
