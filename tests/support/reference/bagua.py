"""BAGUA's algorithms (arXiv 2107.01499) in float64, as its public code has them: all workers' rows at once.

`code(x)` is what a vector decodes to; `g(t, x) -> [W, n]` the gradients of all workers.
"""

import numpy as np


def steps_of(x):
    """The distance of two codes of min-max uint8."""
    return (x.max() - x.min()) / 255


def c_lp_s(x, code):
    """`[W, n]`, n a multiple of W -> the mean `[n]` that all workers get, and the steps of both codes in each chunk."""
    chunks = x.reshape(len(x), len(x), -1)
    whole = np.array([[code(chunk) for chunk in row] for row in chunks]).mean(0)
    first = np.array([[steps_of(chunk) for chunk in row] for row in chunks]).mean(0)
    second = np.array([steps_of(chunk) for chunk in whole])
    return np.concatenate([code(chunk) for chunk in whole]), first, second


def qadam(gradients, x, rate, warmup, b1, b2, eps, code):
    """Momenta travel in units of `√v̂ + ε`, and the correction of `v` rests with it, unlike there."""
    xs, m, v = [], np.zeros_like(x), np.zeros_like(x)
    for t, gradient in enumerate(gradients, 1):
        if t <= warmup:
            m = b1 * m + (1 - b1) * gradient.mean(0)
            v = b2 * v + (1 - b2) * gradient.mean(0) ** 2
        length = np.sqrt(v / (1 - b2 ** min(t, warmup))) + eps
        if t > warmup:
            m = length * c_lp_s((b1 * m + (1 - b1) * gradient) / length, code)[0]
        x = x - rate * m / (1 - b1**t) / length
        xs.append(x)
    return np.array(xs)


def partner(r, s, n):
    """Whom worker `r` of `n` meets at the talk number `s`."""
    half = n // 2
    return (s + r) % half + half if r < half else (r - half - s) % half


def decentralized(g, x, rate, steps, *, peers, interval=1):
    out, talks = [], 0
    for t in range(steps):
        step, mixed = -rate * g(t, x), x
        if (t + 1) % interval == 0:
            if peers == "all":
                mixed = np.tile(x.mean(0), (len(x), 1))
            else:
                mixed = np.array([(x[r] + x[partner(r, talks, len(x))]) / 2 for r in range(len(x))])
            talks += 1
        x = mixed + step
        out.append(x)
    return np.array(out)


def low_precision_decentralized(g, x, rate, steps, *, code, interval=1):
    """`code` takes a row; `x` is the same for all."""
    own, left, right, out = x.copy(), np.roll(x, 1, 0), np.roll(x, -1, 0), []
    for t in range(steps):
        x = x - rate * g(t, x)
        if (t + 1) % interval == 0:
            sent = np.array([code(row) for row in x + (left + right) / 3 - 5 / 3 * own])
            left, right, own = left + np.roll(sent, 1, 0), right + np.roll(sent, -1, 0), own + sent
            x = own
        out.append(x)
    return np.array(out)


def async_model_average(g, x, rate, steps, *, period, delay):
    """A snapshot every `period` steps, whose mean arrives when `delay` more are done."""
    out, snapshot, done = [], x, 0
    for t in range(steps):
        if t and t % period == 0:
            snapshot, done = x, t + delay
        x = x - rate * g(t, x)
        if t + 1 == done:
            x = x + snapshot.mean(0) - snapshot
        out.append(x)
    return np.array(out)
