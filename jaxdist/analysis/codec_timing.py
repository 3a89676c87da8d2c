"""Times the computation of a reducer for many workers on one device."""

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

_AXIS = "simulated"


def codec_seconds(reducer: Reducer, like: PyTree[Like], *, workers: int, turns: int = 5) -> float:
    """Times what a reducer computes in one step: encoding, decoding the payloads of all workers, factorizing.

    It runs on one device, with the other workers simulated by copies of this one's payload, so that a gather of `W`
    payloads is decoded `W` times as in a real job. Nothing is sent and no waiting is counted: `collectives` of the step
    and a link give those. Random updates of unit variance replace gradients, and the state is that of the first steps.

    Args:
      reducer: the reducer, over one axis.
      like: arrays or shapes of the trees to reduce.
      workers: the number of workers, `W`.
      turns: runs after the compiling one; the result is their median.

    Returns:
      Seconds for one step on the default device.

    Raises:
      ValueError: fewer than one worker or turn; or the reducer needs a second axis.

    Example:
      >>> import jax, jaxdist as jd
      >>> like = jax.ShapeDtypeStruct((64, 64), "float32")
      >>> 0 < codec_seconds(jd.error_feedback(jd.power_sgd(rank=2)), like, workers=16) < 10
      True
    """
    for name, value in (("workers", workers), ("turns", turns)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    state = _state_of_one_worker(reducer, like, workers)
    leaves, tree = jax.tree.flatten(like)
    keys = jax.random.split(jax.random.key(0), max(1, len(leaves)))
    updates = tree.unflatten(jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, leaves, strict=False))

    @partial(jax.jit, donate_argnums=1)
    def reduce(updates, state, zero):
        reduced, state = reducer.reduce(updates, state, _simulate_comm(workers, zero))
        return reduced.mean, state

    def run():
        nonlocal state
        mean, state = reduce(updates, state, jnp.int32(0))
        return mean, state

    return statistics.median(seconds_of(run, turns))


def _state_of_one_worker(reducer: Reducer, like: PyTree[Like], workers: int) -> PyTree:
    """Makes the state of the first worker, with its marks, as inside a step."""

    def take_first(marks, x):
        for mark in marks:
            if isinstance(mark, PerWorker) and axis_tuple(mark.axis):
                x = x[0]
            elif isinstance(mark, Sharded) and axis_tuple(mark.axis):
                x = x.reshape(workers, -1)[0]
        return x

    # In one program, which then never materializes the state of all workers.
    return jax.jit(lambda: map_marked(take_first, init_state(lambda: reducer.init(like), workers, axis=_AXIS)))()


def _simulate_comm(workers: int, zero: Array) -> Comm:
    """Makes a group whose other workers send what this one does.

    `zero` is 0, but the compiler cannot know it: it would decode equal rows once instead of `W` times.
    """

    def gather(x):
        never = jnp.arange(workers).reshape(-1, *[1] * x.ndim) < zero
        return jnp.where(never, jnp.zeros_like(x), x[None])

    def identity(tree):
        return tree

    return Comm(
        size=workers,
        index=jnp.zeros((), jnp.int32) + zero,
        mean=identity,
        sum=identity,
        max=identity,
        all_gather=lambda tree, *, agreed=True: jax.tree.map(gather, tree),
        all_to_all=identity,
        reduce_scatter_mean=partial(jax.tree.map, lambda x: x[zero]),
        ppermute=lambda tree, pairs: tree,
        varying=identity,
    )
