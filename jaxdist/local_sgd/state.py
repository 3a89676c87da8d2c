"""The state of `local_steps`, its split into fragments, and the treatment of the inner state in a synchronization."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._core.checks import NO_PARAMS
from .._core.compat import is_on_host
from .._core.dtypes import working_dtype
from .._core.types import Array, AxisNames, Flag, Float, Int, PyTree, State, UInt, Updates
from ..comm.base import Comm
from ..state.marks import NO_PARAMETER, PerWorker, beside, is_mark, with_value
from ..transforms.common import check_per_worker
from ..transforms.local_gradients import check_leaves, check_local
from ..transforms.quantized_state import is_coded
from ..wire.flat import gather_marked, split_marked
from .fragments import merge, split
from .synchronize import Fragment, cond_or_static, exact_mean

Buffers = Literal["maintain", "reset", "average"]


class LocalStepsState(NamedTuple):
    """The state of `local_steps`. A *round* ends when the workers synchronize a fragment.

    Replicated: for each fragment the steps `since` its last round, its number of `rounds` and the sum of learning
    `rates` since then; the bytes `sent` by one worker, as (high, low) words; the `anchor` (the global parameters that
    all workers started the round from), in float32 or better.
    Per worker: for each fragment the `examples` since its last round; with `overlap_correction`, the parameters that
    were `sent_from`.

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
    since, rounds, rates, examples = state.since, state.rounds, state.rates, state.examples.value
    return [
        Fragment(anchors[i], state.outer[i], state.reducer[i], since[i], rounds[i], rates[i], examples[i], sent_from[i])
        for i in range(number)
    ]


def merge_state(state: LocalStepsState, fragments: Sequence[Fragment], labels: PyTree) -> LocalStepsState:
    """Puts the fragments back in place of those of `state`."""
    keeps_sent = bool(jax.tree.leaves(state.sent_from.value))
    sent_from = merge([fragment.sent_from for fragment in fragments], labels) if keeps_sent else ()
    return state._replace(
        since=jnp.stack([fragment.since for fragment in fragments]),
        rounds=jnp.stack([fragment.rounds for fragment in fragments]),
        rates=jnp.stack([fragment.rates for fragment in fragments]),
        anchor=merge([fragment.anchor for fragment in fragments], labels),
        outer=tuple(fragment.outer for fragment in fragments),
        reducer=tuple(fragment.reducer for fragment in fragments),
        examples=with_value(state.examples, jnp.stack([fragment.examples for fragment in fragments])),
        sent_from=with_value(state.sent_from, sent_from) if keeps_sent else state.sent_from,
    )


def global_params(opt_state: State) -> PyTree:
    """Returns the replicated model inside a state of `local_steps`: the one to evaluate and to keep.

    It is the anchor: a tree like the parameters, in float32 or better. `Sharded` parameters (ZeRO stage 3) have a
    sharded anchor: `jd.consensus` joins it.

    Args:
      opt_state: an optimizer state with `local_steps` anywhere inside, placed or as a worker sees it.

    Examples:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = jd.local_steps(optax.sgd(0.1), optax.sgd(1.0), sync_period=8)
      >>> jd.local_sgd.global_params(tx.init(jnp.ones(2))).tolist()
      [1.0, 1.0]
    """
    for node in jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, LocalStepsState)):
        if isinstance(node, LocalStepsState):
            return node.anchor
    raise ValueError("this optimizer state has no local_steps inside, and so no anchor; evaluate the parameters")


