"""The workers along axes of a mesh, under `shard_map` and under `vmap`."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core.compat import (
    assume_replicated,
    cast_varying,
    mesh_axes_being_mapped,
    mesh_axes_left_over,
    types_are_checked,
    varying_axes,
)
from .._core.types import Array, AxisNames
from .._core.xla_quirks import from_ordered_bits, ordered_bits
from ..state.marks import axis_tuple
from .base import Comm, alone, check_permutation, combine_rows, complete_permutation, divisible, map_over_trees
from .dtypes import check_bytes, check_number, check_ordered
from .pair import choose_faster, exchange_pair, gather_pair, is_compressed, is_long, permute_pair
from .turns import MOST_WORKERS, exchange_in_turns

Axes = tuple[str, ...]


def over(axis: AxisNames) -> Comm:
    """The group of workers along one mesh axis, or along several (`("pod", "data")`: slow links first).

    Call it where the axis is bound: inside `distribute`, `simulate`, `shard_map` or `vmap(axis_name=...)`.

    Args:
      axis: the name or names; `None` is `alone()`.

    Returns:
      The group; with several axes its `.inner` is the last one and its `.outer` the others.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jaxdist import comm
      >>> jax.vmap(lambda x: comm.over("data").mean(x), axis_name="data")(jnp.array([1.0, 3.0])).tolist()
      [2.0, 2.0]
    """
    axes = axis_tuple(axis)
    if not axes:
        return alone()
    try:
        _size(axes)
    except NameError:
        raise ValueError(_explain_unbound(axis)) from None
    functions: Any = {name: partial(f, axes) for name, f in _collectives(axes).items()}
    comm = map_over_trees(Comm(size=_size(axes), index=lax.axis_index(axes), **functions))
    if len(axes) == 1:
        return comm
    return comm._replace(inner=over(axes[-1]), outer=over(axes[:-1]))


def worker_key(key: Array, *, axis: AxisNames = "data") -> Array:
    """Folds this worker's number into a key inside a step: `fold_in(key, i)` for worker `i`.

    A replicated key gives the same numbers on all workers, so that all of them use the same dropout mask. The key of
    this function gives different ones, the same on a mesh and in simulation (but of `rbg` keys JAX draws others under
    `vmap`).

    *On the wire*: nothing.

    Args:
      key: a replicated key. Fold the number of the step into it first, so that steps differ too.
      axis: the axis or axes whose workers draw different numbers; `None` is a single worker, with number 0.

    Returns:
      The key of this worker, typed as differing between workers.

    Raises:
      ValueError: the axis is not bound: call it inside the step.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> def step(key, batch):
      ...     mine = jax.random.uniform(jd.runtime.worker_key(key))
      ...     return key, jd.comm.over("data").all_gather(mine)
      >>> _, drawn = jd.simulate(step, workers=4)(jax.random.key(0), jnp.zeros(4))
      >>> len(set(drawn.tolist()))
      4
    """
    return jax.random.fold_in(key, over(axis).index)


def _explain_unbound(axis: AxisNames) -> str:
    names = jax.sharding.get_abstract_mesh().axis_names
    if names and not set(names).issuperset(axis_tuple(axis)):
        return (
            f"axis {axis!r} is not bound here, and the mesh has {names}: pass axis= with the one of the workers, such "
            f"as axis={names[0]!r}, or axis=None for a single worker"
        )
    text = (
        f"axis {axis!r} is not bound here: run the step with distribute(step, mesh) or simulate(step, workers) over "
        "that axis, or pass axis=None for a single worker"
    )
    plain = "; a step that stays a plain jax.jit needs jax.set_mesh(mesh), and axis= with an axis of it"
    return text if names else f"{text}{plain}, see docs/how-to/keep-your-shardings.md"


def _size(axes: Axes) -> int:
    return math.prod(lax.axis_size(name) for name in axes)


def _collectives(axes: Axes) -> dict[str, Any]:
    if not mesh_axes_being_mapped().issuperset(axes):
        return _UNDER_VMAP
    return _ON_MESH if _size(axes) > 1 else _ALONE_ON_MESH


def _max(axes: Axes, x: Array) -> Array:
    check_ordered(x)
    return _max_of_floats(x, axes) if _is_floating(x) else lax.pmax(x, axes)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _max_of_floats(x: Array, axes: Axes) -> Array:
    # Of floats it depends on the wiring whether NaN, or a number, wins: between processes even on the rank.
    return from_ordered_bits(lax.pmax(ordered_bits(x), axes), x.dtype)


@_max_of_floats.defjvp
def _derivative_of_max(axes: Axes, primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[Array, Array]:
    (x,), (tangent,) = primals, tangents
    found = _max_of_floats(x, axes)
    wide = jnp.promote_types(x.dtype, jnp.float32) if x.dtype.itemsize > 1 else jnp.float32
    share = (ordered_bits(x) == ordered_bits(found)).astype(wide)
    share = share / lax.psum(share, axes)
    return found, lax.psum(share * tangent.astype(wide), axes).astype(x.dtype)


def _mesh_sum(axes: Axes, x: Array) -> Array:
    check_number(x)
    return _add_in_words(axes, x) if _is_floating(x) and x.dtype.itemsize == 1 else lax.psum(x, axes)


def _mesh_mean(axes: Axes, x: Array) -> Array:
    check_number(x)
    size = _size(axes)

    def sum_on_the_wire(x):
        # Divide first: the sum of W half-precision numbers overflows.
        return lax.psum(x * jnp.asarray(1 / size, x.dtype), axes)

    if not _is_floating(x) or x.dtype.itemsize >= 4:
        return lax.pmean(divisible(x), axes)
    if x.dtype.itemsize == 1:
        return _add_in_words(axes, x, mean=True)
    # XLA:CPU does not widen float16, but gloo adds it slowly: one collective is faster while arrays are short.
    if x.dtype == jnp.float16 and not is_long(x):
        return sum_on_the_wire(x)
    return choose_faster(x, plain=sum_on_the_wire, cpu=lambda x: _reduce_in_words(axes, x, mean=True))


def _add_in_words(axes: Axes, x: Array, *, mean: bool = False) -> Array:
    """The sum or mean of 8-bit floats, which a wire would add in a few bits, if it can at all."""
    scale = 1 / _size(axes) if mean else 1
    # As with all words, their derivative is that of another form.
    in_words = jax.custom_jvp(lambda x: _reduce_in_words(axes, x, mean=mean))
    derivative = lambda t: lax.psum(t.astype(jnp.float32) * scale, axes).astype(t.dtype)  # noqa: E731
    in_words.defjvp(lambda primals, tangents: (in_words(*primals), derivative(*tangents)))
    return in_words(x)


def _reduce_in_words(axes: Axes, x: Array, *, mean: bool) -> Array:
    """The sum or mean of narrow floats, added in float32: sends their words, and the bytes of an all-reduce."""
    size = _size(axes)
    # A gather sends the same bytes between two workers, at once.
    if size <= 2:
        return combine_rows(_from_words(_gather_words(axes, _to_words(x), to="invarying"), x), mean=mean)
    rows = jnp.pad(x.ravel(), (0, -x.size % size)).reshape(size, -1)
    shard = combine_rows(_mesh_all_to_all(axes, rows), mean=mean)
    return _gather_words(axes, shard, to="invarying").ravel()[: x.size].reshape(x.shape)


def _mesh_all_gather(axes: Axes, x: Array, *, agreed: bool = True) -> Array:
    check_bytes(x)
    # JAX's transpose of a replicated gather takes this worker's part of a gradient that types have summed already.
    if agreed and types_are_checked(axes):
        return _gather_words(axes, x, to="invarying")
    gather = jax.custom_jvp(partial(_gather_words, axes))

    def derive(primals, tangents):
        rows = cast_varying(jnp.zeros((_size(axes), *x.shape), x.dtype), varying_axes(*primals) | frozenset(axes))
        # Its transpose is a reduce-scatter in the form that is right on every platform, and of few bytes.
        _, transpose = jax.vjp(partial(_mesh_reduce_scatter_mean, axes), rows)
        (rows,) = transpose(_mark_varying(axes, *tangents))
        return gather(*primals), rows * jnp.asarray(_size(axes), rows.dtype)

    gather.defjvp(derive)
    return gather(x)


def _gather_words(axes: Axes, x: Array, **typed: Any) -> Array:
    gather = partial(lax.all_gather, axis_name=axes, **typed)

    def gather_tiles(words):
        return gather(jnp.pad(words, (0, _gather_padding(words))))[:, : words.size]

    def send(words):
        whole_tiles = words.ndim != 1 or not _gather_padding(words)
        plain = gather if whole_tiles else lambda words: lax.platform_dependent(words, tpu=gather_tiles, default=gather)
        if _size(axes) == 2 and is_compressed(x) and is_long(words):
            agreed = typed.get("to") == "invarying"
            return choose_faster(words, plain=plain, cpu=partial(gather_pair, axes, agreed=agreed))
        return plain(words)

    return _send_words(_mark_varying(axes, x), send=send, plain=gather)


def _mesh_all_to_all(axes: Axes, x: Array) -> Array:
    check_bytes(x)
    plain = partial(_exchange_rows, axes)

    def send(words):
        if words.shape[0] == _size(axes) == 2 and is_compressed(x) and is_long(words[0]):
            return choose_faster(words, plain=plain, cpu=partial(exchange_pair, axes))
        more = words.shape[0] == _size(axes) <= MOST_WORKERS
        if more and is_compressed(x) and is_long(words[0]):
            in_turns = partial(exchange_in_turns, axes, permute=partial(_permute, axes))
            return choose_faster(words, plain=plain, cpu=in_turns)
        return plain(words)

    return _send_words(_mark_varying(axes, x), send=send, plain=plain)


def _mesh_reduce_scatter_mean(axes: Axes, x: Array) -> Array:
    size = _size(axes)
    _check_rows(x, size)
    if _is_floating(x) and x.dtype.itemsize == 1:
        return combine_rows(_mesh_all_to_all(axes, x), mean=True)

    def scatter(x):
        return _scatter_rows(x * jnp.asarray(1 / size, x.dtype), axes)

    def exchange_tiles(x):
        # XLA:TPU makes an all-reduce of a reduce-scatter of float16. In whole tiles, since the rows of `[W, n]` are
        # interleaved in its words, and taking them apart is unrolled.
        rows = jnp.pad(x.reshape(size, -1), ((0, 0), (0, -x[0].size % _tile(x)))).reshape(size, -1, 128)
        return combine_rows(_mesh_all_to_all(axes, rows), mean=True).ravel()[: x[0].size].reshape(x.shape[1:])

    def scatter_tiles(x):
        if x.dtype == jnp.float16:
            return exchange_tiles(x)
        sizes = [lax.axis_size(name) for name in axes]
        unit = _tile(x) * _tile_multiple(-(-x[0].size // _tile(x)), max(sizes))
        rows = jnp.pad(x.reshape(size, -1) * jnp.asarray(1 / size, x.dtype), ((0, 0), (0, -x[0].size % unit)))
        # One axis after the other, fast links first: the same bytes, and fewer of them over slow links. Of three
        # dimensions the first, the last being 128: other forms became all-reduces, or megabytes of program.
        while sizes:
            rows = jnp.moveaxis(rows.reshape(*sizes, -1), len(sizes) - 1, 0).reshape(sizes.pop(), -1, 128)
            rows = _scatter_rows(rows, axes[len(sizes)])
        return rows.ravel()[: x[0].size].reshape(x.shape[1:])

    return lax.platform_dependent(
        _mark_varying(axes, x),
        cpu=lambda x: combine_rows(_mesh_all_to_all(axes, x), mean=True),
        tpu=scatter_tiles if x[0].size >= _tile(x) else scatter,
        default=scatter,
    )


def _scatter_rows(rows: Array, axes: AxisNames) -> Array:
    """`[W, ...] -> [...]`: this worker's row of the sum over workers."""
    # Without `tiled` jax 0.12 refuses meshes whose other axes are Explicit: it keeps the spec of the dimension.
    return lax.psum_scatter(rows, axes, scatter_dimension=0, tiled=True)[0]


