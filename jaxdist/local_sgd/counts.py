"""The counts in the state of an optimizer after some steps, without the steps: what its schedules go by."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._core.compat import evaluate_jaxpr, keep_results
from .._core.types import Array, PyTree, State
from ..transforms.accumulate import AccumulateState

# They pass on one update of several, so that counts inside take fewer steps.
PASS_ON_SOME = (optax.MultiStepsState, AccumulateState)


def count_leaves(state: State) -> list[bool]:
    """Which leaves are whole numbers, of which some count steps."""
    return [jnp.ndim(x) == 0 and jnp.issubdtype(x.dtype, jnp.integer) for x in jax.tree.leaves(state)]


def passes_on_some(state: State) -> bool:
    """Whether an optimizer collects the gradients of several steps for one update."""
    return any(isinstance(node, PASS_ON_SOME) for node in jax.tree.leaves(state, is_leaf=_is_of(PASS_ON_SOME)))


def _is_of(kinds: tuple[type, ...]) -> Any:
    return lambda node: isinstance(node, kinds)


def step_counts(
    inner: optax.GradientTransformationExtraArgs, state: State, params: PyTree, steps: Array | int
) -> State | None:
    """The state with its counts so many steps further on; `None` if they follow from gradients, or steps communicate.

    The part of an update that computes whole numbers from whole numbers runs in a loop.
    """
    leaves, structure = jax.tree.flatten(state)
    whole = count_leaves(state)

    def update(leaves: list[Array], params: PyTree) -> list[Array]:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return jax.tree.leaves(inner.update(zeros, structure.unflatten(leaves), params)[1])

    try:
        traced = jax.make_jaxpr(update)(leaves, params)
    # Steps that communicate can be traced only where their mesh axes are.
    except (NameError, ValueError):
        return None
    program, used = keep_results(traced, whole)
    if any(use and not own for use, own in zip(used, [*whole, *[False] * len(used)], strict=False)):
        return None
    taken = [use for use, is_whole in zip(used, whole, strict=False) if is_whole]
    counts = [x for x, is_whole in zip(leaves, whole, strict=True) if is_whole]

    def take_step(_: Any, counts: list[Array]) -> list[Array]:
        return evaluate_jaxpr(program, [x for x, use in zip(counts, taken, strict=True) if use])

    new = iter(jax.lax.fori_loop(0, steps, take_step, counts))
    return structure.unflatten([next(new) if is_whole else x for x, is_whole in zip(leaves, whole, strict=True)])
