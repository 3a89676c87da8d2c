"""How workers meet: one fragment's round, what a worker takes over from it, and the warm-up before the first."""

from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .. import comm as comms
from .._core.trees import choose
from .._core.types import Array, Flag, PyTree, State, Updates
from ..comm.base import Comm
from ..reducers.base import Extras, Law, Reducer
from ..reducers.exact import exact
from ..transforms.local_gradients import reduce_weighted


class Group(NamedTuple):
    """What the round of a fragment changes; the trees hold its leaves, and `None` for the others."""

    anchor: Updates
    outer: State
    reducer: State


def one_round(
    comm: Comm,
    due: Flag,
    carrier: Reducer,
    outer: optax.GradientTransformationExtraArgs,
    group: Group,
    local: PyTree,
    *,
    examples: Array | None,
    learning_rate: Array | None,
) -> Group:
    """If it is due: `a += outer(reduce(a - p_w))`. Nobody moves when no worker had an example."""
    agreed = {} if learning_rate is None else {"learning_rate": learning_rate}

    def talk(comm, group, local):
        drift = jax.tree.map(lambda a, p: comm.varying(as_held(a, p)) - p.astype(a.dtype), group.anchor, local)

        def reduce(updates, state):
            reduced, state = carrier.reduce(updates, state, comm, Extras(learning_rate=learning_rate))
            return reduced.mean, state

        mean, state, some = reduce_weighted(reduce, drift, group.reducer, comm, examples, plain=carrier.law == Law.MEAN)
        steps, outer_state = outer.update(mean, group.outer, group.anchor, **agreed)
        new = Group(optax.apply_updates(group.anchor, steps), outer_state, state)
        return new if examples is None else choose(some, new, group)

    def silent(comm, group, local):
        del comm, local
        return group

    return either(due, talk, silent, comm, group, local)


def take_over(
    due: Flag,
    alpha: float | int,
    anchor: Updates,
    local: PyTree,
    params: PyTree,
    steps: Updates,
    sent: PyTree | None = None,
) -> Updates:
    """The updates that bring `params` to `alpha · local + (1 - alpha) · anchor` if something arrived, else `steps`.

    With what was `sent`, to `local + (1 - alpha) (anchor - sent)`: what a worker has moved since stays.
    """

    def one(a, mine, p, u):
        target = as_held(a, p) if alpha == 0 else alpha * mine.astype(a.dtype) + (1 - alpha) * as_held(a, p)
        return (target - p.astype(a.dtype)).astype(u.dtype)

    def ahead(a, mine, p, u, before):
        moved = mine.astype(a.dtype) - p.astype(a.dtype)
        return (moved + (1 - alpha) * (as_held(a, p) - before.astype(a.dtype))).astype(u.dtype)

    if sent is not None:
        return choose(due, jax.tree.map(ahead, anchor, local, params, steps, sent), steps)
    return choose(due, jax.tree.map(one, anchor, local, params, steps), steps)


def warm_mean(comm: Comm, warm: Flag, updates: Updates, examples: Any) -> Updates:
    """The mean gradient during the warm-up, this worker's own after it."""

    def mean(comm, updates):
        heard = None if examples is None else jnp.asarray(examples, jnp.float32)
        found, _, _ = reduce_weighted(_plain_mean(comm), updates, (), comm, heard, plain=True)
        return comm.varying(found)

    return either(warm, mean, lambda comm, updates: comm.varying(updates), comm, updates)


def set_anchor(comm: Comm, due: Flag, anchor: Updates, local: PyTree) -> Updates:
    """The mean of the local models, which the warm-up has kept equal, as the first anchor."""

    def mean(comm, anchor, local):
        ahead = jax.tree.map(lambda a, p: p.astype(a.dtype) - comm.varying(as_held(a, p)), anchor, local)
        return optax.apply_updates(anchor, _plain_mean(comm)(ahead, ())[0])

    return either(due, mean, lambda comm, anchor, local: anchor, comm, anchor, local)


def as_held(anchor: Array, param: Array) -> Array:
    """The anchor as a parameter of this dtype holds it: what bfloat16 loses is no drift."""
    return anchor.astype(param.dtype).astype(anchor.dtype)


def told_to_talk(sync: Any, fragments: int) -> Collection[int] | None:
    """The fragments that the host wants to talk in this step; `None`: their counts decide."""
    if sync is None:
        return None
    if isinstance(sync, bool):
        return range(fragments) if sync else ()
    if isinstance(sync, jax.Array):
        raise ValueError("sync chooses the program, so it must be static: distribute(..., static_argnames=('sync',))")
    if not set(sync) <= set(range(fragments)):
        raise ValueError(f"sync names the fragments that talk, of {fragments}, got {tuple(sync)}")
    return sync


def _plain_mean(comm: Comm):
    def reduce(updates: Updates, state: State) -> tuple[Updates, State]:
        return exact().reduce(updates, (), comm)[0].mean, state

    return reduce


def either(due: Flag, on_true: Any, on_false: Any, comm: Comm, *operands: Any) -> Any:
    """A condition around communication: agreed, or settled by the host."""
    if isinstance(due, bool):
        return (on_true if due else on_false)(comm, *operands)
    return comms.cond(due, on_true, on_false, comm, *operands)
