"""Detours around what XLA does to plain code, each with its reason, as of jax 0.10.

Results are those of the plain form (sums: up to rounding). A test fails where a detour can be seen to be unnecessary.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import DTypeLike, Inexact, Num

from .branches import bind
from .compat import REORDERS_PRODUCTS
from .types import Array, Float, Int, Shaped

# The entries that one reduction of a maximum takes together.
STEP = 8
# The numbers that `running_sum` adds in one product; on TPUs those of a row of a vector's tiles.
ROW, LANES = 32, 128
# Up to this many rows are added as so many slices.
MOST_SLICES = 64
# The entries of a dimension up to which XLA:CPU reduces what it computes without writing it to memory.
FUSED = 32
# Rows from this length up are added in blocks of `ROW` vectors of this many numbers.
LONG, BLOCK = 2**16, 256


def hide_constants(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns the float32 `x`; XLA cannot reorder products across it. It costs nothing.

    For a constant c the XLA of jax 0.10 computes `(c r)²` as `c² r²` and `(c r) u` as `r (c u)`, where c² or c u may
    overflow, or be flushed to zero. That of jax 0.12 does not.
    """
    # XLA:GPU does not fuse what is before a barrier with what is behind it, which XLA:CPU does.
    # Of jax 0.12 it would write the array there.
    on_cpu = lax.optimization_barrier if REORDERS_PRODUCTS else lambda x: x
    return lax.platform_dependent(x, cpu=on_cpu, default=_with_hidden_zero)


def _with_hidden_zero(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    # The bits of x or nothing, which only the barrier knows to be nothing.
    nothing = lax.optimization_barrier(jnp.int32(0))
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) | nothing, jnp.float32)


def run_apart(f: Callable[[Any], Array], x: Any) -> Shaped[Array, "..."]:
    """Returns the integers `f(x)`; XLA:CPU fuses what is in `f` neither with what makes `x` nor with what follows."""
    # A fused reshape makes a loop over one dimension of one over several, with divisions in place of a row of entries
    # to load: ten times slower. XLA:CPU fuses across an optimization barrier, but not into a branch; the predicate is
    # one that only the barrier knows.
    always = lax.optimization_barrier(jnp.int32(0)) == 0
    return lax.cond(always, f, lambda x: f(x) & 0, x)


def reduce_all(reduce: Callable[..., Array], x: Shaped[Array, "..."]) -> Shaped[Array, ""]:
    """Returns `reduce(x)` of all entries, as `jnp.sum` or `jnp.all`, without an array of what makes `x`.

    XLA:CPU reduces long dimensions in steps, and writes all entries to memory before the first.
    """
    flat = x.reshape(-1)
    whole = flat.size // FUSED * FUSED
    # The barrier keeps XLA from merging both steps into one.
    rows = lax.optimization_barrier(reduce(flat[:whole].reshape(-1, FUSED), axis=1))
    return reduce(jnp.concatenate([rows, flat[whole:].astype(rows.dtype)]))


def largest_entry(
    x: Num[Array, "..."], axis: int | Sequence[int] | None = None, *, keepdims: bool = False, initial: Any = None
) -> Num[Array, "..."]:
    """`jnp.max`, where NaN wins as in NumPy, and 0 is larger than -0. `initial` counts as one more entry.

    `jnp.max` of XLA:CPU loses NaN from 4,096 entries on. Entries that share the maximum share its gradient.
    """
    # Of no entries it is `initial`, or JAX's error.
    if not jnp.issubdtype(x.dtype, jnp.floating) or not x.size:
        return jnp.max(x, axis=axis, keepdims=keepdims, initial=initial)
    axes = tuple(range(x.ndim)) if axis is None else tuple(sorted({i % x.ndim for i in np.atleast_1d(axis).tolist()}))
    found = _largest_float(x, axes)
    found = found if initial is None else jnp.maximum(found, jnp.asarray(initial, x.dtype))
    return found if keepdims else jnp.squeeze(found, axes)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _largest_float(x: Array, axes: tuple[int, ...]) -> Array:
    return lax.platform_dependent(
        x, cpu=bind(_largest_by_bits, axes=axes), default=bind(jnp.max, axis=axes, keepdims=True)
    )


@_largest_float.defjvp
def _derivative_of_largest(axes: tuple[int, ...], primals: Sequence[Array], tangents: Sequence[Array]) -> Any:
    (x,), (tangent,) = primals, tangents
    found = _largest_float(x, axes)
    share = (ordered_bits(x) == ordered_bits(found)).astype(x.dtype)
    share = share / jnp.sum(share, axes, keepdims=True)
    return found, jnp.sum(share * tangent, axes, keepdims=True)


