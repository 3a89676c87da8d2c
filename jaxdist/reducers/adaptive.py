"""ALQ and AMQ: quantization levels that follow the distribution of the gradients."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from .. import comm as comms
from .._core.checks import check_count
from .._core.descriptions import with_description
from .._core.types import Array, Float, Like, PyTree, Updates
from .._core.xla_quirks import largest_magnitude
from ..comm.base import Comm
from ..compressors.adapt_levels import (
    best_multiplier,
    bucket_sums,
    distribution_of,
    fit_levels,
    fold,
    grid,
    mixture_of,
    optimal_levels,
    ratio_histogram,
)
from ..compressors.base import Compressor, scaled
from ..compressors.levels import powers, with_levels
from ..compressors.rounding import check_buckets, powers_below
from ..wire.flat import concatenate, from_vectors
from .base import (
    DrawState,
    Extras,
    Forms,
    Protocol,
    Reduced,
    Reducer,
    as_generator,
    cast_like,
    from_generator,
    init_draws,
)
from .compressed import compressed

Norm = Literal["max", "l2"]


class AdaptiveState(NamedTuple):
    """Replicated: the key and count of the compressor, and the current levels."""

    codes: DrawState
    levels: Float[Array, " levels"]


class _Plan(NamedTuple):
    """`statistics(x)` of every worker are averaged, and `fit(statistics)` gives the levels for `code(levels)`."""

    name: str
    first: Array
    statistics: Callable[[Array], Array]
    fit: Callable[[Array], Array]
    code: Callable[[Array], Compressor]
    due: Callable[[Array], Array]
    seed: int


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
    _check(bits, bucket, norm, norm_power, block)
    due = _schedule(update_steps, every)
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
    return _adaptive(_Plan("alq", first, statistics, fit, code, due, seed))


@with_description
def amq(
    bits: int = 3,
    *,
    bucket: int = 8192,
    norm: Norm = "max",
    norm_power: Literal[0, 1, 2] = 2,
    block: int = 64,
    update_steps: Sequence[int] = (100, 2000),
    every: int = 10_000,
    seed: int = 0,
) -> Reducer:
    """Rounds to powers of a multiplier p that is fitted, now and then, to the gradients of all workers.

    As `alq`, with the levels `±p^s, ..., ±p, ±1`, `s = 2**(bits - 1) - 1`: one number to fit, and a larger variance. Ψ
    is computed for 128 values of p, and bisection on dΨ/dp goes on around the best.

    *On the wire*: as `alq`: one all-gather, of `ceil(n bits / 8)` bytes of codes and `4 ceil(n / bucket)` of norms;
    when p is fitted, an all-reduce of 4 bytes and one of 240 more.

    *State* (replicated): a key, a count and the levels.

    The arguments are those of `alq`; p is fitted to the mixture of normal distributions. `norm_power=0` is the paper's
    AMQ-N.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.reducers.amq(3)
      >>> x = jnp.sin(jnp.arange(100.0))
      >>> _, state = reducer.reduce(x, reducer.init(x), jd.comm.alone())
      >>> bool(0.3 < state.levels[-2] < 0.9)  # p
      True

    References:
      Faghri et al., arXiv:2010.12460, 2020.
    """
    _check(bits, bucket, norm, norm_power, block)
    due = _schedule(update_steps, every)
    count = 2**bits

    def code(levels):
        return with_levels(levels, bits=bits, bucket=bucket, norm=norm, zero_level=False)

    def statistics(x):
        return bucket_sums(x, bucket=bucket, norm=norm, norm_power=norm_power, block=block)

    def fit(sums):
        return powers(count, best_multiplier(distribution_of(mixture_of(sums)), count))

    return _adaptive(_Plan("amq", powers(count, jnp.float32(0.5)), statistics, fit, code, due, seed))


def _check(bits: int, bucket: int, norm: str, norm_power: int, block: int) -> None:
    if bits not in (2, 3, 4):
        raise ValueError(f"bits must be 2, 3 or 4, got {bits}; 8 bits lose next to nothing without adapting: qsgd(8)")
    check_buckets(bucket, norm)
    if norm_power not in (0, 1, 2):
        raise ValueError(f"norm_power must be 0, 1 or 2, got {norm_power}")
    check_count("block", block, 1)


def _schedule(update_steps: Sequence[int], every: int) -> Callable[[Array], Array]:
    if any(step < 0 for step in update_steps):
        raise ValueError(f"update_steps must not be negative, got {tuple(update_steps)}")
    check_count("every", every, 1)
    # At step 0, every so many steps, and at the given ones.
    return lambda count: jnp.any(jnp.stack([count % every == 0, *(count == step for step in update_steps)]))


def _adaptive(plan: _Plan, forms: Forms | None = None) -> Reducer:
    if forms is None:
        # Inside error feedback buckets are shrunk by their error with the current levels.
        forms = Forms(contraction=_adaptive(plan._replace(code=lambda levels: scaled(plan.code(levels))), Forms()))
    return from_generator(plan.name, partial(_init, plan), partial(_messages, plan), forms=forms)


def _init(plan: _Plan, like: PyTree[Like]) -> AdaptiveState:
    # A copy of its own for each state, which may be donated.
    return AdaptiveState(init_draws(plan.seed), jnp.array(plan.first))


def _messages(plan: _Plan, updates: Updates, state: AdaptiveState, comm: Comm, extras: Extras) -> Protocol:
    leaves, tree = jax.tree.flatten(updates)
    if not leaves:
        return Reduced(updates, updates), state
    wide = [leaf.astype(jnp.float32) for leaf in leaves]
    flat = concatenate(wide)
    levels = state.levels
    if flat.size:
        due = plan.due(state.codes.count)
        levels = comms.cond(due, partial(_fit, plan), lambda comm, flat, levels: levels, comm, flat, levels)
    reducer = compressed(plan.code(levels), seed=plan.seed)
    reduced, codes = yield from as_generator(reducer, flat, state.codes, comm, extras)
    mean, own = (cast_like(tree.unflatten(from_vectors([part], wide)), updates) for part in reduced)
    return Reduced(mean, own), AdaptiveState(codes, levels)


def _fit(plan: _Plan, comm: Comm, flat: Array, levels: Array) -> Array:
    """Fits the levels to the gradients of all workers; the old ones stay where that fails."""
    # In a unit that all workers share: squares of the norms neither overflow nor vanish, and the fit is the same.
    _, inverse = powers_below(comm.max(largest_magnitude(flat[None])))
    # F is the mean of the workers' distributions, so all of them fit the same levels, bit for bit.
    statistics = comm.mean(plan.statistics(flat * inverse[0]))
    new = plan.fit(statistics)
    # A histogram, or a row of sums for each normal distribution with its weight first. Zeros have no distribution.
    weights = statistics if statistics.ndim == 1 else statistics[:, 0]
    usable = jnp.isfinite(statistics).all() & (jnp.sum(weights) > 0) & (jnp.diff(new) > 0).all()
    return jnp.where(usable, new, levels)
