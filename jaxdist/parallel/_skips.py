"""Steps that look, now and then, whether too many of them have been skipped."""

import functools
from typing import Any

import jax
from jax.core import Tracer

from ..transforms.skip_nonfinite import check_skips


def with_skip_checks(run: Any) -> Any:
    """The compiled step, which raises `TooManySkips` before a call whose state has gone through too many.

    To look is to wait for the step before, so it is done only when the limit may have been reached: in every
    `max_consecutive + 1`-th call as long as nothing is skipped. All processes look in the same calls.
    """
    wait = 0

    @functools.wraps(run)
    def checked(state, batch, **static):
        nonlocal wait
        if wait:
            wait -= 1
        elif not any(isinstance(x, Tracer) for x in jax.tree.leaves(state)):
            wait = check_skips(state)
        return run(state, batch, **static)

    # What callers of a compiled function expect to find.
    for name in ("lower", "trace", "eval_shape", "clear_cache", "_cache_size"):
        setattr(checked, name, getattr(run, name))
    return checked
