"""LoCo (arXiv 2407.04480) in float64, its error stored in 8 bits, block by block."""

import numpy as np


def int4(x):
    """DeepSpeed's symmetric code: the positive maximum does not fit and becomes 7/8 of itself."""
    top = np.abs(x).max() or 1.0
    return np.clip(np.round(x * 8 / top), -8, 7) * top / 8


def stored(x, block):
    blocks = np.pad(x, (0, -x.size % block)).reshape(-1, block)
    scales = np.abs(blocks).max(1, keepdims=True) / 127
    return (np.round(blocks / np.where(scales == 0, 1, scales)) * scales).ravel()[: x.size]


def loco(updates, beta, reset_every, block):
    """`[steps, W, d]` -> means `[steps, d]`, what workers sent and their errors `[steps, W, d]`."""
    errors, sent, e = [], [], np.zeros_like(updates[0])
    for step, x in enumerate(updates):
        h = x + e
        own = np.array([int4(row) for row in h])
        e = np.array([stored(row, block) for row in beta * e + (1 - beta) * (h - own)])
        if (step + 1) % reset_every == 0:
            e = np.zeros_like(e)
        sent.append(own)
        errors.append(e)
    return np.array(sent).mean(1), np.array(sent), np.array(errors)
