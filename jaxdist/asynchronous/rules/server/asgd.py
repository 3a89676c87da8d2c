"""Asynchronous SGD: a step with every gradient, however stale, corrected (DC-ASGD) or with bounded staleness."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ...._core.checks import check_count
from ...._core.dtypes import widen
from ...._core.types import Array, Number, PyTree
from ...protocol import GradientRecord, Message, Reaction, Rule
from ...values import numeric, zeros_for_sum
from ..base import replace_at
from .base import Core, reply, send_current, send_params, server_rule, stepper


def asgd(optimizer: optax.GradientTransformation, *, rate: Callable[[int], float] | None = None) -> Rule:
    """The server steps with each gradient that arrives, `x <- x - γ(d) g`, and sends its worker the new x.

    The delay `d` of a gradient is the number of steps between reading x and using the gradient; on average it is the
    number of workers minus one. With data that differ between workers the limit is the optimum weighted by the workers'
    speeds, not the mean: see `ringleader` and `dude`.

    On the wire: a gradient up and a model down per step.

    State: the server's model and optimizer; a worker's model.

    Args:
      optimizer: the optimizer of the server. Momentum compounds the staleness: lower it with more workers.
      rate: a factor of each update, as a function of the delay of its gradient, such as `staleness_aware()` or
        `delay_adaptive(...)`.

    Examples:
      >>> import optax
      >>> from jaxdist.asynchronous import replay, durations, rules
      >>> rule, law = rules.asgd(optax.sgd(0.1)), durations.constant([1.0, 2.0, 4.0])
      >>> run = replay.run(rule, durations=law, workers=3, seconds=400)
      >>> len(run.trace.steps) / 400
      1.75

    References:
      Tsitsiklis, Bertsekas, Athans, "Distributed asynchronous deterministic and stochastic gradient optimization
      algorithms", 1986; Recht, Ré, Wright, Niu, "Hogwild!", arXiv:1106.5730, 2011.
    """
    server = stepper(optimizer)
    factor = rate or (lambda delay: 1.0)

    def on_gradient(core: Core, worker: int, message: Message) -> Reaction:
        read, version = message.version, core.version
        # x <- x - γ(d) g, where d is the number of steps since the worker read its parameters.
        core, record = server.step(core, message.value, factor(version - read), read)
        core, sent = reply(core, worker)
        return core, (GradientRecord(worker, read, version), record, sent)

    return server_rule("asgd", server, on_gradient)


def staleness_aware() -> Callable[[int], float]:
    """The rate `1 / max(d, 1)` for `asgd`: a gradient that is d steps old is weighted by 1/d.

    Examples:
      >>> from jaxdist.asynchronous import rules
      >>> rules.staleness_aware()(4)
      0.25

    References:
      Zhang, Gupta, Lian, Liu, "Staleness-aware async-SGD for distributed deep learning", arXiv:1511.05950, 2016.
    """
    # A gradient at the current model has delay 0 and the full rate.
    return lambda delay: 1.0 / max(delay, 1)


def delay_adaptive(concurrency: int, learning_rate: Number, smoothness: Number) -> Callable[[int], float]:
    """The rate for `asgd` that scales down only late gradients: `γ_d = γ` up to the usual delay, then `1 / (4 L d)`.

    Args:
      concurrency: the largest delay with the full rate; the number of workers.
      learning_rate: γ, the rate of the server's optimizer.
      smoothness: L, the Lipschitz constant of the gradient. A larger value scales late gradients down more.

    Examples:
      >>> from jaxdist.asynchronous import rules
      >>> rate = rules.delay_adaptive(8, learning_rate=0.1, smoothness=1.0)
      >>> rate(8), rate(25)
      (1.0, 0.1)

    References:
      Mishchenko, Bach, Even, Woodworth, "Asynchronous SGD beats minibatch SGD under arbitrary delays",
      arXiv:2206.07638, 2022; Koloskova, Stich, Jaggi, "Sharper convergence guarantees for asynchronous SGD",
      arXiv:2206.08307, 2022.
    """
    for name, value in (("concurrency", concurrency), ("learning_rate", learning_rate), ("smoothness", smoothness)):
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")

    # The ratio γ_d / γ, since `asgd` multiplies the whole update by it.
    def rate(delay: int) -> float:
        return 1.0 if delay <= concurrency else min(1.0, 1.0 / (4 * smoothness * learning_rate * delay))

    return rate


def ringmaster(max_delay: int, optimizer: optax.GradientTransformation, *, stop: bool = False) -> Rule:
    """The server steps with gradients that are less than R steps old and discards older ones.

    With the right R it attains the optimal time complexity for workers of unequal, fixed speeds that draw from the same
    data: very slow workers do not contribute. In theory `R = max(1, ⌈σ²/ε⌉)` and `γ = min(1/(2 R L), ε/(4 L σ²))` for
    the gradient's variance σ² and the wanted accuracy ε.

    On the wire: a gradient up and a model down per gradient, used or discarded.

    State: the server's model and optimizer; a worker's model.

    Args:
      max_delay: R. 1 uses only gradients at the current model; no bound is `asgd`. With R equally fast workers every
        gradient is R - 1 steps old, so the number of those discards none of theirs, as below.
      optimizer: the optimizer of the server.
      stop: send a worker the current model as soon as its gradient will be too old, so that it restarts there instead
        of finishing a gradient that would be discarded.

    Examples:
      >>> import optax
      >>> from jaxdist.asynchronous import replay, durations, rules
      >>> rule = rules.ringmaster(3, optax.sgd(0.1))
      >>> run = replay.run(rule, durations=durations.constant([1, 1, 1, 10]), workers=4, seconds=1000)
      >>> run.trace.gradients.accepted.sum().item(), len(run.trace.gradients)
      (3000, 3100)

    References:
      Maranjyan, Tyurin, Richtárik, "Ringmaster ASGD: the first asynchronous SGD with optimal time complexity",
      arXiv:2501.16168, 2025.
    """
    if max_delay != float("inf"):
        check_count("max_delay", max_delay, 1)
    server = stepper(optimizer)

    def on_gradient(core: Core, worker: int, message: Message) -> Reaction:
        read, version = message.version, core.version
        accepted = version - read < max_delay
        actions: list = [GradientRecord(worker, read, version, accepted)]
        if accepted:
            # x <- x - γ g, if the gradient is less than R steps old.
            core, record = server.step(core, message.value, 1.0, read)
            actions.append(record)
        core, sent = reply(core, worker)
        actions.append(sent)
        if stop and accepted:
            # Gradients of these workers could only be discarded, so they restart at the new model.
            for other, read_last in enumerate(core.reads):
                if core.version - read_last >= max_delay:
                    core, sent = send_params(core, other)
                    actions.append(sent)
        return core, tuple(actions)

    return server_rule("ringmaster", server, on_gradient, discard_outdated=True)


class _SSPState(NamedTuple):
    """The server's core, and the progress of the workers."""

    core: Core
    # The number of completed iterations of each worker, their minimum, and the number of workers that have it.
    completed: tuple[int, ...]
    least: int
    slowest: int
    # The workers that wait for the slowest.
    waiting: tuple[int, ...]


