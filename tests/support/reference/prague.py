"""Partial all-reduce by a schedule, transcribed from Luo et al., 2020: every worker's model at every step, float64."""

import numpy as np


def prague(groups, gradient, x, iterations, rate):
    """Each worker steps on its own model, then each group of this iteration takes its mean."""
    models = [np.asarray(x, np.float64)]
    for k in range(iterations):
        stepped = np.stack([one - rate * gradient(one, i, k) for i, one in enumerate(models[-1])])
        for group in groups(k):
            stepped[group] = stepped[group].mean(0)
        models.append(stepped)
    return np.stack(models)
