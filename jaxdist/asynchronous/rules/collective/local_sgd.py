"""Local SGD and variants that hide or reduce its waiting: DaSGD, LASGD, PALSGD."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Int

from ...._core.checks import check_count
from ...._core.dtypes import working_dtype
from ...._core.types import Number, PyTree
from ... import protocol
from ...protocol import After, Compute, GradientRecord, Message, Reaction, Role, Rule, Site
from ...values import numeric
from ..base import apply_gradient, optimizer_on_values, other_workers, reduce_all, step_records, unknown_message


class _LocalState(NamedTuple):
    """A worker's model, the replicated global parameters, and the average in progress."""

    site: Site
    params: Any
    opt_state: Any
    # The global parameters, in float32 or better, and their optimizer's state: replicated, and updated when an average
    # arrives. The anchor is the rule's final model.
    anchor: Any
    outer_state: Any
    # The number of averages that this worker's model has merged.
    version: int = 0
    # Local steps since the last snapshot, and the oldest version at which a gradient since then was computed.
    steps: int = 0
    oldest: int = 0
    # The snapshot whose average is in progress, or None, and the oldest version in it.
    sent: Any = None
    sent_oldest: int = 0
    # Whether its average has arrived but is not merged yet.
    back: bool = False
    # Local steps since the beginning.
    total: int = 0
    computing: bool = True
    # Whether the clock allows a snapshot, and the number of its last timer, which is the timer's tag; others have 0.
    due: bool = True
    clock: int = 0


def local_sgd(
    optimizer: optax.GradientTransformation,
    *,
    sync_period: int | Sequence[int] | Int[np.ndarray, " workers"],
    outer: optax.GradientTransformation | None = None,
) -> Rule:
    """Averages after every H local steps, `a <- a - mean(a - x_i)`, `x_i <- a`, and waits for the slowest only then.

    The counterpart of `jd.local_steps`. A round takes the longest of n sums of H computations, which for times that
    vary is less than H times the longest, and one all-reduce. With a number `H_i` for each worker this is Biased Local
    SGD: workers whose `H_i` are in proportion to their speeds finish together, and have equal weight in the average,
    however few steps they took.

    On the wire: an all-reduce of the drift `a - x_i`, in float32, per round, kind `"reduced"`.

    State: each worker's model and optimizer; the global parameters a and the outer optimizer, replicated. The final
    model is a; a step in the trace is an average.

    Args:
      optimizer: the local optimizer of each worker.
      sync_period: H, or H_i of each worker, as `schedule.proportional_steps` makes them. A larger value sends and waits
        less, but lets workers drift further apart; start at 8.
      outer: the optimizer of the global parameters, whose gradient is the mean drift. Default: `optax.sgd(1.0)`, which
        averages; `optax.sgd(0.7, momentum=0.9, nesterov=True)` is DiLoCo.

    Examples:
      >>> import optax
      >>> from jaxdist.asynchronous import durations, replay, rules
      >>> rule = rules.local_sgd(optax.sgd(0.1), sync_period=4)
      >>> run = replay.run(rule, durations=durations.exponential(1.0), workers=8, seconds=1000)
      >>> len(run.trace.steps) * 4 > 1.3 * 1000 / 2.717857  # bsp: the longest of 8, each time
      True

    References:
      Stich, "Local SGD Converges Fast and Communicates Little", arXiv:1805.09767, 2019. Lim et al., "Biased Local SGD
      for Efficient Deep Learning on Heterogeneous Systems", arXiv:2508.08540, 2025 (H_i).
    """
    # a <- a - mean(a - x_i) is the mean of the models.
    return _local_rule("local_sgd", optimizer, outer or optax.sgd(1.0), sync_period=sync_period, delay=0)


def dasgd(optimizer: optax.GradientTransformation, *, sync_period: int, delay: int) -> Rule:
    """Local SGD whose averages overlap the next d local steps, which are kept: `x_i <- a' + (x_i - s_i)`.

    All workers merge the average of the snapshots `s_i` of local step t after local step t + d; faster workers wait.
    An average that takes no longer than d steps costs no time.

    On the wire, and state: as `local_sgd`, and per worker the snapshot.

    Args:
      optimizer: the local optimizer of each worker.
      sync_period: H.
      delay: d, less than H: the duration of an all-reduce in steps. 0 is `local_sgd`.

    Examples:
      >>> import optax
      >>> from jaxdist.asynchronous import links, replay, rules
      >>> slow = links.alpha_beta(0.5)  # an all-reduce of 2 workers: 1 s
      >>> for delay in (0, 1):
      ...     rule = rules.dasgd(optax.sgd(0.1), sync_period=4, delay=delay)
      ...     print(len(replay.run(rule, workers=2, seconds=1001, links=slow).trace.steps))
      200
      250

    References:
      Zhou et al., "DaSGD: Squeezing SGD Parallelization Performance in Distributed Training Using Delayed Averaging",
      arXiv:2006.00441, 2020. Its coefficient that mixes own and average model is 1 here.
    """
    return _local_rule("dasgd", optimizer, optax.sgd(1.0), sync_period=sync_period, delay=delay)


