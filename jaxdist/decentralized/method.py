"""What a method of decentralized training is: a bundle of functions, as `d_psgd()` and `choco(...)` return it."""

from collections.abc import Callable
from typing import Any, NamedTuple

from .. import comm as comms
from .._core.types import Array, Int, Key, PyTree, State, Updates
from ..comm.base import Comm
from ..topology.base import Topology


class Turn(NamedTuple):
    """One step as one worker sees it: what a method works with.

    Attributes:
      gradients: this worker's.
      params: its parameters.
      state: what the method keeps.
      adapt: `adapt(direction) -> (steps, inner state)`, one step of the inner optimizer.
      comm: the workers.
      topology: the graph, as `prepare` returned it.
      count: the number of this step (agreed).
      key: of this step (agreed).
      learning_rate: that of this step (agreed), if it was passed.
      active: whether this worker takes a step, if that was passed.
      told: whether the host has said that neighbors talk in this step, and in which round: `topology` has that alone.
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
    told: bool = False


class Turned(NamedTuple):
    """What a step leads to: parameters in float32 or better, the states of the inner optimizer and the method."""

    params: PyTree
    inner: State
    state: State


class Method(NamedTuple):
    """A method of decentralized training, for `gossip(method=)`.

    Attributes:
      prepare: `prepare(topology) -> topology`: the graph to talk over, or a `ValueError` that says why it cannot work.
      init: `init(params, topology) -> state`: one worker's, made without any communication.
      step: `step(turn) -> Turned`.
    """

    prepare: Callable[[Topology], Topology]
    init: Callable[[PyTree, Topology], State]
    step: Callable[[Turn], Turned]


def in_turns(turn: Turn, interval: int, talk: Callable[..., Any], silent: Callable[..., Any], *operands: PyTree) -> Any:
    """`talk(turn, *operands)` in every `interval`-th step, whose `count` is that of the talks; else `silent(...)`."""
    if interval == 1 or turn.told:
        return talk(turn, *operands)
    numbered = turn._replace(count=turn.count // interval)
    return comms.cond(
        turn.count % interval == interval - 1,
        lambda comm, *xs: talk(numbered._replace(comm=comm), *xs),
        lambda comm, *xs: silent(comm, *xs),
        turn.comm,
        *operands,
    )


def check_interval(interval: int) -> None:
    """Raises unless it is a number of steps."""
    if interval < 1:
        raise ValueError(f"interval must be at least 1, every so many steps neighbors talk; got {interval}")


def empty(params: PyTree, topology: Topology) -> Any:
    """The state of a method that keeps nothing."""
    del params, topology
    return ()
