"""Wrappers of optax that call their inner transformation conditionally, and so must not stand around communication."""

from typing import Any

import jax
import optax

from .._typing import PyTree
from .all_reduce import AllReduceState
from .gossip import GossipState
from .local_steps.state import LocalStepsState
from .mirror_descent.dual import AnytimeMinibatchState
from .mirror_descent.primal import MirrorDescentState
from .no_lo_co import NoLoCoState
from .optimizers.demo import DemoState
from .optimizers.dion import DionState
from .optimizers.frozen_adam import FrozenAdamState
from .optimizers.zero_one_adam import ZeroOneAdamState

COMMUNICATING = (
    AllReduceState,
    AnytimeMinibatchState,
    DemoState,
    DionState,
    FrozenAdamState,
    GossipState,
    LocalStepsState,
    MirrorDescentState,
    NoLoCoState,
    ZeroOneAdamState,
)


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
    for node in _nodes(state, tuple(advice)):
        if _nodes(tuple(node), COMMUNICATING):
            return advice[type(node)]
    return None


def _nodes(tree: PyTree, kind: Any) -> list[Any]:
    found = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
    return [node for node in found if isinstance(node, kind)]
