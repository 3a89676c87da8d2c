"""Detects transformations of optax that do not work around communication or local steps, and says what does."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from optax.contrib import DifferentiallyPrivateAggregateState, SAMState

from .._core.types import PyTree, State, Updates


def communicates(node: Any) -> bool:
    """Returns whether a node is the state of a transformation that communicates (a class attribute)."""
    return getattr(type(node), "communicates", False)


def explain_wrapped_communication(state: PyTree) -> str | None:
    """Returns advice if a wrapper that calls its inner transformation conditionally contains one that communicates."""
    advice = {
        optax.MultiStepsState: "optax.MultiSteps around a transformation that communicates accumulates gradients that "
        "differ between workers: use local_value_and_grad(loss, micro_batches=k), accumulate(tx, k) for k calls of "
        "the step, or put MultiSteps after all_reduce in the chain",
        optax.ApplyIfFiniteState: "optax.apply_if_finite around a transformation that communicates lets each worker "
        "decide separately, and those that communicate never return: use skip_nonfinite(tx), or put apply_if_finite "
        "after all_reduce in the chain",
    }
    for node in _nodes(state, lambda x: type(x) in advice):
        if _nodes(tuple(node), communicates):
            return advice[type(node)]
    return None


def _nodes(tree: PyTree, kind: Callable[[Any], bool]) -> list[Any]:
    return [node for node in jax.tree.leaves(tree, is_leaf=kind) if kind(node)]


# States of transformations that refuse unknown extra arguments.
STRICT = (optax.ScaleByBacktrackingLinesearchState, optax.ScaleByZoomLinesearchState, SAMState)
# Extra arguments that methods with local steps pass to every inner optimizer.
OFFERED = ("anchor", "step", "learning_rate", "examples")


def filter_extras(state: State, extras: dict[str, Any]) -> dict[str, Any]:
    """Returns the extra arguments of a local step that an optimizer with this state accepts."""
    if _has(state, SAMState) and "grad_fn" not in extras:
        raise ValueError(
            "optax.contrib.sam moves to an adversarial point in every other step, where workers must not synchronize; "
            "use sam(..., opaque_mode=True) and pass grad_fn= to the update, which combines both steps"
        )
    if _has(state, STRICT):
        return {name: value for name, value in extras.items() if name not in OFFERED}
    return extras


def refuse_examples(state: State) -> None:
    """Refuses optimizers that need a gradient of each example inside those that average gradients first."""
    if _has(state, DifferentiallyPrivateAggregateState):
        raise ValueError(
            "optax.contrib.dpsgd clips the gradients of single examples, before any mean; put that part in front, "
            "optax.chain(per_worker(optax.contrib.differentially_private_aggregate(...)), zero_redundancy(...))"
        )


def refuse_two_sets(params: PyTree) -> None:
    """Refuses the parameters of `optax.lookahead`."""
    if _has(params, optax.LookaheadParams):
        raise ValueError(
            "optax.lookahead keeps two sets of parameters, of which one has gradients; use "
            "local_steps(inner, optax.sgd(slow_step_size), sync_period=k), whose anchor is the slow set, or "
            "optax.chain(all_reduce(reducer), optax.lookahead(...))"
        )


def with_gradients(params: PyTree) -> PyTree:
    """Returns the parameters that have gradients; of `optax.lookahead`, the fast ones."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def check_shapes(updates: Updates, params: PyTree | None) -> None:
    """Checks that gradients have the shapes of their parameters; gradients of single examples have not."""
    if jax.tree.structure(updates) != jax.tree.structure(params):
        return
    for (path, leaf), param in zip(jax.tree_util.tree_leaves_with_path(updates), jax.tree.leaves(params), strict=True):
        if leaf.shape != param.shape:
            raise ValueError(
                f"the gradient {jax.tree_util.keystr(path)} has shape {leaf.shape} and its parameter {param.shape}; "
                "workers average one gradient each. Put a transformation of the gradients of single examples in front: "
                "optax.chain(per_worker(optax.contrib.differentially_private_aggregate(...)), ...)"
            )


def check_outer(outer: optax.GradientTransformationExtraArgs, params: PyTree) -> None:
    """Checks that an outer optimizer needs only the drift and a learning rate: it sees no loss."""
    likes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    try:
        jax.eval_shape(lambda p: outer.update(p, outer.init(p), p, learning_rate=0.1), likes)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the outer optimizer gets the mean drift and learning_rate= alone, and fails with them: {error}. Use "
            "one that needs no loss, optax.sgd(0.7, momentum=0.9, nesterov=True)"
        ) from error


def _has(tree: PyTree, kind: Any) -> bool:
    return any(isinstance(node, kind) for node in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind)))
