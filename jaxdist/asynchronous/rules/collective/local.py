"""Local steps with averages by an all-reduce: synchronous, merged some steps later, or merged on arrival."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ...._core.dtypes import working_dtype
from ...._core.types import Number, PyTree
from ....schedule.periods import check_whole
from ...protocol import (
    COMPUTED,
    RECOVERED,
    REDUCED,
    TIMER,
    Actions,
    After,
    Compute,
    GradientRecord,
    Message,
    Reduce,
    Role,
    Rule,
    Site,
)
from ...values import numeric
from ..base import (
    all_workers,
    apply_gradient,
    other_workers,
    replicated_optimizer,
    step_records,
    unknown_message,
)


class _LocalState(NamedTuple):
    """A worker's model, the replicated global parameters, and the average in progress.

    Attributes:
      site: where it runs.
      params: this worker's model.
      opt_state: the state of its optimizer.
      anchor: the global parameters, in float32 or better, replicated; the rule's final model. Updated when an average
        arrives.
      outer_state: the state of the outer optimizer, replicated.
      version: the number of averages that this worker's model has merged.
      steps: local steps since the last snapshot.
      oldest: the oldest version at which a gradient since then was computed.
      sent: the snapshot whose average is in progress, or None.
      sent_oldest: the oldest version in it.
      back: whether its average has arrived but is not merged yet.
      total: local steps since the beginning.
      computing: whether a gradient is running.
    """

    site: Site
    params: Any
    opt_state: Any
    anchor: Any
    outer_state: Any
    version: int
    steps: int
    oldest: int
    sent: Any
    sent_oldest: int
    back: bool
    total: int
    computing: bool


# `step(params, opt_state, gradient, anchor, words) -> (params, opt_state)`; words are seed, worker and local step.
LocalStep = Callable[..., tuple[PyTree, PyTree]]


def plain_step(optimizer: optax.GradientTransformation) -> LocalStep:
    """Makes a local step from a worker's optimizer alone."""
    return lambda params, opt_state, gradient, anchor, words: apply_gradient(optimizer, params, opt_state, gradient)


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


def local_rule(
    name: str,
    begin: Callable[[PyTree], PyTree],
    step: LocalStep,
    outer: optax.GradientTransformation,
    *,
    sync_period: Number,
    delay: int | None,
) -> Rule:
    """Makes a rule of local steps and averages of drifts `a - x_i`.

    Args:
      name: the name of the rule.
      begin: `begin(params) -> opt_state` of a worker.
      step: a local step.
      outer: the optimizer of the global parameters, whose gradient is the mean drift.
      sync_period: local steps between two snapshots.
      delay: local steps between a snapshot and merging its average, when workers wait for it; None merges it on
        arrival, and workers never wait.

    Returns:
      The rule.

    Raises:
      ValueError: `sync_period` is below 1, or `delay` not in `[0, sync_period)`.
    """
    check_whole("sync_period", sync_period)
    if sync_period < 1:
        raise ValueError(f"sync_period must be at least 1, got {sync_period}")
    if delay is not None and not 0 <= delay < sync_period:
        raise ValueError(
            f"delay must be in [0, sync_period={sync_period}), got {delay}: only one average may be in progress"
        )

    start_outer, outer_step = replicated_optimizer(outer)
    cfg = _Config(
        name=name,
        start=numeric(begin),
        step=numeric(step, outputs=2),
        to_working_dtype=numeric(_to_working_dtype, shared=True),
        start_outer=start_outer,
        outer_step=outer_step,
        sync_period=sync_period,
        delay=delay,
    )
    return Rule(name, Role(partial(_init, cfg), partial(_receive, cfg), _anchor_of, partial(_waits_for, cfg)))


class _Config(NamedTuple):
    """The arguments of `local_rule`, as functions of values."""

    name: str
    start: Callable[..., Any]
    step: Callable[..., Any]
    to_working_dtype: Callable[..., Any]
    start_outer: Callable[..., Any]
    outer_step: Callable[..., Any]
    sync_period: Number
    delay: int | None


def _init(cfg: _Config, site: Site, params: Any) -> tuple[_LocalState, Actions]:
    anchor = cfg.to_working_dtype(params)
    state = _LocalState(
        site=site,
        params=params,
        opt_state=cfg.start(params),
        anchor=anchor,
        outer_state=cfg.start_outer(anchor),
        version=0,
        steps=0,
        oldest=0,
        sent=None,
        sent_oldest=0,
        back=False,
        total=0,
        computing=True,
    )
    return state, (Compute(params, 0),)


@no_type_check
def _receive(cfg: _Config, state: _LocalState, sender: int, message: Message) -> tuple[_LocalState, Actions]:
    kind, records = message.kind, ()
    if kind == COMPUTED:
        records = (GradientRecord(state.site.index, message.version, state.version),)
        state = _local_step(cfg, state, message)
    elif kind == REDUCED:
        state, records = _outer_step(cfg, state, message.value)
    elif kind == RECOVERED:
        # The gradient that was running is lost.
        state = state._replace(computing=False)
    elif kind != TIMER:
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
    site, first = state.site, not state.steps
    # For random local steps: the same numbers in a replay and on real processes.
    words = np.array([site.seed & 0xFFFFFFFF, site.index, state.total], np.uint32)
    params, opt_state = cfg.step(state.params, state.opt_state, message.value, state.anchor, words)
    return state._replace(
        params=params,
        opt_state=opt_state,
        steps=state.steps + 1,
        oldest=message.version if first else state.oldest,
        total=state.total + 1,
        computing=False,
    )


def _outer_step(cfg: _Config, state: _LocalState, drift: Any) -> tuple[_LocalState, Actions]:
    """Updates the global parameters as soon as the average arrives, at all workers at once."""
    anchor, outer_state = cfg.outer_step(state.anchor, state.outer_state, drift)
    # A step in the trace is an average.
    records = step_records(state.site, state.version + 1, state.sent_oldest)
    return state._replace(anchor=anchor, outer_state=outer_state, back=True), records


def _merge_if_due(cfg: _Config, state: _LocalState) -> _LocalState:
    """Merges an average that has arrived into this worker's model, if it is due."""
    if not state.back or (cfg.delay is not None and state.steps < cfg.delay):
        return state
    anchor, params = state.anchor, state.params
    # Without local steps since the snapshot the model is the anchor itself.
    params = _merge(params, anchor, state.sent) if state.steps else _cast_like(anchor, params)
    return state._replace(params=params, version=state.version + 1, sent=None, back=False)


def _try_snapshot(cfg: _Config, state: _LocalState) -> tuple[_LocalState, Actions]:
    """Starts the next average, if the last one is merged and enough local steps were taken."""
    if state.sent is not None or state.steps < cfg.sync_period:
        return state, ()
    reduce = Reduce(all_workers(state.site.workers), state.version, _drift(state.anchor, state.params))
    return state._replace(sent=state.params, sent_oldest=state.oldest, steps=0), (reduce,)


def _is_waiting(cfg: _Config, state: _LocalState) -> bool:
    return state.sent is not None and cfg.delay is not None and state.steps >= cfg.delay


def _anchor_of(state: _LocalState) -> Any:
    return state.anchor


def _waits_for(cfg: _Config, state: _LocalState) -> tuple[int, ...]:
    return other_workers(state.site) if _is_waiting(cfg, state) else ()
