"""What is trained in a replay."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, no_type_check

import jax

from ..._typing import PyTree
from ..values import Lazy, Spec, force, spec_of


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
    return jax.jit(jax.grad(loss))


def gradients(task: Task, seed: int) -> Callable[[Any, int, int], Any]:
    """`gradient(params, worker, job)`: lazy, or shapes of shapes."""
    gradient, shapes = _gradient(task.loss), spec_of(task.params)

    @no_type_check
    def at(params: Any, worker: int, job: int) -> Any:
        if type(params) is Spec:
            return params
        recipe = (params, worker, job)
        return Lazy(lambda: gradient(force(params), task.batch(seed, worker, job)), shapes, recipe)

    return at
