"""One synchronization: a fragment's round, its merge into the local model, the warm-up, and shards of parameters."""

import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .. import comm as comms
from .._core.jaxprs import CASTS, ELEMENTWISE, evaluate
from .._core.trees import next_count, tree_where
from .._core.types import Array, Flag, Float, Int, PyTree, State, Updates
from ..comm.base import Comm
from ..reducers.exact import exact
from ..reducers.reducer import Extras, Law, Reducer
from ..state.marks import Sharded, flatten_marks, is_mark, with_value
from ..transforms.local_gradients import reduce_weighted
from ..transforms.weights import keep_unused, zero_unless
from ..wire.flat import group_by_sharding, map_groups, select_leaves, whole_likes

# `weigh_drift(anchor, anchor - params)`: the contribution of a worker to the mean drift.
WeighDrift = Callable[[Updates, Updates], Updates]


class Fragment(NamedTuple):
    """One fragment's part of a `LocalStepsState`; trees have its leaves, and `None` for those of the others.

    `examples` has a number for each of its leaves. `sent_from` is `()` where it is not kept.
    """

    anchor: Updates
    outer: State
    reducer: State
    since: Int[Array, ""]
    rounds: Int[Array, ""]
    rates: Float[Array, ""]
    examples: Float[Array, " leaves"]
    sent_from: PyTree


def synchronize_fragment(
    comm: Comm,
    due: Flag,
    reducer: Reducer,
    outer: optax.GradientTransformationExtraArgs,
    fragment: Fragment,
    params: PyTree,
    steps: Updates | None = None,
    group: Updates | None = None,
    *,
    merge_alpha: float | int,
    has_rate: bool,
    has_examples: bool,
    by_leaf: bool,
    weigh_drift: WeighDrift | None = None,
) -> tuple[Fragment, Updates | None]:
    """If due, takes the outer step `a += outer(reduce(a - p_w))` and restarts the counts.

    The model that is sent is `params` after `steps`, or that of its `group`; the updates that merge the new anchor are
    returned in place of `steps`. Without `steps` it is `params`, and the anchor will be merged later.
    `weigh_drift(anchor, drift)` is what this worker contributes, where models do not count alike in their mean.
    """
    # Outer optimizer and reducer see one step a round: its rate is the mean over the inner steps.
    rate = fragment.rates / jnp.maximum(fragment.since, 1) if has_rate else None
    examples = fragment.examples if has_examples else None
    extras = {} if rate is None else {"learning_rate": rate}
    if examples is not None and not by_leaf:
        # Counted together, all leaves have the same number. A fragment may be without any.
        examples = examples[0] if examples.size else comm.varying(jnp.zeros((), jnp.float32))
    take_step = partial(_outer_step, reducer, outer, extras, examples, weigh_drift)
    before = fragment.anchor, fragment.outer, fragment.reducer
    if steps is None:
        after = cond_or_static(due, take_step, lambda comm, before, params: before, comm, before, params)
    else:
        after, steps = end_round(comm, due, take_step, before, params, steps, group, merge_alpha=merge_alpha)
    keeps_sent = bool(jax.tree.leaves(fragment.sent_from))
    synchronized = Fragment(
        *after,
        since=jnp.where(due, 0, fragment.since),
        rounds=jnp.where(due, next_count(fragment.rounds), fragment.rounds),
        rates=jnp.where(due, 0, fragment.rates),
        examples=jnp.where(due, 0, fragment.examples),
        sent_from=tree_where(due, params, fragment.sent_from) if keeps_sent else (),
    )
    return synchronized, steps