def _mesh_permute(axes: Axes, x: Array, pairs: Sequence[tuple[int, int]]) -> Array:
    check_bytes(x, has_zero=True)
    check_permutation(pairs, _size(axes))
    plain = partial(_permute, axes, pairs=pairs)

    def send(words):
        if sorted(pairs) == [(0, 1), (1, 0)] and is_long(words):
            return choose_faster(words, plain=plain, cpu=partial(permute_pair, axes))
        return plain(words)

    return _send_words(_mark_varying(axes, x), send=send, plain=plain)


def _permute(axes: Axes, x: Array, pairs: Sequence[tuple[int, int]]) -> Array:
    names, placed = _in_mesh_order(axes, pairs)
    return lax.ppermute(x, names, placed)


def _in_mesh_order(axes: Axes, pairs: Sequence[tuple[int, int]]) -> tuple[Axes, Sequence[tuple[int, int]]]:
    """The same permutation over the axes in the order of the mesh, in which JAX numbers the workers of `ppermute`.

    All other collectives, and `axis_index`, number them in the order of the axes that they are given.
    """
    names = tuple(name for name in jax.sharding.get_abstract_mesh().axis_names if name in axes)
    if names == axes:
        return axes, pairs
    sizes = [lax.axis_size(name) for name in names]
    in_mesh = np.arange(math.prod(sizes)).reshape(sizes)
    numbers = in_mesh.transpose([names.index(name) for name in axes]).ravel().tolist()
    return names, [(numbers[source], numbers[destination]) for source, destination in pairs]


