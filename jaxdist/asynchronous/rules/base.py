"""Helpers that all families of rules share."""

import functools
from collections.abc import Callable
from typing import Any, Literal, no_type_check

import optax

from ..._core.types import PyTree
from ...topology.base import Topology
from ...transforms.extra_args import with_extra_args
from .. import protocol
from ..protocol import Compute, Message, Reaction, Reduce, Role, Rule, Site, StepRecord
from ..values import numeric

# A topology, or a function that makes one for a number of workers, such as `topology.ring`.
Graph = Topology | Callable[[int], Topology]


def graph_of(graph: Graph, nodes: int, what: str = "workers") -> Topology:
    """Returns the topology for a number of nodes."""
    topology = graph if isinstance(graph, Topology) else graph(nodes)
    if topology.workers != nodes:
        raise ValueError(
            f"the {topology.name} has {topology.workers} {what}, but the run has {nodes}: make the topology for {nodes}"
        )
    return topology


def apply_gradient(
    optimizer: optax.GradientTransformation, params: PyTree, opt_state: PyTree, gradient: PyTree
) -> tuple[PyTree, PyTree]:
    """Takes one optimizer step on arrays; returns the new parameters and optimizer state."""
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def combine_and_adapt(
    combine: Callable[..., PyTree],
    optimizer: optax.GradientTransformation,
    params: PyTree,
    opt_state: PyTree,
    gradient: PyTree,
    *others: Any,
) -> tuple[PyTree, PyTree]:
    """Steps from a combination of models, `combine(params, *others)`, by the update at the worker's own model."""
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    return optax.apply_updates(combine(params, *others), updates), opt_state


def optimizer_on_values(
    optimizer: optax.GradientTransformation, step: Callable[..., Any] = apply_gradient, *, shared: bool = False
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns `start(params)` and `step(optimizer, ...)`, which returns two trees, as functions of values.

    `shared` is for replicated models, on which all workers take the same step: it is computed once.
    """
    with_extra_args(optimizer)  # raises for what is no optimizer
    # A shared call is found by the identity of its arguments, which all workers have in common.
    step = functools.partial(step, optimizer)
    return numeric(optimizer.init, shared=shared), numeric(step, outputs=2, shared=shared)


@functools.lru_cache(maxsize=16)  # one object per size, which dictionaries find without comparing its elements
def _all_workers(workers: int) -> tuple[int, ...]:
    return tuple(range(workers))


def reduce_all(site: Site, tag: int, value: Any, op: Literal["mean", "gather"] = "mean") -> Reduce:
    """Joins a collective of all workers."""
    return Reduce(_all_workers(site.workers), tag, value, op)


def other_workers(site: Site) -> tuple[int, ...]:
    """Returns all workers except this one."""
    return tuple(i for i in range(site.workers) if i != site.index)


def step_records(site: Site, version: int, oldest: int) -> tuple[StepRecord, ...]:
    """Returns the record of a step that all workers take together: worker 0 logs it, the others nothing."""
    return (StepRecord(version, oldest),) if site.index == 0 else ()


def collective_rule(
    name: str,
    init: Callable[[Site, Any], Reaction],
    on_gradient: Callable[[Any, Message], Reaction],
    on_reduced: Callable[[Any, Message], Reaction],
    *,
    is_computing: Callable[[Any], bool],
) -> Rule:
    """Makes a rule of workers that compute at `state.params`, or else wait for all others in a collective."""

    @no_type_check
    def receive(state: Any, sender: int, message: Message) -> Reaction:
        if message.kind == protocol.COMPUTED:
            return on_gradient(state, message)
        if message.kind == protocol.REDUCED:
            return on_reduced(state, message)
        if message.kind == protocol.RECOVERED:
            # A gradient that was running when the worker failed is lost; one that is in a collective is not.
            return state, (Compute(state.params, state.version),) if is_computing(state) else ()
        raise unknown_message(f"a worker of {name}", message)

    def waits_for(state: Any) -> tuple[int, ...]:
        return () if is_computing(state) else other_workers(state.site)

    return Rule(name, Role(init, receive, params_of, waits_for))


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


_MASK = (1 << 64) - 1


@no_type_check
def hash_words(*words: int) -> int:
    """Hashes integers to 64 pseudorandom bits (SplitMix64).

    Random choices are functions of integers in the state, so that they are the same in every run and after a restore.
    """
    state = 0
    # One round of SplitMix64 per word, started from the hash of the previous ones.
    for word in words:
        state = (state + (word & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state
