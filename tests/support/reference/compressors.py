"""Float64 transcriptions of the papers' codes, one array at a time, nothing packed."""

import numpy as np


def uniform_levels(levels):
    """QSGD: 0, 1/s, ..., 1."""
    return np.arange(levels + 1) / levels


def qsgd(x, levels, uniforms, norm="l2"):
    """Decoded values and exact variance of one bucket."""
    x = np.asarray(x, np.float64)
    scale = np.linalg.norm(x) if norm == "l2" else np.abs(x).max(initial=0.0)
    if scale == 0:
        return np.zeros_like(x), 0.0
    ratio, table = np.abs(x) / scale, uniform_levels(levels)
    index = np.minimum(np.searchsorted(table, ratio, side="right") - 1, levels - 1)
    low, high = table[index], table[index + 1]
    chosen = np.where(uniforms < (ratio - low) / (high - low), high, low)
    return scale * np.sign(x) * chosen, float((scale**2 * (high - ratio) * (ratio - low)).sum())


def top_k(x, count):
    order = np.argsort(-np.abs(x), kind="stable")[:count]
    kept = np.zeros_like(x)
    kept[order] = x[order]
    return kept


def scaled_sign(x):
    return np.abs(x).mean() * np.where(x >= 0, 1.0, -1.0)


def relative_error(decoded, x):
    return float(((decoded - x) ** 2).sum() / (np.asarray(x) ** 2).sum())
