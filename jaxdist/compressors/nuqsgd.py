"""NUQSGD: unbiased stochastic rounding of each bucket to powers."""

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from .._core.checks import check_range
from .._core.descriptions import with_description
from .._core.types import Array, Float
from .codecs import LevelCode
from .compressor import Compressor
from .levels import with_levels
from .random import Noise, uniform_hash


@with_description
def nuqsgd(
    bits: int,
    *,
    bucket: int = 8192,
    base: float | int = 0.5,
    norm: Literal["max", "l2"] = "l2",
    zero_level: bool = True,
    noise: Noise = uniform_hash,
    code: LevelCode | None = None,
) -> Compressor:
    """Rounds each bucket at random to powers of `p`, dense around zero where most entries are: unbiased.

    `with_levels` of `0, p^s, ..., p, 1` and both signs, `s = 2**(bits - 1) - 2`; without a zero level of
    `±p^s, ..., ±p, ±1`, `s = 2**(bits - 1) - 1`. With a zero level and the L2 norm, for a bucket of d entries,

    - `ω = p^s sqrt(d) - 1` where `p^s sqrt(d) >= (1 + p)² / 2p`, attained by equal entries
    - `ω = (1 - p)² / 4p + d p^(2s + 1) / (1 + p)²` otherwise, a bound: 1/8 + (2/9) d / 4^s for p = 1/2

    so that 3 and 4 bits have ω = 21.6 and 0.57 with buckets of 8192. Typical errors are larger than those of `qsgd`
    with the largest magnitude as the norm: choose `nuqsgd` for its bound, which grows with `p^s sqrt(d)` only.

    The zero level is the paper's. Without one, as in its authors' code, every entry below `p^s norm` is sent as
    `±p^s norm`: at 3 bits and 8192 entries `|C(x) - x|² / |x|²` is 127 for Gaussian entries, against 17.

    *On the wire*: `ceil(n bits / 8)` bytes of codes (in whole 32-bit words where there are several buckets) and 4 bytes
    of norm per bucket.

    Arguments are those of `with_levels`. With 3 bits use buckets of 512 or fewer; a lower base p, in (0, 1), reaches
    closer to zero with coarser steps.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> code, x = nuqsgd(4, bucket=512), jnp.array([3.0, -4.0, 0.0, 12.0])
      >>> payload = code.compress(x, jax.random.key(0))
      >>> payload.codes.nbytes, round(code.variance((8192,)), 3)
      (2, 0.153)

    References:
      Ramezani-Kebrya et al., "NUQSGD: Provably Communication-Efficient Data-Parallel SGD via Nonuniform Quantization",
      arXiv:1908.06077, 2019.
    """
    check_range("base", base, 0, 1, ends="()")
    if bits not in (2, 3, 4, 8):
        raise ValueError(f"bits must be 2, 3, 4 or 8, got {bits}")
    levels = powers(2 ** (bits - 1), base, lowest=0.0) if zero_level else powers(2**bits, base)
    return with_levels(levels, bits=bits, bucket=bucket, norm=norm, zero_level=zero_level, noise=noise, code=code)


def powers(count: int, base: Float[Array, ""] | float | int, *, lowest: float | int = -1.0) -> Any:
    """`±p^s, ..., ±p, ±1`, in order, where the lowest level is -1; `0, p^s, ..., p, 1` where it is 0.

    A NumPy array, unless p is a JAX one.

    Examples:
      >>> powers(4, 0.5).tolist(), powers(4, 0.5, lowest=0.0).tolist()
      ([-1.0, -0.5, 0.5, 1.0], [0.0, 0.25, 0.5, 1.0])
    """
    xp: Any = np if isinstance(base, float | int) else jnp
    positive = base ** xp.arange(count // 2 - 1 if lowest < 0 else count - 2, -1, -1, dtype=xp.float32)
    return xp.concatenate([-positive[::-1] if lowest < 0 else 0 * positive[:1], positive])
