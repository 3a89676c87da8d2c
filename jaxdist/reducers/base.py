"""The `Reducer`: every worker's tree in, one agreed mean out; and how several of them share one collective.

A reducer is written as a generator: it yields what it wants to send as a `Wire` and is sent back what arrived. Whoever
runs it decides how to put that on the network: `drive` concatenates one reducer's arrays into one collective for each
direction and dtype, `together` merges the wires of several reducers first. Reducers whose communication is conditional
write `reduce` directly and leave `rounds` out.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._compat import mesh_axes_left_over
from .._typing import Array, Like, PyTree, State, Updates
from ..comm import Comm
from ._flat import concatenate

Law = Literal["exact", "telescoping", "none"]


class Reduced(NamedTuple):
    """What a reduction gives: the agreed `mean`, and `own`, what this worker effectively contributed to it."""

    mean: Updates
    own: Updates


class Wire(NamedTuple):
    """What goes out in one round, and in the same shape what comes back.

    Attributes:
      mean: arrays to average; they come back averaged.
      gather: arrays to collect; they come back as `[W, *s]`.
    """

    mean: Sequence[Array] = ()
    gather: Sequence[Array] = ()


Rounds = Generator[Wire, Wire, tuple[Reduced, State]]


class Reducer(NamedTuple):
    """How the updates of all workers become one agreed mean.

    Attributes:
      init: `init(like) -> state` from the shapes of what will be reduced. It never communicates.
      reduce: `reduce(updates, state, comm, **agreed) -> (Reduced, state)`. `agreed` are extras equal on all workers
        (`step`, `learning_rate`).
      scatter: the reduce-scatter form, where there is one.
      law: `"exact"`: `mean == comm.mean(own)`. `"telescoping"`: the same less the change of a server residual.
        `"none"`: neither, and error feedback refuses it.
      rounds: the generator form of `reduce`, which lets `by_leaf` merge collectives.
      plain: the mean of each leaf and nothing else, without state: extra leaves may ride along, and mesh axes that the
        compiler shards need no specs.
      for_feedback: gives the form to use inside error feedback (a contraction), or raises `ValueError` saying why there
        is none. `None`: the reducer itself.
    """

    init: Callable[[PyTree[Like]], State]
    reduce: Callable[..., tuple[Reduced, State]]
    scatter: Callable | None = None
    law: Law = "exact"
    rounds: Callable[..., Rounds] | None = None
    plain: bool = False
    for_feedback: Callable[[], "Reducer"] | None = None


def from_rounds(name: str, init: Callable, rounds: Callable[..., Rounds], **fields: Any) -> Reducer:
    """A reducer from its generator form; `name` is its scope in profiles."""

    def reduce(updates, state, comm, **agreed):
        with jax.named_scope(name):
            return drive(rounds(updates, state, comm, **agreed), comm)

    return Reducer(init, reduce, rounds=rounds, **fields)


def drive(rounds: Rounds, comm: Comm) -> Any:
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

    def advance(i, received):
        try:
            waiting[i] = generators[i].send(received)
        except StopIteration as stop:
            results[i] = stop.value

    for i in range(len(generators)):
        advance(i, None)
    while waiting:
        wires, waiting = waiting, {}
        received = yield Wire(*([array for wire in wires.values() for array in wire[way]] for way in range(2)))
        inboxes = [iter(arrays) for arrays in received]
        for i, wire in wires.items():
            advance(i, Wire(*([next(inboxes[way]) for _ in wire[way]] for way in range(2))))
    return results


def send(wire: Wire, comm: Comm) -> Wire:
    """Puts a wire on the network, one collective for each direction and dtype."""
    mean = _fused(lambda flat: comm.mean(flat), wire.mean)
    if len({array.dtype for array in wire.gather}) > 1:  # one gather of bytes beats one for each dtype
        arrived = _fused(lambda flat: comm.all_gather(flat), [_to_bytes(array) for array in wire.gather])
        gathered = [_from_bytes(words, like) for words, like in zip(arrived, wire.gather, strict=True)]
    else:
        gathered = _fused(lambda flat: comm.all_gather(flat), wire.gather)
    return Wire(mean, gathered)


def _fused(collective: Callable[[Array], Array], arrays: Sequence[Array]) -> list[Array]:
    """`[collective(x) for x in arrays]` with one call for each dtype; `collective` may add a leading dimension."""
    out: list[Any] = [None] * len(arrays)
    # Flattening would gather the axes that the compiler shards by itself.
    apart = bool(mesh_axes_left_over())
    groups: dict[Any, list[int]] = {}
    for i, array in enumerate(arrays):
        groups.setdefault((array.dtype, i if apart else 0), []).append(i)
    for members in groups.values():
        sizes = [arrays[i].size for i in members]
        if len(members) == 1 or not sum(sizes):
            for i in members:
                out[i] = collective(arrays[i])
            continue
        flat = collective(concatenate([arrays[i] for i in members]))
        start = 0
        for i, size in zip(members, sizes, strict=True):
            part = lax.slice_in_dim(flat, start, start + size, axis=flat.ndim - 1)
            out[i] = part.reshape(*flat.shape[:-1], *arrays[i].shape)
            start += size
    return out


def _to_bytes(x: Array) -> Array:
    return x.ravel() if x.dtype == jnp.uint8 else lax.bitcast_convert_type(x.ravel(), jnp.uint8).ravel()


def _from_bytes(words: Array, like: Array) -> Array:
    """`[W, bytes]` -> `[W, *like.shape]`."""
    if like.dtype != jnp.uint8:
        width = like.dtype.itemsize
        words = words.reshape(words.shape[0], like.size, *([width] if width > 1 else []))
        words = lax.bitcast_convert_type(words, like.dtype)
    return words.reshape(words.shape[0], *like.shape)


def feedback_form(reducer: Reducer) -> Reducer:
    """The form of a reducer to put inside error feedback; `ValueError` where none exists."""
    if reducer.law == "none":
        raise ValueError(
            'error feedback needs to know what each worker contributed, and this reducer (law "none", such as a '
            "majority vote) cannot say: use it without feedback"
        )
    return reducer if reducer.for_feedback is None else reducer.for_feedback()


def cast_like(tree: PyTree, like: PyTree) -> PyTree:
    """Each leaf in the dtype of its counterpart."""
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, like)


def is_stand_in(like: PyTree) -> bool:
    """Whether this is what `optax.tree.map_params` passes instead of parameters: no leaves, and no container of them.

    A reducer whose state is not like the parameters leaf by leaf answers it with a single leaf: nothing to map here.
    """
    return not jax.tree.leaves(like) and not isinstance(like, dict | list | tuple | None)
