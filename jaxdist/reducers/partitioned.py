"""Layers in partitions, in an order of one's choice that the compiler keeps."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._core.layers import layer_numbers
from .._core.trees import fold_keys
from .._core.types import Array, Like, PyTree
from ..wire.encoded import after
from ..wire.flat import MULTIPLE, alike, concatenate, from_vectors
from .base import NO_EXTRAS, Reduced, Reducer, as_generator, forward_forms, is_map_params_placeholder, run, weakest

Order = Literal["priority", "fifo"] | Sequence[int]


def partitioned(
    reducer: Reducer,
    *,
    partition_bytes: int = 8 << 20,
    credit_bytes: int = 32 << 20,
    order: Order = "fifo",
    layers: Sequence[Any] | None = None,
    layer_fn: Callable[[str, Like], Any] | None = None,
) -> Reducer:
    """Cuts layers into partitions, reduces each by itself, one after the other in a given order.

    A compiler orders collectives that are independent of each other as it likes, and merges them: XLA:CPU makes one of
    all, GPU and TPU of those up to a threshold. Here partition `m` cannot start before partition `m - w` has arrived,
    `w = ceil(credit / partition)`: it depends on a comparison with that result which always holds, NaN or not, and
    which no compiler folds. On CPU, whose collectives block anyway, `w = 1`. Elsewhere the partitions of one window may
    be merged: on GPU set `--xla_gpu_all_reduce_combine_threshold_bytes` below twice the partition to keep them apart.

    A jitted step makes its gradients last layer first, and the next forward pass begins when the step has ended. So
    inside a step the order is `"fifo"`: with `"priority"` every message waits for the gradient of layer 0, which comes
    last, and nothing is hidden. To send the first layers first and gain by it, cross the border of steps, `pipelined`.
    `schedule.step_timeline` plays the step of these very arguments. A code sees one partition at a time, as a vector:
    one scale, one top-k for each; PowerSGD does not compress inside.

    *On the wire*: for each partition what the reducer sends for one vector of its size.

    *State*: a tuple with the reducer's state for each partition, in the order in which they travel.

    Args:
      reducer: reduces one flat vector.
      partition_bytes: of a partition, up to whole multiples of 8 entries. Smaller lets urgent layers pass sooner, and
        pays latency for each; start at 8 MiB, on GPU not below 4.
      credit_bytes: how much may be under way. One partition waits for each before it goes; the more, the less the link
        idles and the less the order matters. Two to four partitions.
      order: `"fifo"`, last layer first, the order in which the backward pass makes them; `"priority"`, first layer
        first, for gradients that are all there when the step begins; or the layer of each partition in turn, counted
        from 0.
      layers: the top-level entries of the tree in forward order, as `schedule.forward_order(loss, params, batch)` reads
        it from a loss, and tuples of entries that make up one layer: small ones together save messages. `None`: each
        entry is a layer; a sequence or NamedTuple has its own order, and keys of a dict go by name, `block_2` before
        `block_10`.
      layer_fn: in place of `layers`: `layer_fn(path, leaf)`, what to sort a leaf by; equal ones are one layer.

    Returns:
      The reducer.

    Raises:
      ValueError: a size is not positive, there is no such order, or both `layers` and `layer_fn` are given; from
        `init`, `layers` does not name each entry of the tree once, or the layers in `order` are not those of the
        partitions.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.reducers.partitioned(jd.error_feedback(jd.compressed(jd.top_k(0.1))), partition_bytes=384)
      >>> like = {"layer_2": jnp.zeros(50), "layer_10": jnp.zeros((15, 10))}
      >>> [state.residual.value.shape for state in reducer.init(like)]
      [(96,), (54,), (50,)]

    References:
      Peng et al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration", SOSP 2019. Jayarajan
      et al., "Priority-based Parameter Propagation for Distributed DNN Training", arXiv 1905.03960, 2019.
    """
    for name, size in (("partition_bytes", partition_bytes), ("credit_bytes", credit_bytes)):
        if size < 1:
            raise ValueError(f"{name} must be positive, got {size}")
    if isinstance(order, str) and order not in ("priority", "fifo"):
        raise ValueError(f'order must be "priority", "fifo" or the layer of each partition, got {order!r}')
    if layers is not None and layer_fn is not None:
        raise ValueError("layers and layer_fn both say what the layers are: give one of them")
    window = -(-credit_bytes // partition_bytes)

    def plan(tree):
        numbers = layer_numbers(tree, layers) if layer_fn is None else _sorted_by(layer_fn, tree)
        return _in_order(_vectors(tree, numbers), partition_bytes, order)

    def init(like):
        if is_map_params_placeholder(like):
            return 0
        # Partitions must not share their draws.
        states = [reducer.init(_like(part)) for part in plan(like)]
        return tuple(fold_keys(state, i) for i, state in enumerate(states))

    def reduce(updates, state, comm, extras=NO_EXTRAS):
        parts = plan(updates)
        leaves, structure = jax.tree.flatten(updates)
        flats = {part.members: concatenate([leaves[i] for i in part.members]) for part in parts}
        reduced, states = [], []
        for part, part_state in zip(parts, state, strict=True):
            cut = _in_turn(flats[part.members][part.start : part.stop], [done.mean for done in reduced], window)
            done, part_state = run(as_generator(reducer, cut, part_state, comm, extras), comm)
            reduced.append(done)
            states.append(part_state)
        mean, own = ([done[which] for done in reduced] for which in (0, 1))
        return Reduced(*(structure.unflatten(_joined(parts, of, leaves)) for of in (mean, own))), tuple(states)

    def rebuild(inner):
        return partitioned(
            inner,
            partition_bytes=partition_bytes,
            credit_bytes=credit_bytes,
            order=order,
            layers=layers,
            layer_fn=layer_fn,
        )

    return Reducer(init, reduce, weakest(reducer), forward_forms(rebuild, reducer, shards=False))


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


def _sorted_by(layer_fn: Callable[[str, Like], Any], tree: PyTree) -> list[int]:
    """The number of each leaf's layer."""
    keys = [
        layer_fn(jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]
    numbers = {key: layer for layer, key in enumerate(sorted(set(keys)))}
    return [numbers[key] for key in keys]


def _vectors(tree: PyTree, numbers: list[int]) -> list[_Vector]:
    """First layer first."""
    leaves = jax.tree.leaves(tree)
    kinds = [(layer, jnp.dtype(leaf.dtype)) for layer, leaf in zip(numbers, leaves, strict=True)]
    groups = [tuple(group) for group in alike(kinds, lambda kind: kind)]
    sizes = [sum(math.prod(leaves[i].shape) for i in group) for group in groups]
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
