"""One reducer up to a step, another one from then on."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import comm as comms
from .._core.checks import check_count
from .._core.descriptions import with_description
from .._core.dtypes import widen
from .._core.trees import next_count
from .._core.types import Array, Int, State, Updates
from ..comm.base import Comm
from .reducer import NO_EXTRAS, Extras, Reduced, Reducer, forward_forms, forward_limits, weakest


class SwitchState(NamedTuple):
    """Replicated: the number of reductions so far. The states of both reducers; that of the idle one is unchanged."""

    count: Int[Array, ""]
    first: State
    then: State


@with_description
def reducer_schedule(first: Reducer, then: Reducer, step: int) -> Reducer:
    """Reduces with `first` for `step` steps and then with `then`: `exact()` before a lossy compressor, for example.

    Early gradients are large, short-lived and the hardest to compress. Error feedback around the schedule keeps
    its residual at the switch; feedback inside one of the reducers stays with that one, so the residuals and server
    residuals of `first` at the switch are never delivered.

    *On the wire*: what the reducer of the step sends; the program has both.

    *State*: that of both, and a replicated count. The law is the weaker one of the two.

    Args:
      step: the number of reductions by `first`. PyTorch suggests a tenth of the training for PowerSGD, and no fewer
        than the steps of a warm-up.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.reducers.reducer_schedule(jd.exact(), jd.compressed(jd.top_k(0.5)), 1)
      >>> x = jnp.array([1.0, 4.0])
      >>> first, state = reducer.reduce(x, reducer.init(x), jd.comm.alone())
      >>> second, _ = reducer.reduce(x, state, jd.comm.alone())
      >>> first.mean.tolist(), second.mean.tolist()
      ([1.0, 4.0], [0.0, 4.0])

    References:
      Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
      arXiv:1905.13727, 2019 (in PyTorch, `start_powerSGD_iter`).
    """
    check_count("step", step, 0)

    def init(like):
        return SwitchState(jnp.zeros((), jnp.int32), first.init(like), then.init(like))

    def reduce(updates, state, comm, extras=NO_EXTRAS):
        with jax.named_scope("reducer_schedule"):
            parts = {"first": first, "then": then}
            reduced, state = one_of_two(state.count < step, parts, updates, state, comm, extras)
        return reduced, state._replace(count=next_count(state.count))

    forms = forward_forms(lambda first, then: reducer_schedule(first, then, step), first, then)
    return Reducer(init, reduce, weakest(first, then), forms, limits=forward_limits(first, then))


def one_of_two(
    choice: Array, reducers: Mapping[str, Reducer], updates: Updates, state: Any, comm: Comm, extras: Extras
) -> tuple[Reduced, Any]:
    """Reduces with the first of two reducers if `choice` is true; their names are those of their fields in `state`."""
    on_true, on_false = (partial(_reduce_field, field, reducer, extras) for field, reducer in reducers.items())
    return comms.cond(choice, on_true, on_false, comm, updates, state)


def _reduce_field(
    field: str, reducer: Reducer, extras: Extras, comm: Comm, updates: Updates, state: Any
) -> tuple[Reduced, Any]:
    reduced, inner = reducer.reduce(updates, getattr(state, field), comm, extras)
    # Both branches must have one type. With feedback, `own` is wider than the updates.
    own = jax.tree.map(widen, reduced.own)
    return Reduced(reduced.mean, comm.varying(own)), state._replace(**{field: inner})
