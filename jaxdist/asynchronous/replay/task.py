"""Training tasks: a model, its loss and its data."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp

from ..._core.types import Array, PyTree
from ..errors import NonFiniteGradientError
from ..values import Lazy, Spec, force, spec_of


class Task(NamedTuple):
    """A model and its data, as pure functions.

    Attributes:
      params: the initial model.
      loss: `loss(params, batch) -> scalar`, whose gradients the workers compute.
      batch: `batch(seed, worker, job) -> Batch`: the data depend on the worker and its own job count, so that they are
        the same under every rule. Called only for gradients that are used.
      evaluate: `evaluate(params) -> float`, plotted over virtual time; None for no evaluations.
    """

    params: PyTree
    loss: Callable[[PyTree, Any], Any]
    batch: Callable[[int, int, int], Any]
    evaluate: Callable[[PyTree], Any] | None = None


@functools.lru_cache(maxsize=32)
def _check_gradient(loss: Callable[..., Any]) -> Callable[..., Any]:
    def compute(params: PyTree, batch: Any) -> tuple[PyTree, Array]:
        gradient = jax.grad(loss)(params, batch)
        return gradient, _all_finite(gradient)

    return jax.jit(compute)


def _all_finite(tree: PyTree) -> Array:
    return jnp.array([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)], bool).all()


def gradient_function(task: Task, seed: int) -> Callable[[Any, int, int], Any]:
    """Makes `gradient(params, worker, job)`: lazy, or shapes if `params` are; raises if the result is not finite."""
    gradient, shapes = _check_gradient(task.loss), spec_of(task.params)

    @no_type_check
    def compute(params: Any, worker: int, job: int) -> Any:
        params = force(params)
        result, finite = gradient(params, task.batch(seed, worker, job))
        # The model tells a bad batch from a run that diverged before.
        if not finite:
            raise NonFiniteGradientError(worker, job, diverged=not _all_finite(params))
        return result

    @no_type_check
    def defer(params: Any, worker: int, job: int) -> Any:
        if type(params) is Spec:
            return params
        # The recipe is stored in files instead of the gradient.
        recipe = (params, worker, job)
        return Lazy(lambda: compute(*recipe), shapes, recipe)

    return defer
