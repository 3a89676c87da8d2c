"""The coordinate-wise trimmed mean over workers."""

from functools import partial

import jax.numpy as jnp

from .._core.checks import check_count, check_range
from .._core.descriptions import with_description
from .._core.types import Array
from .reducer import Reducer
from .robust import RobustMean, robust


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
    check_range("trim", trim, 1, ends="[]", hint="without trimming use exact()")
    check_count("trim", trim, 1)
    return robust("trimmed_mean", RobustMean(trim, partial(_weighted_trimmed_mean, trim)))


def _weighted_trimmed_mean(trim: int, values: Array, weights: Array) -> Array:
    """The weighted mean of those of the sorted values `[W, *s]` that remain of the workers that take part."""
    counts = jnp.cumsum(weights > 0, axis=0)
    # A single worker, in a group of its own, keeps its value.
    kept = (weights > 0) & ((values.shape[0] == 1) | ((counts > trim) & (counts <= counts[-1:] - trim)))
    weights = jnp.where(kept, weights, 0)
    total = jnp.sum(weights, axis=0, keepdims=True)
    # Not a product with zero, which is NaN for what was trimmed.
    return jnp.sum(jnp.where(kept, values * (weights / jnp.where(total > 0, total, 1)), 0), axis=0)