def lasgd(optimizer: optax.GradientTransformation, *, sync_period: int = 1, interval: Number = 0.0) -> Rule:
    """Local SGD that never waits: snapshots are averaged in the background, and then `x_i <- x_i + (mean(s) - s_i)`.

    A worker takes a snapshot as soon as the previous average has arrived and it has taken H steps since the last
    snapshot, and continues; with an interval, not before so many seconds have passed since the last one, as in the
    asynchronous averages of BAGUA, whose clock has 0.5 s. A gradient that is running when the average arrives is
    applied to the merged model. An all-reduce begins when the slowest worker joins, so that a straggler makes averages
    rare but slows no worker down. On data that differ between workers fast ones count more.

    On the wire, and state: as `local_sgd`, and per worker the snapshot.

    Args:
      optimizer: the local optimizer of each worker.
      sync_period: H, the least number of local steps between two snapshots. 1 averages as often as the network allows.
      interval: the least time between two snapshots of a worker, in seconds, by its own clock.

    Examples:
      >>> import optax
      >>> from jaxdist.asynchronous import durations, replay, rules
      >>> rule = rules.lasgd(optax.sgd(0.1))
      >>> run = replay.run(rule, durations=durations.constant([1, 1, 6]), workers=3, seconds=600)
      >>> run.computing.round(3).tolist(), len(run.trace.steps)
      ([1.0, 1.0, 1.0], 100)

    References:
      Avidor, Tal Israel, "Locally Asynchronous Stochastic Gradient Descent for Decentralized Deep Learning",
      arXiv:2203.13085, 2022. The interval: Gan et al., "BAGUA: Scaling up Distributed Learning with System
      Relaxations", arXiv:2107.01499, 2021.
    """
    if not 0 <= interval < float("inf"):
        raise ValueError(f"interval must be at least 0 seconds and finite, got {interval}")
    return _local_rule("lasgd", optimizer, optax.sgd(1.0), sync_period=sync_period, delay=None, interval=interval)


def palsgd(
    optimizer: optax.GradientTransformation,
    *,
    learning_rate: Number | Callable[[Any], Any],
    sync_period: int = 100,
    probability: Number = 0.2,
    pull: Number = 0.5,
    outer: optax.GradientTransformation | None = None,
) -> Rule:
    """DiLoCo whose workers, with probability p, move towards the anchor instead of stepping: `x -= (γ η / p) (x - a)`.

    Otherwise they step with `γ / (1 - p)`. A pull needs no communication and keeps workers closer together, so that
    rounds can be longer. The gradient of a pull step is computed but not used, as in the paper's code. The counterpart
    of `jd.local_sgd.palsgd`, with the same random decisions for equal seeds and no warm-up.

    On the wire, and state: as `local_sgd`.

    Args:
      optimizer: the local optimizer of each worker; its whole update is scaled by `1 / (1 - p)`.
      learning_rate: γ, the rate of that optimizer, a number or a schedule of local steps; used by the pull.
      sync_period: H; the paper's code uses 100.
      probability: p, in [0, 1); the paper's code uses 0.2. 0 is DiLoCo.
      pull: η, at least 0; the paper's code uses 0.5. `γ η / p` must stay well below 1.
      outer: the optimizer of the anchor, the global parameters. Default: `optax.sgd(0.7, momentum=0.9,
        nesterov=True)`.

    Examples:
      >>> import optax
      >>> from jaxdist.asynchronous import replay, rules
      >>> rule = rules.palsgd(optax.sgd(0.1), learning_rate=0.1, sync_period=10)
      >>> len(replay.run(rule, workers=4, seconds=100).trace.steps)
      10

    References:
      Naganuma et al., "Pseudo-asynchronous local SGD", arXiv:2504.18454, 2025.
    """
    if not 0 <= probability < 1:
        raise ValueError(f"probability must be in [0, 1), got {probability}")
    if pull < 0:
        raise ValueError(f"pull must be at least 0, got {pull}")
    step = _plain_step
    if probability:
        step = partial(_step_or_pull, learning_rate, float(probability), float(pull))
    outer = outer or optax.sgd(0.7, momentum=0.9, nesterov=True)
    return _local_rule("palsgd", optimizer, outer, sync_period=sync_period, delay=0, step=step)


