"""Helpers that all families of rules share: groups of workers, optimizer steps, and small tuple functions."""

import functools
from collections.abc import Callable
from typing import Any, no_type_check

import optax

from ..._core.types import PyTree
from ..protocol import Message, Site, StepRecord
from ..values import numeric


@functools.lru_cache(maxsize=16)  # one object per size, which dictionaries find without comparing its elements
def all_workers(workers: int) -> tuple[int, ...]:
    """Returns the group of all workers."""
    return tuple(range(workers))


def other_workers(site: Site) -> tuple[int, ...]:
    """Returns all workers except this one."""
    return tuple(i for i in range(site.workers) if i != site.index)


def apply_gradient(
    optimizer: optax.GradientTransformation, params: PyTree, opt_state: PyTree, gradient: PyTree
) -> tuple[PyTree, PyTree]:
    """Takes one optimizer step on arrays; returns the new parameters and optimizer state."""
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def local_optimizer(optimizer: optax.GradientTransformation) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns `start(params)` and `step(params, opt_state, gradient)` on values, for a worker's own model."""
    return numeric(optimizer.init), numeric(functools.partial(apply_gradient, optimizer), outputs=2)


def replicated_optimizer(optimizer: optax.GradientTransformation) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the same for models that are replicated: all workers take the same step, which is computed once."""
    # `shared` finds a call by the identity of its arguments, which all workers have in common.
    step = functools.partial(apply_gradient, optimizer)
    return numeric(optimizer.init, shared=True), numeric(step, outputs=2, shared=True)


def step_records(site: Site, version: int, oldest: int) -> tuple[StepRecord, ...]:
    """Returns the record of a step that all workers take together: worker 0 logs it, the others nothing."""
    return (StepRecord(version, oldest),) if site.index == 0 else ()


# Functions that run for every event skip the runtime type checks of the tests, which would take most of the time.
@no_type_check
def replace_at(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    """Returns the tuple with one entry replaced."""
    # Slices are several times faster than unpacking for a thousand workers.
    return values[:index] + (value,) + values[index + 1 :]  # noqa: RUF005


@no_type_check
def params_of(state: Any) -> Any:
    """Returns `state.params`, the model of most roles."""
    return state.params


def unknown_message(role: str, message: Message) -> ValueError:
    """Returns the error for a message whose kind the role does not handle."""
    return ValueError(f"{role} does not handle messages of kind {message.kind!r}")
