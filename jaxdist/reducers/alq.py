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

    All leaves form one vector in buckets of `bucket` entries. An entry `r = x / norm` goes at random to one of the two
    levels around it, out of `2**bits` from -1 to 1, so that it is right on average (`compressors.with_levels`).
    At step 0, at `update_steps` and every `every` steps, the levels move to a minimum of the expected variance of an
    entry, a sum over the intervals between levels:

        Ψ = Σ_j ∫ (l_{j+1} - r) (r - l_j) dF(r)

    F is the distribution of all entries, those of a bucket weighted by `norm**norm_power`:

    - "exact": F is a histogram, and dynamic programming finds the best table of its 257 points.
    - "coordinate": F is a mixture of truncated normal distributions, fitted to the means and variances of blocks of
      entries. Each level in turn goes to the zero of dΨ/dl, 30 times, from three starts, of which the best is kept.

    The paper has "coordinate", the L2 norm and one normal distribution for a bucket. But with that norm the squares of
    the ratios in a full bucket add up to 1, so each has a variance of 1/bucket whatever the gradients are: levels for
    Gaussian buckets, which fail where layers of different scales share a bucket. Hence the blocks. With the largest
    magnitude as the norm no level is spent on ratios that do not occur, and the error is less than half of it.

    *On the wire*: one all-gather, of `ceil(n bits / 8)` bytes of codes for all n entries together (in whole 32-bit
    words where there are several buckets) and `4 ceil(n / bucket)` of norms; a worker sends `W-1` times as much. When
    levels are fitted, an all-reduce of 4 bytes and one of 1028 more ("exact"), or of 240. Levels are not sent: every
    worker computes the same ones from the same averages, bit for bit.

    *State* (replicated): a key, a count and the levels. A gradient of zeros, or one with NaN or infinity, leaves them.

    Inside `error_feedback` buckets are shrunk by their error with the current levels (`compressors.scaled`), typical
    ones hardly. Inside `bucketed`, which sends several pieces, each piece has its own levels.

    Args:
      bits: 2, 3 or 4 for each entry. 3 to start.
      bucket: entries that share a norm. Smaller is more exact and costs 4 bytes per bucket.
      norm: "max", or "l2" as in the paper.
      solver: see above. The pass over the gradients that "exact" takes costs more, at scheduled steps only.
      norm_power: 2 minimizes the variance of the sum; 0 that of each bucket relative to its norm (the paper's ALQ-N);
        1 is what the authors' code has in place of 2.
      symmetric: `2**(bits - 1)` magnitudes with a level at zero, and a sign; fewer free levels, but zeros stay zeros.
      block: neighbors that share a mean and a variance, for the mixture. Fewer follow the scales within a bucket more
        closely, and below 32 take noise for scales; `bucket` is the paper's mixture.
      update_steps: further steps at which the levels are fitted: early, while gradients change fast.
      every: and again after so many steps.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.reducers.alq(3)
      >>> x = jnp.sin(jnp.arange(100.0))
      >>> reduced, state = reducer.reduce(x, reducer.init(x), jd.comm.alone())
      >>> state.levels.shape, bool(jnp.abs(state.levels[3:5]).max() < 0.3)
      ((8,), True)

    References:
      F. Faghri, I. Tabrizian, I. Markov, D. Alistarh, D. Roy, A. Ramezani-Kebrya, "Adaptive gradient quantization for
      data-parallel SGD", arXiv:2010.12460, 2020. The exact solver: R. Ben Basat, Y. Ben-Itzhak, M. Mitzenmacher, S.
      Vargaftik, "Optimal and approximate adaptive stochastic quantization", arXiv:2402.03158, 2024.
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
