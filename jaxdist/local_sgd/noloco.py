"""NoLoCo: outer steps between random pairs of workers, without an all-reduce."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .. import comm as comms
from .._core.checks import check_range
from .._core.trees import next_count
from .._core.types import Array, AxisNames, Int, Key, PyTree, State, UInt, Updates
from ..comm.base import Comm, add_bytes
from ..comm.over import over
from ..state.marks import PerWorker, bind, with_value
from ..transforms.common import inner_step
from ..transforms.extra_args import with_extra_args
from ..transforms.local_gradients import check_leaves, check_shards
from ..transforms.weights import as_flag
from ..wire.buffers import permute
from ..wire.shards import map_groups
from .fragments import SyncPeriod, check_period, period_at
from .rounds import end_round, parse_sync_override, round_like
from .state import check_step, copy_wide


class NoLoCoState(NamedTuple):
    """Replicated: steps `since` the last round, the `key` of all pairings, the bytes `sent` by one worker on average.

    Per worker: the `slow` model that the round started from and its `momentum`, in float32 or better.
    """

    count: Int[Array, ""]
    since: Int[Array, ""]
    rounds: Int[Array, ""]
    key: Key[Array, ""]
    sent: UInt[Array, "2"]
    inner: PerWorker
    slow: PerWorker
    momentum: PerWorker

    communicates = True


def noloco(
    inner: optax.GradientTransformation,
    *,
    sync_period: SyncPeriod,
    learning_rate: float | int = 0.7,
    momentum: float | int = 0.5,
    pull: float | int | None = None,
    seed: int = 0,
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """DiLoCo in pairs: after `H` local steps each worker exchanges with one other, and never waits for the rest.

    With the slow model `φ_i` that a worker starts a round from, `θ_i` where it ends, and means over the pair `{i, j}`:

        m_i = μ m_i + β mean(θ - φ) + γ (mean(φ) - φ_i),   φ_i += m_i,   θ_i = φ_i

    The mean of all `φ` moves as in DiLoCo with heavy-ball momentum, whatever the pairs, and `γ` draws workers together:
    they never agree entirely, and the model to evaluate is `jd.consensus(params)` after a round.

    *On the wire*: in a round one permutation of `β θ + (γ - β) φ`, `4` bytes an entry, where the paper sends `θ - φ`
    and `φ`. On all other steps nothing. The program contains all `W-1` permutations, of which a round runs one.

    *State*: per worker the state of `inner`, slow model and momentum in float32.

    The transformation comes last in a chain. Its `update` needs `params`, `PerWorker` in the train state, and takes
    `active=`, `sync_period=` and `sync=` as that of `local_steps`, but not `examples=`: pairs weighted unequally would
    move the mean of all.

    Args:
      inner: the optimizer of each worker. Its `update` also receives `anchor=`, the slow model, and `step=`.
      sync_period: `H`, or a schedule from the step to `H`; the paper's code has 50.
      learning_rate: `β`, the outer rate.
      momentum: `μ`.
      pull: `γ`, which draws workers together: as large as `learning_rate` by default, as in the code. Lower lets them
        drift apart; the deviations of workers that have stopped learning decay for `γ` in `(0, 2 (1 + μ))`.
      seed: draws the pairings.

    Examples:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = jd.local_sgd.noloco(optax.sgd(0.5), sync_period=1, learning_rate=1.0, momentum=0.0)
      >>> def step(state, target):
      ...     updates, opt_state = tx.update(state["x"] - target[0], state["opt"], state["x"])
      ...     return {"x": state["x"] + updates, "opt": opt_state}, {}
      >>> state = jd.place({"x": jd.PerWorker(jnp.zeros(())), "opt": tx.init(jnp.zeros(()))}, 2)
      >>> state, _ = jd.simulate(step, workers=2)(state, jnp.array([1.0, 3.0]))
      >>> state["x"].value.tolist()  # two workers, γ = β = 1, μ = 0: the average
      [1.0, 1.0]

    References:
      Kolehmainen et al., "NoLoCo: No-all-reduce Low Communication Training Method for Large Models",
      arXiv:2506.10911, 2025.
    """
    check_period(sync_period, 0, 0, 1)
    check_range("momentum", momentum, 0, 1)
    check_range("learning_rate", learning_rate, 0, ends="(]")
    gamma = learning_rate if pull is None else pull
    check_range("pull", gamma, 0)
    tx = _NoLoCo(with_extra_args(inner), sync_period, learning_rate, momentum, gamma, seed, axis)
    return optax.GradientTransformationExtraArgs(tx.init, tx.update)


class _NoLoCo(NamedTuple):
    """`rate` is β, `decay` μ and `pull` γ."""

    inner: optax.GradientTransformationExtraArgs
    sync_period: SyncPeriod
    rate: float | int
    decay: float | int
    pull: float | int
    seed: int
    axis: AxisNames

    def init(self, params: PyTree) -> State:
        check_leaves(params, sharded=True)
        check_shards(params, self.axis)
        slow = copy_wide(params)
        # Three arrays: one that is donated must not be in the state twice.
        count, since, rounds = (jnp.zeros((), jnp.int32) for _ in range(3))
        return NoLoCoState(
            count=count,
            since=since,
            rounds=rounds,
            key=jax.random.key(self.seed),
            sent=jnp.zeros(2, jnp.uint32),
            inner=bind(PerWorker(self.inner.init(params)), self.axis),
            slow=bind(PerWorker(slow), self.axis),
            momentum=bind(PerWorker(jax.tree.map(jnp.zeros_like, slow)), self.axis),
        )

    def update(
        self,
        updates: Updates,
        state: State,
        params: PyTree | None = None,
        *,
        examples: Any = None,
        active: Any = None,
        sync: Any = None,
        sync_period: Any = None,
        **extra_args: Any,
    ) -> tuple[Updates, State]:
        if examples is not None:
            raise ValueError(
                "noloco cannot weigh workers by examples=: pairs of unequal weight would move the mean of all; pass "
                "active=examples > 0 for workers without any, or use local_steps"
            )
        check_step(updates, params, self.axis)
        ledger: list[comms.Sent] = []
        comm = comms.count_sent(over(self.axis), ledger)
        slow, momentum = state.slow.value, state.momentum.value
        override = parse_sync_override(sync, 1)
        with jax.named_scope("noloco"):
            passed = {"step": state.count, **extra_args, "anchor": slow}
            taken = None if active is None else as_flag(active)
            steps, inner_state = inner_step(
                self.inner, updates, state.inner.value, params, axis=self.axis, taken=taken, **passed
            )
            since = state.since + 1
            if override is None:
                due = since >= period_at(self.sync_period if sync_period is None else sync_period, state.count)
            else:
                due = bool(override)
            # All workers draw the same round of the tournament.
            key = jax.random.fold_in(state.key, state.rounds)
            pairing = jax.random.randint(key, (), 0, len(tournament(comm.size)))
            # θ_i = φ_i
            average = partial(self._average_pairs, pairing)
            (slow, momentum), steps = end_round(comm, due, average, (slow, momentum), params, steps)
        return steps, NoLoCoState(
            count=next_count(state.count),
            since=jnp.where(due, 0, since),
            rounds=jnp.where(due, next_count(state.rounds), state.rounds),
            key=state.key,
            sent=add_bytes(state.sent, comms.total_bytes(ledger)),
            inner=with_value(state.inner, comm.varying(inner_state)),
            slow=with_value(state.slow, comm.varying(slow)),
            momentum=with_value(state.momentum, comm.varying(momentum)),
        )

    def _average_pairs(
        self, pairing: Array, comm: Comm, before: tuple[Updates, Updates], local: Updates
    ) -> tuple[Updates, Updates]:
        """Returns the slow model and its momentum after a round."""
        slow, momentum = before
        # β mean(θ - φ) + γ (mean φ - φ_i) is the mean of one array, less γ φ_i: a single exchange suffices.
        drift = jax.tree.map(lambda p, f: p.astype(f.dtype) - round_like(f, p), local, slow)
        own = jax.tree.map(lambda d, f: self.rate * d + self.pull * f, drift, slow)
        partner = map_groups(partial(_exchange, comm, pairing), own)

        # m_i = μ m_i + β mean(θ - φ) + γ (mean(φ) - φ_i)
        def move(m, x, y, f):
            return self.decay * m + ((x + y) / 2 - self.pull * f)

        momentum = jax.tree.map(move, momentum, own, partner, slow)
        # φ_i += m_i
        return jax.tree.map(jnp.add, slow, momentum), momentum


def _exchange(comm: Comm, pairing: Array, tree: Updates) -> Updates:
    """The tree of this worker's partner."""
    # The permutation of each round is static, so each is a branch of its own.
    branches = [partial(permute, pairs=pairs) for pairs in tournament(comm.size)]
    return comms.switch(pairing, branches, comm, tree)


def tournament(workers: int) -> list[list[tuple[int, int]]]:
    """Returns a round-robin tournament as permutations: `W-1` rounds of pairs, `W` for an odd number of workers."""
    # The circle method: the last seat is fixed, and the others rotate.
    seats = workers + workers % 2
    rounds = []
    for turn in range(max(seats - 1, 1)):
        partners = list(range(seats))
        for i in range(seats // 2):
            left = (turn + i) % (seats - 1)
            right = seats - 1 if i == 0 else (turn - i) % (seats - 1)
            partners[left], partners[right] = right, left
        # The partner of the empty seat, if there is one, pauses: it is paired with itself.
        rounds.append([(i, partners[i] if partners[i] < workers else i) for i in range(workers)])
    return rounds
