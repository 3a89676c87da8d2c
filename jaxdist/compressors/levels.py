"""Unbiased stochastic rounding of each bucket to any table of levels."""

import itertools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .._core.descriptions import with_description
from .._core.types import Array, Float, Int, Like, Shape, UInt
from .._core.xla_quirks import largest_entry, smallest_entry
from .codecs import LevelCode, levels_codec
from .compressor import Compressor, Factor
from .one_pass import in_parts
from .packing import pack, unpack
from .qsgd import QuantizedPayload
from .random import KeyOrStream, Noise, uniform_hash
from .rounding import check_buckets, from_buckets, normalize_buckets, shrink_norms, to_buckets, whole_words

# Up to this number of levels, comparisons with all of them are faster than a binary search, whose look-ups CPUs do not
# vectorize.
COMPARED = 16


@with_description
def with_levels(
    levels: Float[Array | np.ndarray, " levels"],
    *,
    bits: int,
    bucket: int = 8192,
    norm: Literal["max", "l2"] = "l2",
    zero_level: bool = True,
    noise: Noise = uniform_hash,
    code: LevelCode | None = None,
) -> Compressor:
    """Rounds each entry of a bucket at random to one of the two levels around it: unbiased.

    With `r_i = x_i / norm` between the levels `l <= r_i <= h`: `C(x)_i = norm h` with probability
    `(r_i - l) / (h - l)`, else `norm l`. The variance of an entry is `norm² (h - r_i) (r_i - l)` (see
    `expected_variance`). The largest sum over a bucket of d entries is `ω |x|²`, maximal over neighbors l, h:

    - "max": `ω = max t - 1`, `2 t = q + sqrt(q² + (d - 1) (l + h)²)`, `q = 1 - (d - 1) l h`; attained
    - "l2":  `ω = min over u > 0 of 1 / u - 1 + d max ((l + h)² u / 4 - l h)`, a bound

    The table may be traced, so that levels can change from step to step; ω is then traced too. A bucket that is longer
    than the largest float has that for its norm, and a smaller error.

    *On the wire*: `ceil(n bits / 8)` bytes of codes (in whole 32-bit words where there are several buckets) and 4 bytes
    of norm per bucket. Levels are not sent: all workers must have the same.

    Args:
      levels: increasing. With a zero level the magnitudes from 0 to 1, at most `2**(bits - 1)`, used with both signs;
        else from -1 to 1, at most `2**bits`.
      bits: 2, 3, 4 or 8.
      bucket: entries that share a norm. Smaller is more exact and costs 4 bytes per bucket.
      norm: "l2", whose ratios are concentrated around zero, or "max".
      zero_level: whether the table contains magnitudes. Else zeros are sent as noise.
      noise: `(key, shape) -> uniforms`.
      code: as for `qsgd`; "elias" needs a zero level.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> code, x = with_levels(jnp.array([0.0, 0.1, 0.5, 1.0]), bits=3, norm="max"), jnp.array([5.0, -1.0, 10.0, 0.0])
      >>> jax.jit(lambda x: code.decompress(code.compress(x, jax.random.key(0)), x))(x)
      Array([ 5., -1., 10.,  0.], dtype=float32)
    """
    if bits not in (2, 3, 4, 8):
        raise ValueError(f"bits must be 2, 3, 4 or 8, got {bits}")
    check_buckets(bucket, norm)
    codec = levels_codec(QuantizedPayload, bits, bucket, code, zero_level=zero_level)
    table = _table(levels, 2 ** (bits - 1) if zero_level else 2**bits, 0.0 if zero_level else -1.0)
    sign_bit = 2 ** (bits - 1)

    def compress(x: Array, key: KeyOrStream) -> QuantizedPayload:
        ratios, norms = normalize_buckets(x, bucket, norm)
        codes = _round(jnp.abs(ratios) if zero_level else ratios, jnp.asarray(table), noise(key, ratios.shape))
        if zero_level:
            codes = codes | jnp.where(ratios < 0, jnp.asarray(sign_bit, codes.dtype), 0)
        return QuantizedPayload(
            pack(codes.astype(jnp.uint8).reshape(-1)[: whole_words(x.size, bits)], bits), norms[:, 0]
        )

    def decompress(payload: QuantizedPayload, like: Like) -> Array:
        codes = _keep_apart(unpack(payload.codes, bits, math.prod(like.shape))).astype(jnp.int32)
        values = jnp.asarray(table)[codes & (sign_bit - 1) if zero_level else codes]
        if zero_level:
            # Zero has no sign, so that it does not decode to -0.
            values = jnp.where((codes >= sign_bit) & (values > 0), -values, values)
        return from_buckets(to_buckets(values, bucket), payload.norms, like)

    def variance(shape: Shape) -> Any:
        return worst_variance(table, min(bucket, math.prod(shape)), norm)

    def shrink(payload: QuantizedPayload, x: Array, factor: Factor) -> QuantizedPayload:
        ratios, _ = normalize_buckets(x, bucket, norm)
        lost = _expected_losses(jnp.abs(ratios) if zero_level else ratios, jnp.asarray(table))
        # Without a zero level the padding of the last bucket would lose something.
        lost = lost * to_buckets(jnp.ones(x.shape), bucket)
        return payload._replace(norms=shrink_norms(payload.norms, ratios, lost, variance(x.shape), factor))

    coded = in_parts(compress, bucket, bits) if noise is uniform_hash else compress
    return Compressor(coded, decompress, variance=variance, codec=codec, shrink=shrink)


