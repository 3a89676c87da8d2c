"""ALQ: quantization levels fitted one by one to the distribution of the gradients."""

from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp

from .._core.descriptions import with_description
from ..compressors.adapt_levels import (
    bucket_sums,
    distribution_of,
    fit_levels,
    fold,
    grid,
    mixture_of,
    optimal_levels,
    ratio_histogram,
)
from ..compressors.levels import with_levels
from ..compressors.nuqsgd import powers
from .adaptive import LevelPlan, Norm, adaptive, check_adaptive, fit_steps
from .reducer import Reducer


@with_description
def alq(
    bits: int = 3,
    *,
    bucket: int = 8192,
    norm: Norm = "max",
    solver: Literal["exact", "coordinate"] = "exact",
    norm_power: Literal[0, 1, 2] = 2,
    symmetric: bool = False,
    block: int = 64,
    update_steps: Sequence[int] = (100, 2000),
    every: int = 10_000,
    seed: int = 0,
) -> Reducer:
    """Rounds to levels that are fitted, now and then, to the gradients of all workers: the least variance for the bits.

    All leaves form one vector in buckets, whose entries `r = x / norm` are rounded at random to `2**bits` levels from
    -1 to 1, without bias (`compressors.with_levels`). At step 0, at `update_steps` and every `every` steps, the levels
    move to a minimum of the expected variance, with the distribution F of all entries, weighted by `norm**norm_power`:

        Ψ = Σ_j ∫ (l_{j+1} - r) (r - l_j) dF(r)

    *On the wire*: one all-gather, of `ceil(n bits / 8)` bytes of codes (in whole 32-bit words where there are several
    buckets) and `4 ceil(n / bucket)` of norms; a worker sends `W-1` times as much. When levels are fitted, all-reduces
    of 4 and 1028 bytes ("exact") or 240.

    *State* (replicated): a key, a count and the levels. A gradient of zeros, or one with NaN or infinity, leaves them.

    Args:
      bits: 2, 3 or 4 for each entry. 3 to start.
      bucket: entries that share a norm. Smaller is more exact and costs 4 bytes per bucket.
      norm: "max", or "l2" as in the paper, with about twice the error.
      solver: "exact", from a histogram by dynamic programming, or "coordinate", the paper's, from truncated normal
        distributions and cheaper.
      norm_power: 2 minimizes the variance of the sum; 0 that of each bucket relative to its norm (the paper's ALQ-N); 1
        is the authors' code.
      symmetric: `2**(bits - 1)` magnitudes with a level at zero, and a sign, so zeros stay zeros.
      block: neighbors that share a mean and a variance, for "coordinate". Fewer follow scales more closely; `bucket` is
        the paper's mixture.
      update_steps: further steps at which levels are fitted, early.
      every: and again after so many.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.reducers.alq(3)
      >>> x = jnp.sin(jnp.arange(100.0))
      >>> reduced, state = jax.jit(lambda x: reducer.reduce(x, reducer.init(x), jd.comm.alone()))(x)
      >>> state.levels.shape, bool(jnp.abs(state.levels[3:5]).max() < 0.3)
      ((8,), True)

    References:
      Faghri, Tabrizian, Markov, Alistarh, Roy, Ramezani-Kebrya, "Adaptive Gradient Quantization for Data-Parallel SGD",
      arXiv:2010.12460, 2020. The exact solver: Ben Basat, Ben-Itzhak, Mitzenmacher, Vargaftik, "Optimal
      and approximate adaptive stochastic quantization", arXiv:2402.03158, 2024.
    """
    if solver not in ("exact", "coordinate"):
        raise ValueError(f'solver must be "exact" or "coordinate", got {solver!r}')
    if symmetric and bits == 2:
        raise ValueError("symmetric levels of 2 bits are 0 and 1, and none is left to fit: use 3 bits, or qsgd(2)")
    check_adaptive(bits, bucket, norm, norm_power, block)
    due = fit_steps(update_steps, every)
    # Magnitudes from 0, or signed levels from -1.
    lowest, count = (0.0, 2 ** (bits - 1)) if symmetric else (-1.0, 2**bits)

    def code(levels):
        return with_levels(levels, bits=bits, bucket=bucket, norm=norm, zero_level=symmetric)

    def statistics(x):
        if solver == "exact":
            return ratio_histogram(x, bucket=bucket, norm=norm, norm_power=norm_power, magnitudes=symmetric)
        return bucket_sums(x, bucket=bucket, norm=norm, norm_power=norm_power, block=block)

    def fit(statistics):
        if solver == "exact":
            return optimal_levels(grid(bucket, magnitudes=symmetric), statistics / jnp.sum(statistics), count)[0]
        distribution = distribution_of(mixture_of(statistics))
        return fit_levels(fold(distribution) if symmetric else distribution, count, lowest=lowest)

    # Until the first fit: powers of 1/2, as in NUQSGD.
    first = powers(count, jnp.float32(0.5), lowest=lowest)
    return adaptive(LevelPlan("alq", first, statistics, fit, code, due, seed))
