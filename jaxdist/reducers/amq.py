"""AMQ: exponential quantization levels with a multiplier fitted to the gradients."""

from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp

from .._core.descriptions import with_description
from ..compressors.adapt_levels import best_multiplier, bucket_sums, distribution_of, mixture_of
from ..compressors.levels import with_levels
from ..compressors.nuqsgd import powers
from .adaptive import LevelPlan, Norm, adaptive, check_adaptive, fit_steps
from .reducer import Reducer


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
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.reducers.amq(3)
      >>> x = jnp.sin(jnp.arange(100.0))
      >>> _, state = jax.jit(lambda x: reducer.reduce(x, reducer.init(x), jd.comm.alone()))(x)
      >>> bool(0.3 < state.levels[-2] < 0.9)  # p
      True

    References:
      Faghri, Tabrizian, Markov, Alistarh, Roy, Ramezani-Kebrya, "Adaptive Gradient Quantization for Data-Parallel SGD",
      arXiv:2010.12460, 2020.
    """
    check_adaptive(bits, bucket, norm, norm_power, block)
    due = fit_steps(update_steps, every)
    count = 2**bits

    def code(levels):
        return with_levels(levels, bits=bits, bucket=bucket, norm=norm, zero_level=False)

    def statistics(x):
        return bucket_sums(x, bucket=bucket, norm=norm, norm_power=norm_power, block=block)

    def fit(sums):
        return powers(count, best_multiplier(distribution_of(mixture_of(sums)), count))

    return adaptive(LevelPlan("amq", powers(count, jnp.float32(0.5)), statistics, fit, code, due, seed))
