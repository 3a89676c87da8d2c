"""The one file that talks to other workers.

A `Comm` is one group of workers as one of them sees it. Its functions map over pytrees, type-check under `shard_map`'s
replication checking, and give the same numbers under `vmap` (simulation). Three traps are dealt with here, once:

- What all workers end up with (a mean, a gather) is typed *invariant*, so it may leave `shard_map` as agreed state.
- XLA:CPU widens bf16 and fp8 in every collective: they travel as u16 and u8 words.
- XLA:CPU's reduce-scatter returns wrong numbers for large chunks (jax-ml/jax#40830): there it is an all-to-all and a
  local sum. The choice is `lax.platform_dependent`, so a program compiled for a TPU on a CPU machine gets the TPU's
  form.
- XLA:TPU makes an all-reduce, twice the bytes, of a gather or a reduce-scatter of pieces that do not fill its tiles,
  or that have an odd number of them: there they are padded. On square slices (4x4, 8x8) it does so with every
  reduce-scatter over one axis of all chips; two axes, one for each side of the square, get two real ones.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._core.compat import mesh_axes_being_mapped, varying_axes
from .._core.types import Array, AxisNames
from ..state.marks import axis_tuple
from .base import Comm as Comm
from .base import Sent as Sent
from .base import check_permutation, completed
from .counted import cond as cond
from .counted import counted as counted
from .counted import switch as switch
from .counted import total_bytes as total_bytes
from .groups import alone as alone
from .groups import grouped as grouped
from .groups import nested as nested


def over(axis: AxisNames) -> Comm:
    """The workers along one mesh axis, or along several (`("pod", "data")`: slow links first).

    Call it where the axis is bound: inside `distribute`, `simulate`, `shard_map` or `vmap(axis_name=...)`.

    Args:
      axis: the name or names; `None` is `alone()`.

    Returns:
      The group; with several axes its `.inner` is the last one and its `.outer` the others.

    Raises:
      ValueError: the axis is not bound here.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxdist import comm
      >>> jax.vmap(lambda x: comm.over("data").mean(x), axis_name="data")(jnp.array([1.0, 3.0])).tolist()
      [2.0, 2.0]
    """
    axes = axis_tuple(axis)
    if not axes:
        return alone()
    try:
        size = math.prod(lax.axis_size(name) for name in axes)
    except NameError:
        raise ValueError(
            f"axis {axis!r} is not bound here: run the step with distribute(step, mesh) or simulate(step, workers) "
            f"over that axis, or pass axis=None for a single worker"
        ) from None
    by_hand = mesh_axes_being_mapped().issuperset(axes)
    varying = partial(_varying, axes) if by_hand else lambda x: x
    gather = _mesh_gather(axes, varying) if by_hand else _simulated_gather(axes)
    exchange = partial(_exchange, axes, varying if by_hand else partial(_mapped, axes))
    scatter = partial(_reduce_scatter_mean, axes, size, by_hand, exchange, varying)

    def permute(x, pairs):
        check_permutation(pairs, size)
        if by_hand:
            return _unword(lax.ppermute(_word(varying(x)), axes, pairs), x)
        whole = completed(pairs, size)  # vmap permutes all workers or none
        if len(axes) > 1:  # and one axis only
            source = dict((destination, source) for source, destination in whole)
            out = gather(x)[jnp.array([source[i] for i in range(size)])[lax.axis_index(axes)]]
        else:
            out = lax.ppermute(x, axes, whole)
        if len(pairs) == size:
            return out
        reached = jnp.array([i in {destination for _, destination in pairs} for i in range(size)])
        return jnp.where(reached[lax.axis_index(axes)], out, jnp.zeros_like(out))

    return Comm(
        size=size,
        index=lax.axis_index(axes),
        mean=partial(jax.tree.map, partial(_mean, axes, size, by_hand, gather, scatter)),
        sum=partial(jax.tree.map, lambda x: lax.psum(x, axes)),
        max=partial(jax.tree.map, lambda x: lax.pmax(x, axes)),
        all_gather=lambda tree, *, agreed=True: jax.tree.map(
            gather if agreed else _differentiable_gather(axes, gather, scatter, varying, by_hand), tree
        ),
        all_to_all=partial(jax.tree.map, exchange),
        reduce_scatter_mean=partial(jax.tree.map, scatter),
        ppermute=lambda tree, pairs: jax.tree.map(lambda x: permute(x, pairs), tree),
        varying=partial(jax.tree.map, varying),
        inner=over(axes[-1]) if len(axes) > 1 else None,
        outer=over(axes[:-1]) if len(axes) > 1 else None,
    )


def _is_floating(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _word(x: Array) -> Array:
    """What XLA:CPU would widen travels as words of its own size."""
    if _is_floating(x) and x.dtype.itemsize < 4 and x.dtype != jnp.float16:
        return lax.bitcast_convert_type(x, jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint8)
    return x


def _unword(words: Array, like: Array) -> Array:
    return words if words.dtype == like.dtype else lax.bitcast_convert_type(words, like.dtype)


def _varying(axes: tuple[str, ...], x: Array) -> Array:
    missing = tuple(name for name in axes if name not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def _mapped(axes: tuple[str, ...], x: Array) -> Array:
    """Mapped by `vmap`, whose all-to-all of what is the same for all workers has a wrong shape."""
    return jnp.where(lax.axis_index(axes) >= 0, x, x)


def _tile(x: Array) -> int:
    """The entries of a tile of one dimension on TPU, 4 KiB."""
    return 1024 * max(1, 4 // x.dtype.itemsize)


def _rows(tiles: int, chips: int) -> int:
    """What the number of tiles of a reduce-scatter must divide by on TPU, where it should stay one.

    XLA:TPU makes an all-reduce of it if that number is odd, is not a multiple of 8 on 128 chips, or has too large an
    odd factor: what passes is at most 151 on 8 chips of an axis, 91 on 16, 49 on 32 and 13 on 128. A power of two that
    goes into it no more than `1800 / (chips + 4)` times keeps that, and adds a few per cent to many tiles.
    """
    if tiles <= 4:
        return 2
    times = max(1, 1800 // (chips + 4))
    return 2 ** max(3, (-(-tiles // times) - 1).bit_length())


def _gather(axes: tuple[str, ...], varying: Callable, x: Array, **typed: Any) -> Array:
    def plain(words):
        return lax.all_gather(words, axes, **typed)

    def in_tiles(words):
        return plain(jnp.pad(words, (0, -words.size % _tile(words))))[:, : words.size]

    words = _word(varying(x))
    if words.ndim != 1 or words.size < _tile(words) or words.size % _tile(words) == 0:
        return _unword(plain(words), x)
    return _unword(lax.platform_dependent(words, tpu=in_tiles, default=plain), x)


def _mesh_gather(axes: tuple[str, ...], varying: Callable) -> Callable[[Array], Array]:
    return lambda x: _gather(axes, varying, x, to="invarying")


def _simulated_gather(axes: tuple[str, ...]) -> Callable[[Array], Array]:
    def gather(x):
        shape = x.shape
        for name in reversed(axes):  # vmap gathers one axis at a time
            x = lax.all_gather(x, name)
        return x.reshape(math.prod(x.shape[: len(axes)]), *shape)  # not -1, which an array without entries leaves open

    return gather


def _differentiable_gather(axes, gather, scatter, varying, by_hand):
    """A gather typed varying, whose gradient is the mean of everybody's gradient for this worker's part."""

    @jax.custom_vjp
    def forward(x):
        return _gather(axes, varying, x) if by_hand else gather(x)

    forward.defvjp(lambda x: (forward(x), None), lambda _, g: (scatter(g),))
    return forward


def _exchange(axes: tuple[str, ...], varying: Callable, x: Array) -> Array:
    return _unword(lax.all_to_all(_word(varying(x)), axes, split_axis=0, concat_axis=0, tiled=True), x)


def _local_mean(x: Array) -> Array:
    """The mean over the first dimension, in float32 or better."""
    wide = x.dtype if x.dtype.itemsize > 4 else jnp.float32  # by hand: 8-bit floats have no promotion
    return x.astype(wide).mean(0).astype(x.dtype)


def _mean(axes, size, by_hand, gather, scatter, x: Array) -> Array:
    if not _is_floating(x) or x.dtype.itemsize >= 4:
        return lax.pmean(x, axes)
    if not by_hand:
        return lax.pmean(x.astype(jnp.float32), axes).astype(x.dtype)

    def on_the_wire(x):  # divide first: the sum of W half-precision numbers overflows
        return lax.psum(x * jnp.asarray(1 / size, x.dtype), axes)

    def as_words(x):
        if size <= 2:  # XLA:CPU's all-to-all is half duplex: two workers exchange faster by a gather
            return _local_mean(gather(x))
        rows = jnp.pad(x.ravel(), (0, -x.size % size)).reshape(size, -1)
        return gather(scatter(rows)).ravel()[: x.size].reshape(x.shape)

    if x.dtype == jnp.float16:
        return on_the_wire(x)
    return lax.platform_dependent(x, cpu=as_words, default=on_the_wire)


def _reduce_scatter_mean(axes, size, by_hand, exchange, varying, x: Array) -> Array:
    if x.shape[0] != size:
        raise ValueError(f"reduce_scatter_mean needs one row for each of the {size} workers, got shape {x.shape}")
    if not by_hand:
        return _local_mean(exchange(x))

    def scatter(x):
        return lax.psum_scatter(x * jnp.asarray(1 / size, x.dtype), axes, scatter_dimension=0)

    def in_tiles(x):
        sizes = [lax.axis_size(name) for name in axes]
        unit = _tile(x) * _rows(-(-x[0].size // _tile(x)), max(sizes))
        rows = jnp.pad(x.reshape(size, -1) * jnp.asarray(1 / size, x.dtype), ((0, 0), (0, -x[0].size % unit)))
        # One axis after the other, fast links first: the same bytes, and fewer of them over slow links. Of three
        # dimensions the first, the last being 128: other forms became all-reduces, or megabytes of program.
        while sizes:
            rows = jnp.moveaxis(rows.reshape(*sizes, -1), len(sizes) - 1, 0).reshape(sizes.pop(), -1, 128)
            rows = lax.psum_scatter(rows, axes[len(sizes)], scatter_dimension=0)
        return rows.ravel()[: x[0].size].reshape(x.shape[1:])

    tpu = in_tiles if x[0].size >= _tile(x) else scatter
    return lax.platform_dependent(varying(x), cpu=lambda x: _local_mean(exchange(x)), tpu=tpu, default=scatter)
