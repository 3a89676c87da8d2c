"""PULSELoCo (arXiv 2602.03839) on quadratics, in float64: local steps, and what bfloat16 sees of their drifts."""

import ml_dtypes
import numpy as np


def visible(x, params, scale=1.0):
    """Whether a step along `x` changes the parameters as bfloat16."""
    return (params - scale * x).astype(ml_dtypes.bfloat16) != params.astype(ml_dtypes.bfloat16)


def with_feedback(updates, params, kept=None):
    """`updates [steps, W, n]` -> means `[steps, n]` and residuals `[steps, W, n]`, with the `kept` largest visible."""
    means, residuals, e = [], [], np.zeros_like(updates[0])
    for update in updates:
        e = e + update
        sent = np.where(visible(e, params), e, 0)
        if kept is not None:
            sent = np.where(np.argsort(np.argsort(-np.abs(sent), kind="stable"), kind="stable") < kept, sent, 0)
        e = e - sent
        means.append(sent.mean(0))
        residuals.append(e)
    return np.array(means), np.array(residuals)


def pulse_loco(targets, start, *, rate, period, outer_rate, momentum):
    """Workers on `|x - target|²/2`, `targets [steps, W, n]` -> the global parameters after each round."""
    anchor, velocity, e, out = start, np.zeros_like(start), np.zeros_like(targets[0]), []
    for first in range(0, len(targets), period):
        local = np.tile(anchor, (targets.shape[1], 1))
        for target in targets[first : first + period]:
            local = local - rate * (local - target)
        e = e + (anchor - local)
        sent = np.where(visible(e, anchor), e, 0)
        e = e - sent
        velocity = momentum * velocity + sent.mean(0)
        anchor = anchor - outer_rate * (sent.mean(0) + momentum * velocity)
        out.append(anchor)
    return np.array(out), e
