"""Methods for workers of unequal speed, transcribed from their papers in float64."""

import numpy as np


def biased_local_sgd(goals, periods, rounds, rate):
    """Local SGD on `|x - goal|²/2`: worker i takes `periods[i]` steps a round, all have equal weight; `[rounds, n]`.

    `goals(worker, job)` is the goal of a worker's next step.
    """
    anchor, jobs, out = np.zeros_like(goals(0, 0), np.float64), np.zeros(len(periods), int), []
    for _ in range(rounds):
        models = []
        for worker, period in enumerate(periods):
            x = anchor
            for _ in range(period):
                x = x - rate * (x - goals(worker, jobs[worker]))
                jobs[worker] += 1
            models.append(x)
        anchor = np.mean(models, 0)
        out.append(anchor)
    return np.stack(out)


def loss_table(examples, rounds):
    """The table of Lim et al.: for each round a list of `(worker, drawn, losses)` in order; `[rounds, examples]`.

    A worker's later loss of an example replaces its earlier one, and workers combine by the minimum.
    """
    table, out = np.full(examples, np.inf), []
    for records in rounds:
        seen = {}
        for worker, drawn, losses in records:
            for k, value in zip(drawn, losses, strict=True):
                seen[worker, int(k)] = float(value)
        for k in {k for _, k in seen}:
            table[k] = min(value for (_, other), value in seen.items() if other == k)
        out.append(table.copy())
    return np.stack(out)


def ata(drawn, batch, rounds, confidence):
    """Shares `[rounds, workers]` of Maranjyan et al.: recursive selection by lower confidence bounds on durations.

    `drawn[i]` are the durations of worker i's tasks in order. A tie goes to the worker with fewer tasks in the round.
    """
    workers = len(drawn)
    total, count, out = np.zeros(workers), np.zeros(workers, int), []
    for k in range(1, rounds + 1):
        log = np.log(2 * k**2)
        bounds = np.zeros(workers)
        for i in np.flatnonzero(count):
            bounds[i] = max(0.0, total[i] / count[i] * (1 - confidence * (np.sqrt(log / count[i]) + log / count[i])))
        shares = np.zeros(workers, int)
        for _ in range(batch):
            shares[min(range(workers), key=lambda i: ((shares[i] + 1) * bounds[i], shares[i], i))] += 1
        for i in range(workers):
            total[i] += sum(drawn[i][count[i] : count[i] + shares[i]])
            count[i] += shares[i]
        out.append(shares)
    return np.stack(out)