def _largest_by_bits(x: Array, *, axes: tuple[int, ...]) -> Array:
    # Narrower floats are exact in float32.
    wide = x if x.dtype.itemsize >= 4 else x.astype(jnp.float32)
    bits, first = ordered_bits(wide), x.ndim - len(axes)
    # XLA:CPU vectorizes the maximum of integers, and in the last dimension that of short rows only.
    if axes == tuple(range(first, x.ndim)):
        bits = jnp.expand_dims(
            _largest_of_rows(bits.reshape(math.prod(x.shape[:first]), -1)).reshape(x.shape[:first]), axes
        )
    else:
        bits = jnp.max(bits, axis=axes, keepdims=True)
    return from_ordered_bits(bits, wide.dtype).astype(x.dtype)


def smallest_entry(
    x: Num[Array, "..."], axis: int | Sequence[int] | None = None, *, keepdims: bool = False, initial: Any = None
) -> Num[Array, "..."]:
    """`jnp.min`, where NaN wins as in NumPy: see `largest_entry`."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.min(x, axis=axis, keepdims=keepdims, initial=initial)
    return -largest_entry(-x, axis, keepdims=keepdims, initial=None if initial is None else -initial)


def largest_magnitude(rows: Float[Array, "rows width"]) -> Float[Array, "rows 1"]:
    """`max |x|` of each float32 row; NaN where there is one. Rows have at least one entry."""
    return lax.platform_dependent(rows, cpu=_largest_magnitude_by_bits, default=_largest_magnitude)


def _largest_magnitude_by_bits(rows: Float[Array, "rows width"]) -> Float[Array, "rows 1"]:
    # As integers, the bits of floats that are not negative have the order of the floats, NaN last.
    bits = _largest_of_rows(lax.bitcast_convert_type(rows, jnp.int32) & 0x7FFFFFFF)
    return lax.bitcast_convert_type(bits, jnp.float32)[:, None]


def _largest_magnitude(rows: Float[Array, "rows width"]) -> Float[Array, "rows 1"]:
    return jnp.max(jnp.abs(rows), axis=1, keepdims=True)


def _largest_of_rows(x: Int[Array, "rows width"]) -> Int[Array, " rows"]:
    # XLA:CPU vectorizes only the maximum of integers, and only of short rows: in steps it is up to twenty times faster.
    rests = []
    while x.shape[1] > STEP:
        whole = x.shape[1] // STEP * STEP
        # The entries behind the last step of a row of another length.
        if whole < x.shape[1]:
            rests.append(jnp.max(x[:, whole:], axis=1))
        # The barrier keeps XLA from merging all steps into one reduction.
        x = lax.optimization_barrier(jnp.max(x[:, :whole].reshape(x.shape[0], whole // STEP, STEP), axis=2))
    return reduce(jnp.maximum, rests, jnp.max(x, axis=1))


def ordered_bits(x: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Integers of the same width in the order of the floats: -inf, numbers, -0, 0, numbers, inf, NaN of all signs."""
    word = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    bits = lax.bitcast_convert_type(x, word)
    # Behind its sign a float has its magnitude: of two negative ones the larger comes first.
    bits = bits ^ (bits >> 8 * word.itemsize - 1 & jnp.iinfo(word).max)
    return jnp.where(jnp.isnan(x), jnp.iinfo(word).max, bits)


def from_ordered_bits(bits: Int[Array, "*shape"], dtype: DTypeLike) -> Float[Array, "*shape"]:
    """The floats of `ordered_bits`."""
    word = bits.dtype
    return lax.bitcast_convert_type(bits ^ (bits >> 8 * word.itemsize - 1 & jnp.iinfo(word).max), dtype)


def sum_rows(rows: Float[Array, "rows width"]) -> Float[Array, "rows 1"]:
    """The sum of each row."""
    # XLA:CPU vectorizes only the sums in a product with a vector from the left: this is fifteen times faster.
    return lax.platform_dependent(
        rows,
        cpu=_sum_long_rows if rows.shape[1] >= LONG else _sum_by_product,
        default=bind(jnp.sum, axis=1, keepdims=True),
    )


def _sum_by_product(rows: Float[Array, "rows width"]) -> Float[Array, "rows 1"]:
    return (jnp.ones(rows.shape[1], rows.dtype) @ rows.T)[:, None]


