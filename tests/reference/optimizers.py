"""Float64 transcriptions of the optimizers that communicate inside; `gradients` are `[steps, W, ...]`.

Each gives the parameters after every step and what workers keep for themselves.
"""

import numpy as np


def cosines(n):
    """The orthonormal DCT-II."""
    matrix = np.cos(np.pi * np.arange(n)[:, None] * (2 * np.arange(n)[None] + 1) / (2 * n)) * np.sqrt(2 / n)
    matrix[0] /= np.sqrt(2)
    return matrix


def largest(x, k):
    out = np.zeros(x.size)
    kept = np.argsort(-np.abs(x.ravel()), kind="stable")[:k]
    out[kept] = x.ravel()[kept]
    return out.reshape(x.shape)


def demo(gradients, x, rate, decay, tile, k):
    """Peng, Quesnelle, Kingma, arXiv 2411.19870, for one matrix."""
    (h, w), (a, b) = tile, map(cosines, tile)
    places = [(slice(i, i + h), slice(j, j + w)) for i in range(0, x.shape[0], h) for j in range(0, x.shape[1], w)]
    xs, ms, m = [], [], np.zeros_like(gradients[0])
    for gradient in gradients:
        m = decay * m + rate * gradient
        direction = np.zeros_like(x)
        for rows, columns in places:
            sent = np.array([largest(a @ block @ b.T, k) for block in m[:, rows, columns]])
            m[:, rows, columns] -= a.T @ sent @ b
            direction[rows, columns] = a.T @ (sent.sum(0) / np.maximum((sent != 0).sum(0), 1)) @ b
        x = x - rate * np.sign(direction)
        xs.append(x)
        ms.append(m.copy())
    return np.array(xs), np.array(ms)


def dion(gradients, x, q, rate, mu, *, own="local"):
    """Ahn et al., arXiv 2504.05295, for one matrix `[in, out]`; `own="paper"` subtracts the averaged factor."""
    xs, ms, m = [], [], np.zeros_like(gradients[0])
    for gradient in gradients:
        m = m + gradient
        p, _ = np.linalg.qr((m @ q).mean(0))
        local = p.T @ m
        r = local.mean(0)
        m = m - (1 - mu) * p @ (local if own == "local" else r)
        q = (r / (np.linalg.norm(r, axis=1, keepdims=True) + 1e-8)).T
        x = x - rate * np.sqrt(x.shape[1] / x.shape[0]) * p @ q.T
        xs.append(x)
        ms.append(m)
    return np.array(xs), np.array(ms)
