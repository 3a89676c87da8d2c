"""The reducer that gathers all workers' values and combines them in sorted order: median and trimmed mean."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._core.dtypes import working_dtype
from .._core.types import Array, Float, State, Updates
from .._core.xla_quirks import largest_entry
from ..comm.base import Comm
from .messages import from_generator
from .reducer import Extras, Forms, Law, Messages, Protocol, Reduced, Reducer, Use
from .trees import LARGEST_UNIT

_NO_FEEDBACK = (
    "error feedback around {name} would keep what the other workers outvoted and send it again: it loses no part of an "
    "update to compression, so use it without feedback"
)
MOST_EXAMPLES = 1e30  # the sum over all workers must not overflow


class RobustMean(NamedTuple):
    """A mean of sorted values `[W, *s]`: `combine(values, weights)`; `trim` is `None` for the median."""

    trim: int | None
    combine: Callable[[Array, Array], Array]

    def messages(self, updates: Updates, state: State, comm: Comm, extras: Extras) -> Protocol:
        """The mean of the values that all workers gather, sorted entry by entry."""
        if self.trim is not None and 1 < comm.size <= 2 * self.trim:
            raise ValueError(
                f"trimmed_mean({self.trim}) leaves out {2 * self.trim} values of each entry, and there are only "
                f"{comm.size} workers: use trim below {comm.size / 2:g}, or more workers"
            )
        leaves, tree = jax.tree.flatten(updates)
        counts = [] if extras.examples is None else [jnp.asarray(extras.examples, jnp.float32)]
        received = yield Messages(gather=[*leaves, *counts])
        if counts:
            weights = _valid_weights(received.gather[-1])
            means = [self._reduce_weighted(x, weights) for x in received.gather[:-1]]
        else:
            means = [_reduce_equal(self.trim, x) for x in received.gather]
        return Reduced(tree.unflatten(means), updates), state

    def _reduce_weighted(self, x: Array, weights: Float[Array, " W"]) -> Array:
        wide = x.astype(working_dtype(x.dtype))
        order = jnp.argsort(wide, axis=0)
        mean = self.combine(jnp.take_along_axis(wide, order, axis=0), weights.astype(wide.dtype)[order])
        return mean.astype(x.dtype)


def robust(name: str, mean: RobustMean) -> Reducer:
    """Makes the reducer of a robust mean."""
    limits = {Use.FEEDBACK: _NO_FEEDBACK.format(name=name)}
    return from_generator(name, lambda like: (), mean.messages, law=Law.NONE, forms=Forms(weighted=True), limits=limits)


def _valid_weights(counts: Float[Array, " W"]) -> Float[Array, " W"]:
    # Not divided by their sum: sums of whole numbers are exact, and show which values are in the middle.
    return jnp.where(jnp.isfinite(counts) & (counts > 0), jnp.minimum(counts, MOST_EXAMPLES), 0)


def _reduce_equal(trim: int | None, x: Array) -> Array:
    """The median or trimmed mean of values `[W, *s]` of equal weight."""
    # NaN is sorted to the end.
    ordered, workers = jnp.sort(x.astype(working_dtype(x.dtype)), axis=0), x.shape[0]
    if trim is None:
        mean = midpoint(ordered[(workers - 1) // 2], ordered[workers // 2])
    else:
        kept = ordered[trim : workers - trim] if workers > 1 else ordered
        # The largest of the kept entries is a unit that the compiler cannot move out of the sum.
        unit = jnp.minimum(largest_entry(jnp.abs(kept), 0), LARGEST_UNIT)
        plain = jnp.mean(kept, axis=0)
        mean = jnp.where(jnp.isfinite(plain), plain, unit * jnp.mean(kept / unit[None], axis=0))
    return mean.astype(x.dtype)


def midpoint(low: Array, high: Array) -> Array:
    """Returns the mean of two values, which does not overflow."""
    # The sum of two huge numbers would; that of their halves too, because XLA adds first and then halves the sum.
    mean = jnp.where((low < 0) == (high < 0), low + 0.5 * (high - low), 0.5 * (low + high))
    # Two infinities have no difference.
    return jnp.where(low == high, low, mean)
