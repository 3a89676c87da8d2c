"""Sparse codes in float64: DGC (arXiv 1712.01887) and the best cut of magnitudes in two."""

import numpy as np
from reference.compressors import top_k


def dgc(gradients, count, *, momentum=0.9, nesterov=False, clip_norm=None, masking=True):
    """`gradients` `[steps, W, d]` -> means `[steps, d]`, and u and v of every worker, `[steps, W, d]`."""
    means, us, vs, u, v = [], [], [], np.zeros_like(gradients[0]), np.zeros_like(gradients[0])
    for gradient in gradients:
        if clip_norm is not None:
            limit = clip_norm / np.sqrt(len(gradient))
            gradient = gradient * np.minimum(1, limit / np.linalg.norm(gradient, axis=1, keepdims=True))
        u = momentum * (u + gradient) if nesterov else momentum * u + gradient
        v = v + u + gradient if nesterov else v + u
        sent = np.array([top_k(row, count) for row in v])
        v = np.where(sent != 0, 0.0, v)
        u = np.where((sent != 0) & masking, 0.0, u)
        means.append(sent.mean(0))
        us.append(u)
        vs.append(v)
    return np.array(means), np.array(us), np.array(vs)


def two_means(x):
    """The best of all cuts of one block."""
    magnitudes = np.abs(np.asarray(x, np.float64))
    best = np.full_like(magnitudes, magnitudes.mean())
    for threshold in np.unique(magnitudes):
        large = magnitudes >= threshold
        small = magnitudes[~large].mean() if (~large).any() else 0.0
        tried = np.where(large, magnitudes[large].mean(), small)
        if ((tried - magnitudes) ** 2).sum() < ((best - magnitudes) ** 2).sum():
            best = tried
    return best * np.where(np.asarray(x) < 0, -1.0, 1.0)


def water_filling(x, count):
    """GSpar's `min(λ |x|, 1)` with the sum `count`: the minimal variance for that number of entries on average."""
    magnitudes = np.abs(np.asarray(x, np.float64))
    falling = np.sort(magnitudes)[::-1]
    rest = np.cumsum(falling[::-1])[::-1]
    # The k largest are certain, for the first k with which the next one is not.
    k = np.argmax((count - np.arange(len(falling))) * falling <= rest)
    return np.minimum(magnitudes * (count - k) / rest[k], 1) if rest[k] else (magnitudes > 0).astype(float)


def greedy_rounds(x, density, rounds):
    """The greedy algorithm of Wangni et al. (Algorithm 3, arXiv 1710.09854): probabilities after so many rounds."""
    magnitudes = np.abs(np.asarray(x, np.float64))
    budget = density * len(magnitudes)
    p = np.minimum(budget * magnitudes / magnitudes.sum(), 1)
    for _ in range(rounds):
        below = p < 1
        factor = (budget - (~below).sum()) / p[below].sum()
        if factor <= 1:
            break
        p = np.minimum(factor * p, 1)
    return p
