"""Sparse compressors: `top_k` of an array (Stich et al.), `block_top_k` (SparseLoCo, DeMo) and `random_k`.

`top_k` sends the largest entries and their positions, `random_k` entries at positions that all workers draw alike.
"""

import math
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from .._core.checks import check_count
from .._core.descriptions import with_description
from .._core.dtypes import saturate, working_dtype
from .._core.types import Array, Float, Int, Like, PRNGKeyArray, Shape, UInt
from .base import Compressor
from .indices import decode_positions, encode_positions, largest_by_sorting, largest_by_threshold
from .random import key_words, random_subset
from .rounding import block_grid

Method = Literal["threshold", "exact"]


class SparsePayload(NamedTuple):
    """The kept entries, in the order of the array, and their encoded positions."""

    values: Float[Array, " kept"]
    indices: UInt[Array, " words"]


class SubsetPayload(NamedTuple):
    """The kept entries, and the seed of their positions as bytes that survive an average of floats."""

    values: Float[Array, " kept"]
    seed: Float[Array, " 4"]


@with_description
def top_k(density: float, *, method: Method = "threshold") -> Compressor:
    """Keeps the entries of largest magnitude: `C(x)_i = x_i` for the k largest `|x_i|`, else 0.

    `k = max(1, round(density d))`, δ = k/d (attained where all magnitudes are equal), and much larger for gradients,
    whose magnitudes are uneven. Biased: without error feedback the small entries are never sent. Ties go to the lower
    index; magnitudes are compared in float32.

    On the wire: k values in the dtype of x, and their positions: `k b + k + ((d - k) >> b)` bits with the best b (near
    `log2(d / k)`; both parts in whole bytes), up to a density of 0.5 at most 0.56 bits an entry above the entropy of k
    positions; or 2 bytes each (up to 65,536 entries) or 4 where that is smaller. At a density of 0.01 that is 1 byte.

    Args:
      density: the share that is kept, in (0, 1]. Start at 0.01; 0.001 with a warm-up; above 0.25 an 8-bit code
        is both smaller and more exact. Workers keep different entries, so W workers receive up to W k of them.
      method: "threshold" counts the entries above a threshold, which a sample of the array suggests; "exact" is
        `lax.top_k`, the reference for the same entries, many times slower.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> code, x = top_k(0.5), jnp.array([3.0, -4.0, 0.0, 12.0])
      >>> code.decompress(code.compress(x, jax.random.key(0)), x)
      Array([ 0., -4.,  0., 12.], dtype=float32)

    References:
      S. U. Stich et al., "Sparsified SGD with memory", arXiv:1809.07599, 2018.
      Y. Lin et al., "Deep gradient compression: reducing the communication bandwidth for distributed training",
      arXiv:1712.01887, 2017 (a threshold from a sample).
    """
    check_density(density)
    if method not in ("threshold", "exact"):
        raise ValueError(f'method must be "threshold" or "exact", got {method!r}')
    find_largest = largest_by_sorting if method == "exact" else largest_by_threshold

    def compress(x: Array, key: PRNGKeyArray) -> SparsePayload:
        del key
        flat = x.reshape(-1)
        return gather_entries(flat, find_largest(flat, num_kept(density, flat.size)))

    return Compressor(compress, decompress, contraction=partial(share_kept, density), add=add)


@with_description
def block_top_k(density: float, *, block: int = 4096) -> Compressor:
    """Keeps the k largest `|x_i|` of each block of `block` entries: `k = max(1, round(density block))`.

    δ = k / block (of an array that is shorter than a block: its own k/d), attained where all magnitudes are equal. No
    part of an array is starved, and blocks can be decoded separately; `top_k` sends larger entries for the same bytes.

    On the wire: `K = k ceil(d / block)` values in the dtype of x, and their positions as in `top_k`: K of
    `block ceil(d / block)`, 8 bits each for 64 of 4096, where indices within the block take 12. The
    padding of the last block is sent as zeros.

    Args:
      density: the share that is kept, in (0, 1]; 32 or 64 of 4096 entries are common.
      block: entries that compete with each other. Smaller is more even, and nearer to a random choice.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> code, x = block_top_k(0.5, block=2), jnp.array([3.0, -4.0, 0.0, 0.1, 7.0])
      >>> code.decompress(code.compress(x, jax.random.key(0)), x)
      Array([ 0. , -4. ,  0. ,  0.1,  7. ], dtype=float32)

    References:
      A. Sarfi et al., arXiv:2508.15706 (SparseLoCo).
      B. Peng et al., "DeMo: decoupled momentum optimization", arXiv:2411.19870, 2024.
    """
    check_density(density)
    check_count("block", block, 1)

    def compress(x: Array, key: PRNGKeyArray) -> SparsePayload:
        del key
        rows, width = block_grid(x.size, block)
        flat = jnp.pad(x.reshape(-1), (0, rows * width - x.size))
        return gather_entries(flat, largest_by_threshold(flat.reshape(rows, width), num_kept(density, width)))

    def decode(payload: SparsePayload, like: Like) -> Array:
        rows, width = block_grid(math.prod(like.shape), block)
        padded = decompress(payload, jax.ShapeDtypeStruct((rows * width,), like.dtype))
        return padded[: math.prod(like.shape)].reshape(like.shape)

    def add_in_blocks(payload: SparsePayload, total: Array) -> Array:
        rows, width = block_grid(total.size, block)
        return _add_entries(payload, total, rows * width)

    def contraction(shape: Shape) -> float:
        _, width = block_grid(math.prod(shape), block)
        return num_kept(density, width) / width if width else 1.0

    return Compressor(compress, decode, contraction=contraction, add=add_in_blocks)


