"""NoLoCo on quadratics, in float64, with both models of a pair, as its paper sends them."""

import numpy as np


def noloco(targets, pairs, *, rate, period, beta, gamma, mu):
    """Workers on `|x - target|²/2` with plain gradient steps; `pairs[round][i]` is whom worker `i` meets.

    `targets [steps, W, n]` -> parameters `[steps, W, n]`.
    """
    local = np.zeros(targets.shape[1:])
    slow, momentum, out = local.copy(), local.copy(), []
    for step, target in enumerate(targets):
        local = local - rate * (local - target)
        if (step + 1) % period == 0:
            partner = pairs[step // period]
            drift = local - slow
            momentum = mu * momentum + beta * (drift + drift[partner]) / 2 + gamma * ((slow + slow[partner]) / 2 - slow)
            slow = slow + momentum
            local = slow.copy()
        out.append(local.copy())
    return np.stack(out)
