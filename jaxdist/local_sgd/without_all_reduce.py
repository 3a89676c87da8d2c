"""Outer steps without an all-reduce: slow momentum of each worker's own drift, and NoLoCo's random pairs."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .. import comm as comms
from .._core.checks import check_range
from .._core.trees import next_count
from .._core.types import Array, AxisNames, Float, Int, Key, PyTree, State, UInt, Updates
from ..comm.base import Comm, add_bytes
from ..comm.over import over
from ..state.marks import PerWorker, bind, with_value
from ..transforms.common import inner_step
from ..transforms.local_gradients import check_leaves, check_shards, with_extra_args
from ..transforms.weights import as_flag, check_shared
from ..wire.flat import map_groups, permute
from .fragments import SyncPeriod, check_period, period_at
from .state import check_stays, check_step, copy_wide, has_models
from .synchronize import check_entrywise, end_round, parse_sync_override, round_like


class LocalSlowMomentumState(NamedTuple):
    """The state of `local_slow_momentum`.

    Replicated: steps `since` the last slow one, the sum of their learning `rates`. Per worker: the `anchor`, its model
    at the start of the round, in float32 or better, and the state of `outer`.
    """

    count: Int[Array, ""]
    since: Int[Array, ""]
    rates: Float[Array, ""]
    inner: State
    anchor: PerWorker
    outer: PerWorker


def local_slow_momentum(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    *,
    sync_period: SyncPeriod,
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """Takes an outer step along each worker's own drift every `H` steps: slow momentum without any average.

    With its anchor `a_i` and the model `x_i` after `H` steps of `inner`, which mixes models by itself:

        Δ_i = a_i - x_i,   a_i += outer(Δ_i),   x_i = a_i

    Around `gossip` with `sgp()` and `slow_momentum()` this is SGP-SlowMo-noaverage. All of it is linear, so the
    mean over workers follows SlowMo with the average; the distance between workers depends on `inner`. That needs
    models that count alike in their mean, so push-sum weights must stay 1: a graph whose rows sum to 1.

    *On the wire*: only what `inner` sends. *State*: per worker the anchor and the state of `outer`, in float32.

    The transformation comes last in a chain. Its `update` needs `params`, `PerWorker` in the train state, and takes
    `learning_rate=`, the replicated rate of this step, which `slow_momentum` needs, and `active=`, as `gossip`; `inner`
    gets the other extra arguments.

    Args:
      inner: a transformation of local gradients that mixes models: `gossip`.
      outer: receives the drift as its gradient: `slow_momentum()`.
      sync_period: `H`, or a schedule from the step to `H`; the paper has 48.

    Raises:
      ValueError: in `init`, gossip inside keeps a part of its models elsewhere: `sgp` on another graph, `osgp`,
        `relay_sgd`, `ecd_psgd`.

    Examples:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = jd.gossip(optax.sgd(0.5), jd.topology.ring(4), method=jd.decentralized.sgp())
      >>> tx = jd.local_sgd.local_slow_momentum(tx, jd.local_sgd.slow_momentum(momentum=0.6), sync_period=2)
      >>> def step(state, target):
      ...     updates, opt = tx.update(state["x"] - target[0], state["opt"], state["x"], learning_rate=0.5)
      ...     return {"x": state["x"] + updates, "opt": opt}, {}
      >>> state = jd.place({"x": jd.PerWorker(jnp.zeros(())), "opt": tx.init(jnp.zeros(()))}, 4)
      >>> for _ in range(4):
      ...     state, _ = jd.simulate(step, workers=4)(state, jnp.array([0.0, 4.0, 8.0, 12.0]))
      >>> round(float(jd.consensus(state["x"])), 4)  # 4.5, then 1.125 more and 0.6 of the first round
      8.325

    References:
      Wang et al., "SlowMo", arXiv:1910.00643, 2019 (SGP-SlowMo-noaverage).
    """
    check_period(sync_period, 0, 0, 1)
    inner, outer = with_extra_args(inner), with_extra_args(outer)

    def init_fn(params) -> State:
        check_leaves(params, sharded=True)
        check_shards(params, axis)
        anchor = copy_wide(params)
        check_entrywise(outer, anchor)
        inner_state = inner.init(params)
        check_stays(inner_state)
        return LocalSlowMomentumState(
            count=jnp.zeros((), jnp.int32),
            since=jnp.zeros((), jnp.int32),
            rates=jnp.zeros((), jnp.float32),
            inner=inner_state,
            anchor=bind(PerWorker(anchor), axis),
            outer=bind(PerWorker(outer.init(anchor)), axis),
        )

    def update_fn(
        updates, state, params: PyTree = None, *, learning_rate=None, examples=None, active=None, **extra_args
    ) -> tuple[Updates, State]:
        if examples is not None:
            raise ValueError(
                "local_slow_momentum averages nothing by itself, and gossip cannot weigh workers by examples=: pass "
                "active=examples > 0 for workers without any, or use slowmo"
            )
        check_step(updates, params, axis)
        comm = over(axis)
        given = {} if learning_rate is None else {"learning_rate": learning_rate}
        passed, taken = {**extra_args, **given}, None if active is None else as_flag(active)
        if taken is not None:
            check_shared("active", taken, params)
        # An inactive worker still mixes models.
        if has_models(state.inner) and taken is not None:
            passed, taken = {**passed, "active": taken}, None
        steps, inner_state = inner_step(inner, updates, state.inner, params, axis=axis, taken=taken, **passed)
        since = state.since + 1
        rates = state.rates + jnp.asarray(given.get("learning_rate", 0.0), jnp.float32)
        due = since >= period_at(sync_period, state.count)

        with jax.named_scope("local_slow_momentum"):
            # The outer optimizer sees the mean rate of the round.
            extras = {"learning_rate": rates / since} if given else {}
            before = state.anchor.value, state.outer.value
            # x_i = a_i
            after, steps = end_round(comm, due, partial(_slow_step, outer, extras), before, params, steps)
            anchor, outer_state = comm.varying(after)
        return steps, LocalSlowMomentumState(
            count=next_count(state.count),
            since=jnp.where(due, 0, since),
            rates=jnp.where(due, 0.0, rates),
            inner=inner_state,
            anchor=with_value(state.anchor, anchor),
            outer=with_value(state.outer, outer_state),
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _slow_step(
    outer: optax.GradientTransformationExtraArgs,
    extras: dict[str, Array],
    comm: Comm,
    before: tuple[Updates, State],
    local: PyTree,
) -> tuple[Updates, State]:
    """Returns the anchor after `a += outer(a - x)`, and the state of `outer`."""
    del comm
    anchor, outer_state = before
    # Δ_i = a_i - x_i, with the anchor as the parameters' dtype represents it
    drift = jax.tree.map(lambda a, p: round_like(a, p) - p.astype(a.dtype), anchor, local)
    # a_i += outer(Δ_i)
    steps, outer_state = outer.update(drift, outer_state, anchor, **extras)
    return jax.tree.map(jnp.add, anchor, steps), outer_state


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


class _NoLoCo(NamedTuple):
    """`rate` is β, `decay` μ and `pull` γ."""

    inner: optax.GradientTransformationExtraArgs
    sync_period: SyncPeriod
    rate: float | int
    decay: float | int
    pull: float | int
    seed: int
    axis: AxisNames


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
    they never agree entirely, and the model to evaluate is `jd.consensus(params)` after a round. The pairs of a round
    are those of one of the `W-1` rounds of a round-robin tournament, drawn by all workers from the same key; with an
    odd number of workers, one of them pauses each time.

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
    if not learning_rate > 0:
        raise ValueError(f"learning_rate must be positive, got {learning_rate}")
    gamma = learning_rate if pull is None else pull
    check_range("pull", gamma, 0)
    cfg = _NoLoCo(with_extra_args(inner), sync_period, learning_rate, momentum, gamma, seed, axis)
    return optax.GradientTransformationExtraArgs(partial(_init_noloco, cfg), partial(_noloco_update, cfg))


def _init_noloco(cfg: _NoLoCo, params: PyTree) -> State:
    check_leaves(params, sharded=True)
    check_shards(params, cfg.axis)
    slow = copy_wide(params)
    # Three arrays: one that is donated must not be in the state twice.
    count, since, rounds = (jnp.zeros((), jnp.int32) for _ in range(3))
    return NoLoCoState(
        count=count,
        since=since,
        rounds=rounds,
        key=jax.random.key(cfg.seed),
        sent=jnp.zeros(2, jnp.uint32),
        inner=bind(PerWorker(cfg.inner.init(params)), cfg.axis),
        slow=bind(PerWorker(slow), cfg.axis),
        momentum=bind(PerWorker(jax.tree.map(jnp.zeros_like, slow)), cfg.axis),
    )


def _noloco_update(
    cfg: _NoLoCo,
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
    check_step(updates, params, cfg.axis)
    ledger: list[comms.Sent] = []
    comm = comms.count_sent(over(cfg.axis), ledger)
    slow, momentum = state.slow.value, state.momentum.value
    override = parse_sync_override(sync, 1)
    with jax.named_scope("noloco"):
        passed = {"step": state.count, **extra_args, "anchor": slow}
        taken = None if active is None else as_flag(active)
        steps, inner_state = inner_step(
            cfg.inner, updates, state.inner.value, params, axis=cfg.axis, taken=taken, **passed
        )
        since = state.since + 1
        if override is None:
            due = since >= period_at(cfg.sync_period if sync_period is None else sync_period, state.count)
        else:
            due = bool(override)
        # All workers draw the same round of the tournament.
        key = jax.random.fold_in(state.key, state.rounds)
        pairing = jax.random.randint(key, (), 0, len(tournament(comm.size)))
        # θ_i = φ_i
        average = partial(_average_pairs, cfg, pairing)
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
    cfg: _NoLoCo, pairing: Array, comm: Comm, before: tuple[Updates, Updates], local: Updates
) -> tuple[Updates, Updates]:
    """Returns the slow model and its momentum after a round."""
    slow, momentum = before
    # β mean(θ - φ) + γ (mean φ - φ_i) is the mean of one array, less γ φ_i: a single exchange suffices.
    drift = jax.tree.map(lambda p, f: p.astype(f.dtype) - round_like(f, p), local, slow)
    own = jax.tree.map(lambda d, f: cfg.rate * d + cfg.pull * f, drift, slow)
    partner = map_groups(partial(_exchange, comm, pairing), own)

    # m_i = μ m_i + β mean(θ - φ) + γ (mean(φ) - φ_i)
    def move(m, x, y, f):
        return cfg.decay * m + ((x + y) / 2 - cfg.pull * f)

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
