"""Asynchronous decentralized methods in float64."""

import numpy as np


def ad_psgd(events, goals, rate):
    """Models `[n]` after each event of `f_i = (x - goals_i)²/2`: `(i,)` is a gradient of i, `(i, j)` an exchange.

    A gradient is at the copy that its worker took when it began, before the exchange beside it.
    """
    x = np.zeros(len(goals))
    copies, out = x.copy(), []
    for event in events:
        if len(event) == 1:
            (i,) = event
            x[i] -= rate * (copies[i] - goals[i])
            copies[i] = x[i]
        else:
            x[list(event)] = x[list(event)].mean()
        out.append(x.copy())
    return np.array(out)
