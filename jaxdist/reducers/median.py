"""The coordinate-wise median over workers."""

import jax.numpy as jnp

from .._core.descriptions import with_description
from .._core.types import Array
from .reducer import Reducer
from .robust import RobustMean, midpoint, robust


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
    return robust("median", RobustMean(None, _weighted_median))


def _weighted_median(values: Array, weights: Array) -> Array:
    """The mean of the lower and the upper weighted median of sorted values `[W, *s]`."""
    total = jnp.cumsum(weights, axis=0)
    half = 0.5 * total[-1:]
    lower, upper = (
        jnp.take_along_axis(values, jnp.argmax(reached, axis=0, keepdims=True), axis=0)[0]
        for reached in (total >= half, total > half)
    )
    return jnp.where(half[0] > 0, midpoint(lower, upper), 0)
