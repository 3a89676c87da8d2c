"""DC-ASGD: stale gradients corrected to first order."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ...._core.types import Number, PyTree
from ...protocol import Actions, Counted, Message, Rule, Site
from ...values import numeric
from .base import Core, fresh, outdated, put, reply, server_rule, stepper

EPSILON = 1e-7


class DCASGDState(NamedTuple):
    """The server's core, the model that each worker was sent last, and the running mean of squared gradients."""

    core: Core
    backups: tuple[Any, ...]
    mean_square: Any


def dc_asgd(
    optimizer: optax.GradientTransformation, *, compensation: Number = 0.04, decay: Number | None = None
) -> Rule:
    """Asynchronous SGD with `g + λ g ⊙ g ⊙ (x - x_i)`, where `x_i` is the model that worker i computed g at.

    The second term estimates how the gradient changed since, with `g ⊙ g` in place of the Hessian. With `decay` λ
    becomes `λ / sqrt(v + 1e-7)`, `v <- m v + (1 - m) g ⊙ g` (DC-ASGD-a), which does not depend on the scale of the
    loss. A gradient from before a worker's failure that arrives after the worker has pulled anew is thrown away.

    On the wire: a gradient up and a model down per step.

    State: the server's model and optimizer, the last model of each worker (references to the models they were, so n
    models at most), and one more with `decay`.

    Args:
      optimizer: what the server steps with.
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
    begin, step = stepper(optimizer)

    def corrected(gradient: PyTree, params: PyTree, backup: PyTree) -> PyTree:
        return jax.tree.map(lambda g, x, b: g + compensation * g * g * (x - b), gradient, params, backup)

    def corrected_adaptively(gradient: PyTree, params: PyTree, backup: PyTree, square: PyTree) -> tuple[PyTree, PyTree]:
        m = decay or 0.0
        square = jax.tree.map(lambda v, g: m * v + (1 - m) * g * g, square, gradient)
        out = jax.tree.map(
            lambda g, x, b, v: g + compensation / jnp.sqrt(v + EPSILON) * g * g * (x - b),
            *(gradient, params, backup, square),
        )
        return out, square

    constant, adaptive = numeric(corrected), numeric(corrected_adaptively, outputs=2)
    zeros = numeric(lambda params: jax.tree.map(jnp.zeros_like, params))

    def init(site: Site, params: Any) -> DCASGDState:
        return DCASGDState(begin(site, params), (params,) * site.workers, None if decay is None else zeros(params))

    def on_gradient(state: DCASGDState, worker: int, message: Message) -> tuple[DCASGDState, Actions]:
        core, square, backup = state.core, state.mean_square, state.backups[worker]
        late, ignored = outdated(core, worker, message)
        if ignored:  # the model that it is of is not kept any more
            return state, late
        gradient, read, version = message.value, message.version, core.version
        if square is None:
            gradient = constant(gradient, core.params, backup)
        else:
            gradient, square = adaptive(gradient, core.params, backup, square)
        core, stepped = step(core, gradient, 1.0, read)
        core, sent = reply(core, worker)
        backups = put(state.backups, worker, core.params)
        return DCASGDState(core, backups, square), (Counted(worker, read, version), stepped, sent)

    def on_pull(state: DCASGDState, worker: int, message: Message) -> tuple[DCASGDState, Actions]:
        core, sent = fresh(state.core, worker)
        return state._replace(core=core, backups=put(state.backups, worker, core.params)), (sent,)

    return server_rule("dc_asgd", init, on_gradient, on_pull=on_pull)
