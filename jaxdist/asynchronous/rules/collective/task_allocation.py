"""Task allocation: shares of a batch by the measured speed of each worker."""

from collections.abc import Sequence
from functools import partial

import optax

from ...._core.checks import check_range
from ...._core.types import Number
from ....schedule.allocate_tasks import allocate_tasks
from ...protocol import Rule
from .allocation import allocate, allocation_rule

# The length in rounds of the moving average of durations: fewer follow noise, more react slowly to a changed speed.
MEMORY = 8


def task_allocation(
    batch: int, optimizer: optax.GradientTransformation, *, seconds: Sequence[Number] | None = None
) -> Rule:
    """Synchronous SGD with B microbatches a step, divided among workers in proportion to speed: `Σ_i b_i = B`.

    `x <- x - γ (1/B) Σ_i Σ_{k <= b_i} g_ik`, with shares such that the last worker finishes soonest. A round takes
    about `B / Σ 1/τ_i`, where even shares take `max τ_i B / n`. All microbatches have the same weight: on data that
    differ between workers fast ones count more.

    With `seconds` the shares are fixed (*static*), and a worker that would only delay the others gets none: it joins
    the all-reduce with zeros. Otherwise each worker gets at least one microbatch, the first round is divided evenly,
    and each worker measures the duration of its microbatches. All gather the durations, in whole microseconds, beside
    the all-reduce, and update the estimates `τ_i <- τ_i + (measured - τ_i) / min(t + 1, 8)`. `ata` allocates by
    measured speeds too, and leaves workers out.

    *On the wire*: an all-reduce of the sum of gradients, in float32 or wider, per round, and unless `seconds` are given
    a gather of 8 bytes from each worker; kind `"reduced"`, of which `compressed` encodes the gradients only.

    *State*: replicated model, optimizer state and n durations; a sum of gradients per worker.

    Args:
      batch: B, at least the number of workers. Finer microbatches fit the speeds better: use 4 or more per worker.
      optimizer: the optimizer of every worker.
      seconds: `τ_i`, the known duration of a microbatch at each worker. None measures.

    Examples:
      >>> import optax
      >>> from jaxdist.asynchronous import durations, replay, rules
      >>> law = durations.constant([1, 1, 4])
      >>> run = replay.run(rules.task_allocation(12, optax.sgd(0.1)), durations=law, workers=3, seconds=1000)
      >>> (run.trace.steps.tick[[0, 1, -1]] // 10**9).tolist()  # 16 s evenly, then 6 s: 5, 6 and 1
      [16, 22, 1000]

    References:
      Chao, Liao, Gao, "Task Allocation for Decentralized Training in Heterogeneous Environment", arXiv:2111.08272,
      2021. The average over 8 rounds is ours.
    """
    check_range("batch", batch, 1, ends="[]")
    if seconds is None:
        return allocation_rule("task_allocation", batch, optimizer, _adaptive_shares, _moving_average, measures=True)
    given = tuple(map(float, seconds))
    # Refuses durations that cannot be before the first round.
    allocate_tasks(given, batch)
    shares = partial(_static_shares, given)
    return allocation_rule("task_allocation", batch, optimizer, shares, _moving_average, measures=False)


# Shares of the next round: `(batch, seconds, tasks, version) -> shares`, from what all workers know.
def _adaptive_shares(batch: int, seconds: tuple, tasks: tuple, version: int) -> tuple[int, ...]:
    workers = len(tasks)
    if batch < workers:
        raise ValueError(f"batch must be at least 1 microbatch for each of the {workers} workers, got {batch}")
    return allocate(seconds if version else (1.0,) * workers, batch, 1)


def _static_shares(given: tuple[float, ...], batch: int, seconds: tuple, tasks: tuple, version: int) -> tuple[int, ...]:
    if len(given) != len(tasks):
        raise ValueError(f"seconds must be those of the {len(tasks)} workers, got {len(given)} numbers")
    return allocate(given, batch, 0)


# The weight of a round in the estimate of a duration: `(round, its microbatches, all so far) -> weight`.
def _moving_average(version: int, count: int, total: int) -> float:
    # A mean over the first rounds, then a moving average.
    return 1 / min(version + 1, MEMORY)