def update_buffers(
    mode: Buffers, comm: Comm, due: Flag, inner: optax.GradientTransformation, state: State, params: PyTree
) -> State:
    """Maintains, resets or averages momentum and the like after a round, if it is due.

    *On the wire* for `"average"`: one all-reduce of all buffers, `2(W-1)/W · 4` bytes an entry; one for the counts.
    """
    if mode == "maintain":
        return state
    if mode == "average" and any(is_coded(x) for x in jax.tree.leaves(state, is_leaf=is_coded)):
        raise ValueError(
            'buffers="average" cannot average the encoded arrays of quantized_state; use buffers="maintain" or "reset"'
        )
    owned = _find_buffers(inner, state, params)
    if mode == "average":
        return cond_or_static(due, partial(_average, owned), lambda comm, state: comm.varying(state), comm, state)
    return cond_or_static(
        due, partial(_reset, owned, inner), lambda comm, state, _: comm.varying(state), comm, state, params
    )


def _reset(owned: PyTree, inner: optax.GradientTransformation, comm: Comm, state: State, params: PyTree) -> State:
    """Buffers as `init` makes them, with the counts that belong to them; schedules go on counting."""
    # `init` is written for whole parameters, and makes whole arrays.
    fresh = split_marked(jax.tree.map(_on_device, inner.init(gather_marked(params))))
    return comm.varying(jax.tree.map(lambda own, new, old: _place_like(old, new) if own else old, owned, fresh, state))


def _average(owned: PyTree, comm: Comm, state: State) -> State:
    """Averages buffers over workers; of the counts that belong to them it takes the largest."""

    def select(floating: bool) -> PyTree:
        return jax.tree.map(
            lambda own, x: _on_device(x) if own and jnp.issubdtype(x.dtype, jnp.floating) == floating else None,
            owned,
            state,
        )

    def replace_leaf(old, mean, largest):
        new = old if mean is None and largest is None else largest if mean is None else mean
        return comm.varying(_place_like(old, new))

    means, largest = exact_mean(comm, select(True)), comm.max(select(False))
    return jax.tree.map(replace_leaf, state, means, largest, is_leaf=lambda x: x is None)


def _on_device(x: Array) -> Array:
    return jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x


def _place_like(old: Array, new: Array) -> Array:
    """Moves a new array to the memory of the old one."""
    return jax.device_put(new, jax.memory.Space.Host) if is_on_host(old) else new


def _find_buffers(inner: optax.GradientTransformation, state: State, params: PyTree) -> PyTree:
    """Returns a tree of booleans: true for buffers shaped like the parameters and for the counts of such buffers.

    Adam's bias correction counts since its moments were zero, so that count goes with them. A learning-rate schedule
    counts steps and must go on. A count belongs to a buffer if both are fields of the same NamedTuple.
    """
    params = _without_marks(params)
    like_params = jax.tree.map(lambda k: k != NO_PARAMETER, beside(inner.init, state, params, is_leaf=is_coded))
    return _flag_counts(state, like_params, jax.tree.structure(params))


def _flag_counts(node: Any, flags: Any, structure: Any) -> Any:
    """Extends the flags of buffers to the counts and keys of the NamedTuples that they are in."""
    if jax.tree_util.all_leaves([node]):
        return flags
    # One level down: the children of this node, and the flags below each.
    children, outside = jax.tree.flatten(node, is_leaf=lambda x: x is not node)
    pairs = list(zip(children, outside.flatten_up_to(flags), strict=True))
    has_buffers = hasattr(node, "_fields") and any(_is_buffer(*pair, structure) for pair in pairs)

    def flag_child(child: Any, flags: Any) -> Any:
        # A field that is another state, beside master parameters, has counts of its own.
        if has_buffers and jax.tree_util.all_leaves([_without_marks(child)]):
            return jax.tree.map(lambda _: True, flags)
        return _flag_counts(child, flags, structure)

    return outside.unflatten([flag_child(*pair) for pair in pairs])


def _is_buffer(node: Any, flags: Any, structure: Any) -> bool:
    found = jax.tree.leaves(flags)
    like_params = jax.tree.structure(_without_marks(node)) == structure or not isinstance(node, tuple)
    return bool(found) and all(found) and like_params


def _without_marks(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: _without_marks(x.value) if is_mark(x) else x, tree, is_leaf=is_mark)
