"""Random-k: a random subset of the entries, whose positions a seed gives."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._core.descriptions import with_description
from .._core.dtypes import saturate, working_dtype
from .._core.types import Array, Float, Like, PRNGKeyArray, Shape, UInt
from .compressor import Compressor
from .random import key_words, random_subset
from .sparse import check_density, num_kept, scatter, share_kept


class SubsetPayload(NamedTuple):
    """The kept entries, and the seed of their positions as bytes that survive an average of floats."""

    values: Float[Array, " kept"]
    seed: Float[Array, " 4"]


@with_description
def random_k(density: float, *, unbiased: bool = False) -> Compressor:
    """Keeps a random k of d entries, the same ones on all workers, so that they can be all-reduced.

    `C(x)_i = x_i` for i in S, else 0, with S uniform among the subsets of `k = max(1, round(density d))` entries.
    `E|C(x) - x|² = (1 - k/d) |x|²`: δ = k/d. With `unbiased`, kept entries are multiplied by d/k and
    `E|C(x) - x|² = (d/k - 1) |x|²`: ω = d/k - 1. A product above the largest number of the dtype becomes that number:
    finite, with a smaller error, and no longer unbiased. NaN of an entry that is not drawn is not sent: check for it
    before.

    *On the wire*: k values in the dtype of x, and 16 bytes of seed. Positions are not sent: each worker computes them
    from the seed, which is sent as four floats of one byte each, so that the average of equal seeds is the seed.

    Args:
      density: the share that is kept, in (0, 1]. It needs far more than `top_k`, 0.05 with feedback was useless on
        digits (`benchmarks/reports/2026-11-compression`), but costs the same for any number of workers and no search.
      unbiased: multiply by d/k; for use without error feedback.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> code, x = random_k(0.5), jnp.arange(1.0, 5.0)
      >>> int((jax.jit(lambda x: code.decompress(code.compress(x, jax.random.key(0)), x))(x) == x).sum())
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


def _seed_to_floats(seed: UInt[Array, ""]) -> Float[Array, " 4"]:
    shifts = 8 * jax.lax.iota(jnp.uint32, 4)
    return ((seed >> shifts) & 0xFF).astype(jnp.int32).astype(jnp.float32)


def _floats_to_seed(words: Float[Array, " 4"]) -> UInt[Array, ""]:
    # Rounded: the sum over the workers, divided by their number, may be off by a rounding error.
    parts = jnp.round(words).astype(jnp.uint32) << (8 * jax.lax.iota(jnp.uint32, 4))
    return jnp.sum(parts, dtype=jnp.uint32)
