"""The `Reducer`: every worker's tree in, one agreed mean out; and how several of them share one collective.

A reducer is written as a generator: it yields what it wants to send as a `Wire` and is sent back what arrived. Whoever
runs it decides how to put that on the network: `drive` concatenates one reducer's arrays into one collective for each
direction and dtype, `together` merges the wires of several reducers first. Reducers whose communication is conditional
write `reduce` directly and leave `rounds` out.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from .._core.types import Array, Like, PyTree, State, Updates
from ..comm.base import Comm
from ..wire.flat import fused, fused_bytes

Law = Literal["exact", "telescoping", "unbiased", "none"]
# From the strongest: each says less than the one before.
LAWS: tuple[Law, ...] = ("exact", "telescoping", "unbiased", "none")


class Reduced(NamedTuple):
    """What a reduction gives: the agreed `mean`, and `own`, what this worker effectively contributed to it."""

    mean: Updates
    own: Updates


class Wire(NamedTuple):
    """What goes out in one round, and in the same shape what comes back.

    Attributes:
      mean: arrays to average; they come back averaged.
      gather: arrays to collect; they come back as `[W, *s]`.
      exchange: arrays `[W, *s]`, row `j` for worker `j`; they come back as `[W, *s]`, row `j` from worker `j`.
      sum: arrays to add up, integers too, in their own dtype: who sends them sees to it that they cannot overflow.
      max: arrays of which to find the largest entries.
      scatter: arrays `[W, *s]`; they come back as `[*s]`, the mean of everybody's row for this worker.
    """

    mean: Sequence[Array] = ()
    gather: Sequence[Array] = ()
    exchange: Sequence[Array] = ()
    sum: Sequence[Array] = ()
    max: Sequence[Array] = ()
    scatter: Sequence[Array] = ()


Rounds = Generator[Wire, Wire, tuple[Reduced, State]]


class Reducer(NamedTuple):
    """How the updates of all workers become one agreed mean.

    Attributes:
      init: `init(like) -> state` from the shapes of what will be reduced. It never communicates.
      reduce: `reduce(updates, state, comm, **agreed) -> (Reduced, state)`. `agreed` are extras equal on all workers
        (`step`, `learning_rate`).
      scatter: gives the reduce-scatter form, a reducer whose `mean` has this worker's piece `[n]` of each leaf, cut as
        `Sharded(leaf, multiple=8)` is, and whose `own` is whole; or raises `ValueError` saying why there is none. With
        `reduce(..., pods=P)` the group is one of `P`, cut over all their workers: worker `i` gets, one after the
        other, what the workers at place `i` of all groups own. `None`: there is none.
      law: `"exact"`: `mean == comm.mean(own)`. `"telescoping"`: the same plus what servers held before and less what
        they hold after. `"unbiased"`: that, plus noise of mean zero which nobody makes up for. `"none"`: none of these,
        and error feedback refuses it.
      rounds: the generator form of `reduce`, which lets `per_leaf` merge collectives.
      plain: the mean of each leaf and nothing else, without state: extra leaves may ride along, and mesh axes that the
        compiler shards need no specs.
      for_feedback: gives the form to use inside error feedback (a contraction), or raises `ValueError` saying why there
        is none. `None`: the reducer itself.
    """

    init: Callable[[PyTree[Like]], State]
    reduce: Callable[..., tuple[Reduced, State]]
    scatter: Callable[[], "Reducer"] | None = None
    law: Law = "exact"
    rounds: Callable[..., Rounds] | None = None
    plain: bool = False
    for_feedback: Callable[[], "Reducer"] | None = None
    held: Callable[[State, PyTree[Like], Comm], Updates] | None = None


def from_rounds(name: str, init: Callable, rounds: Callable[..., Rounds], **fields: Any) -> Reducer:
    """A reducer from its generator form; `name` is its scope in profiles."""

    def reduce(updates, state, comm, **agreed):
        with jax.named_scope(name):
            return drive(rounds(updates, state, comm, **agreed), comm)

    return Reducer(init, reduce, rounds=rounds, **fields)


def drive(rounds: Generator[Wire, Wire, Any], comm: Comm) -> Any:
    """Runs a generator of wires to its end over a group of workers and returns what it returns."""
    try:
        wire = next(rounds)
        while True:
            wire = rounds.send(send(wire, comm))
    except StopIteration as stop:
        return stop.value


def rounds_of(reducer: Reducer, updates: Updates, state: State, comm: Comm, **agreed: Any) -> Rounds:
    """Any reducer in its generator form, for `yield from` inside another one."""
    if reducer.rounds is None:
        return reducer.reduce(updates, state, comm, **agreed)
    return (yield from reducer.rounds(updates, state, comm, **agreed))


def together(generators: Sequence[Generator[Wire, Any, Any]]) -> Generator[Wire, Wire, list[Any]]:
    """Runs several generators side by side: round `i` of all of them is one wire. Returns what each returned."""
    results: list[Any] = [None] * len(generators)
    waiting: dict[int, Wire] = {}
    ways = range(len(Wire._fields))

    def advance(i, received):
        try:
            waiting[i] = generators[i].send(received)
        except StopIteration as stop:
            results[i] = stop.value

    for i in range(len(generators)):
        advance(i, None)
    while waiting:
        wires, waiting = waiting, {}
        received = yield Wire(*([array for wire in wires.values() for array in wire[way]] for way in ways))
        inboxes = [iter(arrays) for arrays in received]
        for i, wire in wires.items():
            advance(i, Wire(*([next(inboxes[way]) for _ in wire[way]] for way in ways)))
    return results


def send(wire: Wire, comm: Comm) -> Wire:
    """Puts a wire on the network, one collective for each direction and dtype."""
    return Wire(
        mean=fused(comm.mean, wire.mean),
        gather=fused_bytes(comm.all_gather, wire.gather),
        exchange=fused_bytes(comm.all_to_all, wire.exchange, rows=True),
        sum=fused(comm.sum, wire.sum),
        max=fused(comm.max, wire.max),
        scatter=fused(comm.reduce_scatter_mean, wire.scatter, rows=True),
    )


def held_by(reducer: Reducer, state: State, like: PyTree[Like], comm: Comm) -> Updates:
    """What the servers of any reducer have yet to deliver."""
    if reducer.held is None:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    return reducer.held(state, like, comm)


def weakest(reducers: Iterable[Reducer]) -> Law:
    """The law that holds for several reducers side by side."""
    law: Law = "exact"
    for reducer in reducers:
        law = reducer.law if LAWS.index(reducer.law) > LAWS.index(law) else law
    return law


def feedback_form(reducer: Reducer) -> Reducer:
    """The form of a reducer to put inside error feedback; `ValueError` where none exists."""
    if reducer.law == "none":
        raise ValueError(
            'error feedback needs to know what each worker contributed, and this reducer (law "none": a majority vote, '
            "a biased second code whose error nobody keeps) cannot say: use it without feedback"
        )
    return reducer if reducer.for_feedback is None else reducer.for_feedback()


def scatter_form(reducer: Reducer, advice: str = "reduce in full") -> Reducer:
    """The reduce-scatter form of a reducer; `ValueError` with the advice where none exists."""
    if reducer.scatter is None:
        raise ValueError(
            "this reducer has no reduce-scatter form; those that have are exact(), two_shot(code), hierarchical() of "
            f"such, error_feedback and loco around two_shot, per_leaf or reducer_schedule of them: use one, or {advice}"
        )
    return reducer.scatter()


def already_corrected() -> Reducer:
    """The `for_feedback` of reducers that have feedback themselves."""
    raise ValueError("this reducer has error feedback already; use it once, around the reducer that compresses")


def cast_like(tree: PyTree, like: PyTree) -> PyTree:
    """Each leaf in the dtype of its counterpart."""
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, like)


def is_stand_in(like: PyTree) -> bool:
    """Whether this is what `optax.tree.map_params` passes instead of parameters: no leaves, and no container of them.

    A reducer whose state is not like the parameters leaf by leaf answers it with a single leaf: nothing to map here.
    """
    return not jax.tree.leaves(like) and not isinstance(like, dict | list | tuple | None)
