"""The interface of decentralized methods: a bundle of functions, as `d_psgd()` and `choco(...)` return it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from .. import comm as comms
from .._core.types import Array, Int, Key, PyTree, State, Updates
from ..comm.base import Comm
from ..topology.base import Topology


class StepContext(NamedTuple):
    """One step as one worker sees it: the arguments of a method's `step`.

    Attributes:
      gradients: of this worker.
      params: of this worker.
      state: the method's state on this worker.
      adapt: `adapt(direction) -> (steps, inner state)`, one step of the inner optimizer.
      comm: the workers.
      topology: the graph, as `prepare` returned it.
      count: the number of this step (replicated).
      key: of this step (replicated).
      learning_rate: of this step (replicated), if it was passed.
      active: whether this worker takes a step, if that was passed.
      static_round: whether the host passed `round=`: neighbors communicate in this step, and `topology` has only that
        round.
    """

    gradients: Updates
    params: PyTree
    state: State
    adapt: Callable[[Updates], tuple[Updates, State]]
    comm: Comm
    topology: Topology
    count: Int[Array, ""]
    key: Key[Array, ""]
    learning_rate: Array | None
    active: Array | None
    static_round: bool = False


class StepResult(NamedTuple):
    """The result of a method's `step`.

    Attributes:
      params: the new parameters, in float32 or better.
      inner: the new state of the inner optimizer.
      state: the new state of the method.
    """

    params: PyTree
    inner: State
    state: State


class Method(NamedTuple):
    """A method of decentralized training, for `gossip(method=)`.

    Attributes:
      prepare: `prepare(topology) -> topology`: the graph to communicate over. Raises `ValueError` for a graph on which
        the method cannot work.
      init: `init(params, topology) -> state` of one worker, made without communication.
      step: `step(context) -> StepResult`.
    """

    prepare: Callable[[Topology], Topology]
    init: Callable[[PyTree, Topology], State]
    step: Callable[[StepContext], StepResult]


def every_n_steps(
    context: StepContext, interval: int, communicate: Callable[..., Any], skip: Callable[..., Any], *operands: PyTree
) -> Any:
    """Communicates in every `interval`-th step and skips the steps between.

    Args:
      context: of this step.
      interval: the number of steps from one communication to the next.
      communicate: `communicate(context, *operands)`, where `context.count` counts communications instead of steps, so
        that a topology that changes goes on by one round with each.
      skip: `skip(comm, *operands)`, with a result of the same types.
      *operands: pytrees of arrays.

    Returns:
      The result of `communicate` or of `skip`.
    """
    if interval == 1 or context.static_round:
        return communicate(context, *operands)
    numbered = context._replace(count=context.count // interval)
    return comms.cond(
        context.count % interval == interval - 1,
        lambda comm, *xs: communicate(numbered._replace(comm=comm), *xs),
        lambda comm, *xs: skip(comm, *xs),
        context.comm,
        *operands,
    )


def check_interval(interval: int) -> None:
    """Checks that `interval` is a positive number of steps."""
    if interval < 1:
        raise ValueError(f"interval must be at least 1 (the steps from one communication to the next), got {interval}")


def init_nothing(params: PyTree, topology: Topology) -> tuple[()]:
    """Returns the state of a method that has none."""
    del params, topology
    return ()


def cast_like(tree: Updates, like: Updates) -> Updates:
    """Casts each leaf of `tree` to the dtype of the same leaf of `like`."""
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, like)
