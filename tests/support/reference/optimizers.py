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


def by_signs(x, e, s):
    """The mean of `[W, n]` by two shots of scaled signs; the residuals `e` of workers and `s` of servers change."""
    chunks = (x + e).reshape(len(x), len(x), -1)
    sent = np.abs(chunks).mean(2, keepdims=True) * np.where(chunks >= 0, 1, -1)
    e[:] = (chunks - sent).reshape(x.shape)
    mean = sent.mean(0) + s
    back = np.abs(mean).mean(1, keepdims=True) * np.where(mean >= 0, 1, -1)
    s[:] = mean - back
    return back.ravel()


def residuals(x):
    """Zeros for `by_signs`."""
    return np.zeros_like(x), np.zeros((len(x), x.shape[1] // len(x)))


def one_bit_adam(gradients, x, rate, freeze, b1, b2, eps):
    """Tang et al., arXiv 2102.02888, for one vector; what is sent is in units of `√v + ε`, unlike there."""
    xs, m, v, (e, s) = [], np.zeros_like(x), np.zeros_like(x), residuals(gradients[0])
    for t, gradient in enumerate(gradients, 1):
        if t <= freeze:
            m = b1 * m + (1 - b1) * gradient.mean(0)
            v = b2 * v + (1 - b2) * gradient.mean(0) ** 2
        else:
            d = np.sqrt(v) + eps
            m = d * by_signs((b1 * m + (1 - b1) * gradient) / d, e, s)
        x = x - rate * m / (np.sqrt(v) + eps)
        xs.append(x)
    return np.array(xs)


def qadam(gradients, x, rate, warmup, b1, b2, eps):
    """Gan et al., arXiv 2107.01499, for one vector and a code without loss; the variance and its correction rest."""
    xs, m, v = [], np.zeros_like(x), np.zeros_like(x)
    for t, gradient in enumerate(gradients, 1):
        m = b1 * m + (1 - b1) * gradient.mean(0)
        if t <= warmup:
            v = b2 * v + (1 - b2) * gradient.mean(0) ** 2
        length = np.sqrt(v / (1 - b2 ** min(t, warmup))) + eps
        x = x - rate * m / (1 - b1**t) / length
        xs.append(x)
    return np.array(xs)


def zero_one_adam(gradients, x, rate, freeze, refreshes, doubling, longest, b1, b2, eps):
    """Lu et al., arXiv 2202.06009, for one vector: parameters `[steps, W, n]` and what each step sent.

    What is sent is in units of `√v + ε`, unlike there, and so are residuals.
    """
    xs, sent, w, m, v = [], [], np.tile(x, (len(gradients[0]), 1)), 0 * gradients[0], 0 * x
    (e, s), k, h, done, local, total = residuals(w), 1, 1, 0, 0, 0.0
    for t, gradient in enumerate(gradients, 1):
        if t <= freeze:
            exact, d = t % k == 0, np.sqrt(v) + eps
            mean = gradient.mean(0) if exact else d * by_signs(gradient / d, e, s)
            gradient, v = mean, b2 * v + (1 - b2) * mean**2 if exact else v
            e, s = (r * (d / (np.sqrt(v) + eps)).reshape(-1, r.shape[1]) for r in (e, s))
            done, k = (0, 2 * k) if exact and done + 1 == refreshes else (done + exact, k)
            sent.append("floats" if exact else "signs")
        elif t == freeze + 1:
            x, (e, s) = w[0], residuals(w)
        m = b1 * m + (1 - b1) * gradient
        w = w - rate * m / (np.sqrt(v) + eps)
        if t > freeze:
            total, local = total + rate, local + 1
            sent.append("nothing" if t % h else "signs")
            if t % h == 0:
                u = by_signs(w - x, e, s)
                m, total = np.tile(-u * (np.sqrt(v) + eps) / total, (len(w), 1)), 0.0
                x, w = x + u, np.tile(x + u, (len(w), 1))
            local, h = (0, min(2 * h, longest)) if local == doubling else (local, h)
        xs.append(w)
    return np.array(xs), sent
