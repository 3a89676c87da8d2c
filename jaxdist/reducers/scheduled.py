"""Layers in partitions, in an order of one's choice that the compiler keeps."""

import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._typing import Array, Like, PyTree
from ._coded import fold_keys
from ._flat import MULTIPLE, alike, concatenate, from_vectors
from ._ordered import after
from .base import Reduced, Reducer, drive, feedback_form, held_by, is_stand_in, rounds_of

Order = Literal["priority", "fifo"] | Sequence[int]


def scheduled(
    reducer: Reducer,
    *,
    partition_bytes: int = 8 << 20,
    credit_bytes: int = 32 << 20,
    order: Order = "priority",
    layer_fn: Callable[[str, Like], Any] | None = None,
) -> Reducer:
    """Cuts layers into partitions, reduces each by itself, one after the other in a given order.

    A compiler orders collectives that are independent of each other as it likes, and merges them: XLA:CPU makes one of
    all, GPU and TPU of those up to a threshold. Here partition `m` cannot start before partition `m - w` has arrived,
    `w = ceil(credit / partition)`: it depends on a comparison with that result which always holds, NaN or not, and
    which no compiler folds. On CPU, whose collectives block anyway, `w = 1`. Elsewhere the partitions of one window may
    be merged: on GPU set `--xla_gpu_all_reduce_combine_threshold_bytes` below twice the partition to keep them apart.

    What order helps, and how much, `schedule.timeline` says; `schedule.tune` finds partition and credit. A code sees
    one partition at a time, as a vector: one scale, one top-k for each; PowerSGD does not compress inside.

    *On the wire*: for each partition what the reducer sends for one vector of its size.

    *State*: a tuple with the reducer's state for each partition, in the order in which they travel.

    Args:
      reducer: reduces one flat vector.
      partition_bytes: of a partition, up to whole multiples of 8 entries. Smaller lets urgent layers pass sooner, and
        pays latency for each; start at 8 MiB, on GPU not below 4.
      credit_bytes: how much may be under way. One partition waits for each before it goes; the more, the less the link
        idles and the less the order matters. Two to four partitions.
      order: `"priority"`, first layer first, the order in which the next forward pass needs them; `"fifo"`, last layer
        first, the order in which the backward pass makes them; or the layer of each partition in turn, counted from
        0, as the messages of a `timeline` have it.
      layer_fn: `layer_fn(path, leaf)`, what to sort a leaf by; equal ones are one layer. By default the first part of
        the path: layers are the top-level entries of the tree, `block_2` before `block_10`.

    Returns:
      The reducer.

    Raises:
      ValueError: a size is not positive, there is no such order, or the layers in `order` are not those of the
        partitions.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.scheduled(jd.error_feedback(jd.compressed(jd.top_k(0.1))), partition_bytes=384)
      >>> like = {"layer_2": jnp.zeros(50), "layer_10": jnp.zeros((15, 10))}
      >>> [state.residual.value.shape for state in reducer.init(like)]
      [(50,), (96,), (54,)]

    References:
      Peng et al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration", SOSP 2019. Jayarajan
      et al., "Priority-based Parameter Propagation for Distributed DNN Training", arXiv 1905.03960, 2019.
    """
    for name, size in (("partition_bytes", partition_bytes), ("credit_bytes", credit_bytes)):
        if size < 1:
            raise ValueError(f"{name} must be positive, got {size}")
    if isinstance(order, str) and order not in ("priority", "fifo"):
        raise ValueError(f'order must be "priority", "fifo" or the layer of each partition, got {order!r}')
    window = -(-credit_bytes // partition_bytes)

    def plan(tree):
        return _in_order(_vectors(tree, layer_fn or _first_of_path), partition_bytes, order)

    def init(like):
        if is_stand_in(like):
            return 0
        # Partitions must not share their draws.
        states = [reducer.init(_like(part)) for part in plan(like)]
        return tuple(fold_keys(state, i) for i, state in enumerate(states))

    def reduce(updates, state, comm, **agreed):
        parts = plan(updates)
        leaves, structure = jax.tree.flatten(updates)
        flats = {part.members: concatenate([leaves[i] for i in part.members]) for part in parts}
        reduced, states = [], []
        for part, part_state in zip(parts, state, strict=True):
            cut = _in_turn(flats[part.members][part.start : part.stop], [done.mean for done in reduced], window)
            done, part_state = drive(rounds_of(reducer, cut, part_state, comm, **agreed), comm)
            reduced.append(done)
            states.append(part_state)
        mean, own = ([done[which] for done in reduced] for which in (0, 1))
        return Reduced(*(structure.unflatten(_joined(parts, of, leaves)) for of in (mean, own))), tuple(states)

    def held(state, like, comm):
        parts = plan(like)
        leaves, structure = jax.tree.flatten(like)
        vectors = [
            held_by(reducer, part_state, _like(part), comm) for part, part_state in zip(parts, state, strict=True)
        ]
        return structure.unflatten(_joined(parts, vectors, leaves))

    def for_feedback():
        return scheduled(
            feedback_form(reducer),
            partition_bytes=partition_bytes,
            credit_bytes=credit_bytes,
            order=order,
            layer_fn=layer_fn,
        )

    return Reducer(init, reduce, law=reducer.law, held=held, for_feedback=for_feedback)


class _Part(NamedTuple):
    """Entries `start` to `stop` of the vector that some leaves make."""

    members: tuple[int, ...]
    dtype: Any
    start: int
    stop: int


class _Vector(NamedTuple):
    """The leaves of one layer and dtype, and how many entries they have together."""

    layer: int
    members: tuple[int, ...]
    dtype: Any
    size: int


def _vectors(tree: PyTree, layer_fn: Callable[[str, Like], Any]) -> list[_Vector]:
    """First layer first."""
    named = [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]
    keys = [layer_fn(path, leaf) for path, leaf in named]
    layers = {key: layer for layer, key in enumerate(sorted(set(keys)))}
    kinds = [(layers[key], jnp.dtype(leaf.dtype)) for key, (_, leaf) in zip(keys, named, strict=True)]
    groups = [tuple(group) for group in alike(kinds, lambda kind: kind)]
    sizes = [sum(math.prod(named[i][1].shape) for i in group) for group in groups]
    vectors = [_Vector(kinds[g[0]][0], g, kinds[g[0]][1], size) for g, size in zip(groups, sizes, strict=True)]
    return sorted((v for v in vectors if v.size), key=lambda vector: vector.layer)


def _in_order(vectors: list[_Vector], partition_bytes: int, order: Order) -> list[_Part]:
    """All partitions in the order in which they travel."""
    parts: dict[int, list[_Part]] = {}
    for layer, members, dtype, size in vectors:
        entries = max(MULTIPLE, partition_bytes // (dtype.itemsize * MULTIPLE) * MULTIPLE)
        cuts = [*range(0, size, entries), size]
        parts.setdefault(layer, []).extend(_Part(members, dtype, *ends) for ends in itertools.pairwise(cuts))
    if isinstance(order, str):
        by_layer = parts.values() if order == "priority" else reversed(parts.values())
        return [part for of_layer in by_layer for part in of_layer]
    wanted = {layer: list(order).count(layer) for layer in sorted({*order, *parts})}
    there = {layer: len(parts.get(layer, [])) for layer in wanted}
    if wanted != there:
        raise ValueError(f"order must name each layer once for each of its partitions, {there}, but names {wanted}")
    left = {layer: iter(of_layer) for layer, of_layer in parts.items()}
    return [next(left[layer]) for layer in order]


def _in_turn(cut: Array, arrived: list[Array], window: int) -> Array:
    """`cut`, but not before the partition that leaves the window has arrived."""
    if not arrived:
        return cut
    if window == 1:
        return after(cut, arrived[-1])
    first = arrived[-window:][:1] if len(arrived) >= window else []
    # Collectives on CPU block, and would be merged within a window.
    return lax.platform_dependent(
        cut,
        arrived[-1],
        first,
        cpu=lambda cut, last, first: after(cut, last),
        default=lambda cut, last, first: after(cut, first),
    )


def _joined(parts: list[_Part], pieces: list[Array], leaves: list) -> list:
    """The leaves of partitions."""
    # What has no entries does not travel, and all agree on it.
    out = [leaf if math.prod(leaf.shape) else jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
    for group in alike(parts, lambda part: part.members):
        group = sorted(group, key=lambda i: parts[i].start)
        members = parts[group[0]].members
        flat = concatenate([pieces[i] for i in group])
        for i, leaf in zip(members, from_vectors([flat], [leaves[i] for i in members]), strict=True):
            out[i] = leaf
    return out


def _like(part: _Part) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((part.stop - part.start,), part.dtype)


def _first_of_path(path: str, leaf: Like) -> tuple:
    """`block_2` before `block_10`."""
    del leaf
    words = re.split(r"(\d+)", path.partition("/")[0])
    return tuple((0, int(word), "") if word.isdigit() else (1, 0, word) for word in words)
