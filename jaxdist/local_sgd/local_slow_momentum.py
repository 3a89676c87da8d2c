"""Slow momentum of each worker's own drift, without an all-reduce."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._core.trees import next_count
from .._core.types import Array, AxisNames, Float, Int, PyTree, State, Updates
from ..comm.base import Comm
from ..comm.over import over
from ..state.marks import PerWorker, bind, with_value
from ..transforms.common import inner_step
from ..transforms.extra_args import with_extra_args
from ..transforms.local_gradients import check_leaves, check_shards
from ..transforms.weights import as_flag, check_shared
from .fragments import SyncPeriod, check_period, period_at
from .nested import check_stays, has_models
from .rounds import end_round, round_like
from .shards import check_entrywise
from .state import check_step, copy_wide


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
      >>> run = jd.simulate(step, workers=4)
      >>> for _ in range(4):
      ...     state, _ = run(state, jnp.array([0.0, 4.0, 8.0, 12.0]))
      >>> round(float(jd.consensus(state["x"])), 4)  # 4.5, then 1.125 more and 0.6 of the first round
      8.325

    References:
      Wang, Tantia, Ballas, Rabbat, "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum",
      arXiv:1910.00643, 2019 (SGP-SlowMo-noaverage).
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
