"""Accordion's choice of levels in float64 (Agarwal et al., arXiv 2010.16248), one group of leaves."""

import numpy as np


def levels(gradients, rates, *, epoch, interval, eta=0.5):
    """Mean gradients `[steps, d]` and learning rates -> whether each step is reduced with low compression."""
    critical, previous, chosen = True, 0.0, []
    for step in range(len(gradients)):
        critical = critical or (step > 0 and rates[step] < rates[step - 1])
        chosen.append(critical)
        first, position = step - step % interval, step % interval
        if position == epoch - 1:
            norm = np.linalg.norm(np.sum(gradients[first : step + 1], axis=0, dtype=np.float64))
            ratio = 9.0 if previous == 0 else abs(previous - norm) / previous
            critical, previous = ratio >= eta, norm
    return chosen
