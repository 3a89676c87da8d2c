"""Shares of a batch by the speeds of the workers."""

import heapq
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from .._core.types import Number


def allocate_tasks(
    seconds: Sequence[Number] | np.ndarray, tasks: int, *, least: int = 0
) -> Int[np.ndarray, " workers"]:
    """Divides equal tasks among workers of given speeds so that the last worker finishes soonest: `min max_i a_i τ_i`.

    Tasks are given out one by one, each to the worker that would finish it first, which is optimal. A worker that is
    slower than all others need for everything gets none, and need not take part. Where several would finish at the same
    time the one with fewer tasks comes first.

    Args:
      seconds: `τ_i`, of one task on each worker: at least 0.
      tasks: their number `Σ a_i`, for example the microbatches of a step.
      least: the fewest tasks of a worker. 0 leaves out workers that are too slow.

    Raises:
      ValueError: a time is negative or not a number, or there are fewer tasks than `least` of each worker.

    Examples:
      >>> from jaxdist.schedule import allocate_tasks
      >>> allocate_tasks([1.0, 1.0, 2.0, 20.0], 10).tolist()
      [4, 4, 2, 0]
      >>> allocate_tasks([1.0, 1.0, 2.0, 20.0], 10, least=1).tolist()  # 20 s instead of 4
      [4, 3, 2, 1]

    References:
      Chao, Liao, Gao, "Task Allocation for Decentralized Training in Heterogeneous Environment", arXiv:2111.08272,
      2021. Maranjyan, Saad, Richtárik, Orabona, "ATA: Adaptive Task Allocation for Efficient Resource Management in
      Distributed Machine Learning", arXiv:2502.00775, 2025 (the recursive selection).
    """
    if not all(0 <= tau < float("inf") for tau in seconds):
        raise ValueError(f"seconds must be at least 0 and finite, one for each worker, got {list(seconds)}")
    if not len(seconds) or least < 0 or tasks < least * len(seconds):
        raise ValueError(f"tasks must be at least {least} for each of the {len(seconds)} workers, got {tasks}")
    # A heap of (the time at which the worker would finish one more task, its tasks, worker).
    heap = [((least + 1) * tau, least, i) for i, tau in enumerate(seconds)]
    heapq.heapify(heap)
    counts = [least] * len(seconds)
    for _ in range(tasks - least * len(seconds)):
        _, _, i = heap[0]
        counts[i] += 1
        heapq.heapreplace(heap, ((counts[i] + 1) * seconds[i], counts[i], i))
    return np.array(counts, np.int64)