def end_round(
    comm: Comm,
    due: Flag,
    take_step: Callable,
    before: tuple,
    params: PyTree,
    steps: Updates,
    group: Updates | None = None,
    *,
    merge_alpha: float | int = 0,
) -> tuple[tuple, Updates]:
    """If a round is due, returns what `take_step(comm, before, model)` returns, and the updates to its first part.

    `before` and what `take_step` returns begin with the anchor. One condition holds the communication and the merge,
    and passes `steps` through: computed from them outside, the model and its difference from the anchor are two more
    arrays in each step, and XLA:CPU computes the steps once for each.
    """

    def synchronize(comm, before, params, steps, group):
        after = take_step(comm, before, optax.apply_updates(params, steps) if group is None else group)
        # The model of its group was sent; what this worker has done since the group's last round is kept.
        sent = None if group is None else jax.tree.map(lambda model, p: model.astype(p.dtype), group, params)
        return after, comm.varying(merge_anchor(merge_alpha, after[0], params, steps, sent))

    def skip(comm, before, params, steps, group):
        del params, group
        return before, comm.varying(steps)

    return cond_or_static(due, synchronize, skip, comm, before, params, steps, group)


def _outer_step(
    reducer: Reducer,
    outer: optax.GradientTransformationExtraArgs,
    extras: dict[str, Array],
    examples: Array | None,
    weigh_drift: WeighDrift | None,
    comm: Comm,
    before: tuple[Updates, State, State],
    local: PyTree,
) -> tuple[Updates, State, State]:
    anchor, outer_state, reducer_state = before
    # The difference is averaged, in float32: a mean of bfloat16 parameters would lose small drifts.
    start = jax.tree.map(lambda a, p: comm.varying(round_like(a, p)), anchor, local)
    drift = jax.tree.map(lambda a, p: a - p.astype(a.dtype), start, local)
    if weigh_drift is not None:
        drift = weigh_drift(start, drift)

    def reduce(updates, state):
        # With numbers of leaves no worker is absent as a whole: it sends what it has kept.
        absent = None if examples is None or examples.ndim else examples
        passed = Extras(learning_rate=extras.get("learning_rate"), examples=absent)
        return reduce_groups(reducer, updates, state, comm, passed)

    # Δ = reduce(Δ_w), weighted by examples. Their number, which all workers with one model share, travels by itself
    # where there are shards.
    plain = reducer.law == Law.MEAN and not has_shards(drift)
    mean, state, used = reduce_weighted(reduce, drift, reducer_state, comm, examples, plain=plain, forms=reducer.forms)
    # a += outer(Δ)
    steps, new = outer.update(mean, outer_state, anchor, **extras)
    # In a round without any example, momentum alone must not move the anchor.
    if not isinstance(used, bool):
        steps, new = zero_unless(used, steps), keep_unused(used, new, outer_state, outer.init, anchor)
    return optax.apply_updates(anchor, steps), new, state


def merge_anchor(
    alpha: float | int, anchor: Updates, params: PyTree, steps: Updates, sent: PyTree | None = None
) -> Updates:
    """Returns the updates that bring `params` to `alpha · local + (1 - alpha) · anchor`, `local` after `steps`.

    With the parameters that were `sent`, to `local + (1 - alpha) (anchor - sent)`: local progress since then is kept.
    """
    local = optax.apply_updates(params, steps)

    # α p_w + (1-α) a
    def mix(a, own, p, step):
        target = round_like(a, p) if alpha == 0 else alpha * own.astype(a.dtype) + (1 - alpha) * round_like(a, p)
        return (target - p.astype(a.dtype)).astype(step.dtype)

    # p_w + (1-α) (a - p̂_w)
    def correct(a, own, p, step, before):
        progress = own.astype(a.dtype) - p.astype(a.dtype)
        return (progress + (1 - alpha) * (round_like(a, p) - before.astype(a.dtype))).astype(step.dtype)

    if sent is None:
        return jax.tree.map(mix, anchor, local, params, steps)
    return jax.tree.map(correct, anchor, local, params, steps, sent)


