"""Hop without its extras, transcribed from Luo et al., 2019: every worker's model at every iteration, in float64."""

import numpy as np


def hop(weights, gradient, x, iterations, rate):
    """`x_i^(k+1) = Σ_j w_ij x_j^k - γ g_i^k(x_i^k)`: whatever the speeds, iteration k uses models of iteration k."""
    models = [np.asarray(x, np.float64)]
    for k in range(iterations):
        gradients = np.stack([gradient(models[-1][i], i, k) for i in range(len(weights))])
        models.append(weights @ models[-1] - rate * gradients)
    return np.stack(models)
