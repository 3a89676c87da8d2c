"""Wrappers of optax that call their inner transformation conditionally, and so must not stand around communication."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from .._typing import PyTree


def communicates(node: Any) -> bool:
    """Whether a node of a state belongs to a transformation that communicates: its class says `communicates = True`."""
    return getattr(type(node), "communicates", False)


def wrapped_communication(state: PyTree) -> str | None:
    """Why a state cannot work, if such a wrapper holds a transformation that communicates."""
    advice = {
        optax.MultiStepsState: "optax.MultiSteps around a transformation that communicates accumulates gradients that "
        "differ between workers: use local_value_and_grad(loss, micro_batches=k), accumulate(tx, k) for k calls of "
        "the step, or put MultiSteps after all_reduce in the chain",
        optax.ApplyIfFiniteState: "optax.apply_if_finite around a transformation that communicates lets each worker "
        "decide for itself, and those that communicate wait for ever: use skip_nonfinite(tx), or put apply_if_finite "
        "after all_reduce in the chain",
    }
    for node in _nodes(state, lambda x: type(x) in advice):
        if _nodes(tuple(node), communicates):
            return advice[type(node)]
    return None


def _nodes(tree: PyTree, kind: Callable[[Any], bool]) -> list[Any]:
    return [node for node in jax.tree.leaves(tree, is_leaf=kind) if kind(node)]
