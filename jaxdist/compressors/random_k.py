"""A random k of the entries, the same ones on all workers."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._typing import Array, Float, Like, PRNGKeyArray, Shape, UInt
from .base import Compressor, saturated, working_dtype
from .random import key_words, random_subset
from .sparse import check_density, kept, kept_part, scatter

SEED_WORDS = 4


class SubsetPayload(NamedTuple):
    """The kept entries, and the seed of their positions as bytes that survive an average of floats."""

    values: Float[Array, " kept"]
    seed: Float[Array, " 4"]


def random_k(density: float, *, unbiased: bool = False) -> Compressor:
    """Keeps a random k of d entries, the same ones on all workers, so that an all-reduce carries them.

    `C(x)_i = x_i` for i in S, else 0, with S uniform among the subsets of `k = max(1, round(density d))` entries.
    `E|C(x) - x|² = (1 - k/d) |x|²`: δ = k/d. With `unbiased`, what is kept is multiplied by d/k and
    `E|C(x) - x|² = (d/k - 1) |x|²`: ω = d/k - 1. Where the product is above the largest number of the dtype it is that
    number: finite, with a smaller error, and no longer right on average.

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
    check_density(density)

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
            wide = values.astype(working_dtype(values.dtype))
            values = saturated(wide * (size / max(values.size, 1)), like.dtype, jnp.isfinite(wide))
        return scatter(values, random_subset(_floats_to_seed(payload.seed), values.size, size), like)

    def contraction(shape: Shape) -> float:
        return kept_part(density, shape)

    laws = {"variance": lambda shape: 1.0 / contraction(shape) - 1.0} if unbiased else {"contraction": contraction}
    return Compressor(compress, decompress, summable=True, shared_key=True, **laws)


def _seed_to_floats(seed: UInt[Array, ""]) -> Float[Array, " 4"]:
    shifts = 8 * jax.lax.iota(jnp.uint32, SEED_WORDS)
    return ((seed >> shifts) & 0xFF).astype(jnp.int32).astype(jnp.float32)


def _floats_to_seed(words: Float[Array, " 4"]) -> UInt[Array, ""]:
    # Rounded: the sum over the workers, divided by their number, may be off by a rounding error.
    parts = jnp.round(words).astype(jnp.uint32) << (8 * jax.lax.iota(jnp.uint32, SEED_WORDS))
    return jnp.sum(parts, dtype=jnp.uint32)
