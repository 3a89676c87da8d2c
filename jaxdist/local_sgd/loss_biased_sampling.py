"""Sampling on slow workers of the examples that lately had high losses."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .. import comm as comms
from .._core.types import Array, AxisNames, Bool, Flag, Float, Int, Key
from ..comm.base import Comm
from ..comm.over import over
from ..state.marks import PerWorker, bind, with_value
from ..transforms.local_gradients import varies_somewhere


class LossTable(NamedTuple):
    """The last known loss of each of `n` examples.

    Attributes:
      losses: `[n]`, as of the last exchange; infinite for an example that no worker has drawn (replicated).
      hardest: `[pool]`, the examples with the highest of these losses (replicated).
      recent: `[n]`, the losses that this worker has seen since; infinite for the others (per-worker).
    """

    losses: Float[Array, " examples"]
    hardest: Int[Array, " pool"]
    recent: PerWorker


class LossBiasedSampling(NamedTuple):
    """Functions on a `LossTable`, to be called inside a step.

    Attributes:
      init: `init() -> table`, without losses; a leaf of the train state.
      draw: `draw(table, key, size, biased) -> Int[size]`, positions of examples, with replacement: of the hardest ones
        where `biased`, else of all. The key must differ between workers and steps.
      record: `record(table, drawn, losses, exchange, active=True) -> table` after a step: `losses [size]` of the
        examples drawn. In the last step of a round `exchange` is true, on all workers, and workers combine their
        losses. A worker that is not `active` records nothing.
    """

    init: Callable[[], LossTable]
    draw: Callable[..., Int[Array, " size"]]
    record: Callable[..., LossTable]


def loss_biased_sampling(examples: int, *, pool: int, axis: AxisNames = "data") -> LossBiasedSampling:
    """The sampling of Biased Local SGD: fast workers draw uniformly, slow ones from the highest recent losses.

    In a round of local SGD a slow worker takes few steps `H_i` and has the same weight as the others. Examples with
    high losses have larger gradients, so that its few steps move the average more. All workers draw from one data set.
    At the end of a round the table gets, for each example that was drawn in it, the lowest of the losses that workers
    saw; other examples keep theirs, and one that was never drawn counts as the hardest.

    Give worker `i` its `H_i` with `active=`, as `schedule.proportional_steps` describes; on a virtual clock the rule is
    `asynchronous.rules.local_sgd(sync_period=(H_1, ..., H_W))`.

    *On the wire*: in the last step of each round one all-reduce (maximum) of `4n` bytes, `n = examples`.

    *State*: `n` float32 and `pool` integers replicated, and `n` float32 per worker.

    Args:
      examples: `n`, the size of the data set.
      pool: the number of hardest examples from which slow workers draw, at most `n`. Too few repeat outliers and wrong
        labels; `n` is uniform sampling. Where some digits were rare `n/30` gained a seventh of the loss and `n/5`
        nothing; with all digits neither did (`benchmarks/reports/2026-11-uneven`).
      axis: the axis of the workers; `None` is a single worker.

    Raises:
      ValueError: `pool` is not between 1 and `examples`; at trace time, `exchange` differs between workers.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> sampling = jd.local_sgd.loss_biased_sampling(4, pool=1, axis=None)
      >>> table = sampling.init()
      >>> table = sampling.record(table, jnp.arange(4), jnp.array([0.1, 0.4, 0.3, 0.2]), True)
      >>> sampling.draw(table, jax.random.key(0), 3, True).tolist()
      [1, 1, 1]

    References:
      Lim, Jo, Ko, Go, Hwa, Lee, "Biased Local SGD for Efficient Deep Learning on Heterogeneous Systems",
      arXiv:2508.08540, 2025. As there, workers combine by the minimum; that only the losses of the last round count
      where there are any, and drawing with replacement, are ours.
    """
    if not 1 <= pool <= examples:
        raise ValueError(f"pool must be between 1 and the {examples} examples, got {pool}")
    sampling = _LossBiased(examples, pool, axis)
    return LossBiasedSampling(sampling.init, sampling.draw, sampling.record)


class _LossBiased(NamedTuple):
    examples: int
    pool: int
    axis: AxisNames

    def init(self) -> LossTable:
        # Separate buffers: states may be donated.
        unknown, recent = (jnp.full(self.examples, math.inf, jnp.float32) for _ in range(2))
        return LossTable(unknown, jnp.arange(self.pool), bind(PerWorker(recent, resize="copy"), self.axis))

    def draw(
        self, table: LossTable, key: Key[Array, ""], size: int, biased: Flag | Bool[Array, ""]
    ) -> Int[Array, " size"]:
        # One draw of numbers below the size of the pool or of the data set, whichever this worker uses.
        limit = jnp.where(biased, len(table.hardest), self.examples)
        drawn = jax.random.randint(key, (size,), 0, limit)
        return jnp.where(biased, table.hardest[jnp.minimum(drawn, len(table.hardest) - 1)], drawn)

    def record(
        self,
        table: LossTable,
        drawn: Int[Array, " size"],
        losses: Float[Array, " size"],
        exchange: Flag,
        active: Flag = True,
    ) -> LossTable:
        comm = over(self.axis)
        if varies_somewhere(jnp.asarray(exchange), self.axis):
            raise ValueError("exchange must be equal on all workers: derive it from the count of steps")
        recent = comm.varying(table.recent.value)
        # The same example twice in a batch has the same loss twice, so the order of writing does not matter.
        recent = jnp.where(active, recent.at[drawn].set(losses.astype(recent.dtype)), recent)
        losses, hardest, recent = comms.cond(
            jnp.asarray(exchange), self._exchange, _keep, comm, table.losses, table.hardest, recent
        )
        return LossTable(losses, hardest, with_value(table.recent, recent))

    def _exchange(self, comm: Comm, losses: Array, hardest: Array, recent: Array) -> tuple[Array, Array, Array]:
        # The minimum over workers, by a maximum of negatives.
        seen = -comm.max(-recent)
        # ℓ_k <- min_i ℓ_ik where a worker has drawn example k in this round.
        losses = jnp.where(jnp.isfinite(seen), seen, losses)
        return losses, lax.top_k(losses, self.pool)[1].astype(hardest.dtype), jnp.full_like(recent, math.inf)


def _keep(comm: Comm, losses: Array, hardest: Array, recent: Array) -> tuple[Array, Array, Array]:
    return losses, hardest, recent