def _sum_long_rows(rows: Float[Array, "rows width"]) -> Float[Array, "rows 1"]:
    # And the sums over a dimension that is not the last one. Under `vmap` a product copies long rows, transposed.
    count, block = rows.shape[0], BLOCK * ROW
    padded = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % block)))
    sums = jnp.sum(padded.reshape(count, -1, ROW, BLOCK), axis=2).reshape(count, -1)
    while sums.shape[1] > 8:
        sums = jnp.sum(jnp.pad(sums, ((0, 0), (0, -sums.shape[1] % 8))).reshape(count, -1, 8), axis=2)
    return jnp.sum(sums, axis=1, keepdims=True)


def add_rows(rows: Inexact[Array, "count ..."]) -> Inexact[Array, "..."]:
    """The sum over the first dimension, of at least one row of float32 or wider."""
    # XLA:CPU adds slices as vectors, and fuses conversions; its reduction over the first dimension takes 4 to 18 times
    # as long, and with conversions from 16 bits on several devices of one process 70 times.
    if rows.shape[0] <= MOST_SLICES:
        return sum(rows[1:], rows[0])
    return jnp.sum(rows, axis=0)


def sum_vector(x: Float[Array, " size"]) -> Float[Array, ""]:
    """The sum, exact to a few units in the last place."""
    # As a tree of eights, which XLA:CPU adds as vectors.
    while x.shape[0] > 8:
        x = jnp.sum(jnp.pad(x, (0, -x.shape[0] % 8)).reshape(-1, 8), axis=1)
    return jnp.sum(x)


def sum_counts(counts: Int[Array, "*rows width"]) -> Int[Array, "*rows"]:
    """The sum of each row of integers."""
    # Eighths are added as vectors first, since XLA:CPU adds the numbers of a row one by one.
    while counts.shape[-1] >= 1024:
        counts = jnp.pad(counts, [(0, 0)] * (counts.ndim - 1) + [(0, -counts.shape[-1] % 64)])
        eighth = counts.shape[-1] // 8
        parts = [lax.slice_in_dim(counts, i * eighth, (i + 1) * eighth, axis=-1) for i in range(8)]
        counts = sum(parts[1:], parts[0])
    return jnp.sum(counts, axis=-1, dtype=jnp.int32)


def running_sum(x: Int[Array, " size"], *, most: int) -> Int[Array, " size"]:
    """`jnp.cumsum` of counts, each below `2**17` or all together below `2**24`, whose sum is at most `most`."""
    # In two levels, of which the lower is a product with a triangular matrix.
    return lax.platform_dependent(x, tpu=_running_sum_of_lanes, default=bind(_running_sum_of_rows, most))


def _running_sum_of_lanes(x: Int[Array, " size"]) -> Int[Array, " size"]:
    # In the tiles of a vector on TPUs: a third of the program of shorter rows, and half that of `jnp.cumsum`.
    rows = jnp.pad(x, (0, -x.shape[0] % LANES)).reshape(-1, LANES)
    totals = jnp.sum(rows, axis=1, dtype=jnp.int32)
    sums = _multiply(rows.astype(jnp.float32), jnp.triu(jnp.ones((LANES, LANES), jnp.float32))).astype(jnp.int32)
    return (sums + (jnp.cumsum(totals) - totals)[:, None]).reshape(-1)[: x.shape[0]]


def _running_sum_of_rows(most: int, x: Int[Array, " size"]) -> Int[Array, " size"]:
    # Several times as fast as `jnp.cumsum` on XLA:CPU.
    rows = jnp.pad(x, (0, -x.shape[0] % ROW)).reshape(-1, ROW).astype(jnp.float32)
    totals = _multiply(rows, jnp.ones(ROW, jnp.float32)).astype(jnp.int32)
    before = (jnp.cumsum(totals) - totals)[:, None]
    # XLA:CPU would repeat the addition of `before`, and part of its sum, in every use of the result. As a column of the
    # product it is added once, where float32 can hold the result.
    column = before if most < 2**24 else jnp.zeros_like(before)
    shape = ROW + 1, ROW
    upper = lax.broadcasted_iota(jnp.int32, shape, 0) <= lax.broadcasted_iota(jnp.int32, shape, 1) + 1
    rows = jnp.concatenate([column.astype(jnp.float32), rows], axis=1)
    sums = _multiply(rows, upper.astype(jnp.float32)).astype(jnp.int32)
    return (sums if most < 2**24 else sums + before).reshape(-1)[: x.shape[0]]


def _multiply(x: Float[Array, "..."], y: Float[Array, "..."]) -> Float[Array, "..."]:
    # Exact for counts, which some backends multiply in lower precision by default.
    return jnp.dot(x, y, precision=lax.Precision.HIGHEST)