@with_description
def random_k(density: float, *, unbiased: bool = False) -> Compressor:
    """Keeps a random k of d entries, the same ones on all workers, so that they can be all-reduced.

    `C(x)_i = x_i` for i in S, else 0, with S uniform among the subsets of `k = max(1, round(density d))` entries.
    `E|C(x) - x|² = (1 - k/d) |x|²`: δ = k/d. With `unbiased`, kept entries are multiplied by d/k and
    `E|C(x) - x|² = (d/k - 1) |x|²`: ω = d/k - 1. A product above the largest number of the dtype becomes that number:
    finite, with a smaller error, and no longer unbiased. NaN of an entry that is not drawn is not sent: check for it
    before.

    On the wire: k values in the dtype of x, and 16 bytes of seed. Positions are not sent: each worker computes them
    from the seed, which is sent as four floats of one byte each, so that the average of equal seeds is the seed.

    Args:
      density: the share that is kept, in (0, 1]. It needs far more than `top_k`, 0.05 with feedback was useless on
        digits (`benchmarks/reports/2026-11-compression`), but costs the same for any number of workers and no search.
      unbiased: multiply by d/k; for use without error feedback.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> code, x = random_k(0.5), jnp.arange(1.0, 5.0)
      >>> int((code.decompress(code.compress(x, jax.random.key(0)), x) == x).sum())
      2
    """
    check_density(density)

    def compress(x: Array, key: PRNGKeyArray) -> SubsetPayload:
        flat = x.reshape(-1)
        seed, _ = key_words(key)
        positions = random_subset(seed, num_kept(density, flat.size), flat.size)
        values = flat.at[positions].get(mode="promise_in_bounds", unique_indices=True)
        return SubsetPayload(values, _seed_to_floats(seed))

    def decompress(payload: SubsetPayload, like: Like) -> Array:
        size = math.prod(like.shape)
        values = payload.values
        if unbiased:
            wide = values.astype(working_dtype(values.dtype))
            values = saturate(wide * (size / max(values.size, 1)), like.dtype, jnp.isfinite(wide))
        return scatter(values, random_subset(_floats_to_seed(payload.seed), values.size, size), like)

    def contraction(shape: Shape) -> float:
        return share_kept(density, shape)

    # ω = d/k - 1 is 1/δ - 1.
    bound = {"variance": lambda shape: 1.0 / contraction(shape) - 1.0} if unbiased else {"contraction": contraction}
    return Compressor(compress, decompress, summable=True, shared_key=True)._replace(**bound)


def decompress(payload: SparsePayload, like: Like) -> Array:
    """Puts the kept entries at their positions, and zeros elsewhere."""
    where = decode_positions(payload.indices, payload.values.shape[0], math.prod(like.shape))
    return scatter(payload.values, where, like)


def add(payload: SparsePayload, total: Array) -> Array:
    """Adds the kept entries to `total`, at their positions."""
    return _add_entries(payload, total, total.size)


def _add_entries(payload: SparsePayload, total: Array, size: int) -> Array:
    """The same for positions in `range(size)`, of which those beyond the array belong to padding."""
    where = decode_positions(payload.indices, payload.values.shape[0], size)
    values = payload.values.astype(total.dtype)
    mode = "promise_in_bounds" if size == total.size else "drop"
    return total.reshape(-1).at[where].add(values, mode=mode, unique_indices=True).reshape(total.shape)


def gather_entries(flat: Float[Array, " size"], where: Int[Array, " kept"]) -> SparsePayload:
    """Returns the payload of the entries at ascending positions."""
    values = flat.at[where].get(mode="promise_in_bounds", unique_indices=True, indices_are_sorted=True)
    return SparsePayload(values, encode_positions(where, flat.shape[0]))


def scatter(values: Float[Array, " kept"], where: Int[Array, " kept"] | UInt[Array, " kept"], like: Like) -> Array:
    """Writes the values at their positions into zeros."""
    flat = jnp.zeros(math.prod(like.shape), like.dtype)
    # Signed indices, since JAX would widen u16 and u32 differently.
    where, values = where.astype(jnp.int32), values.astype(like.dtype)
    return flat.at[where].set(values, mode="promise_in_bounds", unique_indices=True).reshape(like.shape)


def num_kept(density: float, size: int) -> int:
    """The number of entries that are sent of `size`: `max(1, round(density * size))`, none of an empty array."""
    return min(size, max(1, round(density * size)))


def check_density(density: float) -> None:
    """Checks that the density is in (0, 1]."""
    if not 0 < density <= 1:
        raise ValueError(f"density must be in (0, 1], got {density}")


def share_kept(density: float, shape: Shape) -> float:
    """k/d, or 1 for an empty array."""
    size = math.prod(shape)
    return num_kept(density, size) / size if size else 1.0


def _seed_to_floats(seed: UInt[Array, ""]) -> Float[Array, " 4"]:
    shifts = 8 * jax.lax.iota(jnp.uint32, 4)
    return ((seed >> shifts) & 0xFF).astype(jnp.int32).astype(jnp.float32)


def _floats_to_seed(words: Float[Array, " 4"]) -> UInt[Array, ""]:
    # Rounded: the sum over the workers, divided by their number, may be off by a rounding error.
    parts = jnp.round(words).astype(jnp.uint32) << (8 * jax.lax.iota(jnp.uint32, 4))
    return jnp.sum(parts, dtype=jnp.uint32)