def warm_mean(
    comm: Comm, warm: Flag, updates: Updates, weight: Array | None, value: Any = None
) -> tuple[Updates, Array | None, Array | None]:
    """Returns the mean gradient during the warm-up, this worker's own gradient afterwards.

    Also returns whether there is one, for this worker or in the warm-up for any: one boolean or `[leaves]`; `None`
    without weights. And the loss `value`, by which an inner optimizer may change its step, in the same way.
    """

    def average_gradients(comm, updates, weight, value):
        # The loss counts as the leaf with the most examples.
        weights = weight
        if value is not None and weight is not None and weight.ndim:
            weights = jnp.concatenate([weight, weight.max(keepdims=True)])
        together, _, used = reduce_weighted(partial(_mean, comm), (updates, value), (), comm, weights, plain=True)
        if weight is not None and weight.ndim:
            used = jnp.asarray(used)[: weight.size]
        return *comm.varying(together), None if weight is None else comm.varying(used)

    def keep_own(comm, updates, weight, value):
        return *comm.varying((updates, value)), None if weight is None else comm.varying(weight > 0)

    value = None if value is None else jnp.asarray(value)
    mean, value, used = cond_or_static(warm, average_gradients, keep_own, comm, updates, weight, value)
    return mean, used, value


def set_anchor(comm: Comm, due: Flag, anchor: Updates, params: PyTree, steps: Updates) -> Updates:
    """Returns the mean of the models after `steps` as the first anchor; the warm-up has kept them equal."""

    def average_models(comm, anchor, params, steps):
        local = optax.apply_updates(params, steps)
        # Differences again, as in a round: the mean of what the warm-up added to the anchor.
        ahead = jax.tree.map(lambda a, p: p.astype(a.dtype) - comm.varying(round_like(a, p)), anchor, local)
        return optax.apply_updates(anchor, exact_mean(comm, ahead))

    return cond_or_static(due, average_models, lambda comm, anchor, *_: anchor, comm, anchor, params, steps)


def _mean(comm: Comm, updates: Updates, state: State) -> tuple[Updates, State]:
    return exact_mean(comm, updates), state


def round_like(anchor: Array, param: Array) -> Array:
    """Rounds the anchor to the dtype of a parameter and back: what bfloat16 loses must not count as drift."""
    return anchor.astype(param.dtype).astype(anchor.dtype)


def parse_sync_override(sync: Any, fragments: int) -> Collection[int] | None:
    """Returns the fragments that the static `sync=` selects for this step; `None`: their counts decide."""
    if sync is None:
        return None
    if isinstance(sync, bool | np.bool_):
        return range(fragments) if sync else ()
    if isinstance(sync, jax.Array):
        raise ValueError("sync chooses the program, so it must be static: distribute(..., static_argnames=('sync',))")
    if not isinstance(sync, Collection) or not set(sync) <= set(range(fragments)):
        raise ValueError(
            f"sync must be True, False, or the numbers of fragments to synchronize, 0 to {fragments - 1}, got {sync!r}"
        )
    return sync


def cond_or_static(due: Flag, on_true: Any, on_false: Any, comm: Comm, *operands: Any) -> Any:
    """Runs one of two branches that may communicate: on a replicated array a `comm.cond`, on a Python bool at once."""
    if isinstance(due, bool):
        return (on_true if due else on_false)(comm, *operands)
    return comms.cond(due, on_true, on_false, comm, *operands)


class _Entries(NamedTuple):
    """An array of which a worker has some entries, in a trace that is checked."""


def has_shards(tree: PyTree) -> bool:
    """Returns whether a tree has `Sharded` leaves."""
    return any(isinstance(mark, Sharded) for leaf in flatten_marks(tree) for mark in leaf.marks)


