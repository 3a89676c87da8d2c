"""Extra arguments of updates: which transformation takes which, and which are refused."""

from typing import Any

import jax
import optax
from optax.contrib import DifferentiallyPrivateAggregateState, SAMState

from .._core.compat import types_are_checked
from .._core.types import AxisNames, PyTree, State
from ..state.marks import axis_tuple, explain_new_tree

SEARCHES = (optax.ScaleByBacktrackingLinesearchState, optax.ScaleByZoomLinesearchState)
# States of transformations that refuse unknown extra arguments.
STRICT = (*SEARCHES, SAMState)
# Extra arguments that methods with local steps pass to every inner optimizer.
OFFERED = ("anchor", "step", "learning_rate", "examples", "moved")


def filter_extras(state: State, extras: dict[str, Any]) -> dict[str, Any]:
    """Returns the extra arguments of a local step that an optimizer with this state accepts."""
    if has_type(state, SAMState) and "grad_fn" not in extras:
        raise ValueError(
            "optax.contrib.sam moves to an adversarial point in every other step, where workers must not synchronize; "
            "use sam(..., opaque_mode=True) and pass grad_fn= to the update, which combines both steps"
        )
    if has_type(state, STRICT):
        return {name: value for name, value in extras.items() if name not in OFFERED}
    return extras


def check_searches(state: State, axis: AxisNames) -> None:
    """Refuses line searches on models that differ where types are checked: the loops of optax cannot be typed."""
    if has_type(state, SEARCHES) and types_are_checked(axis_tuple(axis)):
        raise ValueError(
            "the line searches of optax start their loops with constants, which JAX cannot type where workers have "
            f'models of their own (axis {axis!r}): use distribute(..., check="values") or simulate'
        )


def refuse_examples(state: State) -> None:
    """Refuses optimizers that need a gradient of each example inside those that average gradients first."""
    if has_type(state, DifferentiallyPrivateAggregateState):
        raise ValueError(
            "optax.contrib.dpsgd clips the gradients of single examples, before any mean; put that part in front, "
            "optax.chain(per_worker(optax.contrib.differentially_private_aggregate(...)), zero_redundancy(...))"
        )


def has_type(tree: PyTree, kind: Any) -> bool:
    """Whether a tree of transformations holds a state of these types."""
    return any(isinstance(node, kind) for node in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind)))


def with_extra_args(tx: Any) -> optax.GradientTransformationExtraArgs:
    """The optimizer, whose update takes extra arguments; raises TypeError for what is no optimizer."""
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise TypeError(f"expected an optimizer, such as optax.adam(1e-3), got {tx!r}")
    plain = optax.with_extra_args_support(tx)

    def update(updates, state, params=None, **extra_args):
        updates, new = plain.update(updates, state, params, **extra_args)
        # Here, where it can be named: loops and conditions around it would fail with errors about trees.
        if reason := explain_new_tree(state, new):
            raise ValueError(reason)
        return updates, new

    return optax.GradientTransformationExtraArgs(plain.init, update)
