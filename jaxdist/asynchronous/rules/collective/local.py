"""Workers that step by themselves and average by an all-reduce: at once, some steps later, or whenever it arrives."""

from collections.abc import Callable
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
    Counted,
    Message,
    Reduce,
    Role,
    Rule,
    Site,
    Stepped,
)
from ...values import numeric
from ..server.base import everybody, others, replica, step_of


class LocalState(NamedTuple):
    """A worker's own model, what all agree on, and the average under way.

    Attributes:
      site: where it runs.
      params: this worker's model.
      opt_state: its optimizer's.
      anchor: the model that all agreed on last, in float32 or better: what is shipped. It moves when an average comes.
      outer_state: that of the optimizer of averages, the same at all workers.
      version: averages that this worker's model has taken over.
      steps: local steps since the snapshot before.
      oldest: the oldest version that a gradient since then was read at.
      sent: the snapshot whose average is under way, or None.
      sent_oldest: the oldest version in it.
      back: whether it came and is not taken over yet.
      total: local steps in all.
      computing: whether a gradient is in the making.
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
    """A step of a worker's own optimizer."""
    move = step_of(optimizer)
    return lambda params, opt_state, gradient, anchor, words: move(params, opt_state, gradient)


def _wide(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, working_dtype(leaf.dtype)), tree)


def _caught_up(params: PyTree, anchor: PyTree, sent: PyTree) -> PyTree:
    return jax.tree.map(
        lambda x, a, s: (x.astype(a.dtype) + (a - s.astype(a.dtype))).astype(x.dtype), params, anchor, sent
    )


_drift = numeric(lambda anchor, params: jax.tree.map(lambda a, x: a - x.astype(a.dtype), anchor, params))
_catch_up = numeric(_caught_up)
_adopt = numeric(lambda anchor, params: jax.tree.map(lambda a, x: a.astype(x.dtype), anchor, params))


def local_rule(
    name: str,
    begin: Callable[[PyTree], PyTree],
    step: LocalStep,
    outer: optax.GradientTransformation,
    *,
    sync_period: Number,
    delay: int | None,
) -> Rule:
    """Local steps and averages of drifts `a - x_i`.

    Args:
      name: of the rule.
      begin: `begin(params) -> opt_state` of a worker.
      step: a local step.
      outer: the optimizer of the anchor, which gets the mean drift as its gradient.
      sync_period: local steps between two snapshots.
      delay: local steps between a snapshot and taking its average over, at which workers wait for it; None: whenever it
        arrives, and nobody waits.

    Returns:
      The rule.

    Raises:
      ValueError: `sync_period` is below 1, or `delay` not in `[0, sync_period)`.
    """
    check_whole("sync_period", sync_period)
    if sync_period < 1:
        raise ValueError(f"sync_period must be at least 1, got {sync_period}")
    if delay is not None and not 0 <= delay < sync_period:
        raise ValueError(f"delay must be in [0, sync_period={sync_period}), got {delay}: one average after the other")

    held, start, local = numeric(_wide, shared=True), numeric(begin), numeric(step, outputs=2)
    start_outer, meet = replica(outer)

    def init(site: Site, params: Any) -> tuple[LocalState, Actions]:
        anchor = held(params)
        state = LocalState(site, params, start(params), anchor, start_outer(anchor), 0, 0, 0, None, 0, False, 0, True)
        return state, (Compute(params, 0),)

    def stepped(state: LocalState, message: Message) -> LocalState:
        site, first = state.site, not state.steps
        words = np.array([site.seed & 0xFFFFFFFF, site.index, state.total], np.uint32)
        params, opt_state = local(state.params, state.opt_state, message.value, state.anchor, words)
        return state._replace(
            params=params,
            opt_state=opt_state,
            steps=state.steps + 1,
            oldest=message.version if first else state.oldest,
            total=state.total + 1,
            computing=False,
        )

    def moved(state: LocalState, drift: Any) -> tuple[LocalState, Actions]:
        """The anchor, as soon as the average is there: at all workers at once."""
        anchor, outer_state = meet(state.anchor, state.outer_state, drift)
        books = (Stepped(state.version + 1, state.sent_oldest),) if state.site.index == 0 else ()
        return state._replace(anchor=anchor, outer_state=outer_state, back=True), books

    def taken_over(state: LocalState) -> LocalState:
        """The model of this worker, when that is due."""
        if not state.back or (delay is not None and state.steps < delay):
            return state
        anchor, params = state.anchor, state.params
        params = _catch_up(params, anchor, state.sent) if state.steps else _adopt(anchor, params)
        return state._replace(params=params, version=state.version + 1, sent=None, back=False)

    def snapshot(state: LocalState) -> tuple[LocalState, Actions]:
        """The next average, if the one before is over and enough steps were taken."""
        if state.sent is not None or state.steps < sync_period:
            return state, ()
        part = Reduce(everybody(state.site.workers), state.version, _drift(state.anchor, state.params))
        return state._replace(sent=state.params, sent_oldest=state.oldest, steps=0), (part,)

    def waiting(state: LocalState) -> bool:
        return state.sent is not None and delay is not None and state.steps >= delay

    @no_type_check
    def receive(state: LocalState, sender: int, message: Message) -> tuple[LocalState, Actions]:
        kind, books = message.kind, ()
        if kind == COMPUTED:
            books = (Counted(state.site.index, message.version, state.version),)
            state = stepped(state, message)
        elif kind == REDUCED:
            state, books = moved(state, message.value)
        elif kind == RECOVERED:  # what was in the making is lost
            state = state._replace(computing=False)
        elif kind != TIMER:
            raise ValueError(f"a worker of {name} does not know the message {kind!r}")
        state, part = snapshot(taken_over(state))
        actions = (*books, *part)
        if state.computing or waiting(state):
            return state, actions
        if part and delay is None:
            # A look whether the average is back at once, as it is where messages take no time, before going on without.
            return state, (*actions, After(0))
        return state._replace(computing=True), (*actions, Compute(state.params, state.version))

    def waits_for(state: LocalState) -> tuple[int, ...]:
        return others(state.site) if waiting(state) else ()

    return Rule(name, Role(init, receive, lambda state: state.anchor, waits_for))