def init_reducer(reducer: Reducer, params: PyTree) -> State:
    """The state of a reducer of drifts: one for each group of leaves that are sharded alike, where there are several.

    Raises:
      ValueError: the reducer keeps numbers of sharded leaves that are not shaped as these, which each worker would
        compute from its own shard.
    """
    if not has_shards(params):
        return reducer.init(params)
    # A worker reduces a shard, which is a vector: what a reducer decides by the shape, it decides for vectors.
    flat = jax.tree.map(lambda x: with_value(x, jnp.ravel(x.value)) if is_mark(x) else x, params, is_leaf=is_mark)
    groups = group_by_sharding(flat)
    states = tuple(reducer.init(select_leaves(flat, members)) for members in groups)
    for members, state in zip(groups, states, strict=True):
        if has_shards(select_leaves(params, members)):
            _check_reducer_state(reducer, state)
    return states if len(groups) > 1 else states[0]


def _check_reducer_state(reducer: Reducer, state: State) -> None:
    for leaf in flatten_marks(state):
        # A mark without an axis is the reducer's own: it splits a whole array over its workers.
        own = [mark for mark in leaf.marks if isinstance(mark, Sharded) and mark.axis is not None]
        sizes = [(math.prod(mark.shape),) for mark in own]
        is_floating = jnp.issubdtype(leaf.value.dtype, jnp.floating)
        # Residuals are cut as their parameters are; keys and counts are equal on all workers.
        if is_floating != bool(sizes) or any(leaf.value.shape != size for size in sizes):
            raise ValueError(
                f"{reducer.description or 'this reducer'} keeps {jax.tree_util.keystr(leaf.path)} of shape "
                f"{leaf.value.shape} besides arrays that are shaped as the parameters, and of Sharded parameters each "
                "worker would keep another one: use exact(), compressed(...), two_shot(..., server_feedback=False), or "
                "error_feedback(...) of these, or do not shard the parameters (stages 1 and 2)"
            )


def reduce_groups(
    reducer: Reducer, updates: Updates, state: State, comm: Comm, extras: Extras
) -> tuple[Updates, State]:
    """Averages drifts, each group of leaves that are sharded alike by itself; `state` is that of `init_reducer`."""
    groups = group_by_sharding(updates)
    if len(groups) < 2:
        reduced, state = reducer.reduce(updates, state, comm, extras)
        return reduced.mean, state
    # The same order as in `map_groups`.
    before, after = iter(state), []

    def reduce_group(part: Updates) -> Updates:
        reduced, new = reducer.reduce(part, next(before), comm, extras)
        after.append(new)
        return reduced.mean

    return map_groups(reduce_group, updates), tuple(after)


def exact_mean(comm: Comm, tree: PyTree) -> PyTree:
    """The mean over workers: one collective for each dtype, and for each way in which leaves are sharded."""
    return map_groups(lambda part: exact().reduce(part, (), comm)[0].mean, tree)


def check_entrywise(outer: optax.GradientTransformationExtraArgs, anchor: PyTree) -> None:
    """Checks that an outer optimizer treats each entry of sharded parameters by itself: a worker has some of them.

    Raises:
      ValueError: it takes norms, factors or other functions of whole arrays.
    """
    if not has_shards(anchor):
        return
    arguments = whole_likes((anchor, outer.init(anchor), anchor))
    closed = jax.make_jaxpr(lambda *trees: outer.update(*trees, learning_rate=0.1))(*arguments)
    operands = [
        _Entries() if any(isinstance(mark, Sharded) for mark in leaf.marks) else None
        for leaf in flatten_marks(arguments)
    ]
    evaluate(closed, _apply_entrywise, operands)


def _apply_entrywise(equation: Any, operands: list[Any]) -> list[Any]:
    if not any(isinstance(x, _Entries) for x in operands):
        return [None] * len(equation.outvars)
    if equation.primitive.name not in ELEMENTWISE | CASTS:
        raise ValueError(
            f"the outer optimizer computes a `{equation.primitive.name}` of whole arrays, and of Sharded parameters a "
            "worker has a shard: use one that treats each entry by itself, "
            "optax.sgd(0.7, momentum=0.9, nesterov=True)"
        )
    return [_Entries()] * len(equation.outvars)
