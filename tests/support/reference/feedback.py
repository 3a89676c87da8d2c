"""Error feedback in float64: EF14 (Seide et al., 2014), EF21 (arXiv 2106.05203), EF21-SGDM (arXiv 2305.15155)."""

import numpy as np


def top_k(x, k):
    out = np.zeros_like(x)
    kept = np.argsort(-np.abs(x), kind="stable")[:k]
    out[kept] = x[kept]
    return out


def ef14(gradients, k):
    """`gradients` `[steps, W, d]` -> means `[steps, d]` and residuals `[steps, W, d]`."""
    means, residuals, e = [], [], np.zeros_like(gradients[0])
    for gradient in gradients:
        corrected = gradient + e
        sent = np.array([top_k(row, k) for row in corrected])
        e = corrected - sent
        means.append(sent.mean(0))
        residuals.append(e)
    return np.array(means), np.array(residuals)


def ef21(gradients, k, eta=1.0):
    """`gradients` `[steps, W, d]` -> means `[steps, d]` and what the workers hold, `[steps, W, d]`."""
    means, held, h, v = [], [], np.zeros_like(gradients[0]), np.zeros_like(gradients[0])
    for gradient in gradients:
        v = (1 - eta) * v + eta * gradient
        h = h + np.array([top_k(row, k) for row in v - h])
        means.append(h.mean(0))
        held.append(h)
    return np.array(means), np.array(held)


def decayed(gradients, k, decay):
    """SparseLoCo's buffer: `e = decay · e + x`, and what is sent leaves it. Means and residuals."""
    means, residuals, e = [], [], np.zeros_like(gradients[0])
    for gradient in gradients:
        e = decay * e + gradient
        sent = np.array([top_k(row, k) for row in e])
        e = e - sent
        means.append(sent.mean(0))
        residuals.append(e)
    return np.array(means), np.array(residuals)


def with_rates(gradients, k, rates):
    """EF-signSGD's form, `p = e + rate · g`: the steps taken `[steps, d]` and the residuals `[steps, W, d]`."""
    taken, residuals, e = [], [], np.zeros_like(gradients[0])
    for gradient, rate in zip(gradients, rates, strict=True):
        corrected = e + rate * gradient
        sent = np.array([top_k(row, k) for row in corrected])
        e = corrected - sent
        taken.append(sent.mean(0))
        residuals.append(e)
    return np.array(taken), np.array(residuals)
