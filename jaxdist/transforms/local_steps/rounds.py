"""When a fragment's round is due: one rule, in traced arrays and, for hosts that choose the program, in numbers."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from ..._typing import Array, Bool, Int
from ...schedule.periods import check_whole

SyncPeriod = int | Callable[[Int[Array, ""]], Int[Array, ""] | int]


def check_period(sync_period: SyncPeriod | float, offset: int | float, delay: int | float, fragments: int) -> None:
    """Raises for periods, offsets and delays that make no sense together."""
    check_whole("offset", offset)
    check_whole("delay", delay)
    if offset < 0 or delay < 0:
        raise ValueError(f"offset and delay must not be negative, got {offset} and {delay}")
    if callable(sync_period):
        if fragments > 1:
            raise ValueError("several fragments share out the steps of a round: sync_period must then be a number")
        return
    check_whole("sync_period", sync_period)
    if sync_period < 1:
        raise ValueError(f"sync_period must be at least 1, got {sync_period}")
    if offset >= sync_period > 1:
        raise ValueError(f"offset must be less than sync_period={sync_period}, got {offset}")
    if delay >= sync_period and delay:
        raise ValueError(
            f"delay must be less than sync_period={sync_period}, got {delay}: the next round would start before the "
            "last one has arrived"
        )
    if fragments > sync_period:
        raise ValueError(
            f"{fragments} fragments cannot each meet once in sync_period={sync_period} steps at steps of their own"
        )


def period_at(sync_period: Any, count: Int[Array, ""]) -> Int[Array, ""]:
    """`H` for the round that this step belongs to."""
    period = jnp.asarray(sync_period(count) if callable(sync_period) else sync_period)
    if not jnp.issubdtype(period.dtype, jnp.integer):
        raise ValueError(f"sync_period must be a whole number of steps, got {period.dtype}: round it to jnp.int32")
    return jnp.maximum(period.astype(jnp.int32), 1)


def first_round(sync_period: SyncPeriod, offset: int, fragment: int, fragments: int) -> int:
    """After how many steps a fragment meets first; 0: after a whole period."""
    spread = 0 if callable(sync_period) else fragment * sync_period // fragments
    return (offset + spread) if callable(sync_period) else (offset + spread) % sync_period


def is_due(since: Int[Array, ""], rounds: Int[Array, ""], period: Int[Array, ""], first: int) -> Bool[Array, ""]:
    """Whether so many steps since the last of `rounds` rounds are enough."""
    return since >= (jnp.where(rounds == 0, first, period) if first else period)


def due_fragments(
    step: int, *, sync_period: int, offset: int = 0, fragments: int = 1, warmup_steps: int = 0, delay: int = 0
) -> tuple[int, ...]:
    """Which fragments talk in a step: what a host passes as the static `sync=`, so that other steps hold no collective.

    Args:
      step: the number of the step, from 0.
      sync_period: as in `local_steps`, a number.
      offset: as in `local_steps`.
      fragments: how many there are.
      warmup_steps: as in `local_steps`. In these steps leave `sync` out: they average gradients.
      delay: as in `local_steps`: with a delay, a fragment talks one step later, at the start of the step.

    Returns:
      The numbers of the fragments, in ascending order; `()` for a step without any.

    Raises:
      ValueError: the arguments do not go together.

    Example:
      >>> from jaxdist.transforms import due_fragments
      >>> [due_fragments(step, sync_period=4, fragments=2) for step in range(8)]
      [(), (1,), (), (0,), (), (1,), (), (0,)]
    """
    check_period(sync_period, offset, delay, fragments)
    done = step - warmup_steps + (0 if delay else 1)
    if done < 1:
        return ()
    firsts = [first_round(sync_period, offset, i, fragments) or sync_period for i in range(fragments)]
    return tuple(i for i, first in enumerate(firsts) if done >= first and (done - first) % sync_period == 0)
