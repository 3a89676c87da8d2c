"""PowerSGD with error feedback in float64 (Vogels, Karimireddy, Jaggi, arXiv 1905.13727, algorithms 1 and 2)."""

import numpy as np


def power_sgd(gradients, q, *, own="local"):
    """`gradients` `[steps, W, n, m]`, `q` `[m, r]` -> means `[steps, n, m]` and residuals `[steps, W, n, m]`."""
    means, residuals, e = [], [], np.zeros_like(gradients[0])
    for gradient in gradients:
        corrected = gradient + e
        p, _ = np.linalg.qr((corrected @ q).mean(0))
        local = p.T @ corrected  # every worker's Qᵀ
        q = local.mean(0).T
        e = corrected - (p @ q.T if own == "paper" else p @ local)
        means.append(p @ q.T)
        residuals.append(e)
    return np.array(means), np.array(residuals)