def _table(levels: Array | np.ndarray, most: int, first: float) -> Any:
    """Checks the table and returns it in float32: a NumPy array, for a static ω, unless it is traced."""
    try:
        table = np.asarray(levels, np.float32)
    except jax.errors.TracerArrayConversionError:
        table = levels.astype(jnp.float32)
    if table.ndim != 1 or not 2 <= table.shape[0] <= most:
        raise ValueError(f"levels must be a vector of 2 to {most} for these bits, got shape {table.shape}")
    if isinstance(table, np.ndarray) and not (table[0] == first and table[-1] == 1 and (np.diff(table) > 0).all()):
        raise ValueError(f"levels must increase from {first:g} to 1 (in float32), got {table.tolist()}")
    return table


def _keep_apart(codes: UInt[Array, " size"]) -> UInt[Array, " size"]:
    # XLA:TPU makes a comparison with each level of the look-up, and would unpack anew for some of them: the program of
    # 16 levels is four times as long.
    return jax.lax.platform_dependent(codes, tpu=jax.lax.optimization_barrier, default=lambda codes: codes)


def _round(
    ratios: Float[Array, "buckets width"], levels: Float[Array, " levels"], uniforms: Float[Array, "buckets width"]
) -> Int[Array, "buckets width"]:
    """The index of the level below each ratio, or of the one above with the probability that makes it unbiased."""
    count = levels.shape[0]
    if count <= COMPARED:
        # The number of intervals whose random threshold is below the ratio: all intervals below it, and its own at
        # random.
        codes = jnp.zeros(ratios.shape, jnp.int32)
        for low, high in itertools.pairwise(levels):
            codes += (uniforms * (high - low) < ratios - low).astype(jnp.int32)
        return codes
    below = level_below(ratios, levels)
    low = levels[below]
    return below + (uniforms * (levels[below + 1] - low) < ratios - low).astype(jnp.int32)


def expected_variance(
    x: Float[Array, "..."],
    levels: Float[Array | np.ndarray, " levels"],
    *,
    bucket: int = 8192,
    norm: Literal["max", "l2"] = "l2",
    zero_level: bool = True,
) -> Float[Array, ""]:
    """`E|C(x) - x|²` of `with_levels` in closed form: `Σ norm² (h - r_i) (r_i - l)` over all entries of any array.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> x = jnp.array([3.0, -4.0, 0.0, 12.0])
      >>> round(float(jax.jit(expected_variance)(x, jnp.array([0.0, 0.125, 0.25, 0.5, 1.0]))), 4)
      7.7187
    """
    ratios, norms = normalize_buckets(x, bucket, norm)
    ratios = jnp.abs(ratios) if zero_level else ratios
    squares = _expected_losses(ratios, jnp.asarray(levels, jnp.float32))
    # The padding of the last bucket does not count.
    real = to_buckets(jnp.ones(x.shape), bucket)
    # Squared last: norms may be so large that their squares overflow.
    return jnp.sum((jnp.sqrt(jnp.sum(squares * real, axis=1)) * norms[:, 0]) ** 2)


def _expected_losses(
    ratios: Float[Array, "buckets width"], levels: Float[Array, " levels"]
) -> Float[Array, "buckets width"]:
    """`(h - r) (r - l)` of the levels `l <= r <= h` around each ratio."""
    below = level_below(ratios, levels)
    return (levels[below + 1] - ratios) * (ratios - levels[below])


def level_below(ratios: Float[Array, "..."], levels: Float[Array, " levels"]) -> Int[Array, "..."]:
    """The index of the last level that is not above each ratio, at most the last but one."""
    found = jnp.searchsorted(levels, ratios, side="right").astype(jnp.int32) - 1
    return jnp.clip(found, 0, levels.shape[0] - 2)


def worst_variance(levels: Any, size: int, norm: str) -> Any:
    """ω: the largest `E|C(x) - x|² / |x|²` over buckets of `size` entries.

    A NumPy table gives a float, a traced one a traced number. Between the neighbors l and h an entry of ratio r costs
    `(h - r) (r - l)`, which is negative outside. With the largest magnitude as the norm, one entry costs nothing and
    weighs 1, and each other entry is worst where it has the largest `(h - r) (r - l) - ω r²`; hence
    `ω = (d - 1) max_r ((h - r) (r - l) - ω r²)`, a quadratic equation in `t = 1 + ω` for each interval. With the
    Euclidean norm the squares of the ratios add up to 1, and the dual of that constraint with the multiplier λ gives
    `ω <= λ + d max_r ((h - r) (r - l) - λ r²)` for every λ. With `u = 1 / (1 + λ)` the maximum is over the lines
    `(l + h)² u / 4 - l h`, so the best u is where one of them has the slope of `1 / u`, or where two neighbors cross.
    """
    if size <= 1:
        return 0.0
    # NumPy's float64 for tables that are known, so that ω is exact there.
    static = isinstance(levels, np.ndarray)
    xp, largest, smallest = (np, np.max, np.min) if static else (jnp, largest_entry, smallest_entry)
    levels = levels.astype(np.float64) if static else levels
    low, high = levels[:-1], levels[1:]
    slopes, drops = (low + high) ** 2 / 4, low * high
    if norm == "max":
        q = 1 - (size - 1) * drops
        worst = largest(q + xp.sqrt(q * q + 4 * (size - 1) * slopes)) / 2 - 1
    else:
        rises = slopes[1:] - slopes[:-1]
        crossings = (drops[1:] - drops[:-1]) / xp.where(rises == 0, 1, rises)
        u = xp.concatenate([1 / xp.sqrt(size * xp.where(slopes == 0, 1, slopes)), crossings, xp.ones(1, levels.dtype)])
        u = xp.where(u > 0, u, 1)
        worst = smallest(1 / u - 1 + size * largest(slopes[:, None] * u[None, :] - drops[:, None], 0))
    return max(0.0, float(worst)) if static else xp.maximum(worst, 0)
