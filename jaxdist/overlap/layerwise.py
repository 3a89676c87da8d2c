"""An optax transformation applied to some layers now and to the others later."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._core.jaxprs import propagate
from .._core.types import Array, PyTree, State
from ..schedule.forward_order import Layers
from ..state.marks import MARKS
from ..transforms.optax_wrappers import communicates


class Ownership(NamedTuple):
    """For each leaf of the parameters and of the optimizer's state the number of its layer; `None`: no layer's."""

    params: list[int]
    state: list[int | None]


def ownership(tx: optax.GradientTransformationExtraArgs, params: PyTree, state: State, cut: Layers) -> Ownership:
    """Which layer each leaf of an optimizer's state belongs to, read from the trace of its update.

    Raises:
      ValueError: the update of one layer needs another layer's gradient, or the state has marks.
    """
    if any(map(_is_apart, jax.tree.leaves(state, is_leaf=_is_apart))):
        raise ValueError(
            "pipelined around an optimizer that communicates, or that keeps its state in parts or on the host: give it "
            "an optimizer of optax, and what goes over the network as reducer= (instead of all_reduce)"
        )
    of_params = jax.tree.leaves(cut.join([jax.tree.map(lambda _, i=i: i, part) for i, part in enumerate(cut.parts)]))
    likes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, state, params))
    closed, out = jax.make_jaxpr(lambda *args: tx.update(*args), return_shape=True)(*likes)
    if jax.tree.structure(out[1]) != jax.tree.structure(state):
        raise ValueError("pipelined needs an optimizer whose update returns a state with the tree that its init made")
    of_layer = [1 << i for i in of_params]
    of_state = [0] * len(jax.tree.leaves(state))
    while True:  # what the state takes up in one step it brings into the next
        masks, merges = propagate(closed, [*of_layer, *of_state, *of_layer])
        found = [old | new for old, new in zip(of_state, masks[len(of_layer) :], strict=True)]
        if found == of_state:
            break
        of_state = found
    for own, mask in zip([*of_layer, *([None] * len(of_state))], masks, strict=True):
        allowed = (own is None and mask.bit_count() <= 1) or mask | (own or 0) == own
        if not allowed:
            raise ValueError(_refusal(cut, own, mask, merges))
    return Ownership(of_params, [mask.bit_length() - 1 if mask else None for mask in of_state])


def update_some(
    tx: optax.GradientTransformationExtraArgs,
    gradients: Sequence[Any],
    state: State,
    params: PyTree,
    cut: Layers,
    own: Ownership,
) -> tuple[PyTree, State]:
    """Moves the layers that have a gradient, the others' being `None`; their parts of the state, and what all share."""
    now = {i for i, gradient in enumerate(gradients) if gradient is not None}
    whole = [
        jax.tree.map(jnp.zeros_like, part) if gradient is None else gradient
        for part, gradient in zip(cut.parts, gradients, strict=True)
    ]
    updates, new = tx.update(cut.join(whole), state, params)
    leaves, structure = jax.tree.flatten(params)
    moved = jax.tree.leaves(optax.apply_updates(params, updates))
    params = structure.unflatten([b if i in now else a for a, b, i in zip(leaves, moved, own.params, strict=True)])
    old, form = jax.tree.flatten(state)
    mixed = [b if i is None or i in now else a for a, b, i in zip(old, jax.tree.leaves(new), own.state, strict=True)]
    return params, form.unflatten(mixed)


def keep_shared(state: State, other: State, own: Ownership) -> State:
    """`state`, but what belongs to no layer is that of `other`."""
    leaves, structure = jax.tree.flatten(state)
    pairs = zip(leaves, jax.tree.leaves(other), own.state, strict=True)
    return structure.unflatten([b if i is None else a for a, b, i in pairs])


def select(flag: Array, new: PyTree, old: PyTree) -> PyTree:
    """Leaf by leaf."""
    return jax.tree.map(lambda a, b: jnp.where(flag, a, b), new, old)


def _refusal(cut: Layers, own: int | None, mask: int, merges: list[Any]) -> str:
    def name(bits):
        layer = cut.parts[bits.bit_length() - 1]
        return ", ".join(map(str, layer))

    others = mask & ~(own or (1 << (mask.bit_length() - 1)))
    subject = "the optimizer's state" if own is None else f"the update of layer {name(own)}"
    joined = f"{name(others)}" if own is not None else f"{name(others)} and {name(mask)} together"
    culprit = _culprit(merges)
    return (
        f"{subject} depends on the gradient of {joined}{f' ({culprit})' if culprit else ''}: pipelined moves each "
        "layer before the others' gradients are there. Use what looks at one leaf at a time (optax.clip, "
        "optax.clip_by_block_rms, optax.adaptive_grad_clip), or all_reduce, which waits for all of them"
    )


def _culprit(merges: list[Any]) -> str | None:
    """The transformation in whose update layers first met."""
    for equation in merges:
        traceback = equation.source_info.traceback
        for frame in [] if traceback is None else traceback.frames:
            names = frame.function_name.split(".")
            if len(names) > 1 and "update" in names[-1] and "/jax/" not in frame.file_name:
                return names[0]
    return None


def _is_apart(node: Any) -> bool:
    return communicates(node) or isinstance(node, MARKS)
