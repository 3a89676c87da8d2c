"""DC-ASGD: stale gradients are corrected by a Taylor expansion."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ...._core.checks import check_range
from ...._core.dtypes import widen
from ...._core.types import Array, Number, PyTree
from ...protocol import GradientRecord, Message, Reaction, Rule
from ...values import numeric, zeros_for_sum
from ..base import replace_at
from .base import Core, reply, send_current, server_rule, stepper

EPSILON = 1e-7


class _DCASGDState(NamedTuple):
    """The server's core, the parameters last sent to each worker, and the running mean of squared gradients."""

    core: Core
    backups: tuple[Any, ...]
    mean_square: Any


def dc_asgd(
    optimizer: optax.GradientTransformation, *, compensation: Number = 0.04, decay: Number | None = None
) -> Rule:
    """Asynchronous SGD with `g + λ g ⊙ g ⊙ (x - x_i)`, where `x_i` is the model that worker i computed g at.

    The second term estimates the change of the gradient since then, with `g ⊙ g` in place of the Hessian. With `decay`
    λ becomes `λ / sqrt(v + 1e-7)`, `v <- m v + (1 - m) g ⊙ g` (DC-ASGD-a), which does not depend on the scale of the
    loss. A gradient from before a worker's failure that arrives after the worker's next pull is discarded.

    *On the wire*: a gradient up and a model down per step.

    *State*: the server's model and optimizer, the last model of each worker (at most n models), and one more with
    `decay`.

    Args:
      optimizer: the optimizer of the server.
      compensation: λ. 0 is `asgd`; the paper uses 0.04, or 2 with `decay`. Too high amplifies noise.
      decay: m, such as 0.95; None for a constant λ.

    Examples:
      >>> import optax
      >>> from jaxdist.asynchronous import rules
      >>> rules.dc_asgd(optax.sgd(0.1)).name
      'dc_asgd'

    References:
      Zheng et al., "Asynchronous stochastic gradient descent with delay compensation", arXiv:1609.08326, 2017.
    """
    check_range("compensation", compensation, 0, ends="[]")
    if decay is not None:
        check_range("decay", decay, 0, 1)
    server = stepper(optimizer)
    adaptive = decay is not None
    if adaptive:
        compensate = numeric(partial(_compensate_adaptively, compensation, decay), outputs=2)
    else:
        compensate = numeric(partial(_compensate, compensation))

    def begin(core: Core) -> _DCASGDState:
        # A constant λ needs no running mean of squares.
        return _DCASGDState(core, (core.params,) * len(core.reads), zeros_for_sum(core.params) if adaptive else None)

    def on_gradient(state: _DCASGDState, worker: int, message: Message) -> Reaction:
        core, square, backup = state.core, state.mean_square, state.backups[worker]
        if adaptive:
            gradient, square = compensate(message.value, core.params, backup, square)
        else:
            gradient = compensate(message.value, core.params, backup)
        record = GradientRecord(worker, message.version, core.version)
        core, step_record = server.step(core, gradient, 1.0, message.version)
        core, sent = reply(core, worker)
        # x_i: the model at which the worker computes its next gradient.
        backups = replace_at(state.backups, worker, core.params)
        return _DCASGDState(core, backups, square), (record, step_record, sent)

    # The model of an outdated gradient is no longer stored, so it cannot be compensated.
    return server_rule("dc_asgd", server, on_gradient, begin=begin, on_pull=_on_pull, discard_outdated=True)


def _compensate(compensation: Number, gradient: PyTree, params: PyTree, backup: PyTree) -> PyTree:
    # DC-ASGD-c: the first-order term, with the diagonal of g gᵀ as the Hessian.
    return jax.tree.map(partial(_compensate_leaf, compensation), gradient, params, backup)


def _compensate_leaf(rate: Any, gradient: Array, params: Array, backup: Array) -> Array:
    # Squares of half precision overflow.
    g, change = widen(gradient), widen(params) - widen(backup)
    return (g + rate * g * g * change).astype(gradient.dtype)


def _compensate_adaptively(
    compensation: Number, decay: Number, gradient: PyTree, params: PyTree, backup: PyTree, square: PyTree
) -> tuple[PyTree, PyTree]:
    # DC-ASGD-a: λ is divided by the root of a running mean of squares, which makes it independent of the loss scale.
    square = jax.tree.map(lambda v, g: decay * v + (1 - decay) * widen(g) * widen(g), square, gradient)
    rates = jax.tree.map(lambda v: compensation / jnp.sqrt(v + EPSILON), square)
    gradient = jax.tree.map(_compensate_leaf, rates, gradient, params, backup)
    return gradient, square


def _on_pull(state: _DCASGDState, worker: int, message: Message) -> Reaction:
    state, actions = send_current(state, worker, message)
    return state._replace(backups=replace_at(state.backups, worker, state.core.params)), actions