# Local steps, whose last arguments are the anchor and, for random choices, the seed, the worker and the local step.


def _plain_step(
    optimizer: optax.GradientTransformation, params: PyTree, opt_state: PyTree, gradient: PyTree, *unused: Any
) -> tuple[PyTree, PyTree]:
    return apply_gradient(optimizer, params, opt_state, gradient)


def _step_or_pull(
    learning_rate: Any,
    probability: float,
    pull: float,
    optimizer: optax.GradientTransformation,
    params: PyTree,
    opt_state: PyTree,
    gradient: PyTree,
    anchor: PyTree,
    words: Any,
) -> tuple[PyTree, PyTree]:
    seed, worker, count = words
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), count), worker)
    pulls = jax.random.bernoulli(key, probability)
    rate = learning_rate(count) if callable(learning_rate) else learning_rate
    # x -= (γ η / p) (x - a)
    strength = jnp.asarray(rate, jnp.float32) * (pull / probability)
    stepped, new_opt_state = apply_gradient(optimizer, params, opt_state, gradient)

    def move_leaf(x: Any, y: Any, a: Any) -> Any:
        wide = working_dtype(x.dtype)
        old = x.astype(wide)
        towards_anchor = strength.astype(wide) * (a.astype(wide) - old)
        # Steps are rarer by 1 - p and larger by its inverse: the expected update stays.
        own_step = (y.astype(wide) - old) / (1 - probability)
        return (old + jnp.where(pulls, towards_anchor, own_step)).astype(x.dtype)

    # A pull leaves the local optimizer as it was.
    opt_state = jax.tree.map(lambda old, new: jnp.where(pulls, old, new), opt_state, new_opt_state)
    return jax.tree.map(move_leaf, params, stepped, anchor), opt_state


# Averages.


def _to_working_dtype(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, working_dtype(leaf.dtype)), tree)


def _merge_average(params: PyTree, anchor: PyTree, sent: PyTree) -> PyTree:
    # x_i <- a + (x_i - s_i), as x_i + (a - s_i): exact where the average changes nothing.
    return jax.tree.map(
        lambda x, a, s: (x.astype(a.dtype) + (a - s.astype(a.dtype))).astype(x.dtype), params, anchor, sent
    )


# a - x_i in the dtype of the anchor: small differences of bfloat16 models would be lost.
_drift = numeric(lambda anchor, params: jax.tree.map(lambda a, x: a - x.astype(a.dtype), anchor, params))
_merge = numeric(_merge_average)
_cast_like = numeric(lambda anchor, params: jax.tree.map(lambda a, x: a.astype(x.dtype), anchor, params))


def _local_rule(
    name: str,
    optimizer: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    *,
    sync_period: Number | Sequence[Number] | Int[np.ndarray, " workers"],
    delay: int | None,
    step: Callable[..., tuple[PyTree, PyTree]] = _plain_step,
    interval: Number = 0.0,
) -> Rule:
    """Makes a rule of local steps and averages of drifts `a - x_i`.

    The mean drift is the gradient of `outer`, the optimizer of the global parameters. `delay` is the number of local
    steps between a snapshot and merging its average, when workers wait for it; None merges it on arrival, and workers
    never wait.
    """
    periods = tuple(np.atleast_1d(sync_period).tolist())
    for period in periods:
        check_count("sync_period", period, 1)
    if delay is not None and not 0 <= delay < min(periods):
        raise ValueError(
            f"delay must be in [0, sync_period={sync_period}), got {delay}: only one average may be in progress"
        )

    cfg = _Config(
        name,
        *optimizer_on_values(optimizer, step),
        numeric(_to_working_dtype, shared=True),
        *optimizer_on_values(outer, shared=True),
        periods,
        delay,
        interval,
    )
    worker = Role(partial(_init, cfg), partial(_receive, cfg), lambda state: state.anchor, partial(_waits_for, cfg))
    return Rule(name, worker)


