"""How long a call takes on the devices that are here."""

import time
from collections.abc import Callable
from typing import Any

import jax


def seconds_of(call: Callable[[], Any], turns: int) -> list[float]:
    """The time of each of so many calls, their results waited for, after a first one that compiles.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdist.analysis.timing import seconds_of
      >>> len(seconds_of(lambda: jnp.ones(3) + 1, 5))
      5
    """
    jax.block_until_ready(call())
    found = []
    for _ in range(turns):
        start = time.perf_counter()
        jax.block_until_ready(call())
        found.append(time.perf_counter() - start)
    return found
