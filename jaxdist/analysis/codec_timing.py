"""What a reducer computes when it has many workers, timed on one device and with no other worker there."""

import statistics
from functools import partial

import jax
import jax.numpy as jnp

from .._core.types import Array, Like, PyTree
from ..comm.base import Comm
from ..reducers.base import Reducer
from ..state.marks import PerWorker, Sharded, axis_tuple, map_marked
from ..state.placement import init_state
from .measured import seconds_of

_AXIS = "rehearsed"


def codec_seconds(reducer: Reducer, like: PyTree[Like], *, workers: int, turns: int = 5) -> float:
    """The time that a reducer computes in one step: coding, decoding what all workers sent, factorising.

    It runs on one device, among imitated workers who all send what this one does, so that a gather of `W` payloads is
    decoded `W` times, as it will be. Nothing is sent and no waiting is counted: `collectives` of the step and a link
    give those. Random updates of unit variance stand in for gradients, and the state is that of the first steps.

    Args:
      reducer: the reducer, over one axis.
      like: arrays or shapes of what it will reduce.
      workers: how many there are to be, `W`.
      turns: runs after the compiling one; the result is their median.

    Returns:
      Seconds for one step on the default device.

    Raises:
      ValueError: fewer than one worker or turn; or the reducer wants a second axis.

    Example:
      >>> import jax, jaxdist as jd
      >>> like = jax.ShapeDtypeStruct((64, 64), "float32")
      >>> 0 < codec_seconds(jd.error_feedback(jd.power_sgd(rank=2)), like, workers=16) < 10
      True
    """
    for name, value in (("workers", workers), ("turns", turns)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    state = _as_one_sees_it(reducer, like, workers)
    leaves, tree = jax.tree.flatten(like)
    keys = jax.random.split(jax.random.key(0), max(1, len(leaves)))
    updates = tree.unflatten(jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, leaves, strict=False))

    @partial(jax.jit, donate_argnums=1)
    def reduce(updates, state, nought):
        reduced, state = reducer.reduce(updates, state, _imitation(workers, nought))
        return reduced.mean, state

    def run():
        nonlocal state
        mean, state = reduce(updates, state, jnp.int32(0))
        return mean, state

    return statistics.median(seconds_of(run, turns))


def _as_one_sees_it(reducer: Reducer, like: PyTree[Like], workers: int) -> PyTree:
    """The state of the first of so many workers, its marks on, as inside a step."""

    def one(marks, x):
        for mark in marks:
            if isinstance(mark, PerWorker) and axis_tuple(mark.axis):
                x = x[0]
            elif isinstance(mark, Sharded) and axis_tuple(mark.axis):
                x = x.reshape(workers, -1)[0]
        return x

    # In one program, which then never makes the state of all of them.
    return jax.jit(lambda: map_marked(one, init_state(lambda: reducer.init(like), workers, axis=_AXIS)))()


def _imitation(workers: int, nought: Array) -> Comm:
    """A group whose other workers send what this one does.

    `nought` is 0, which the compiler cannot know: it would decode equal rows once instead of `W` times.
    """

    def gather(x):
        other = jnp.arange(workers).reshape(-1, *[1] * x.ndim) < nought
        return jnp.where(other, jnp.zeros_like(x), x[None])

    def same(tree):
        return tree

    return Comm(
        size=workers,
        index=jnp.zeros((), jnp.int32) + nought,
        mean=same,
        sum=same,
        max=same,
        all_gather=lambda tree, *, agreed=True: jax.tree.map(gather, tree),
        all_to_all=same,
        reduce_scatter_mean=partial(jax.tree.map, lambda x: x[nought]),
        ppermute=lambda tree, pairs: tree,
        varying=same,
    )
