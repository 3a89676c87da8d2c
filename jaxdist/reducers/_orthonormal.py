"""Orthonormal bases of the columns of tall matrices, by plain operations."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from .._typing import Array


def orthonormal(factors: Sequence[Array]) -> list[Array]:
    """An orthonormal basis of the columns of each matrix in stacks `[k, n, r]`, as rows `[k, r, n]`: Qᵀ of a QR.

    A zero matrix gives columns of the identity, so a dead factor recovers. Plain operations rather than
    `jnp.linalg.qr`: the batched LAPACK call of jaxlib 0.10 waits, on a thread of the pool, for tasks that need threads
    of the same pool, and hangs when devices or groups take all of them.

    Stacks of one rank and of similar height share one loop, for the sake of compile time: rows of zeros below a matrix
    stay zeros.
    """
    alike: dict[tuple, list[int]] = {}
    for i, factor in enumerate(factors):
        _, n, r = factor.shape
        alike.setdefault((1 << (n - 1).bit_length(), r, factor.dtype), []).append(i)
    bases: list[Any] = [None] * len(factors)
    for members in alike.values():
        height = max(factors[i].shape[1] for i in members)
        # Transposed, so that what a reflection reads is contiguous.
        rows = [jnp.swapaxes(factors[i], 1, 2) for i in members]
        q = _householder(jnp.concatenate([jnp.pad(x, [(0, 0), (0, 0), (0, height - x.shape[2])]) for x in rows]))
        start = 0
        for i in members:
            k, n, _ = factors[i].shape
            bases[i] = q[start : start + k, :, :n]
            start += k
    return bases


def _householder(a: Array) -> Array:
    """Transposed Q of the QR of transposed matrices, `[k, r, n] -> [k, r, n]`."""
    r, n = a.shape[1:]
    position = lax.broadcasted_iota(jnp.int32, (1, n), 1)

    def reflect(x, v):
        """`x (I - 2 v vᵀ)`, in full precision wherever products are shortened by default."""
        along = jnp.einsum("krn,kn->kr", x, v, precision=lax.Precision.HIGHEST)
        return x - 2 * along[:, :, None] * v[:, None, :]

    def eliminate(j, carry):
        """Below the diagonal, column `j` becomes zero."""
        a, normals = carry
        column = jnp.where(position >= j, lax.dynamic_index_in_dim(a, j, 1, keepdims=False), 0)
        # Scaled, so that squares of tiny and huge entries neither vanish nor overflow.
        largest = jnp.max(jnp.abs(column), axis=1, keepdims=True)
        column = column / jnp.where(largest == 0, 1, largest)
        norm = jnp.sqrt(jnp.sum(jnp.square(column), axis=1, keepdims=True))
        # Away from the diagonal entry, where nothing cancels.
        v = jnp.where(position == j, column + jnp.where(column < 0, -norm, norm), column)
        length = jnp.sqrt(jnp.sum(jnp.square(v), axis=1, keepdims=True))
        v = v / jnp.where(length == 0, 1, length)
        return reflect(a, v), lax.dynamic_update_index_in_dim(normals, v, j, 1)

    def accumulate(i, q):
        return reflect(q, lax.dynamic_index_in_dim(normals, r - 1 - i, 1, keepdims=False))

    _, normals = lax.fori_loop(0, r, eliminate, (a, jnp.zeros_like(a)))
    unit = jnp.zeros_like(a) + jnp.eye(r, n, dtype=a.dtype)[None]
    return lax.fori_loop(0, r, accumulate, unit)