def _mark_varying(axes: Axes, x: Array) -> Array:
    return cast_varying(x, axes)


def _vmap_sum(axes: Axes, x: Array) -> Array:
    check_number(x)
    # Vmap would round to half precision at every worker.
    wide = x.astype(jnp.float32) if _is_floating(x) and x.dtype.itemsize < 4 else x
    return lax.psum(wide, axes).astype(x.dtype) if wide is not x else lax.psum(x, axes)


def _vmap_mean(axes: Axes, x: Array) -> Array:
    check_number(x)
    if not _is_floating(x) or x.dtype.itemsize >= 4:
        return lax.pmean(divisible(x), axes)
    return lax.pmean(x.astype(jnp.float32), axes).astype(x.dtype)


def _vmap_all_gather(axes: Axes, x: Array, *, agreed: bool = True) -> Array:
    del agreed
    check_bytes(x)
    return _gather_mapped(axes, x)


def _gather_mapped(axes: Axes, x: Array) -> Array:
    shape = x.shape
    # Vmap gathers one axis at a time.
    for name in reversed(axes):
        x = lax.all_gather(x, name)
    # Not -1, which is ambiguous for an empty array.
    return x.reshape(math.prod(x.shape[: len(axes)]), *shape)


def _vmap_all_to_all(axes: Axes, x: Array) -> Array:
    check_bytes(x)
    # vmap's all-to-all of an array that is not mapped has a wrong shape: map it by a condition that always holds.
    # Of no entries it is none, which vmap refuses to divide.
    return _exchange_rows(axes, jnp.where(lax.axis_index(axes) >= 0, x, x)) if x.size else x


