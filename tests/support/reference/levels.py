"""Rounding to levels, and levels that adapt, in float64 (arXiv 1908.06077, 2010.12460, 2402.03158)."""

from functools import partial

import numpy as np
from scipy.optimize import root_scalar
from scipy.stats import truncnorm


def with_levels(x, table, uniforms, norm="l2", zero_level=True):
    """Decoded values and exact variance of one bucket."""
    x, table = np.asarray(x, np.float64), np.asarray(table, np.float64)
    scale = np.linalg.norm(x) if norm == "l2" else np.abs(x).max(initial=0.0)
    if scale == 0:
        return np.zeros_like(x), 0.0
    ratio = np.abs(x) / scale if zero_level else x / scale
    index = np.clip(np.searchsorted(table, ratio, side="right") - 1, 0, len(table) - 2)
    low, high = table[index], table[index + 1]
    chosen = np.where(uniforms < (ratio - low) / (high - low), high, low)
    sign = np.sign(x) if zero_level else 1.0
    return scale * sign * chosen, float((scale**2 * (high - ratio) * (ratio - low)).sum())


def coordinate_descent(levels, mean, sigma, sweeps):
    """ALQ in the closed form of the paper, odd levels before even ones, for one truncated normal distribution."""
    shape = {"a": (-1 - mean) / sigma, "b": (1 - mean) / sigma, "loc": mean, "scale": sigma}
    cdf, density = partial(truncnorm.cdf, **shape), partial(truncnorm.pdf, **shape)

    def first(a, c):
        return mean * (cdf(c) - cdf(a)) + sigma**2 * (density(a) - density(c))

    levels = np.array(levels, np.float64)
    for _ in range(sweeps):
        for j in [*range(1, len(levels) - 1, 2), *range(2, len(levels) - 1, 2)]:
            a, c = levels[j - 1], levels[j + 1]
            mass = cdf(c) - cdf(a)
            target = cdf(c) - (first(a, c) - a * mass) / (c - a)
            levels[j] = root_scalar(lambda r, target=target: cdf(r) - target, bracket=(a, c), xtol=1e-13).root
    return levels


def gradient_descent(levels, slopes_at, rate=1.0, sweeps=300):
    """ALQ by projected gradients: a level whose slope changes its sign continues at half its rate."""
    levels = np.array(levels, np.float64)
    rates, last = np.full(len(levels) - 2, rate), np.zeros(len(levels) - 2)
    for turn in range(2 * sweeps):
        slopes = np.asarray(slopes_at(levels.astype(np.float32)), np.float64)
        moves = np.arange(1, len(levels) - 1) % 2 != turn % 2
        rates[moves & (slopes * last < 0)] /= 2
        last[moves] = slopes[moves]
        # At most half of the way to a neighbor.
        room = np.minimum(np.diff(levels)[:-1], np.diff(levels)[1:]) / 2
        levels[1:-1] -= moves * np.sign(slopes) * np.minimum(rates * np.abs(slopes), room)
    return levels


def optimal_levels(points, weights, count):
    """The least sum of variances over all choices of `count` points, by the recurrence of the paper."""
    x, w = np.asarray(points, np.float64), np.asarray(weights, np.float64)
    m, b, g = (np.append(0, np.cumsum(w * x**n)) for n in range(3))

    def cost(k, j):
        return (x[j] + x[k]) * (b[j + 1] - b[k]) - (g[j + 1] - g[k]) - x[j] * x[k] * (m[j + 1] - m[k])

    least, before = np.array([cost(0, j) for j in range(len(x))]), []
    for _ in range(count - 2):
        sums = np.array([[least[k] + cost(k, j) if k < j else np.inf for k in range(len(x))] for j in range(len(x))])
        least, chosen = sums.min(1), sums.argmin(1)
        before.append(chosen)
    path = [len(x) - 1]
    for chosen in reversed(before):
        path.append(chosen[path[-1]])
    return x[[0, *reversed(path)]], least[-1]
