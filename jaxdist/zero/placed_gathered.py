"""Stage 3 of ZeRO over global arrays of a plain `jit`: functions whose parameters `PartitionSpec`s shard."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from .._core.compat import shard_map
from .._core.dtypes import widen
from .._core.hashing import cheap_hash
from .._core.trees import fold_keys
from .._core.types import Array, AxisNames, PyTree
from ..comm.base import Comm
from ..comm.over import over
from ..compressors.compressor import Compressor
from ..reducers.reducer import NO_EXTRAS, Reducer, shards_of
from ..state.marks import axis_tuple, expand_specs, spec_entry
from ..state.parameter_specs import check_specs, spec_axes, without_axes
from ..transforms.in_plain_jit import mapped_workers, merge_workers, split_rows, vmap_workers
from ..transforms.reduce_scatter import scattered_dimensions, scattering
from .placed import place_as
from .shards import check_stateless, decode, encode, gather_payloads, key_of_shards

CALLER = "gathered(specs=)"


def placed_gathered(
    f: Callable[..., Any],
    *,
    axis: AxisNames,
    remat: bool,
    reducer: Reducer,
    compressor: Compressor | None,
    specs: PyTree,
) -> Callable[..., Any]:
    """Checks the specs of `gathered(specs=)`, and makes its function."""
    names = axis_tuple(axis)
    check_specs(specs, caller=CALLER)
    dimensions = jax.tree.leaves(scattered_dimensions(specs, names, caller=CALLER))
    if max(dimensions, default=-1) < 0:
        raise ValueError(
            f"{CALLER} gathers parameters over axis {spec_entry(names)!r}, but no spec names it: shard a dimension of "
            f"large parameters over it, as in P({names[0]!r}, 'model')"
        )
    method = _PlacedGathered(f, names, reducer, compressor, specs)

    def call(params: PyTree, rows: PyTree, *rest: Any) -> Any:
        return method.call(params, rows, *rest)

    # Common subexpressions are not merged: both passes gather, and keep no whole parameters in between.
    return jax.checkpoint(call, prevent_cse=True) if remat else call


class _PlacedGathered(NamedTuple):
    f: Callable[..., Any]
    names: tuple[str, ...]
    reducer: Reducer
    compressor: Compressor | None
    specs: PyTree

    def call(self, params: PyTree, rows: PyTree, *rest: Any) -> Any:
        if manual := jax.sharding.get_abstract_mesh().manual_axes:
            raise ValueError(
                f"{CALLER} is for a plain jit under jax.set_mesh(mesh), and axis {manual[0]!r} is mapped here: compute "
                f"gradients with transforms.per_worker_value_and_grad(loss, axis={manual[0]!r}) in place of distribute"
            )
        split = split_rows(self.names, rows, what=f"the second argument of {CALLER}")
        leaves, tree = jax.tree.flatten(params)
        specs = jax.tree.leaves(expand_specs(self.specs, params))
        mapped: list[int | None] = [None] * len(leaves)
        for members in self._kinds(specs):
            copies = self._copy([leaves[i] for i in members], [specs[i] for i in members])
            for i, copy in zip(members, copies, strict=True):
                leaves[i], mapped[i] = copy, 0
        in_axes = (tree.unflatten(mapped), 0, *[None] * len(rest))
        out = vmap_workers(self.f, self.names, in_axes, what=f"the function of {CALLER}")(
            tree.unflatten(leaves), split, *rest
        )
        first = jax.typeof(jax.tree.leaves(rows)[0]).sharding.spec
        return jax.tree.map(lambda y: merge_workers(y) if y.ndim == 1 else _join_rows(y, first), out)

    def _kinds(self, specs: Sequence[PartitionSpec]) -> list[list[int]]:
        """The positions of leaves that are gathered, for each set of axes that shard them.

        Joined in one buffer, leaves that an axis does not shard would be typed as differing along it.
        """
        kinds: dict[frozenset[str], list[int]] = {}
        for i, spec in enumerate(specs):
            if set(spec_axes(spec)) & set(self.names):
                kinds.setdefault(frozenset(spec_axes(spec)), []).append(i)
        return list(kinds.values())

    def _copy(self, params: Sequence[Array], specs: Sequence[PartitionSpec]) -> list[Array]:
        """`[*s] -> [W, *s]`: every worker's whole copy. Its gradients, one for each worker, are reduce-scattered."""
        check_stateless(shards_of(self.reducer), list(params))
        dimensions = jax.tree.leaves(scattered_dimensions(list(specs), self.names, caller=CALLER))
        copies = [PartitionSpec(spec_entry(self.names), *without_axes(spec, self.names)) for spec in specs]

        def gather(params: list[Array]) -> list[Array]:
            return self._gather(dimensions, params)

        def scatter(gradients: list[Array]) -> list[Array]:
            return self._scatter(dimensions, gradients)

        forward = _map_devices(gather, list(specs), copies)
        backward = _map_devices(scatter, copies, list(specs))
        copy = jax.custom_vjp(forward)
        copy.defvjp(lambda params: (forward(params), None), lambda _, gradients: (backward(gradients),))
        return copy([place_as(*pair) for pair in zip(params, specs, strict=True)])

    def _gather(self, dimensions: Sequence[int], shards: Sequence[Array]) -> list[Array]:
        """On one device: its shards, of parameters that further axes shard too, `-> [1, *s]`, of all workers."""
        comm = over(self.names)
        flat = [x.reshape(-1) for x in shards]
        if self.compressor is None:
            rows = [comm.all_gather(x, agreed=False) for x in flat]
        else:
            payloads = encode(
                self.compressor, flat, [(comm.size * x.size,) for x in flat], key_of_shards(flat, comm), comm
            )
            rows = decode(self.compressor, gather_payloads(payloads, comm, agreed=False), flat, of_all=True)
        return [_assemble(*parts) for parts in zip(rows, shards, dimensions, strict=True)]

    def _scatter(self, dimensions: Sequence[int], gradients: Sequence[Array]) -> list[Array]:
        """On one device: the sum over workers of `[1, *s]`, its shards."""
        comm: Comm = over(self.names)
        # A loss of all rows has a term for each worker: the sum of terms is the mean of `W` times as large ones.
        terms = comm.varying([(widen(g[0]) * comm.size).astype(g.dtype) for g in gradients])
        method = scattering(self.reducer, list(dimensions), comm.size)
        # The reducer starts afresh in each step, with draws that depend on the gradients.
        state = fold_keys(method.init(terms), cheap_hash(terms))
        return method.reduce(terms, state, comm, NO_EXTRAS)[0].mean


