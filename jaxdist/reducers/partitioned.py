"""ByteScheduler: layers split into partitions, which are sent in a chosen order that the compiler keeps."""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._core.layers import layer_numbers
from .._core.trees import fold_keys
from .._core.types import Array, Like, PyTree, State, Updates
from ..comm.base import Comm
from ..wire.encoded import after
from ..wire.flat import MULTIPLE, concatenate, from_vectors, group_alike
from .base import (
    NO_EXTRAS,
    Extras,
    Reduced,
    Reducer,
    as_generator,
    forward_forms,
    is_map_params_placeholder,
    run,
    weakest,
)

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
    """Splits layers into partitions and reduces them separately, one after the other in a given order.

    Compilers reorder and merge independent collectives: XLA:CPU merges all of them, GPU and TPU those up to a
    threshold. Here partition `m` cannot start before partition `m - w` has arrived, `w = ceil(credit / partition)`: it
    depends on a comparison with that result which always holds, NaN or not, and which no compiler folds. On CPU, whose
    collectives block anyway, `w = 1`. Elsewhere the partitions of one window may be merged: on GPU set
    `--xla_gpu_all_reduce_combine_threshold_bytes` below twice the partition to keep them separate.

    A jitted step computes its gradients last layer first, and the next forward pass starts when the step has ended.
    Inside a step use `"fifo"`: with `"priority"` every message waits for the gradient of layer 0, which comes last, and
    nothing overlaps. To send the first layers first, overlap consecutive steps with `pipelined`.
    `schedule.step_timeline` simulates a step with these arguments. The reducer sees one partition at a time, as a
    vector: one scale, one top-k for each; PowerSGD does not compress inside.

    *On the wire*: for each partition what the reducer sends for one vector of its size.

    *State*: a tuple with the reducer's state for each partition, in the order in which they are sent.

    Args:
      reducer: reduces one flat vector.
      partition_bytes: the size of a partition, rounded to multiples of 8 entries. Smaller partitions let urgent layers
        pass sooner, but each pays latency; start at 8 MiB, on GPU not below 4.
      credit_bytes: how many bytes may be in flight. A larger credit keeps the link busier, and makes the order matter
        less. Use two to four partitions.
      order: `"fifo"`, last layer first, the order of the backward pass; `"priority"`, first layer first, for gradients
        that are all available when the step begins; or the layer of each partition, counted from 0.
      layers: the top-level entries of the tree in forward order, as `schedule.forward_order(loss, params, batch)` reads
        it from a loss; a tuple of entries is one layer, which saves messages if they are small. `None`: each entry is
        a layer; a sequence or NamedTuple keeps its order, and keys of a dict are sorted by name, `block_2` before
        `block_10`.
      layer_fn: in place of `layers`: `layer_fn(path, leaf)`, the sort key of a leaf; leaves with equal keys form one
        layer.

    Returns:
      The reducer.

    Raises:
      ValueError: a size is not positive, the order is unknown, or both `layers` and `layer_fn` are given; from
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
        raise ValueError("layers and layer_fn both define the layers: pass one of them")
    cfg = _Config(reducer, partition_bytes, -(-credit_bytes // partition_bytes), order, layers, layer_fn)

    def rebuild(inner):
        return partitioned(
            inner,
            partition_bytes=partition_bytes,
            credit_bytes=credit_bytes,
            order=order,
            layers=layers,
            layer_fn=layer_fn,
        )

    forms = forward_forms(rebuild, reducer, shards=False)
    return Reducer(partial(_init, cfg), partial(_reduce, cfg), weakest(reducer), forms)


class _Config(NamedTuple):
    """`window`: how many partitions may be in flight."""

    reducer: Reducer
    partition_bytes: int
    window: int
    order: Order
    layers: Sequence[Any] | None
    layer_fn: Callable[[str, Like], Any] | None


def _init(cfg: _Config, like: PyTree[Like]) -> State:
    if is_map_params_placeholder(like):
        return 0
    states = [cfg.reducer.init(_like(part)) for part in _plan(cfg, like)]
    # Partitions must not share their draws.
    return tuple(fold_keys(state, i) for i, state in enumerate(states))


def _reduce(
    cfg: _Config, updates: Updates, state: State, comm: Comm, extras: Extras = NO_EXTRAS
) -> tuple[Reduced, State]:
    parts = _plan(cfg, updates)
    leaves, structure = jax.tree.flatten(updates)
    flats = {part.members: concatenate([leaves[i] for i in part.members]) for part in parts}
    reduced, states = [], []
    for part, part_state in zip(parts, state, strict=True):
        vector = flats[part.members][part.start : part.stop]
        vector = _wait_for_window(vector, [done.mean for done in reduced], cfg.window)
        done, part_state = run(as_generator(cfg.reducer, vector, part_state, comm, extras), comm)
        reduced.append(done)
        states.append(part_state)
    means, owns = ([done[which] for done in reduced] for which in (0, 1))
    mean, own = (structure.unflatten(_join(parts, vectors, leaves)) for vectors in (means, owns))
    return Reduced(mean, own), tuple(states)


def _plan(cfg: _Config, tree: PyTree[Like]) -> list["_Part"]:
    """The partitions of a tree, in the order in which they are sent."""
    numbers = layer_numbers(tree, cfg.layers) if cfg.layer_fn is None else _number_layers(cfg.layer_fn, tree)
    return _order_parts(_vectors(tree, numbers), cfg.partition_bytes, cfg.order)


class _Part(NamedTuple):
    """Entries `start` to `stop` of the vector of some leaves."""

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


def _number_layers(layer_fn: Callable[[str, Like], Any], tree: PyTree) -> list[int]:
    """The number of each leaf's layer."""
    keys = [
        layer_fn(jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]
    numbers = {key: layer for layer, key in enumerate(sorted(set(keys)))}
    return [numbers[key] for key in keys]


def _vectors(tree: PyTree, numbers: list[int]) -> list[_Vector]:
    """The vectors of all layers and dtypes, first layer first."""
    leaves = jax.tree.leaves(tree)
    kinds = [(layer, jnp.dtype(leaf.dtype)) for layer, leaf in zip(numbers, leaves, strict=True)]
    groups = [tuple(group) for group in group_alike(kinds, lambda kind: kind)]
    sizes = [sum(math.prod(leaves[i].shape) for i in group) for group in groups]
    vectors = [_Vector(kinds[g[0]][0], g, kinds[g[0]][1], size) for g, size in zip(groups, sizes, strict=True)]
    return sorted((v for v in vectors if v.size), key=lambda vector: vector.layer)


def _order_parts(vectors: list[_Vector], partition_bytes: int, order: Order) -> list[_Part]:
    """All partitions, in the order in which they are sent."""
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


def _wait_for_window(vector: Array, arrived: list[Array], window: int) -> Array:
    """The same vector, available only once the partition that leaves the window has arrived."""
    if not arrived:
        return vector
    if window == 1:
        return after(vector, arrived[-1])
    first = arrived[-window:][:1] if len(arrived) >= window else []
    # Collectives on CPU block, and would be merged within a window.
    return lax.platform_dependent(
        vector,
        arrived[-1],
        first,
        cpu=lambda vector, last, first: after(vector, last),
        default=lambda vector, last, first: after(vector, first),
    )


def _join(parts: list[_Part], pieces: list[Array], leaves: list) -> list:
    """Joins partitions into leaves."""
    # Empty leaves are not sent, and are equal on all workers.
    out = [leaf if math.prod(leaf.shape) else jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
    for group in group_alike(parts, lambda part: part.members):
        group = sorted(group, key=lambda i: parts[i].start)
        members = parts[group[0]].members
        flat = concatenate([pieces[i] for i in group])
        for i, leaf in zip(members, from_vectors([flat], [leaves[i] for i in members]), strict=True):
            out[i] = leaf
    return out


def _like(part: _Part) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((part.stop - part.start,), part.dtype)
