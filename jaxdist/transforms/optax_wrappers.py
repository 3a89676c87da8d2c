"""Wrappers of optax that call their inner transformation conditionally, and so must not stand around communication."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from optax.contrib import DifferentiallyPrivateAggregateState, SAMState

from .._core.types import PyTree, State, Updates


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


# They refuse extra arguments that they do not know.
STRICT = (optax.ScaleByBacktrackingLinesearchState, optax.ScaleByZoomLinesearchState, SAMState)
# What those who let workers step by themselves pass on for optimizers that ask for it.
OFFERED = ("anchor", "step", "learning_rate", "examples")


def extras_of(state: State, given: dict[str, Any]) -> dict[str, Any]:
    """The extra arguments for one step of a worker by itself, of an optimizer with this state."""
    if _has(state, SAMState) and "grad_fn" not in given:
        raise ValueError(
            "optax.contrib.sam goes to an adversarial point in every other step, where workers must not meet: use "
            "sam(..., opaque_mode=True) and pass grad_fn= to the update, which is both steps in one"
        )
    if _has(state, STRICT):
        return {name: value for name, value in given.items() if name not in OFFERED}
    return given


def refuse_examples(state: State) -> None:
    """Raises for an optimizer that takes a gradient of each example, inside one that averages gradients first."""
    if _has(state, DifferentiallyPrivateAggregateState):
        raise ValueError(
            "optax.contrib.dpsgd clips the gradients of single examples, before any mean: put that part in front, "
            "optax.chain(per_worker(optax.contrib.differentially_private_aggregate(...)), zero_redundancy(...))"
        )


def refuse_two_sets(params: PyTree) -> None:
    """Raises for the parameters of `optax.lookahead`."""
    if _has(params, optax.LookaheadParams):
        raise ValueError(
            "optax.lookahead keeps two sets of parameters, of which one has gradients: its slow set is what "
            "local_steps(inner, optax.sgd(slow_step_size), sync_period=k) keeps for all workers; or use "
            "optax.chain(all_reduce(reducer), optax.lookahead(...))"
        )


def with_gradients(params: PyTree) -> PyTree:
    """The parameters that have gradients, of `optax.lookahead` the fast ones."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def check_shapes(updates: Updates, params: PyTree | None) -> None:
    """Raises where a gradient has another shape than its parameter, as those of single examples have."""
    if jax.tree.structure(updates) != jax.tree.structure(params):
        return
    for (path, leaf), param in zip(jax.tree_util.tree_leaves_with_path(updates), jax.tree.leaves(params), strict=True):
        if leaf.shape != param.shape:
            raise ValueError(
                f"the gradient {jax.tree_util.keystr(path)} has shape {leaf.shape} and its parameter {param.shape}: "
                "what workers average is one gradient each. Put what takes those of single examples in front: "
                "optax.chain(per_worker(optax.contrib.differentially_private_aggregate(...)), ...)"
            )


def check_outer(outer: optax.GradientTransformationExtraArgs, params: PyTree) -> None:
    """Raises unless an outer optimizer can do with the drift and a learning rate: it sees no loss."""
    likes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    try:
        jax.eval_shape(lambda p: outer.update(p, outer.init(p), p, learning_rate=0.1), likes)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the outer optimizer gets the mean drift and learning_rate= alone, and cannot take that: {error}. Take "
            "one that needs no loss, optax.sgd(0.7, momentum=0.9, nesterov=True)"
        ) from error


def _has(tree: PyTree, kind: Any) -> bool:
    return any(isinstance(node, kind) for node in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind)))
