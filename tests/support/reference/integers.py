"""IntSGD (arXiv 2102.08374, its authors' code) in float64, for given uniforms."""

import numpy as np


def intsgd(updates, uniforms, levels, beta, scale):
    """`[steps, W, d]` -> means `[steps, d]` and the codes of later steps `[steps - 1, W, d]`."""
    _, workers, size = updates.shape
    means, codes = [updates[0].mean(0)], []
    square = (means[0] ** 2).sum()
    for x, u in zip(updates[1:], uniforms[1:], strict=True):
        alpha = scale * np.sqrt(size / (2 * workers * square))
        q = np.clip(np.floor(alpha * x + u), -levels, levels)
        mean = q.sum(0) / (workers * alpha)
        square = beta * square + (1 - beta) * (mean**2).sum()
        means.append(mean)
        codes.append(q)
    return np.array(means), np.array(codes)