def _map_devices(
    f: Callable[[list[Array]], list[Array]],
    in_specs: Sequence[PartitionSpec],
    out_specs: Sequence[PartitionSpec],
    outer: tuple[Any, ...] = (),
) -> Callable[[list[Array]], list[Array]]:
    """A map of `f` over all devices, inside any `vmap`, whose dimensions come first.

    `outer` has for each of these the axis of the workers over which it is sharded, or `None`. JAX's own rule types what
    is inside as if it were equal over this axis.
    """
    mapped = f
    for axis in reversed(outer):
        mapped = jax.vmap(mapped) if axis is None else _on_first(mapped)
    ins, outs = ([PartitionSpec(*outer, *spec) for spec in specs] for specs in (in_specs, out_specs))

    @jax.custom_batching.custom_vmap
    def call(arrays: list[Array]) -> list[Array]:
        # Inside a `vmap` over an Explicit axis, JAX maps this axis in no other way.
        waiting = mapped_workers()[: len(mapped_workers()) - len(outer)]
        axes = set(jax.sharding.get_abstract_mesh().axis_names).difference(*waiting)
        return shard_map(mapped, mesh=None, in_specs=(ins,), out_specs=outs, axis_names=axes, check_vma=True)(arrays)

    @call.def_vmap
    def map_once_more(size: int, is_batched: Any, arrays: list[Array]) -> tuple[list[Array], list[bool]]:
        # The innermost comes first. A `vmap` of the user's own, whose dimension is not sharded, may be among them.
        around = mapped_workers()[::-1][len(outer) :][:1]
        mesh = jax.sharding.get_abstract_mesh()
        is_sharded = any(size == math.prod(mesh.shape[name] for name in names) for names in around)
        dimensions = (spec_entry(around[0]) if is_sharded else None, *outer)
        batched = [
            x if has else place_as(jnp.broadcast_to(x, (size, *x.shape)), PartitionSpec(*dimensions, *spec))
            for x, has, spec in zip(arrays, is_batched[0], in_specs, strict=True)
        ]
        return _map_devices(f, in_specs, out_specs, dimensions)(batched), [True] * len(out_specs)

    return call


def _on_first(f: Callable[[list[Array]], list[Array]]) -> Callable[[list[Array]], list[Array]]:
    """The function for arrays with one more dimension, of which a device has one entry."""
    return lambda arrays: [y[None] for y in f([x[0] for x in arrays])]


def _assemble(rows: Array, shard: Array, dimension: int) -> Array:
    """`[W, n] -> [1, *s]`: the shards of all workers, joined along the dimension."""
    parts = jnp.moveaxis(rows.reshape(-1, *shard.shape), 0, dimension)
    shape = list(shard.shape)
    shape[dimension] *= rows.shape[0]
    return parts.reshape(1, *shape)


def _join_rows(y: Array, first: PartitionSpec) -> Array:
    """`[W, B/W, ...] -> [B, ...]`, on Explicit axes sharded along it as the argument was, whose spec is `first`."""
    shape = (y.shape[0] * y.shape[1], *y.shape[2:])
    if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        return y.reshape(shape)
    workers, rest, *others = (*jax.typeof(y).sharding.spec.partitions, *[None] * y.ndim)[: y.ndim]
    joined = PartitionSpec((*axis_tuple(workers), *axis_tuple(rest)), *others)
    return jax.reshard(lax.reshape(y, shape, out_sharding=joined), PartitionSpec(*first.partitions[:1], *others))
