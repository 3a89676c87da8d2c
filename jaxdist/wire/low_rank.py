"""Low-rank factors of stacked matrices: products, orthonormal bases, and which leaves are worth factoring."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core.dtypes import working_dtype
from .._core.types import Array, Like, PyTree, Shape
from .._core.xla_quirks import largest_entry

# Matrices of up to this many elements and similar shapes are stacked, since each separate product adds to the compile
# time. Larger ones are not, since stacking copies them.
STACKED_SIZE = 2**16

# Columns for each matrix of a stack, from which a solver's QR is faster than a loop over the columns.
SOLVER_RANK = 12

# Stacks of fewer matrices are unstacked by slices at constant indices.
MANY = 16

# The sides of a matrix `[n, m]`, whose factors are `[n, r]` and `[m, r]`.
LEFT, RIGHT = 0, 1

# `(n, m, r)` of a leaf to compress, from its shape; None for one to send whole.
View = Callable[[Shape], tuple[int, int, int] | None]


class MatrixGroup(NamedTuple):
    """Leaves whose matrices `[n, m]` are stacked: equally wide and nearly equally tall; or a single large leaf."""

    leaves: list[int]
    shapes: list[tuple[int, int]]
    dtype: jnp.dtype


def squarest_view(shape: Shape) -> tuple[int, int]:
    """The matrix view of a leaf: cut between leading and trailing dimensions where rows + columns are fewest.

    Examples:
      >>> from jaxdist.wire.low_rank import squarest_view
      >>> squarest_view((3, 3, 128, 256)), squarest_view((512, 8, 64))
      ((1152, 256), (512, 512))
    """
    cuts = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
    return min(reversed(cuts), key=sum)


def view_of(rank: int, min_compression_rate: float | int) -> View:
    """The view that compresses the leaves where it saves enough."""

    def view(shape):
        if len(shape) < 2 or 0 in shape:
            return None
        n, m = squarest_view(shape)
        r = min(rank, n, m)
        return (n, m, r) if (n + m) * r * min_compression_rate < n * m else None

    return view


def draw_factors(like: PyTree[Like], view: View, side: int, key: Array) -> PyTree:
    """Draws Gaussian factors of one side, `[n, r]` or `[m, r]`, for compressed leaves; others get a scalar zero.

    The tree is that of the updates, and orbax cannot write arrays without entries: hence the zeros.
    """

    def draw_factor(leaf, index):
        found = view(leaf.shape)
        if found is None:
            return jnp.zeros((), working_dtype(leaf.dtype))
        shape = (found[side], found[2])
        return jax.random.normal(jax.random.fold_in(key, index), shape, working_dtype(leaf.dtype))

    leaves, structure = jax.tree.flatten(like)
    return structure.unflatten([draw_factor(leaf, i) for i, leaf in enumerate(leaves)])


def group_leaves(leaves: Sequence[Array], view: View) -> tuple[list[MatrixGroup], list[int]]:
    """Groups leaves to compress, small ones by similar matrix shape; returns the positions of the other leaves too."""
    groups: dict[tuple, MatrixGroup] = {}
    rest = []
    for i, leaf in enumerate(leaves):
        found = view(leaf.shape)
        if found is None:
            rest.append(i)
            continue
        n, m, r = found
        alone = i if n * m > STACKED_SIZE else None
        dtype = jnp.dtype(working_dtype(leaf.dtype))
        group = groups.setdefault((_round_matrix(n), m, r, dtype, alone), MatrixGroup([], [], dtype))
        group.leaves.append(i)
        group.shapes.append((n, m))
    return list(groups.values()), rest


def _round_matrix(size: int) -> int:
    """Heights that count as nearly equal: less than a quarter of the smaller one is added to it."""
    step = max(1, (1 << (size - 1).bit_length()) // 8)
    return -(-size // step) * step


def stack_matrices(leaves: Sequence[Array], group: MatrixGroup) -> Array:
    """Stacks the matrices of a group, `[k, n, m]`."""
    matrices = [leaves[i].reshape(shape).astype(group.dtype) for i, shape in zip(group.leaves, group.shapes)]
    if len(matrices) == 1:
        return _stack(matrices)

    def stack_apart(*matrices: Array) -> Array:
        # XLA:TPU copies each to a constant place, by a kernel that is equal to no other: what computes the matrix would
        # be fused into it, and compiled again in each.
        return _stack([lax.optimization_barrier(matrix) for matrix in matrices])

    return lax.platform_dependent(*matrices, tpu=stack_apart, default=lambda *matrices: _stack(matrices))


def stack_factors(factors: Sequence[Array], group: MatrixGroup) -> Array:
    """Stacks the factors of a group, `[k, n, r]` or `[k, m, r]`."""
    return _stack([factors[i] for i in group.leaves])


def _stack(matrices: Sequence[Array]) -> Array:
    """Stacks matrices, with rows of zeros below the smaller ones."""
    # Not `jnp.pad`, which needs code for each matrix; this copies bytes.
    height = max(len(matrix) for matrix in matrices)
    blocks = [x for y in matrices for x in (y, jnp.zeros_like(y, shape=(height - len(y), y.shape[1]))) if len(x)]
    return jnp.concatenate(blocks).reshape(len(matrices), height, -1)


def pack_factors(groups: Sequence[MatrixGroup], stacks: Sequence[Array], side: int) -> list[Array]:
    """Removes the padding of stacked factors; only left ones, `[k, n, r]`, have any."""
    out = []
    for group, stacked in zip(groups, stacks, strict=True):
        filled = _row_mask(group)
        if side == LEFT and not filled.all():
            # Indexing rows is one kernel for a group; slices would be one for each shape.
            rows = stacked.reshape(-1, stacked.shape[2])
            stacked = rows.at[np.flatnonzero(filled).astype(np.int32)].get(mode="promise_in_bounds")
        out.append(stacked)
    return out


def unpack_factors(groups: Sequence[MatrixGroup], arrived: Sequence[Array], side: int) -> list[Array]:
    """The inverse of `pack_factors`; further arrays after those of the groups are ignored."""
    stacks = []
    for group, array in zip(groups, arrived):
        filled = _row_mask(group)
        if side == LEFT and not filled.all():
            # Indices past the end give zeros, the padding.
            indices = np.where(filled, np.cumsum(filled).reshape(filled.shape) - 1, len(array)).astype(np.int32)
            array = array.at[indices].get(mode="fill", fill_value=0)
        stacks.append(array)
    return stacks


def _row_mask(group: MatrixGroup) -> np.ndarray:
    """Marks the rows of stacked matrices that are not padding, `[k, n]`."""
    heights = np.array([n for n, _ in group.shapes])
    return np.arange(np.max(heights)) < heights[:, None]


def overflow_scale(terms: int, workers: int) -> float:
    """A power of two that keeps a mean of products with orthonormal columns of `terms` entries from overflowing.

    Such a product is at most `√terms` times the largest entry, and all-reduces add before they divide.
    """
    return 2.0 ** -math.ceil(math.log2(math.sqrt(terms) * workers))


def outer(left: Array, right: Array) -> Array:
    """Multiplies stacked factors: `[k, n, r]`, `[k, r, m]` -> `[k, n, m]`."""
    # XLA:CPU would fold a transposition of `left` into the product, which is then slower.
    return jnp.einsum("knr,krm->knm", lax.optimization_barrier(left), right)


def stack_indices(groups: Sequence[MatrixGroup], always: Array) -> list[Array]:
    """`0, 1, ...`, for the largest group; on CPU as scalars that the compiler does not know to be constant.

    XLA:CPU compiles equal kernels once. Slices of a stack at constant indices are all different, and hundreds of them
    were most of the compile time; slices at indices that are arguments are equal. `always` is true on all workers, but
    not a constant either.
    """
    number = max((len(group.leaves) for group in groups), default=0)

    def constants():
        return tuple(jnp.asarray(k, jnp.uint32) for k in range(number))

    def hidden(always):
        return lax.cond(always, constants, lambda: tuple(jnp.zeros((), jnp.uint32) for _ in range(number)))

    if number < MANY:
        return list(constants())
    return list(lax.platform_dependent(always, cpu=hidden, default=lambda always: constants()))


def write_products(
    leaves: Sequence[Array],
    groups: Sequence[MatrixGroup],
    left: Sequence[Array],
    right: Sequence[Array],
    at: Sequence[Array],
) -> list[Array]:
    """The leaves, with the product of each pair of factors in place of its leaf, in that leaf's shape and dtype.

    The factors are stacked, `[k, n, r]` and `[k, r, m]`. XLA:TPU compiles equal kernels once, but what reads a slice of
    the stack of products differs from leaf to leaf. There each leaf has a product of its own, which is equal to those
    of leaves alike and is fused with what reads it.
    """
    out = list(leaves)
    for group, p, q in zip(groups, left, right, strict=True):
        matrices = lax.platform_dependent(
            p, q, tpu=partial(_multiply_each, group), default=partial(_multiply_stacks, group, at)
        )
        for i, matrix in zip(group.leaves, matrices, strict=True):
            out[i] = matrix.reshape(out[i].shape).astype(out[i].dtype)
    return out


def _multiply_stacks(group: MatrixGroup, at: Sequence[Array], p: Array, q: Array) -> tuple[Array, ...]:
    """The products of a group, cut from the stack of all."""
    products = outer(p, q)
    return tuple(lax.dynamic_index_in_dim(products, k, keepdims=False)[:n] for k, (n, _) in zip(at, group.shapes))


def _multiply_each(group: MatrixGroup, p: Array, q: Array) -> tuple[Array, ...]:
    """The products of a group, one by one."""
    # Without the barrier the slices would be fused with the products, which would differ again.
    pairs = lax.optimization_barrier([(p[k, :n], q[k]) for k, (n, _) in enumerate(group.shapes)])
    return tuple(p @ q for p, q in pairs)


def write_factors(
    factors: Sequence[Array],
    groups: Sequence[MatrixGroup],
    stacks: Sequence[Array],
    at: Sequence[Array],
    scales: Sequence[float],
) -> list[Array]:
    """The factors, with those of the stacks `[k, s, r]` in place of the old ones; a zero factor keeps the old one.

    Stacks come in units of `1 / scales`, powers of two, and keep them where they would overflow otherwise: only the
    column space of a factor is used.
    """
    out = list(factors)
    for group, new, scale in zip(groups, stacks, scales, strict=True):
        largest = largest_entry(jnp.abs(new), (1, 2))
        # A zero factor says nothing about the next gradient.
        alive = largest != 0
        new = jnp.where(jnp.isfinite(largest / scale)[:, None, None], new / scale, new)
        for k, i in zip(at, group.leaves):
            # Not from a stack of the old ones: XLA:CPU would put the code of all of them into that of each.
            is_alive, factor = (lax.dynamic_index_in_dim(x, k, keepdims=False) for x in (alive, new))
            out[i] = jnp.where(is_alive, factor[: len(out[i])], out[i])
    return out


def orthonormal(factors: Sequence[Array]) -> list[Array]:
    """An orthonormal basis of the columns of each matrix in stacks `[k, n, r]`, as rows `[k, r, n]`: Qᵀ of a QR.

    A zero matrix gives columns of the identity, so a dead factor recovers. Stacks of one rank and similar height share
    one loop, which shortens compilation: rows of zeros below a matrix stay zeros.
    """
    # Not `jnp.linalg.qr` on CPU: the batched LAPACK call of jaxlib 0.10 waits, on a thread of the pool, for tasks that
    # need threads of the same pool, and hangs when devices or groups take all of them.
    alike: dict[tuple, list[int]] = {}
    for i, factor in enumerate(factors):
        _, n, r = factor.shape
        alike.setdefault((1 << (n - 1).bit_length(), r, factor.dtype), []).append(i)
    bases: list[Any] = [None] * len(factors)
    for members in alike.values():
        height = max(factors[i].shape[1] for i in members)
        # Transposed, so that what a reflection reads is contiguous.
        rows = [jnp.swapaxes(factors[i], 1, 2) for i in members]
        rows = jnp.concatenate([jnp.pad(x, [(0, 0), (0, 0), (0, height - x.shape[2])]) for x in rows])
        q = lax.platform_dependent(rows, cuda=_on_gpu, default=_householder)
        start = 0
        for i in members:
            k, n, _ = factors[i].shape
            bases[i] = q[start : start + k, :, :n]
            start += k
    return bases


def _on_gpu(a: Array) -> Array:
    """The same on NVIDIA GPUs, where a reflection takes 17 us in 11 kernels, and a matrix of cuSOLVER 200 us."""
    k, r, _ = a.shape
    if r < SOLVER_RANK * k:
        return _householder(a)
    # Scaling columns leaves Q as it is, and squares of tiny and huge entries neither vanish nor overflow.
    largest = largest_entry(jnp.abs(a), 2, keepdims=True)
    q, _ = jnp.linalg.qr(jnp.swapaxes(a / jnp.where(largest == 0, 1, largest), 1, 2))
    return jnp.swapaxes(q, 1, 2)


def _householder(a: Array) -> Array:
    """Transposed Q of the QR of transposed matrices, `[k, r, n] -> [k, r, n]`."""
    r, n = a.shape[1:]
    position = lax.broadcasted_iota(jnp.int32, (1, n), 1)

    def reflect(x, v):
        """Reflects rows, `x (I - 2 v vᵀ)`, in full precision even where products use less by default."""
        along = jnp.einsum("krn,kn->kr", x, v, precision=lax.Precision.HIGHEST)
        return x - 2 * along[:, :, None] * v[:, None, :]

    def eliminate(j, carry):
        """Makes column `j` zero below the diagonal."""
        a, normals = carry
        column = jnp.where(position >= j, lax.dynamic_index_in_dim(a, j, 1, keepdims=False), 0)
        # Scale first, so that squares of tiny and huge entries neither vanish nor overflow.
        largest = largest_entry(jnp.abs(column), 1, keepdims=True)
        column = column / jnp.where(largest == 0, 1, largest)
        norm = jnp.sqrt(jnp.sum(jnp.square(column), axis=1, keepdims=True))
        # Move away from the diagonal entry, so that nothing cancels.
        v = jnp.where(position == j, column + jnp.where(column < 0, -norm, norm), column)
        length = jnp.sqrt(jnp.sum(jnp.square(v), axis=1, keepdims=True))
        v = v / jnp.where(length == 0, 1, length)
        return reflect(a, v), lax.dynamic_update_index_in_dim(normals, v, j, 1)

    def accumulate(i, q):
        return reflect(q, lax.dynamic_index_in_dim(normals, r - 1 - i, 1, keepdims=False))

    _, normals = lax.fori_loop(0, r, eliminate, (a, jnp.zeros_like(a)))
    unit = jnp.zeros_like(a) + jnp.eye(r, n, dtype=a.dtype)[None]
    return lax.fori_loop(0, r, accumulate, unit)
