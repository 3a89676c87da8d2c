"""Accordion's choice of levels in float64 (Agarwal et al., arXiv 2010.16248), one group of leaves."""

import numpy as np


def levels(gradients, rates, *, epoch, interval, eta=0.5, full=False):
    """Gradients `[steps, d]`, or `[steps, workers, d]`, and rates -> whether each step has low compression.

    With workers the norm is the mean of those of each worker's sum, otherwise that of the sum. `full` adds what holds
    after the last step.
    """
    critical, previous, chosen = True, 0.0, []
    for step in range(len(gradients)):
        critical = critical or (step > 0 and rates[step] < rates[step - 1])
        chosen.append(critical)
        first, position = step - step % interval, step % interval
        if position == epoch - 1:
            norm = np.linalg.norm(np.sum(gradients[first : step + 1], axis=0, dtype=np.float64), axis=-1).mean()
            ratio = 9.0 if previous == 0 else abs(previous - norm) / previous
            critical, previous = ratio >= eta, norm
    return [*chosen, critical] if full else chosen


def batch_sizes(verdicts, small, large):
    """Whether the regime is critical before each epoch -> the batch of each: small until it first is not."""
    grown = np.cumsum(~np.asarray(verdicts, bool)) > 0
    return np.where(grown, large, small).tolist()
