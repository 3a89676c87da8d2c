"""Coordinate-wise robust means (Yin et al., 2018), in float64, one entry after the other."""

import numpy as np


def weighted_median(values, weights):
    """The mean of all middle values of one entry: those with at most half of the weight on either side."""
    order = np.argsort(np.where(np.isnan(values), np.inf, values), kind="stable")
    pairs = [(float(values[i]), float(weights[i])) for i in order if weights[i] > 0]
    half = sum(weight for _, weight in pairs) / 2
    below, middle = 0.0, []
    for value, weight in pairs:
        if below <= half <= below + weight:
            middle.append(value)
        below += weight
    return (middle[0] + middle[-1]) / 2 if middle else 0.0


def weighted_trimmed_mean(values, weights, trim):
    """The weighted mean without the `trim` smallest and largest values of the workers that take part."""
    order = np.argsort(np.where(np.isnan(values), np.inf, values), kind="stable")
    left = [(float(values[i]), float(weights[i])) for i in order if weights[i] > 0][trim:]
    left = left[: max(len(left) - trim, 0)]
    return sum(value * weight for value, weight in left) / sum(weight for _, weight in left) if left else 0.0


def robust_mean(updates, weights=None, trim=None):
    """`updates [W, n]`, `weights [W]` -> `[n]`; without `trim` the median."""
    updates = np.asarray(updates, float)
    weights = np.ones(len(updates)) if weights is None else weights
    if trim is None:
        return np.array([weighted_median(column, weights) for column in updates.T])
    return np.array([weighted_trimmed_mean(column, weights, trim) for column in updates.T])
