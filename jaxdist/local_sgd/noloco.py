"""NoLoCo: local steps without any all-reduce: at the end of a round workers meet in pairs drawn anew."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .. import comm as comms
from .._core.checks import NO_PARAMS, check_range
from .._core.dtypes import working_dtype
from .._core.trees import next_count
from .._core.types import Array, AxisNames, Int, Key, State, UInt, Updates
from ..comm.base import Comm
from ..comm.over import over
from ..reducers.with_stats import add_bytes
from ..state.marks import PerWorker, bind, with_value
from ..transforms.common import check_per_worker, inner_step
from ..transforms.local_gradients import check_leaves, check_local
from ..wire.flat import fused
from .fragments import SyncPeriod, check_period, period_at
from .synchronize import as_held, either, take_over, told_to_talk


class NoLoCoState(NamedTuple):
    """What has been agreed on, and what this worker keeps.

    Agreed: `count` of steps, steps `since` the last round, `rounds`; the key of all pairings; the bytes `sent` by one
    worker on average, as (high, low) words.
    Per worker: the `inner` state, the `slow` model that it started the round from and its `momentum`, in float32 or
    better.
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
    """DiLoCo in pairs: after `H` steps by itself each worker talks to one other, and nobody waits for all.

    With the slow model `φ_i` that a worker starts a round from, `θ_i` where it ends, and means over the pair `{i, j}`:

        m_i = μ m_i + β mean(θ - φ) + γ (mean(φ) - φ_i),   φ_i += m_i,   θ_i = φ_i

    The mean of all `φ` moves as in DiLoCo with heavy-ball momentum, whatever the pairs, and `γ` draws workers together:
    they never agree entirely, and the model to evaluate is `jd.consensus(params)` after a round. Pairs are one of the
    `W-1` rounds of a tournament in which everybody meets everybody, drawn by all workers from one key; with an odd
    number one worker each time has nobody to meet.

    *On the wire*: in a round one permutation of `β θ + (γ - β) φ`, the part of both that the other needs: `4` bytes an
    entry, where the paper sends `θ - φ` and `φ`. On all other steps nothing. The program holds all `W-1` permutations,
    of which a round runs one.

    *State*: agreed, counts and a key; per worker that of `inner`, slow model and momentum in float32.

    Args:
      inner: the optimizer of each worker. It is also passed `anchor=`, its slow model, and `step=`.
      sync_period: `H`, or a schedule from the step to `H`; the paper's code has 50.
      learning_rate: `β`, the outer rate.
      momentum: `μ`.
      pull: `γ`, which draws workers together: as large as `learning_rate` by default, as in the code. Lower lets them
        drift apart; the deviations of workers that have stopped learning decay for `γ` in `(0, 2 (1 + μ))`.
      seed: of the pairings.
      axis: the mesh axis of the workers.

    Returns:
      A gradient transformation for local gradients; it needs `params`, `PerWorker` in the train state, and comes last
      in a chain. Its `update` takes `active=` (this worker takes no step where it is false), `sync_period=` and
      `sync=` as that of `local_steps`.

    Raises:
      ValueError: an argument is out of range; at trace time, if `params` are missing or not marked `PerWorker`, or if
        `examples=` is passed: pairs weighted unequally would move the mean of all.

    Example:
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
      Kolehmainen, Blagoev, Donaghy, Ersoy, Nies, "NoLoCo: No-all-reduce Low Communication Training Method for Large
      Models", arXiv 2506.10911, 2025.
    """
    check_period(sync_period, 0, 0, 1)
    check_range("momentum", momentum, 0, 1)
    if not learning_rate > 0:
        raise ValueError(f"learning_rate must be positive, got {learning_rate}")
    gamma = learning_rate if pull is None else pull
    check_range("pull", gamma, 0)
    inner = optax.with_extra_args_support(inner)

    def init(params) -> State:
        check_leaves(params)
        # Copies, since parameters and optimizer state may both be donated.
        slow = jax.tree.map(lambda x: jnp.array(x, working_dtype(x.dtype)), params)
        zero = jnp.zeros((), jnp.int32)
        return NoLoCoState(
            count=zero,
            since=jnp.zeros_like(zero),
            rounds=jnp.zeros_like(zero),
            key=jax.random.key(seed),
            sent=jnp.zeros(2, jnp.uint32),
            inner=bind(PerWorker(inner.init(params)), axis),
            slow=bind(PerWorker(slow), axis),
            momentum=bind(PerWorker(jax.tree.map(jnp.zeros_like, slow)), axis),
        )

    def meet(comm: Comm, which: Array, local: Updates, slow: Updates, velocity: Updates) -> tuple[Updates, Updates]:
        # β mean(θ - φ) + γ (mean φ - φ_i) is the mean of one array, less γ φ_i.
        drift = jax.tree.map(lambda p, f: p.astype(f.dtype) - as_held(f, p), local, slow)
        mine = jax.tree.map(lambda d, f: learning_rate * d + gamma * f, drift, slow)
        leaves, tree = jax.tree.flatten(mine)

        def talk(pairs):
            return lambda comm, leaves: fused(lambda x: comm.ppermute(x, pairs), leaves)

        theirs = tree.unflatten(comms.switch(which, [talk(pairs) for pairs in tournament(comm.size)], comm, leaves))
        velocity = jax.tree.map(
            lambda m, x, y, f: momentum * m + ((x + y) / 2 - gamma * f), velocity, mine, theirs, slow
        )
        return jax.tree.map(jnp.add, slow, velocity), velocity

    def update(
        updates,
        state,
        params=None,
        *,
        examples=None,
        active=None,
        sync=None,
        sync_period: Any = sync_period,
        **extra_args,
    ) -> tuple[Updates, State]:
        if params is None:
            raise ValueError(NO_PARAMS)
        if examples is not None:
            raise ValueError(
                "noloco cannot weigh workers by examples: pairs of unequal weight would move the mean of all; pass "
                "active= for workers without any, or use local_steps"
            )
        check_leaves(updates)
        check_local(updates, axis)
        check_per_worker(params, axis)
        ledger: list[comms.Sent] = []
        comm = comms.counted(over(axis), ledger)
        slow, velocity = state.slow.value, state.momentum.value
        with jax.named_scope("noloco"):
            given = {"step": state.count, **extra_args, "anchor": slow}
            steps, inner_state, local = inner_step(inner, updates, state.inner.value, params, active=active, **given)
            since = state.since + 1
            told = told_to_talk(sync, 1)
            due = since >= period_at(sync_period, state.count) if told is None else bool(told)
            drawn = jax.random.fold_in(state.key, state.rounds)
            which = jax.random.randint(drawn, (), 0, len(tournament(comm.size)))
            slow, velocity = either(due, meet, _stay, comm, which, local, slow, velocity)
            steps = take_over(due, 0.0, slow, local, params, steps)
        return steps, NoLoCoState(
            count=next_count(state.count),
            since=jnp.where(due, 0, since),
            rounds=jnp.where(due, next_count(state.rounds), state.rounds),
            key=state.key,
            sent=add_bytes(state.sent, comms.total_bytes(ledger)),
            inner=with_value(state.inner, comm.varying(inner_state)),
            slow=with_value(state.slow, comm.varying(slow)),
            momentum=with_value(state.momentum, comm.varying(velocity)),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _stay(comm: Comm, which: Array, local: Updates, slow: Updates, velocity: Updates) -> tuple[Updates, Updates]:
    del comm, which, local
    return slow, velocity


def tournament(workers: int) -> list[list[tuple[int, int]]]:
    """Rounds of pairs in which everybody meets everybody once, as permutations: `W-1` of them, `W` for an odd number.

    With an odd number one worker stays out of each round, and is paired with itself. One stays in place and the others
    go around it.
    """
    seats = workers + workers % 2
    rounds = []
    for turn in range(max(seats - 1, 1)):
        partners = list(range(seats))
        for i in range(seats // 2):
            left = (turn + i) % (seats - 1)
            right = seats - 1 if i == 0 else (turn - i) % (seats - 1)
            partners[left], partners[right] = right, left
        rounds.append([(i, partners[i] if partners[i] < workers else i) for i in range(workers)])
    return rounds
