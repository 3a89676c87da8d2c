"""How the codes are timed. It imports JAX, so import it once the environment has what JAX reads there."""

import time
from collections.abc import Callable
from typing import Any

import jax


def time_call(run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """The seconds until all results of a call are there; with `time.process_time`, those of the processor."""
    start = clock()
    jax.block_until_ready(run())
    return clock() - start


def make_copy(x: jax.Array) -> Callable[[], jax.Array]:
    """Makes the yardstick: `x -> -x` in a buffer that is given away, which reads and writes the array once."""
    negated = jax.jit(lambda x: -x, donate_argnums=0)
    held = [x + 0.0]

    def copy():
        held[0] = negated(held[0])
        return held[0]

    return copy
