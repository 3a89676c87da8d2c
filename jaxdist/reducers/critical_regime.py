"""Critical regimes: when gradients change fast, or the learning rate has just fallen, and compression does harm."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import comm as comms
from .._typing import Array, Bool, Float, Int, Like, PyTree, Updates
from ..compressors.base import working_dtype

_LAST = jnp.iinfo(jnp.int32).max


class CriticalRegimeState(NamedTuple):
    """Agreed, but for the sum in `accordion`. What a detector remembers.

    Attributes:
      count: steps so far.
      total: the sum of the gradients of the current epoch, in float32 or better; `PerWorker` in `accordion`.
      norm: that of the mean gradient of the last epoch that was looked at; in `accordion` the mean over workers.
      critical: the verdict.
      learning_rate: of the last step; 0 before the first one.
    """

    count: Int[Array, ""]
    total: Updates
    norm: Float[Array, ""]
    critical: Bool[Array, ""]
    learning_rate: Float[Array, ""]


class CriticalRegime(NamedTuple):
    """A detector, as pure functions.

    Attributes:
      init: `init(like) -> state` from the shapes of the gradients. The beginning is critical.
      before: `before(state, learning_rate=None) -> state`, at the beginning of a step: a rate well below that of the
        last step makes it critical.
      after: `after(state, gradient, own=None, comm=None) -> state`, at its end, with an agreed gradient: the mean. One
        that differs between workers comes with their group, `comm`, over which norms are averaged; and if it has error
        feedback in it, with what of it was sent, `own`.
    """

    init: Callable[[PyTree[Like]], CriticalRegimeState]
    before: Callable[..., CriticalRegimeState]
    after: Callable[..., CriticalRegimeState]


def critical_regime(
    *,
    epoch_steps: int,
    interval_steps: int,
    eta: float | int = 0.5,
    schedule: Callable[[Int[Array, ""]], Float[Array, ""] | float] | None = None,
    fall: float | int = 0.1,
) -> CriticalRegime:
    """Detects them as Accordion does: `critical` unless `| |A'| - |A| | < eta |A'|`, and when the learning rate falls.

    `A` is the gradient summed over the first `epoch_steps` of every `interval_steps`, and `A'` the one before. Norms
    are those of the mean over the epoch, which stay comparable when a larger batch makes epochs shorter.

    `A` must be free of compression, or the detector sees its own verdicts: what error feedback holds back in one epoch
    comes in another. `accordion` sums what each worker computed. Inside feedback it sees `x_t = g_t + e_(t-1)` and what
    of it was sent, `own_t = x_t - e_t`, and the sum of the gradients telescopes,
    `Σ_(s..T) g_t = Σ_(s..T-1) own_t + x_T - e_(s-1)`.

    Deviations: the paper looks at one worker's sum, here the norms of all workers' are averaged; it takes any fall of
    the learning rate between epochs for critical, which a cosine has in all of them, here the rate must `fall` at once.

    *On the wire*: nothing; with `comm` the mean of 4 bytes in each step that ends with a verdict.

    *State* (agreed): see `CriticalRegimeState`; a float32 copy of the gradients.

    Args:
      epoch_steps: over how many steps to sum: those of an epoch. Noise cancels in long sums, and only in them.
      interval_steps: from one verdict to the next, ten epochs in the paper. Shorter follows the training more closely
        and decides by smaller changes.
      eta: the relative change from which on a regime is critical. Lower is more careful.
      schedule: the learning rate of each step, for callers that do not pass `learning_rate`.
      fall: the part by which the rate must fall from one step to the next to be critical: a drop to a half or a tenth
        is, a cosine or linear decay is not but for its last few steps. 0: any fall, as in the paper, for rates that
        change in steps only. 1: none; the gradient alone decides.

    Returns:
      The detector. Its verdict stands until the end of the next epoch that it looks at; there is no first one to
      compare with, so that it is critical for `interval_steps + epoch_steps` at least.

    Raises:
      ValueError: an argument is out of range.

    Warns:
      UserWarning: from `init`, `schedule` falls by as much as `fall` in one step after the other, which makes them all
        critical.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdist.reducers import critical_regime
      >>> detector = critical_regime(epoch_steps=1, interval_steps=1)
      >>> state, verdicts = detector.init(jnp.zeros(1)), []
      >>> for norm in (10.0, 4.0, 3.0):
      ...     state = detector.after(detector.before(state, learning_rate=0.1), jnp.full(1, norm))
      ...     verdicts.append(bool(state.critical))
      >>> verdicts, bool(detector.before(state, learning_rate=0.01).critical)
      ([True, True, False], True)

    References:
      Agarwal, Wang, Lee, Venkataraman, Papailiopoulos, "Accordion: Adaptive Gradient Communication via Critical
      Learning Regime Identification", arXiv 2010.16248, 2021.
    """
    if epoch_steps < 1:
        raise ValueError(f"epoch_steps must be at least 1, got {epoch_steps}")
    if interval_steps < epoch_steps:
        raise ValueError(f"interval_steps must be at least epoch_steps, {epoch_steps}, got {interval_steps}")
    if eta < 0:
        raise ValueError(f"eta must not be negative, got {eta}")

    if not 0 <= fall <= 1:
        raise ValueError(f"fall must be in [0, 1], got {fall}")

    def init(like):
        if schedule is not None and _falls_all_the_time(schedule, fall):
            warnings.warn(
                f"the rates of schedule= fall by more than fall={fall} step after step, so that every step is critical "
                "and reduced with low compression: raise fall=, or take fall=1, with which rates do not count",
                stacklevel=2,
            )
        total = jax.tree.map(lambda x: jnp.zeros(x.shape, working_dtype(x.dtype)), like)
        norm, learning_rate = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)
        return CriticalRegimeState(jnp.zeros((), jnp.int32), total, norm, jnp.ones((), bool), learning_rate)

    def before(state, learning_rate=None):
        if schedule is not None:
            learning_rate = schedule(state.count)
        if learning_rate is None:
            return state
        rate = jnp.asarray(learning_rate, jnp.float32)
        fell = rate < (1 - fall) * state.learning_rate
        return state._replace(critical=state.critical | fell, learning_rate=rate)

    def after(state, gradient, own=None, comm=None):
        comm = comms.alone() if comm is None else comm
        own = gradient if own is None else own
        position = state.count % interval_steps
        looking = state.count < _LAST  # where the count stays, so does the verdict
        ends, last = position == epoch_steps - 1, position == interval_steps - 1

        def judge(comm, total, norm, critical):
            del critical
            whole = jax.tree.map(lambda a, x: a + x.astype(a.dtype), total, gradient)
            new = comm.mean(_norm(whole)) / epoch_steps
            return new, ~(jnp.abs(norm - new) < eta * norm)  # critical also where a norm is NaN

        def add(total):
            """`own`, and before an epoch begins what is left behind and comes in it: `-e = own - x`."""

            def sum_up(a, x, sent):
                return jnp.where(last, 0, a) + sent.astype(a.dtype) - jnp.where(last, x.astype(a.dtype), 0)

            return jax.tree.map(sum_up, total, gradient, own)

        norm, critical = comms.cond(
            looking & ends, judge, lambda comm, total, *old: old, comm, state.total, state.norm, state.critical
        )
        total = lax.cond(looking & ((position < epoch_steps) | last), add, lambda total: total, state.total)
        count = jnp.where(looking, state.count + 1, state.count)
        return CriticalRegimeState(count, total, norm, critical, state.learning_rate)

    return CriticalRegime(init, before, after)


def _falls_all_the_time(schedule: Callable[..., Any], fall: float | int) -> bool:
    """Whether the rate falls in two steps in a row, which decays in steps do not, at more than one time."""
    times = np.unique(np.geomspace(1, 1e6, 100).astype(np.int32))
    with jax.ensure_compile_time_eval():
        rates = jax.vmap(jax.vmap(schedule))(jnp.asarray(times[:, None] + np.arange(3, dtype=np.int32)))
        falls = np.asarray(rates[:, 1:] < (1 - fall) * rates[:, :-1])
    return bool(falls.all(axis=1).sum() > 1)


def _norm(tree: Updates) -> Float[Array, ""]:
    """Scaled, so that squares of tiny and huge gradients neither vanish nor overflow."""
    zero = jnp.zeros((), jnp.float32)
    leaves = jax.tree.leaves(tree)
    largest = [jnp.max(jnp.abs(x), initial=0).astype(jnp.float32) for x in leaves]
    scale = jnp.max(jnp.stack([zero, *largest]))
    divisor = jnp.where(scale == 0, 1, scale)
    squares = [jnp.sum(jnp.square((x / divisor.astype(x.dtype)).astype(jnp.float32))) for x in leaves]
    return scale * jnp.sqrt(sum(squares, zero))
