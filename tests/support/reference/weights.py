"""Means over the workers that used a leaf, in float64."""

import numpy as np


def mean_by_leaf(values, counts):
    """`Σ n_w x_w / Σ n_w` over the workers with examples; zero if there are none. `values [W, *s]`, `counts [W]`."""
    counts, total = np.asarray(counts, float), 0.0
    for value, count in zip(np.asarray(values, float), counts, strict=True):
        total = total + (count * value if count else 0.0)
    return total / counts.sum() if counts.sum() else np.zeros(np.shape(values)[1:])


def diloco_by_leaf(targets, counts, *, rate, period, outer_rate, momentum):
    """DiLoCo with Nesterov on one leaf with `|x - target|²/2`, of which workers use `counts [steps, W]` examples.

    A worker takes no step without examples; a round in which there are none leaves the anchor and its momentum.
    `targets [steps, W, n]` -> anchors `[steps, n]`.
    """
    steps, workers, n = targets.shape
    anchor, buffer, local = np.zeros(n), np.zeros(n), np.zeros((workers, n))
    seen, out = np.zeros(workers), []
    for step in range(steps):
        for w in np.flatnonzero(counts[step]):
            local[w] -= rate * (local[w] - targets[step, w])
        seen += counts[step]
        if (step + 1) % period == 0:
            if seen.any():
                drift = mean_by_leaf(anchor - local, seen)
                buffer = momentum * buffer + drift
                anchor = anchor - outer_rate * (drift + momentum * buffer)
            local, seen = np.tile(anchor, (workers, 1)), np.zeros(workers)
        out.append(anchor.copy())
    return np.stack(out)
