"""DC-ASGD: stale gradients corrected to first order."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ...._core.types import Number, PyTree
from ...protocol import Actions, GradientRecord, Message, Rule, Site
from ...values import numeric
from ..base import replace_at
from .base import Core, Stepper, discard, is_outdated, reply, send_params, server_rule, stepper

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

    On the wire: a gradient up and a model down per step.

    State: the server's model and optimizer, the last model of each worker (at most n models), and one more with
    `decay`.

    Args:
      optimizer: the optimizer of the server.
      compensation: λ. 0 is `asgd`; the paper uses 0.04, or 2 with `decay`. Too high amplifies noise.
      decay: m, such as 0.95; None for a constant λ.

    Returns:
      The rule.

    Raises:
      ValueError: `compensation` is negative, or `decay` outside [0, 1).

    Example:
      >>> import optax
      >>> from jaxdist.asynchronous import rules
      >>> rules.dc_asgd(optax.sgd(0.1)).name
      'dc_asgd'

    References:
      Zheng, Meng, Wang, Chen, Yu, Ma, Liu, "Asynchronous stochastic gradient descent with delay compensation",
      arXiv:1609.08326, 2017.
    """
    if compensation < 0:
        raise ValueError(f"compensation must be at least 0, got {compensation}")
    if decay is not None and not 0 <= decay < 1:
        raise ValueError(f"decay must be in [0, 1), got {decay}")
    cfg = _Config(
        stepper(optimizer),
        numeric(partial(_compensate, compensation)),
        None if decay is None else numeric(partial(_compensate_adaptively, compensation, decay), outputs=2),
        numeric(lambda params: jax.tree.map(jnp.zeros_like, params)),
    )
    return server_rule("dc_asgd", partial(_init, cfg), partial(_on_gradient, cfg), on_pull=_on_pull)


class _Config(NamedTuple):
    """The server's step and the compensation on values; `adaptive` is None for a constant λ."""

    stepper: Stepper
    constant: Callable[..., Any]
    adaptive: Callable[..., Any] | None
    zeros: Callable[..., Any]


def _compensate(compensation: Number, gradient: PyTree, params: PyTree, backup: PyTree) -> PyTree:
    # DC-ASGD-c: the first-order term, with the diagonal of g gᵀ as the Hessian.
    return jax.tree.map(lambda g, x, b: g + compensation * g * g * (x - b), gradient, params, backup)


def _compensate_adaptively(
    compensation: Number, decay: Number, gradient: PyTree, params: PyTree, backup: PyTree, square: PyTree
) -> tuple[PyTree, PyTree]:
    # DC-ASGD-a: λ is divided by the root of a running mean of squares, which makes it independent of the loss scale.
    square = jax.tree.map(lambda v, g: decay * v + (1 - decay) * g * g, square, gradient)
    gradient = jax.tree.map(
        lambda g, x, b, v: g + compensation / jnp.sqrt(v + EPSILON) * g * g * (x - b),
        *(gradient, params, backup, square),
    )
    return gradient, square


def _init(cfg: _Config, site: Site, params: Any) -> _DCASGDState:
    # A constant λ needs no running mean of squares.
    square = None if cfg.adaptive is None else cfg.zeros(params)
    return _DCASGDState(cfg.stepper.init(site, params), (params,) * site.workers, square)


def _on_gradient(cfg: _Config, state: _DCASGDState, worker: int, message: Message) -> tuple[_DCASGDState, Actions]:
    core, square, backup = state.core, state.mean_square, state.backups[worker]
    # The model of an outdated gradient is no longer stored, so it cannot be compensated.
    if is_outdated(core, worker, message):
        return state, discard(core, worker, message)
    if cfg.adaptive is None:
        gradient = cfg.constant(message.value, core.params, backup)
    else:
        gradient, square = cfg.adaptive(message.value, core.params, backup, square)
    record = GradientRecord(worker, message.version, core.version)
    core, step_record = cfg.stepper.step(core, gradient, 1.0, message.version)
    core, sent = reply(core, worker)
    # x_i: the model at which the worker computes its next gradient.
    backups = replace_at(state.backups, worker, core.params)
    return _DCASGDState(core, backups, square), (record, step_record, sent)


def _on_pull(state: _DCASGDState, worker: int, message: Message) -> tuple[_DCASGDState, Actions]:
    core, sent = send_params(state.core, worker)
    return state._replace(core=core, backups=replace_at(state.backups, worker, core.params)), (sent,)
