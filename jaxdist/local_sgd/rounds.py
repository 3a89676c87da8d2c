"""One round of a fragment: its drift is averaged, the outer optimizer steps, and the local model follows."""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .. import comm as comms
from .._core.trees import next_count, tree_where
from .._core.types import Array, Flag, Float, Int, PyTree, State, Updates
from ..comm.base import Comm
from ..reducers.exact import exact
from ..reducers.reducer import Extras, Law, Reducer
from ..transforms.local_gradients import reduce_weighted
from ..transforms.weights import keep_unused, zero_unless
from ..wire.shards import map_groups
from .merging import Merge, check_linear, from_polar, to_polar
from .shards import has_shards, reduce_groups

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
    merge: Merge = "mean",
    eager: bool = False,
    weigh_drift: WeighDrift | None = None,
) -> tuple[Fragment, Updates | None]:
    """If due, takes the outer step `a += outer(reduce(a - p_w))` and restarts the counts.

    The model that is sent is `params` after `steps`, or that of its `group`; the updates that merge the new anchor are
    returned in place of `steps`. Without `steps` it is `params`, and the anchor will be merged later.
    If `eager`, what was `sent_from` becomes the model after the outer step along this worker's share alone.
    `weigh_drift(anchor, drift)` is what this worker contributes, where models do not count alike in their mean.
    """
    # Outer optimizer and reducer see one step a round: its rate is the mean over the inner steps.
    rate = fragment.rates / jnp.maximum(fragment.since, 1) if has_rate else None
    examples = fragment.examples if has_examples else None
    extras = {} if rate is None else {"learning_rate": rate}
    if examples is not None and not by_leaf:
        # Counted together, all leaves have the same number. A fragment may be without any.
        examples = examples[0] if examples.size else comm.varying(jnp.zeros((), jnp.float32))
    take_step = partial(_outer_step, reducer, outer, extras, examples, weigh_drift, merge)
    before = fragment.anchor, fragment.outer, fragment.reducer
    sent_from = params
    if steps is None and eager:
        peek = partial(_peek, outer, extras)

        def send(comm, before, params):
            return take_step(comm, before, params), peek(comm, before, params)

        after, sent_from = cond_or_static(
            due, send, lambda comm, before, params: (before, params), comm, before, params
        )
    elif steps is None:
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
        sent_from=tree_where(due, sent_from, fragment.sent_from) if keeps_sent else (),
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
    merge: Merge,
    comm: Comm,
    before: tuple[Updates, State, State],
    local: PyTree,
) -> tuple[Updates, State, State]:
    anchor, outer_state, reducer_state = before
    start, drift = _drift(comm, anchor, local)
    if weigh_drift is not None:
        drift = weigh_drift(start, drift)

    def reduce(updates, state):
        # With numbers of leaves no worker is absent as a whole: it sends what it has kept.
        absent = None if examples is None or examples.ndim else examples
        # A worker has shards of sharded parameters, and reduces them as vectors.
        whole = None if has_shards(drift) else start
        passed = Extras(learning_rate=extras.get("learning_rate"), examples=absent, params=whole)
        return reduce_groups(reducer, updates, state, comm, passed)

    # Δ = reduce(Δ_w), weighted by examples. Their number, which all workers with one model share, travels by itself
    # where there are shards.
    plain = reducer.law == Law.MEAN and not has_shards(drift)
    reduce_all = partial(reduce_weighted, reduce, comm=comm, plain=plain, reducer=reducer)
    if merge == "mean":
        mean, state, used = reduce_all(drift, reducer_state, examples=examples)
    else:
        check_linear(merge, reducer)
        # Each leaf is two, a direction and a length, of one weight.
        weights = examples if examples is None or not examples.ndim else jnp.concatenate([examples, examples])
        polar, state, used = reduce_all(to_polar(drift), reducer_state, examples=weights)
        mean = from_polar(polar)
        used = used if isinstance(used, bool) or not used.ndim else used[: used.size // 2]
    # a += outer(Δ)
    steps, new = outer.update(mean, outer_state, anchor, **extras)
    # In a round without any example, momentum alone must not move the anchor.
    if not isinstance(used, bool):
        steps, new = zero_unless(used, steps), keep_unused(used, new, outer_state, outer.init, anchor)
    return optax.apply_updates(anchor, steps), new, state


def _drift(comm: Comm, anchor: Updates, local: PyTree) -> tuple[Updates, Updates]:
    """The anchor as this worker's parameters can hold it, and what is missing from it to these."""
    # The difference is averaged, in float32: a mean of bfloat16 parameters would lose small drifts.
    start = jax.tree.map(lambda a, p: comm.varying(round_like(a, p)), anchor, local)
    return start, jax.tree.map(lambda a, p: a - p.astype(a.dtype), start, local)


def _peek(
    outer: optax.GradientTransformationExtraArgs,
    extras: dict[str, Array],
    comm: Comm,
    before: tuple[Updates, State, State],
    local: PyTree,
) -> PyTree:
    """The model of a worker after the outer step along its own share `Δ_w / W`, as if the others had not moved."""
    anchor, outer_state, _ = comm.varying(before)
    share = jax.tree.map(lambda x: x / comm.size, _drift(comm, anchor, local)[1])
    steps, _ = outer.update(share, outer_state, anchor, **extras)
    return comm.varying(jax.tree.map(lambda a, p: a.astype(p.dtype), optax.apply_updates(anchor, steps), local))


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


def exact_mean(comm: Comm, tree: PyTree) -> PyTree:
    """The mean over workers: one collective for each dtype, and for each way in which leaves are sharded."""
    return map_groups(lambda part: exact().reduce(part, (), comm)[0].mean, tree)