def ssp(staleness: int, optimizer: optax.GradientTransformation) -> Rule:
    """Asynchronous SGD in which a worker starts its next iteration only if `c - min_j c_j <= s`.

    `c` counts completed iterations. The rule absorbs random slowdowns of up to s iterations; if one worker is always
    slow, all others end up waiting for it, at one iteration each per iteration of that worker. Running iterations are
    finished, so completed counts differ by up to `s + 1`.

    On the wire, and state: as `asgd`.

    Args:
      staleness: s. 0 is lockstep (but each gradient is a separate step); a large value is `asgd`.
      optimizer: the optimizer of the server.

    Examples:
      >>> import optax
      >>> from jaxdist.asynchronous import replay, durations, rules
      >>> rule = rules.ssp(3, optax.sgd(0.1))
      >>> run = replay.run(rule, durations=durations.constant([1, 1, 1, 6]), workers=4, seconds=600)
      >>> len(run.trace.steps)
      409

    References:
      Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", NIPS 2013.
    """
    if staleness < 0:
        raise ValueError(f"staleness must be at least 0, got {staleness}")
    server = stepper(optimizer)
    on_gradient = partial(_on_ssp_gradient, server.step, staleness)
    return server_rule("ssp", server, on_gradient, begin=_begin_ssp, on_pull=_on_ssp_pull, waits_for=_ssp_waits_for)


def _begin_ssp(core: Core) -> _SSPState:
    workers = len(core.reads)
    return _SSPState(core, (0,) * workers, 0, workers, ())


def _on_ssp_gradient(
    step: Callable[..., Any], staleness: int, state: _SSPState, worker: int, message: Message
) -> Reaction:
    version = state.core.version
    # Every gradient is a step, x <- x - γ g; only the reply may have to wait.
    core, step_record = step(state.core, message.value, 1.0, message.version)
    done, least = state.completed[worker], state.least
    completed = replace_at(state.completed, worker, done + 1)
    slowest, ready, waiting = state.slowest - (done == least), [worker], list(state.waiting)
    # When the last of the slowest has moved, the minimum rises, and waiting workers may continue. Only then is it
    # recomputed, which makes an event cheap with a thousand workers.
    if not slowest:
        least = min(completed)
        slowest, ready, waiting = completed.count(least), sorted([*waiting, worker]), []
    actions: list = [GradientRecord(worker, message.version, version), step_record]
    for candidate in ready:
        # c - min_j c_j <= s
        if completed[candidate] <= least + staleness:
            core, sent = reply(core, candidate)
            actions.append(sent)
        else:
            waiting.append(candidate)
    return _SSPState(core, completed, least, slowest, tuple(waiting)), tuple(actions)


def _on_ssp_pull(state: _SSPState, worker: int, message: Message) -> Reaction:
    # The worker failed after its gradient had arrived: it must wait as before.
    return (state, ()) if worker in state.waiting else send_current(state, worker, message)


def _ssp_waits_for(state: _SSPState) -> tuple[int, ...]:
    return tuple(i for i, c in enumerate(state.completed) if c == state.least) if state.waiting else ()


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

    Examples:
      >>> import optax
      >>> from jaxdist.asynchronous import rules
      >>> rules.dc_asgd(optax.sgd(0.1)).name
      'dc_asgd'

    References:
      Zheng et al., "Asynchronous stochastic gradient descent with delay compensation", arXiv:1609.08326, 2017.
    """
    if compensation < 0:
        raise ValueError(f"compensation must be at least 0, got {compensation}")
    if decay is not None and not 0 <= decay < 1:
        raise ValueError(f"decay must be in [0, 1), got {decay}")
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
