"""Robust means: coordinate-wise medians and trimmed means, which a few arbitrary workers cannot move far."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._core.checks import check_count
from .._core.descriptions import with_description
from .._core.dtypes import working_dtype
from .._core.types import Array, Float, State, Updates
from ..comm.base import Comm
from .base import Extras, Forms, Law, Messages, Protocol, Reduced, Reducer, from_generator

_NO_FEEDBACK = (
    "error feedback around {name} would keep what the other workers outvoted and send it again: it loses no part of an "
    "update to compression, so use it without feedback"
)

MOST_EXAMPLES = 1e30  # the sum over all workers must not overflow


class _Config(NamedTuple):
    """`trim` is `None` for the median; `combine(values, weights)` is for sorted values `[W, *s]`."""

    trim: int | None
    combine: Callable[[Array, Array], Array]


@with_description
def median() -> Reducer:
    """The median over workers of each entry: `mean_i = median_w x_w,i`, with two in the middle their mean.

    Fewer than half of the workers cannot move an entry beyond the values of the others, whatever they send. NaN counts
    as the largest value: one worker that sends NaN or infinities is outvoted like any other, and an entry is NaN or
    infinite only if half of the workers say so. With one or two workers it is the mean.

    The median is not the mean where the workers' data differ: it ignores a class that few workers have. If all draw
    from the same data, its error is of order `α/√N + 1/√(N W) + 1/N` for a fraction `α` of hostile workers and `N`
    examples on each worker.

    With `examples=` it is the weighted median, and a worker with 0 does not count. The numbers are taken as stated: for
    workers that may report false numbers, pass 1 or 0. NaN, infinity and negative numbers count as 0.

    *On the wire* for all `n` entries together: an all-gather, `(W-1) · itemsize · n` bytes sent; with `examples`,
    `4 (W-1)` for the numbers and an all-reduce of four bytes. Each worker computes the median by itself: to send chunks
    to the worker that computes them would cost the bytes of an all-reduce, but every such worker would have to be
    trusted.

    *State*: none. The law is `Law.NONE`.

    Raises:
      ValueError: error feedback around it.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.reducers.median()
      >>> def one_worker(x):
      ...     return reducer.reduce(x, (), jd.comm.over("data"))[0].mean
      >>> x = jnp.array([[1.0, 4.0], [2.0, 5.0], [jnp.inf, -1e9]])
      >>> jax.jit(jax.vmap(one_worker, axis_name="data"))(x)[0].tolist()
      [2.0, 4.0]

    References:
      Yin, Chen, Ramchandran, Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates",
      arXiv:1803.01498, 2018.
    """
    return _robust("median", _Config(None, _weighted_median))


@with_description
def trimmed_mean(trim: int) -> Reducer:
    """The mean of each entry without its `trim` largest and its `trim` smallest values.

        mean_i = 1/(W - 2b) Σ_(b < k ≤ W-b) x_(k),i      with the sorted values x_(1) ≤ ... ≤ x_(W) and b = `trim`

    Up to `trim` workers cannot move an entry beyond the values of the others, whatever they send. NaN counts as the
    largest value: up to `trim` workers may send it, with more an entry is NaN. It averages away more noise than the
    `median`, at about the same protection if `trim` is just below half of the workers.

    With `examples=` the remaining values are weighted by them, and a worker with 0 does not count; `trim` stays the
    same, so that a step with no more than `2 trim` workers gives a zero mean. The numbers are taken as stated: for
    workers that may report false numbers, pass 1 or 0. NaN, infinity and negative numbers count as 0.

    *On the wire*: as `median`, `(W-1) · itemsize · n` bytes sent.

    *State*: none. The law is `Law.NONE`.

    Args:
      trim: the number of hostile workers to expect. Each one more discards two honest values of every entry.

    Raises:
      ValueError: `trim` is below 1; at trace time, before anything is sent, there are no more than `2 trim` workers (a
        single worker, without others, keeps its updates); error feedback around it.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.reducers.trimmed_mean(1)
      >>> def one_worker(x):
      ...     return reducer.reduce(x, (), jd.comm.over("data"))[0].mean
      >>> jax.jit(jax.vmap(one_worker, axis_name="data"))(jnp.array([1.0, 2.0, jnp.nan, 6.0])).tolist()
      [4.0, 4.0, 4.0, 4.0]

    References:
      Yin, Chen, Ramchandran, Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates",
      arXiv:1803.01498, 2018.
    """
    if trim < 1:
        raise ValueError(f"trim must be at least 1, got {trim}; without trimming use exact()")
    check_count("trim", trim, 1)
    return _robust("trimmed_mean", _Config(trim, partial(_weighted_trimmed_mean, trim)))


def _robust(name: str, cfg: _Config) -> Reducer:
    forms = Forms(no_feedback=_NO_FEEDBACK.format(name=name), weighted=True)
    return from_generator(name, lambda like: (), partial(_messages, cfg), law=Law.NONE, forms=forms)


def _messages(cfg: _Config, updates: Updates, state: State, comm: Comm, extras: Extras) -> Protocol:
    if cfg.trim is not None and 1 < comm.size <= 2 * cfg.trim:
        raise ValueError(
            f"trimmed_mean({cfg.trim}) leaves out {2 * cfg.trim} values of each entry, and there are only {comm.size} "
            f"workers: use trim below {comm.size / 2:g}, or more workers"
        )
    leaves, tree = jax.tree.flatten(updates)
    counts = [] if extras.examples is None else [jnp.asarray(extras.examples, jnp.float32)]
    received = yield Messages(gather=[*leaves, *counts])
    if counts:
        weights = _valid_weights(received.gather[-1])
        means = [_reduce_weighted(cfg, x, weights) for x in received.gather[:-1]]
    else:
        means = [_reduce_equal(cfg.trim, x) for x in received.gather]
    return Reduced(tree.unflatten(means), updates), state


def _valid_weights(counts: Float[Array, " W"]) -> Float[Array, " W"]:
    # Not divided by their sum: sums of whole numbers are exact, and show which values are in the middle.
    return jnp.where(jnp.isfinite(counts) & (counts > 0), jnp.minimum(counts, MOST_EXAMPLES), 0)


def _reduce_equal(trim: int | None, x: Array) -> Array:
    """The median or trimmed mean of values `[W, *s]` of equal weight."""
    # NaN is sorted to the end.
    ordered, workers = jnp.sort(x.astype(working_dtype(x.dtype)), axis=0), x.shape[0]
    if trim is None:
        # Halved first: the sum of two huge numbers would overflow.
        mean = 0.5 * ordered[(workers - 1) // 2] + 0.5 * ordered[workers // 2]
    else:
        mean = jnp.mean(ordered[trim : workers - trim] if workers > 1 else ordered, axis=0)
    return mean.astype(x.dtype)


def _reduce_weighted(cfg: _Config, x: Array, weights: Float[Array, " W"]) -> Array:
    wide = x.astype(working_dtype(x.dtype))
    order = jnp.argsort(wide, axis=0)
    mean = cfg.combine(jnp.take_along_axis(wide, order, axis=0), weights.astype(wide.dtype)[order])
    return mean.astype(x.dtype)


def _weighted_median(values: Array, weights: Array) -> Array:
    """The mean of the lower and the upper weighted median of sorted values `[W, *s]`."""
    total = jnp.cumsum(weights, axis=0)
    half = 0.5 * total[-1:]
    lower, upper = (
        jnp.take_along_axis(values, jnp.argmax(reached, axis=0, keepdims=True), axis=0)[0]
        for reached in (total >= half, total > half)
    )
    return jnp.where(half[0] > 0, 0.5 * lower + 0.5 * upper, 0)


def _weighted_trimmed_mean(trim: int, values: Array, weights: Array) -> Array:
    """The weighted mean of those of the sorted values `[W, *s]` that remain of the workers that take part."""
    counts = jnp.cumsum(weights > 0, axis=0)
    # A single worker, in a group of its own, keeps its value.
    kept = (weights > 0) & ((values.shape[0] == 1) | ((counts > trim) & (counts <= counts[-1:] - trim)))
    weights = jnp.where(kept, weights, 0)
    total = jnp.sum(weights, axis=0, keepdims=True)
    # Not a product with zero, which is NaN for what was trimmed.
    return jnp.sum(jnp.where(kept, values * (weights / jnp.where(total > 0, total, 1)), 0), axis=0)
