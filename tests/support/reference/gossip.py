"""Decentralized methods in float64: `x [n, d]` of all workers at once, mixing matrices `[n, n]`.

Each takes the gradient function `g(t, x) -> [n, d]` of all workers, the start, the matrices by step and the rate `γ`,
and returns the models after each step, `[steps, n, d]`.
"""

import numpy as np


def d_psgd(g, x, matrices, rate, *, combine_first=False):
    out = []
    for t, w in enumerate(matrices):
        step = -rate * g(t, x)
        x = w @ x + step if combine_first else w @ (x + step)
        out.append(x)
    return np.array(out)


def sgp(g, z, matrices, rate):
    x, weight, out = z.copy(), np.ones((len(z), 1)), []
    for t, p in enumerate(matrices):
        x = p @ (x - rate * g(t, x / weight))
        weight = p @ weight
        out.append(x / weight)
    return np.array(out)


def d2(g, x, matrices, rate):
    out, before, old = [], None, None
    for t, w in enumerate(matrices):
        new = g(t, x)
        after = w @ (x - rate * new) if before is None else w @ (2 * x - before - rate * (new - old))
        x, before, old = after, x, new
        out.append(x)
    return np.array(out)


def gradient_tracking(g, x, matrices, rate, *, combine_first=False):
    out, y, old = [], np.zeros_like(x), np.zeros_like(x)
    for t, w in enumerate(matrices):
        new = g(t, x)
        y = w @ y + new - old if combine_first else w @ (y + new - old)
        x = w @ x - rate * y if combine_first else w @ (x - rate * y)
        old = new
        out.append(x)
    return np.array(out)


def saps_psgd(g, x, matrices, rate, *, mask):
    """`mask(t)` is 1 for the entries that all workers draw in step `t`."""
    out = []
    for t, w in enumerate(matrices):
        x = x - rate * g(t, x)
        x = np.where(mask(t) > 0, w @ x, x)
        out.append(x)
    return np.array(out)


def quasi_global_momentum(g, x, matrices, rate, *, beta=0.9, mu=0.9, nesterov=False):
    out, kept = [], np.zeros_like(x)
    for t, w in enumerate(matrices):
        gradient = g(t, x)
        m = beta * kept + gradient
        new = w @ (x - rate * (gradient + beta * m if nesterov else m))
        kept = mu * kept + (1 - mu) * (x - new) / rate
        x = new
        out.append(x)
    return np.array(out)


def quasi_global_adam(g, x, matrices, rate, *, b1=0.9, b2=0.99, eps=1e-8):
    out, first, second = [], np.zeros_like(x), np.zeros_like(x)
    for t, w in enumerate(matrices):
        gradient = g(t, x)
        m = b1 * first + (1 - b1) * gradient
        v = b2 * second + (1 - b2) * gradient**2
        new = w @ (x - rate * (m / (1 - b1 ** (t + 1))) / (np.sqrt(v / (1 - b2 ** (t + 1))) + eps))
        moved = (x - new) / (np.linalg.norm(x - new, axis=1, keepdims=True) + 1e-8)
        first = b1 * first + (1 - b1) * moved
        second = b2 * second + (1 - b2) * moved**2
        x = new
        out.append(x)
    return np.array(out)


def top_k(x, k):
    """The largest `k` entries of each row."""
    kept = np.argsort(-np.abs(x), axis=1, kind="stable")[:, :k]
    out = np.zeros_like(x)
    np.put_along_axis(out, kept, np.take_along_axis(x, kept, 1), 1)
    return out


def choco(g, x, matrices, rate, *, known, code, step_size):
    """Every worker keeps the public copies of all, as the paper writes it; `known [n, d]` is the first of them."""
    out, public = [], known.copy()
    for t, w in enumerate(matrices):
        x = x - rate * g(t, x)
        x = x + step_size * np.einsum("ij,ijd->id", w, public[None] - public[:, None])
        public = public + code(x - public)
        out.append(x)
    return np.array(out)


def quasi_global_choco(g, x, matrices, rate, *, known, code, step_size, beta=0.9):
    """The step of CHOCO along the momentum, which follows what became of the model."""
    out, public, kept = [], known.copy(), np.zeros_like(x)
    for t, w in enumerate(matrices):
        pull = np.einsum("ij,ijd->id", w, public[None] - public[:, None])
        new = x - rate * (beta * kept + g(t, x)) + step_size * pull
        public = public + code(new - public)
        kept = beta * kept + (1 - beta) * (x - new) / rate
        x = new
        out.append(x)
    return np.array(out)


def dcd_psgd(g, x, matrices, rate, *, code):
    out = []
    for t, w in enumerate(matrices):
        x = x + code(w @ x - rate * g(t, x) - x)
        out.append(x)
    return np.array(out)


def low_precision_ring(g, x, matrices, rate, *, code):
    """As BAGUA's code has it: each worker keeps replicas of itself and of its two neighbors on a ring."""
    own, left, right, out = x.copy(), np.roll(x, 1, 0), np.roll(x, -1, 0), []
    for t in range(len(matrices)):
        half = own - rate * g(t, own)
        sent = code(half + (left + right) / 3 - 5 / 3 * own)
        left, right, own = left + np.roll(sent, 1, 0), right + np.roll(sent, -1, 0), own + sent
        out.append(own)
    return np.array(out)


def ecd_psgd(g, x, matrices, rate, *, code):
    out, estimate = [], x.copy()
    for t, w in enumerate(matrices, start=2):
        new = w @ estimate - rate * g(t - 2, x)
        ahead = (1 - t / 2) * x + t / 2 * new
        estimate = (1 - 2 / t) * estimate + 2 / t * code(ahead)
        x = new
        out.append(x)
    return np.array(out)


def relay_sgd(g, x, distances, rate, steps):
    """The delayed average over all workers, by their distances in the tree."""
    n = len(x)
    out, halves = [], [x] * (n + 1)
    for t in range(steps):
        halves.append(x - rate * g(t, x))
        delays = np.maximum(distances - 1, 0)
        x = np.array([np.mean([halves[-1 - delays[i, j]][j] for j in range(n)], axis=0) for i in range(n)])
        out.append(x)
    return np.array(out)