class _Config(NamedTuple):
    """The arguments of `_local_rule`, as functions of values."""

    name: str
    start: Callable[..., Any]
    step: Callable[..., Any]
    to_working_dtype: Callable[..., Any]
    start_outer: Callable[..., Any]
    outer_step: Callable[..., Any]
    # One for all workers, or one for each.
    sync_periods: tuple[Number, ...]
    delay: int | None
    interval: Number


def _init(cfg: _Config, site: Site, params: Any) -> Reaction:
    if len(cfg.sync_periods) not in (1, site.workers):
        raise ValueError(f"sync_period must be one number or {site.workers}, one a worker, got {cfg.sync_periods}")
    anchor = cfg.to_working_dtype(params)
    state = _LocalState(site, params, cfg.start(params), anchor, cfg.start_outer(anchor))
    state, clock = _wind_clock(cfg, state)
    return state, (Compute(params, 0), *clock)


def _wind_clock(cfg: _Config, state: _LocalState) -> Reaction:
    """Without an interval a snapshot is always due, and there is no timer."""
    if not cfg.interval:
        return state, ()
    clock = state.clock + 1
    return state._replace(due=False, clock=clock), (After(cfg.interval, clock),)


@no_type_check
def _receive(cfg: _Config, state: _LocalState, sender: int, message: Message) -> Reaction:
    kind, records = message.kind, ()
    if kind == protocol.COMPUTED:
        records = (GradientRecord(state.site.index, message.version, state.version),)
        state = _local_step(cfg, state, message)
    elif kind == protocol.REDUCED:
        # The global parameters are updated as soon as the average arrives, at all workers at once.
        anchor, outer_state = cfg.outer_step(state.anchor, state.outer_state, message.value)
        state = state._replace(anchor=anchor, outer_state=outer_state, back=True)
        # A step in the trace is an average.
        records = step_records(state.site, state.version + 1, state.sent_oldest)
    elif kind == protocol.RECOVERED:
        # The gradient that was running is lost, and the timer may be: another takes its place.
        state = state._replace(computing=False)
        if not state.due:
            state, records = _wind_clock(cfg, state)
    elif kind == protocol.TIMER:
        state = state._replace(due=state.due or message.tag == state.clock)
    else:
        raise unknown_message(f"a worker of {cfg.name}", message)
    state, reduce = _try_snapshot(cfg, _merge_if_due(cfg, state))
    actions = (*records, *reduce)
    if state.computing or _is_waiting(cfg, state):
        return state, actions
    if reduce and cfg.delay is None:
        # Where messages take no time, the average arrives at this same instant: look once before continuing without it.
        return state, (*actions, After(0))
    return state._replace(computing=True), (*actions, Compute(state.params, state.version))


def _local_step(cfg: _Config, state: _LocalState, message: Message) -> _LocalState:
    site = state.site
    # For random local steps: the same numbers in a replay and on real processes.
    words = np.array([site.seed & 0xFFFFFFFF, site.index, state.total], np.uint32)
    params, opt_state = cfg.step(state.params, state.opt_state, message.value, state.anchor, words)
    return state._replace(
        params=params,
        opt_state=opt_state,
        steps=state.steps + 1,
        oldest=state.oldest if state.steps else message.version,
        total=state.total + 1,
        computing=False,
    )


def _merge_if_due(cfg: _Config, state: _LocalState) -> _LocalState:
    """Merges an average that has arrived into this worker's model, if it is due."""
    if not state.back or (cfg.delay is not None and state.steps < cfg.delay):
        return state
    anchor, params = state.anchor, state.params
    # Without local steps since the snapshot the model is the anchor itself.
    params = _merge(params, anchor, state.sent) if state.steps else _cast_like(anchor, params)
    return state._replace(params=params, version=state.version + 1, sent=None, back=False)


def _try_snapshot(cfg: _Config, state: _LocalState) -> Reaction:
    """Starts the next average, if the last one is merged and enough local steps were taken."""
    # H, or H_i.
    period = cfg.sync_periods[state.site.index % len(cfg.sync_periods)]
    if state.sent is not None or state.steps < period or not state.due:
        return state, ()
    reduce = reduce_all(state.site, state.version, _drift(state.anchor, state.params))
    state, clock = _wind_clock(cfg, state._replace(sent=state.params, sent_oldest=state.oldest, steps=0))
    return state, (reduce, *clock)


def _is_waiting(cfg: _Config, state: _LocalState) -> bool:
    return state.sent is not None and cfg.delay is not None and state.steps >= cfg.delay


def _waits_for(cfg: _Config, state: _LocalState) -> tuple[int, ...]:
    return other_workers(state.site) if _is_waiting(cfg, state) else ()
