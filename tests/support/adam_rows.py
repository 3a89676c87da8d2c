"""Gradients of several workers, as the rows of one array."""

import numpy as np


def rows(steps, workers=4, size=64, *, seed=0):
    """Noise around a mean of its own for each worker."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((steps, workers, size)) + rng.standard_normal((1, workers, size))
