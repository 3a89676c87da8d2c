"""Codes that keep k entries and drop the rest: the largest ones, or random ones."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._typing import Array, Float, Like, PRNGKeyArray, Shape, UInt
from .base import Compressor, working_dtype
from .random import key_words, random_subset

SEED_WORDS = 4


class SparsePayload(NamedTuple):
    """The kept entries and where they were in the flat array."""

    values: Float[Array, " kept"]
    indices: UInt[Array, " kept"]


class SubsetPayload(NamedTuple):
    """The kept entries, and the seed of their positions as bytes that survive an average of floats."""

    values: Float[Array, " kept"]
    seed: Float[Array, " 4"]


def kept(density: float, size: int) -> int:
    """How many of `size` entries are sent: `max(1, round(density * size))`, none of an empty array."""
    return min(size, max(1, round(density * size)))


def top_k(density: float) -> Compressor:
    """Keeps the entries of largest magnitude: `C(x)_i = x_i` for the k largest `|x_i|`, else 0.

    `k = max(1, round(density d))`, δ = k/d, and far better for gradients, whose magnitudes are uneven. Biased: without
    error feedback the small entries are never sent. Ties go to the lower index; magnitudes are compared in float32.

    On the wire: k values in the dtype of x, and k indices of 2 bytes (up to 65,536 entries) or 4.

    Args:
      density: the part that is kept, in (0, 1]. Start at 0.01; 0.001 with a warm-up; above 0.25 an 8-bit code
        is both smaller and more exact. Workers keep different entries, so W workers receive up to W k of them.

    Returns:
      A biased compressor; payloads are gathered.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> code, x = top_k(0.5), jnp.array([3.0, -4.0, 0.0, 12.0])
      >>> code.decompress(code.compress(x, jax.random.key(0)), x)
      Array([ 0., -4.,  0., 12.], dtype=float32)

    References:
      S. U. Stich, J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with memory", arXiv:1809.07599, 2018.
      Y. Lin, S. Han, H. Mao, Y. Wang, W. J. Dally, "Deep gradient compression: reducing the communication bandwidth
      for distributed training", arXiv:1712.01887, 2017.
    """
    _check_density(density)

    def compress(x: Array, key: PRNGKeyArray) -> SparsePayload:
        del key
        flat = x.reshape(-1)
        # In float32: the CPU's top_k is ten times slower for any other dtype.
        _, indices = jax.lax.top_k(jnp.abs(flat.astype(jnp.float32)), kept(density, flat.size))
        values = flat.at[indices].get(mode="promise_in_bounds", unique_indices=True)
        return SparsePayload(values, indices.astype(_index_dtype(flat.size)))

    def decompress(payload: SparsePayload, like: Like) -> Array:
        return _scatter(payload.values, payload.indices, like)

    return Compressor(compress, decompress, contraction=lambda shape: _kept_part(density, shape))


def random_k(density: float, *, unbiased: bool = False) -> Compressor:
    """Keeps a random k of d entries, the same ones on all workers, so that an all-reduce carries them.

    `C(x)_i = x_i` for i in S, else 0, with S uniform among the subsets of `k = max(1, round(density d))` entries.
    `E|C(x) - x|² = (1 - k/d) |x|²`: δ = k/d. With `unbiased`, what is kept is multiplied by d/k and
    `E|C(x) - x|² = (d/k - 1) |x|²`: ω = d/k - 1.

    On the wire: k values in the dtype of x, and 16 bytes of seed. Positions are not sent: each worker computes them
    from the seed, which travels as four floats of one byte each, so that the average of equal seeds is the seed.

    Args:
      density: the part that is kept, in (0, 1]. Start at 0.1: it needs about ten times the density of `top_k`, but
        costs the same for any number of workers and no search for the largest.
      unbiased: multiply by d/k; for use without error feedback.

    Returns:
      A summable compressor whose key all workers share.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> code, x = random_k(0.5), jnp.arange(1.0, 5.0)
      >>> int((code.decompress(code.compress(x, jax.random.key(0)), x) == x).sum())
      2

    References:
      S. U. Stich, J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with memory", arXiv:1809.07599, 2018.
    """
    _check_density(density)

    def compress(x: Array, key: PRNGKeyArray) -> SubsetPayload:
        flat = x.reshape(-1)
        seed, _ = key_words(key)
        positions = random_subset(seed, kept(density, flat.size), flat.size)
        values = flat.at[positions].get(mode="promise_in_bounds", unique_indices=True)
        return SubsetPayload(values, _seed_to_floats(seed))

    def decompress(payload: SubsetPayload, like: Like) -> Array:
        size = math.prod(like.shape)
        values = payload.values
        if unbiased:
            values = values.astype(working_dtype(values.dtype)) * (size / max(values.size, 1))
        return _scatter(values, random_subset(_floats_to_seed(payload.seed), values.size, size), like)

    def contraction(shape: Shape) -> float:
        return _kept_part(density, shape)

    laws = {"variance": lambda shape: 1.0 / contraction(shape) - 1.0} if unbiased else {"contraction": contraction}
    return Compressor(compress, decompress, summable=True, shared_key=True, **laws)


def _check_density(density: float) -> None:
    if not 0 < density <= 1:
        raise ValueError(f"density must be in (0, 1], got {density}")


def _kept_part(density: float, shape: Shape) -> float:
    size = math.prod(shape)
    return kept(density, size) / size if size else 1.0


def _index_dtype(size: int) -> type:
    return jnp.uint16 if size <= 2**16 else jnp.uint32


def _scatter(values: Array, indices: UInt[Array, " kept"], like: Like) -> Array:
    flat = jnp.zeros(math.prod(like.shape), like.dtype)
    # Signed indices: JAX would widen u16 ones and u32 ones differently.
    scattered = flat.at[indices.astype(jnp.int32)].set(
        values.astype(like.dtype), mode="promise_in_bounds", unique_indices=True
    )
    return scattered.reshape(like.shape)


def _seed_to_floats(seed: UInt[Array, ""]) -> Float[Array, " 4"]:
    shifts = 8 * jax.lax.iota(jnp.uint32, SEED_WORDS)
    return ((seed >> shifts) & 0xFF).astype(jnp.int32).astype(jnp.float32)


def _floats_to_seed(words: Float[Array, " 4"]) -> UInt[Array, ""]:
    # Rounded: the sum over the workers, divided by their number, may be off by a rounding error.
    parts = jnp.round(words).astype(jnp.uint32) << (8 * jax.lax.iota(jnp.uint32, SEED_WORDS))
    return jnp.sum(parts, dtype=jnp.uint32)
