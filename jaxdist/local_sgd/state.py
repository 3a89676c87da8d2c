"""The state of `local_steps`, and its split into fragments."""

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._core.checks import NO_PARAMS
from .._core.dtypes import working_dtype
from .._core.trees import leaf_name
from .._core.types import Array, AxisNames, Float, Int, PyTree, State, UInt, Updates
from ..state.marks import PerWorker, with_value
from ..transforms.common import check_per_worker
from ..transforms.local_gradients import check_leaves, check_local
from .fragments import merge, split
from .rounds import Fragment


class LocalStepsState(NamedTuple):
    """The state of `local_steps`. A *round* ends when the workers synchronize a fragment.

    Replicated: for each fragment the steps `since` its last round, its number of `rounds` and the sum of learning
    `rates` since then; the bytes `sent` by one worker, as (high, low) words; the `anchor` (the global parameters that
    all workers started the round from), in float32 or better.
    Per worker: for each leaf the `examples` since its last round, in an island -1 until a step counts them; with
    `overlap_correction`, the parameters that were `sent_from`, with `eager` those after one's own share.

    `inner` is one `PerWorker`, or a tree of them if the inner optimizer keeps models. With local steps around, along a
    slower axis, the `count_fields` stay replicated, and a round outside replaces the `model_fields`.
    """

    count: Int[Array, ""]
    since: Int[Array, " fragments"]
    rounds: Int[Array, " fragments"]
    rates: Float[Array, " fragments"]
    sent: UInt[Array, "2"]
    anchor: Updates
    outer: tuple[State, ...]
    inner: State
    examples: PerWorker
    reducer: tuple[State, ...]
    sent_from: PerWorker

    communicates = True
    count_fields = ("count", "since", "rounds", "rates", "sent")
    model_fields = ("anchor",)


def copy_wide(params: PyTree) -> PyTree:
    """Copies parameters in float32 or better: parameters and optimizer state may both be donated."""
    return jax.tree.map(lambda x: jnp.array(x, working_dtype(x.dtype)), params)


def check_step(updates: Updates, params: PyTree | None, axis: AxisNames) -> None:
    """Checks the arguments of a local step: gradients of this worker, and parameters marked as its own."""
    if params is None:
        raise ValueError(NO_PARAMS)
    check_leaves(updates, sharded=True)
    check_local(updates, axis)
    check_per_worker(params, axis)


def split_state(state: LocalStepsState, labels: PyTree) -> list[Fragment]:
    """Splits off the part of each fragment; `labels` has the number of each leaf's fragment."""
    number = len(state.outer)
    anchors, sent_from = split(state.anchor, labels, number), state.sent_from.value
    # `()` without overlap correction
    sent_from = split(sent_from, labels, number) if jax.tree.leaves(sent_from) else [()] * number
    since, rounds, rates = state.since, state.rounds, state.rates
    examples = [state.examples.value[leaves] for leaves in _leaves_of(labels, number)]
    return [
        Fragment(anchors[i], state.outer[i], state.reducer[i], since[i], rounds[i], rates[i], examples[i], sent_from[i])
        for i in range(number)
    ]


def _leaves_of(labels: PyTree, number: int) -> list[Any]:
    """The positions of the leaves of each fragment."""
    owners = np.array(jax.tree.leaves(labels), int)
    return [np.flatnonzero(owners == i) if number > 1 else slice(None) for i in range(number)]


def merge_state(state: LocalStepsState, fragments: Sequence[Fragment], labels: PyTree) -> LocalStepsState:
    """Puts the fragments back in place of those of `state`."""
    keeps_sent = bool(jax.tree.leaves(state.sent_from.value))
    examples = state.examples.value
    for leaves, fragment in zip(_leaves_of(labels, len(fragments)), fragments, strict=True):
        examples = examples.at[leaves].set(fragment.examples)
    sent_from = merge([fragment.sent_from for fragment in fragments], labels) if keeps_sent else ()
    return state._replace(
        since=jnp.stack([fragment.since for fragment in fragments]),
        rounds=jnp.stack([fragment.rounds for fragment in fragments]),
        rates=jnp.stack([fragment.rates for fragment in fragments]),
        anchor=merge([fragment.anchor for fragment in fragments], labels),
        outer=tuple(fragment.outer for fragment in fragments),
        reducer=tuple(fragment.reducer for fragment in fragments),
        examples=with_value(state.examples, examples),
        sent_from=with_value(state.sent_from, sent_from) if keeps_sent else state.sent_from,
    )


def global_params(opt_state: State) -> PyTree:
    """Returns the replicated model inside a state of `local_steps`: the one to evaluate and to keep.

    It is the anchor: a tree like the parameters, in float32 or better. `Sharded` parameters (ZeRO stage 3) have a
    sharded anchor: `jd.consensus` joins it.

    Args:
      opt_state: an optimizer state with `local_steps` anywhere inside, placed or as a worker sees it.

    Raises:
      ValueError: there is no `local_steps` inside, or there are several that are not parts of one model.

    Examples:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = jd.local_steps(optax.sgd(0.1), optax.sgd(1.0), sync_period=8)
      >>> jd.local_sgd.global_params(tx.init(jnp.ones(2))).tolist()
      [1.0, 1.0]
    """
    nodes = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=lambda x: isinstance(x, LocalStepsState))
    anchors = {leaf_name(path, "this state"): x.anchor for path, x in nodes if isinstance(x, LocalStepsState)}
    if not anchors:
        raise ValueError("this optimizer state has no local_steps inside, and so no anchor; evaluate the parameters")
    # With `optax.partition` each has a part of the model, and placeholders for the others'.
    try:
        return reduce(_join_parts, anchors.values())
    except _SeveralModelsError:
        raise ValueError(
            f"this state has models of local_steps in {', '.join(map(repr, anchors))}, which are not the parts of one: "
            "pass the state of one of them"
        ) from None


class _SeveralModelsError(Exception):
    """Two trees are not the parts of one."""


def _join_parts(first: PyTree, second: PyTree) -> PyTree:
    """The tree of two that have placeholders for each other's parts, each for one leaf or several."""
    if isinstance(first, optax.MaskedNode):
        return second
    if isinstance(second, optax.MaskedNode):
        return first
    (left, structure), (right, other) = (
        jax.tree.flatten(tree, is_leaf=lambda x, tree=tree: x is not tree) for tree in (first, second)
    )
    if jax.tree_util.all_leaves([first]) or structure != other:
        raise _SeveralModelsError
    return structure.unflatten(map(_join_parts, left, right))
