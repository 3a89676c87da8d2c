"""Any-batch mirror descent and anytime minibatch on quadratics, in float64, with dense mixing matrices."""

import numpy as np


def euclidean(y, g, rate):
    return y - rate * g


def entropy(y, g, rate):
    x = y * np.exp(-rate * g)
    return x / x.sum(-1, keepdims=True)


def average(x, b, matrices):
    """`[W, n]`, ratio consensus; a worker that hears of no example keeps its own."""
    top, bottom = x * b[:, None], b[:, None].astype(float)
    for w in matrices:
        top, bottom = w @ top, w @ bottom
    return np.where(bottom > 0, top / np.where(bottom > 0, bottom, 1), x)


def mirror_descent(start, targets, counts, *, matrices, rounds, rate, step, weights, order):
    """Gradients `x - target`; `matrices[k]` is the `k`-th round of consensus. `targets [T, W, n]` -> `[T, W, n]`."""
    workers = targets.shape[1]
    x, before, out = np.tile(start, (workers, 1)).astype(float), np.ones(workers), []
    for t, (target, b) in enumerate(zip(targets, counts, strict=True)):
        mixing, g = [matrices(t * rounds + k) for k in range(rounds)], x - target
        own = np.ones(workers) if weights == "uniform" else b
        if order == "combine_then_adapt":
            y = average(x, np.ones(workers) if weights == "uniform" else before, mixing)
            x, before = np.where(b[:, None] > 0, step(y, g, rate(t)), y), b
        else:
            z = np.where(b[:, None] > 0, step(x, g, rate(t)), x)
            mixed = average(z, own, mixing)
            x = np.where((sum_of(own, mixing) > 0)[:, None], mixed, x)
        out.append(x)
    return np.stack(out)


def sum_of(b, matrices):
    for w in matrices:
        b = w @ b
    return b


def anytime_minibatch(start, targets, counts, *, matrices, rounds, rate, step):
    workers = targets.shape[1]
    x, z, out = np.tile(start, (workers, 1)).astype(float), np.zeros(targets.shape[1:]), []
    for t, (target, b) in enumerate(zip(targets, counts, strict=True)):
        mixing = [matrices(t * rounds + k) for k in range(rounds)]
        z = np.where((sum_of(b, mixing) > 0)[:, None], average(z + (x - target), b, mixing), z)
        x = step(np.tile(start, (workers, 1)), z, rate(t))
        out.append(x)
    return np.stack(out)
