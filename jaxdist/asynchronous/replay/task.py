"""What is trained in a replay."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp

from ..._core.types import Array, PyTree
from ..values import Lazy, Spec, force, spec_of
from .errors import NonFiniteGradient


class Task(NamedTuple):
    """A model and its data, as pure functions.

    Attributes:
      params: the model to begin with.
      loss: `loss(params, batch) -> scalar`, what gradients are of.
      batch: `batch(seed, worker, job) -> Batch`: the data follow from the worker and its own count of jobs, so that
        they are the same under every rule. Called for gradients that somebody uses.
      evaluate: `evaluate(params) -> float`, what the curve over virtual time shows; None for no curve.
    """

    params: PyTree
    loss: Callable[[PyTree, Any], Any]
    batch: Callable[[int, int, int], Any]
    evaluate: Callable[[PyTree], Any] | None = None


@functools.lru_cache(maxsize=32)
def _gradient(loss: Callable[..., Any]) -> Callable[..., Any]:
    def checked(params: PyTree, batch: Any) -> tuple[PyTree, Array]:
        gradient = jax.grad(loss)(params, batch)
        return gradient, _all_finite(gradient)

    return jax.jit(checked)


def _all_finite(tree: PyTree) -> Array:
    return jnp.array([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)], bool).all()


def gradients(task: Task, seed: int) -> Callable[[Any, int, int], Any]:
    """`gradient(params, worker, job)`: lazy, or shapes of shapes; an error where it is not finite."""
    gradient, shapes = _gradient(task.loss), spec_of(task.params)

    @no_type_check
    def read(params: Any, worker: int, job: int) -> Any:
        params = force(params)
        found, finite = gradient(params, task.batch(seed, worker, job))
        if not finite:
            raise NonFiniteGradient(worker, job, diverged=not _all_finite(params))
        return found

    @no_type_check
    def at(params: Any, worker: int, job: int) -> Any:
        if type(params) is Spec:
            return params
        recipe = (params, worker, job)
        return Lazy(lambda: read(*recipe), shapes, recipe)

    return at
