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


def one_sided(gradients, q, *, own="local"):
    """The same of the one-sided form (arXiv 2008.01425, algorithm 2): the side that was renewed is kept next time."""
    means, residuals, e, factor = [], [], np.zeros_like(gradients[0]), q
    for step, gradient in enumerate(gradients):
        corrected = gradient + e
        turned = corrected if step % 2 == 0 else np.swapaxes(corrected, 1, 2)
        basis, _ = np.linalg.qr(factor)
        local = turned @ basis
        factor = local.mean(0)
        mean, contribution = factor @ basis.T, local @ basis.T
        if step % 2:
            mean, contribution = mean.T, np.swapaxes(contribution, 1, 2)
        e = corrected - (mean if own == "paper" else contribution)
        means.append(mean)
        residuals.append(e)
    return np.array(means), np.array(residuals)
