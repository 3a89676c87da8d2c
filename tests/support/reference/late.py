"""Pipe-SGD of width 2 in float64 (Li et al., arXiv 1811.03619): every update is the mean gradient of the last step."""

import numpy as np
from reference.feedback import top_k


def pipe_sgd(gradient, start, rate, weights, k):
    """`gradient(theta, t)` gives `[W, d]`, `weights[t]` belong to it; the mean is of top-k with error feedback.

    Parameters `[steps, d]` after each update, and the residuals `[W, d]` at the end.
    """
    theta, last, residual, path = np.array(start, np.float64), None, 0.0, []
    for t in range(len(weights)):
        now = gradient(theta, t) * (weights[t] / weights[t].mean())[:, None]
        if last is not None:
            corrected = residual + last
            sent = np.array([top_k(row, k) for row in corrected])
            residual = corrected - sent
            theta = theta - rate * sent.mean(0)
        last = now
        path.append(theta)
    return np.array(path), residual