def _vmap_reduce_scatter_mean(axes: Axes, x: Array) -> Array:
    _check_rows(x, _size(axes))
    return combine_rows(_vmap_all_to_all(axes, x), mean=True)


def _vmap_permute(axes: Axes, x: Array, pairs: Sequence[tuple[int, int]]) -> Array:
    size = _size(axes)
    check_bytes(x, has_zero=True)
    check_permutation(pairs, size)
    # Vmap permutes all workers or none.
    complete = complete_permutation(pairs, size)
    # And along one axis only.
    if len(axes) > 1:
        source = {destination: source for source, destination in complete}
        out = _gather_mapped(axes, x)[jnp.array([source[i] for i in range(size)])[lax.axis_index(axes)]]
    else:
        out = lax.ppermute(x, axes, complete)
    if len(pairs) == size:
        return out
    destinations = {destination for _, destination in pairs}
    receives = jnp.array([i in destinations for i in range(size)])
    return jnp.where(receives[lax.axis_index(axes)], out, jnp.zeros_like(out))


def _exchange_rows(axes: Axes, x: Array) -> Array:
    return lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)


def _check_rows(x: Array, size: int) -> None:
    check_number(x, inexact=True)
    if x.shape[0] != size:
        raise ValueError(f"reduce_scatter_mean needs one row for each of the {size} workers, got shape {x.shape}")


