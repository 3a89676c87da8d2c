"""An optax transformation applied to some layers now and to the others later."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._core.jaxprs import propagate
from .._core.types import PyTree, State
from ..schedule.forward_order import LayerSplit
from ..state.marks import MARKS
from ..transforms.optax_wrappers import communicates


class Ownership(NamedTuple):
    """The number of the layer to which each leaf belongs.

    Attributes:
      params: for each leaf of the parameters.
      state: for each leaf of the optimizer's state; `None` for leaves that all layers share, such as step counts.
    """

    params: list[int]
    state: list[int | None]


def find_owners(
    tx: optax.GradientTransformationExtraArgs, params: PyTree, state: State, split: LayerSplit
) -> Ownership:
    """Returns the layer to which each leaf of an optimizer's state belongs, read from the trace of its update.

    Raises:
      ValueError: the update of one layer needs another layer's gradient, or the state has marks.
    """
    if any(map(_is_not_replicated, jax.tree.leaves(state, is_leaf=_is_not_replicated))):
        raise ValueError(
            "pipelined does not support optimizers that communicate, or whose state is sharded, per-worker or on the "
            "host: pass an optimizer of optax, and the communication as reducer= (instead of all_reduce)"
        )
    owners = jax.tree.leaves(split.join([jax.tree.map(lambda _, i=i: i, part) for i, part in enumerate(split.parts)]))
    likes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, state, params))
    closed, out = jax.make_jaxpr(lambda *args: tx.update(*args), return_shape=True)(*likes)
    if jax.tree.structure(out[1]) != jax.tree.structure(state):
        raise ValueError("pipelined needs an optimizer whose update returns a state with the tree of its init")
    # Sets of layers as bit masks: the layers whose gradients each leaf depends on.
    params_masks = [1 << i for i in owners]
    state_masks = [0] * len(jax.tree.leaves(state))
    # Repeated to a fixed point, since the state of one step enters the next.
    while True:
        masks, merges = propagate(closed, [*params_masks, *state_masks, *params_masks])
        new_masks = [old | new for old, new in zip(state_masks, masks[len(params_masks) :], strict=True)]
        if new_masks == state_masks:
            break
        state_masks = new_masks
    for own, mask in zip([*params_masks, *([None] * len(state_masks))], masks, strict=True):
        # An update may depend on its own layer, a leaf of the state on any one layer.
        allowed = (own is None and mask.bit_count() <= 1) or mask | (own or 0) == own
        if not allowed:
            raise ValueError(_refusal(split, own, mask, merges))
    return Ownership(owners, [mask.bit_length() - 1 if mask else None for mask in state_masks])


def update_layers(
    tx: optax.GradientTransformationExtraArgs,
    gradients: Sequence[Any],
    state: State,
    params: PyTree,
    split: LayerSplit,
    owners: Ownership,
) -> tuple[PyTree, State]:
    """Updates the layers that have a gradient, their leaves of the state and those that all layers share.

    Args:
      tx: the optimizer.
      gradients: of each layer; `None` for layers that are left as they are.
      state: of the optimizer.
      params: the parameters.
      split: the parameters by layer.
      owners: the layers of leaves.

    Returns:
      The parameters and the state.
    """
    active = {i for i, gradient in enumerate(gradients) if gradient is not None}
    # The update of one layer does not depend on the others' gradients, so zeros may take their place.
    all_gradients = [
        jax.tree.map(jnp.zeros_like, part) if gradient is None else gradient
        for part, gradient in zip(split.parts, gradients, strict=True)
    ]
    updates, new_state = tx.update(split.join(all_gradients), state, params)
    new_params = optax.apply_updates(params, updates)
    return (
        _merge(params, new_params, [i in active for i in owners.params]),
        _merge(state, new_state, [i is None or i in active for i in owners.state]),
    )


def keep_shared(state: State, other: State, owners: Ownership) -> State:
    """Returns `state`, with the leaves that all layers share taken from `other`."""
    return _merge(state, other, [i is None for i in owners.state])


def _merge(old: PyTree, new: PyTree, take_new: Sequence[bool]) -> PyTree:
    leaves, structure = jax.tree.flatten(old)
    pairs = zip(leaves, jax.tree.leaves(new), take_new, strict=True)
    return structure.unflatten([b if take else a for a, b, take in pairs])


def _refusal(split: LayerSplit, own: int | None, mask: int, merges: list[Any]) -> str:
    def name(bits):
        layer = split.parts[bits.bit_length() - 1]
        return ", ".join(map(str, layer))

    others = mask & ~(own or (1 << (mask.bit_length() - 1)))
    subject = "the optimizer's state" if own is None else f"the update of layer {name(own)}"
    layers = f"{name(others)}" if own is not None else f"{name(others)} and {name(mask)} together"
    culprit = _culprit(merges)
    return (
        f"{subject} depends on the gradient of {layers}{f' ({culprit})' if culprit else ''}, but pipelined updates "
        "each layer before the gradients of the others are reduced. Use a transformation that treats each leaf "
        "separately (optax.clip, optax.clip_by_block_rms, optax.adaptive_grad_clip), or all_reduce, which waits for all"
    )


def _culprit(merges: list[Any]) -> str | None:
    """The name of the transformation whose update first combined layers."""
    for equation in merges:
        traceback = equation.source_info.traceback
        for frame in [] if traceback is None else traceback.frames:
            names = frame.function_name.split(".")
            if len(names) > 1 and "update" in names[-1] and "/jax/" not in frame.file_name:
                return names[0]
    return None


def _is_not_replicated(node: Any) -> bool:
    return communicates(node) or isinstance(node, MARKS)
