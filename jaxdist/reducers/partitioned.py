"""ByteScheduler's partitions: layers cut into parts of equal bytes, reduced in the order in which they are used."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from .._core.checks import check_range
from .._core.descriptions import with_description
from .._core.types import Array, Like, PyTree, State, Updates
from ..comm.base import Comm
from ..schedule.buckets import layer_numbers
from ..state.marks import LeafOrder
from ..wire.buffers import MULTIPLE, concatenate, from_vectors, group_alike, leaf_order
from .messages import for_real_numbers
from .parts import check_parts, init_parts, reduce_parts
from .reducer import NO_EXTRAS, Extras, Reduced, Reducer, Result, forward_forms, forward_limits, weakest
from .trees import is_map_params_placeholder, list_named_leaves

Order = Literal["priority", "fifo"] | Sequence[int]


@with_description
def partitioned(
    reducer: Reducer,
    *,
    partition_bytes: int = 8 << 20,
    credit_bytes: int = 32 << 20,
    order: Order = "fifo",
    layers: Sequence[Any] | None = None,
    layer_fn: Callable[[str, Like], Any] | None = None,
) -> Reducer:
    """Splits layers into partitions and reduces them separately, one after the other in a given order.

    Partition `m` cannot start before partition `m - w` has arrived, `w = ceil(credit / partition)` (on CPU `w = 1`), so
    that compilers neither reorder nor merge them; within a window they may: on GPU
    `--xla_gpu_all_reduce_combine_threshold_bytes` below twice the partition prevents it. The reducer sees one partition
    at a time, as a vector: one scale, one top-k for each.

    *On the wire*: for each partition what the reducer sends for one vector of its size.

    *State*: a tuple with the reducer's state for each partition, in the order in which they are sent.

    Args:
      reducer: reduces one flat vector.
      partition_bytes: the size of a partition, rounded to multiples of 8 entries. Smaller partitions let urgent layers
        pass sooner, but each pays latency: start at 8 MiB up to 100 Gbit/s, at 32 above.
      credit_bytes: how many bytes may be in flight: two to four partitions. A larger credit keeps the link busier, and
        makes the order matter less.
      order: `"fifo"`, last layer first, for use inside a step: the order of the backward pass; `"priority"`, first
        layer first, for gradients that are all available when the step begins; or the layer of each partition, counted
        from 0.
      layers: as in `bucketed`; a tuple of entries is one layer. `None`: each entry is a layer.
      layer_fn: in place of `layers`: `layer_fn(path, leaf)`, the sort key of a leaf; leaves with equal keys form one
        layer.

    Raises:
      ValueError: both `layers` and `layer_fn` are given; the reducer needs matrices or whole gradients (`power_sgd`,
        `dgc` with `clip_norm=`); from `init`, `layers` does not name each entry once, or the layers in `order` are not
        those of the partitions.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.reducers.partitioned(jd.error_feedback(jd.compressed(jd.top_k(0.1))), partition_bytes=384)
      >>> like = {"layer_2": jnp.zeros(50), "layer_10": jnp.zeros((15, 10))}
      >>> [state.residual.value.shape for state in reducer.init(like)]
      [(96,), (54,), (50,)]

    References:
      ByteScheduler: Peng et al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration", SOSP,
      2019. Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training", arXiv:1905.03960,
      2019.
    """
    for name, size in (("partition_bytes", partition_bytes), ("credit_bytes", credit_bytes)):
        check_range(name, size, 1, ends="[]")
    if isinstance(order, str) and order not in ("priority", "fifo"):
        raise ValueError(f'order must be "priority", "fifo" or the layer of each partition, got {order!r}')
    if layers is not None and layer_fn is not None:
        raise ValueError("layers and layer_fn both define the layers: pass one of them")
    check_parts("partitioned() cuts layers into vectors", reducer)
    method = _Partitioned(reducer, partition_bytes, -(-credit_bytes // partition_bytes), order, layers, layer_fn)
    return method.as_reducer()


class _Part(NamedTuple):
    """Entries `start` to `stop` of the vector of some leaves."""

    members: tuple[int, ...]
    dtype: Any
    start: int
    stop: int


class _Partitioned(NamedTuple):
    """`window`: how many partitions may be in flight."""

    reducer: Reducer
    partition_bytes: int
    window: int
    order: Order
    layers: Sequence[Any] | None
    layer_fn: Callable[[str, Like], Any] | None

    def as_reducer(self) -> Reducer:
        forms = forward_forms(lambda inner: self._replace(reducer=inner).as_reducer(), self.reducer, shards=False)
        return Reducer(
            for_real_numbers(self.init), self.reduce, weakest(self.reducer), forms, limits=forward_limits(self.reducer)
        )

    def init(self, like: PyTree[Like]) -> State:
        if is_map_params_placeholder(like):
            return 0
        parts, order = self._plan(like), leaf_order(like)
        return init_parts(
            self.reducer,
            [jax.ShapeDtypeStruct((part.stop - part.start,), part.dtype) for part in parts],
            orders=[_order_of(part, order) for part in parts],
        )

    def reduce(self, updates: Updates, state: State, comm: Comm, extras: Extras = NO_EXTRAS) -> Result:
        parts = self._plan(updates)
        leaves, structure = jax.tree.flatten(updates)
        flats = {part.members: concatenate([leaves[i] for i in part.members]) for part in parts}
        vectors = [flats[part.members][part.start : part.stop] for part in parts]
        reduced, state = reduce_parts(self.reducer, vectors, state, comm, extras, window=self.window)
        mean, own = (structure.unflatten(_join(parts, [done[which] for done in reduced], leaves)) for which in (0, 1))
        return Reduced(mean, own), state

    def _plan(self, tree: PyTree[Like]) -> list[_Part]:
        """The partitions of a tree, in the order in which they are sent."""
        if self.layer_fn is None:
            numbers = layer_numbers(tree, self.layers)
        else:
            keys = [self.layer_fn(path, leaf) for path, leaf in list_named_leaves(tree)]
            layer_of = {key: layer for layer, key in enumerate(sorted(set(keys)))}
            numbers = [layer_of[key] for key in keys]
        return _order_parts(_vectors(tree, numbers), self.partition_bytes, self.order)


class _Vector(NamedTuple):
    """The leaves of one layer and dtype, and how many entries they have together."""

    layer: int
    members: tuple[int, ...]
    dtype: Any
    size: int


def _vectors(tree: PyTree, numbers: list[int]) -> list[_Vector]:
    """The vectors of all layers and dtypes, first layer first."""
    leaves = jax.tree.leaves(tree)
    kinds = [(layer, jnp.dtype(leaf.dtype)) for layer, leaf in zip(numbers, leaves, strict=True)]
    groups = [tuple(group) for group in group_alike(kinds, lambda kind: kind)]
    sizes = [sum(math.prod(leaves[i].shape) for i in group) for group in groups]
    vectors = [_Vector(kinds[g[0]][0], g, kinds[g[0]][1], size) for g, size in zip(groups, sizes, strict=True)]
    return sorted((v for v in vectors if v.size), key=lambda vector: vector.layer)


def _order_parts(vectors: list[_Vector], partition_bytes: int, order: Order) -> list[_Part]:
    parts: dict[int, list[_Part]] = {}
    for layer, members, dtype, size in vectors:
        # A multiple of 8 entries, for codes that fill whole bytes.
        entries = max(MULTIPLE, partition_bytes // (dtype.itemsize * MULTIPLE) * MULTIPLE)
        cuts = [*range(0, size, entries), size]
        parts.setdefault(layer, []).extend(_Part(members, dtype, *ends) for ends in itertools.pairwise(cuts))
    if isinstance(order, str):
        by_layer = parts.values() if order == "priority" else reversed(parts.values())
        return [part for of_layer in by_layer for part in of_layer]
    # A given order: each layer as often as it has partitions.
    wanted = {layer: list(order).count(layer) for layer in sorted({*order, *parts})}
    there = {layer: len(parts.get(layer, [])) for layer in wanted}
    if wanted != there:
        raise ValueError(f"order must name each layer once for each of its partitions, {there}, but names {wanted}")
    left = {layer: iter(of_layer) for layer, of_layer in parts.items()}
    return [next(left[layer]) for layer in order]


def _order_of(part: _Part, order: LeafOrder) -> LeafOrder:
    """The leaves of a partition; of one that is cut, `w[8:16]` of its entries."""
    found, start = [], 0
    for name, shape in (order[i] for i in part.members):
        size = math.prod(shape)
        low, high = max(part.start - start, 0), min(part.stop - start, size)
        if low < high:
            found.append((name, shape) if high - low == size else (f"{name}[{low}:{high}]", (high - low,)))
        start += size
    return tuple(found)


def _join(parts: list[_Part], pieces: list[Array], leaves: list) -> list:
    # Empty leaves are not sent, and are equal on all workers.
    out = [leaf if math.prod(leaf.shape) else jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
    for group in group_alike(parts, lambda part: part.members):
        group = sorted(group, key=lambda i: parts[i].start)
        members = parts[group[0]].members
        flat = concatenate([pieces[i] for i in group])
        for i, leaf in zip(members, from_vectors([flat], [leaves[i] for i in members]), strict=True):
            out[i] = leaf
    return out