def _is_floating(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _send_words(x: Array, *, send: Callable[[Array], Array], plain: Callable[[Array], Array]) -> Array:
    """`send(x)`, narrow floats as words. These have no derivative: it is that of `plain(x)`, the same in any dtype."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(send(jax.random.key_data(x)), impl=jax.random.key_impl(x))
    if _to_words(x) is x:
        return send(x)
    in_words = jax.custom_jvp(lambda x: _from_words(send(_to_words(x)), x))
    in_words.defjvp(lambda primals, tangents: (in_words(*primals), plain(*tangents)))
    return in_words(x)


def _to_words(x: Array) -> Array:
    """Floats of 8 and 16 bits as unsigned integers of the same size: XLA:CPU would widen all but float16."""
    if _is_floating(x) and x.dtype.itemsize < 4:
        return lax.bitcast_convert_type(x, jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint8)
    return x


def _from_words(words: Array, like: Array) -> Array:
    return words if words.dtype == like.dtype else lax.bitcast_convert_type(words, like.dtype)


def _tile(x: Array) -> int:
    """The number of entries of a one-dimensional tile on TPU, 4 KiB."""
    return 1024 * max(1, 4 // x.dtype.itemsize)


def _gather_padding(x: Array) -> int:
    """The number of entries to add to a vector for its gather on TPU, so that it stays one.

    XLA:TPU turns it into an all-reduce of the whole result unless a device sends a multiple of 128 entries. Of narrow
    ones it fills a buffer of whole tiles with a multiple of 1024, and pads all others to four bytes an entry.
    """
    return -x.size % (1024 if x.dtype.itemsize < 4 and x.size >= 1024 else 128)


def _is_padded_on_tpu(x: Array) -> bool:
    """Whether the buffer of an array of narrow entries is more than an eighth longer on TPU than its entries.

    Its two last dimensions are cut into tiles of 1 to 8 words times 128, in the order that needs fewer: of a row
    `[1, n]` of bytes three quarters are empty, and of a kernel `[3, 3, 64, 64]` one half.
    """
    if x.ndim < 2 or x.dtype.itemsize >= 4 or x.size < 1024:
        return False

    def fill(rows: int, width: int) -> int:
        height = min(8, max(4 // x.dtype.itemsize, 2 ** (rows - 1).bit_length()))
        return -(-rows // height) * height * -(-width // 128) * 128

    *rest, rows, width = x.shape
    return math.prod(rest) * min(fill(rows, width), fill(width, rows)) > 1.125 * x.size


def _send_flat(collective: Callable[..., Array], axes: Axes, x: Array, *args: Any, **options: Any) -> Array:
    """A collective of entries, of a vector where the array would be padded on TPU."""
    # Flattening would gather the mesh axes that the compiler shards.
    if not _is_padded_on_tpu(x) or mesh_axes_left_over():
        return collective(axes, x, *args, **options)
    # XLA would move the change of shape behind the collective.
    sent = collective(axes, lax.optimization_barrier(x.ravel()), *args, **options)
    return lax.optimization_barrier(sent).reshape(*sent.shape[:-1], *x.shape)


def _tile_multiple(tiles: int, chips: int) -> int:
    """The multiple to which to pad the number of tiles of a reduce-scatter on TPU, so that it stays one.

    XLA:TPU turns it into an all-reduce if the number of tiles is odd, is not a multiple of 8 on 128 chips, or has too
    large an odd factor: at most 151 on 8 chips of an axis, 91 on 16, 49 on 32 and 13 on 128. A power of two that
    divides it no more than `1800 / (chips + 4)` times avoids that, and adds a few per cent to many tiles.
    """
    if tiles <= 4:
        return 2
    times = max(1, 1800 // (chips + 4))
    return 2 ** max(3, (-(-tiles // times) - 1).bit_length())


def _replicate_alone(collective: Callable[[Axes, Array], Array], axes: Axes, x: Array) -> Array:
    # The collectives of JAX turn some integers into other numbers, even for one worker.
    return assume_replicated(x, axes) if _is_floating(x) else collective(axes, x)


def _gather_alone(axes: Axes, x: Array, *, agreed: bool = True) -> Array:
    return assume_replicated(x[None], axes) if agreed else _mark_varying(axes, x)[None]


def _scatter_alone(axes: Axes, x: Array) -> Array:
    _check_rows(x, 1)
    return _mark_varying(axes, x)[0]


def _permute_alone(axes: Axes, x: Array, pairs: Sequence[tuple[int, int]]) -> Array:
    return _mark_varying(axes, alone().ppermute(x, pairs))


# The functions of a group for single arrays: under `shard_map`, and under `vmap`, which types nothing.
_ON_MESH = {
    "sum": _mesh_sum,
    "max": _max,
    "mean": _mesh_mean,
    "all_gather": _mesh_all_gather,
    "all_to_all": _mesh_all_to_all,
    "reduce_scatter_mean": _mesh_reduce_scatter_mean,
    "ppermute": _mesh_permute,
    "varying": _mark_varying,
}
_ON_MESH |= {name: partial(_send_flat, _ON_MESH[name]) for name in ("sum", "mean", "all_gather", "ppermute")}
_UNDER_VMAP = {
    "sum": _vmap_sum,
    "max": _max,
    "mean": _vmap_mean,
    "all_gather": _vmap_all_gather,
    "all_to_all": _vmap_all_to_all,
    "reduce_scatter_mean": _vmap_reduce_scatter_mean,
    "ppermute": _vmap_permute,
    "varying": lambda axes, x: x,
}

# Of one worker they are identities, with the types that collectives give. XLA:CPU does not know that: it would pack the
# arrays of an all-reduce, copy them and unpack them, which takes longer than Adam.
_ALONE_ON_MESH = {
    "sum": partial(_replicate_alone, _mesh_sum),
    "max": partial(_replicate_alone, _max),
    "mean": partial(_replicate_alone, _mesh_mean),
    "all_gather": _gather_alone,
    "all_to_all": _mark_varying,
    "reduce_scatter_mean": _scatter_alone,
    "ppermute": _permute_alone,
    "varying": _mark_varying,
}
