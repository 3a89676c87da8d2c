"""Synchronous SGD: bulk synchronous, and with an all-reduce of gradients or of models that overlaps computation."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import optax

from ...protocol import Actions, Compute, GradientRecord, Message, Reaction, Rule, Site
from ..base import collective_rule, combine_and_adapt, optimizer_on_values, reduce_all, step_records


class _BSPState(NamedTuple):
    """A worker's site, model, optimizer state, step count, and whether it has joined the all-reduce of this step."""

    site: Site
    params: Any
    opt_state: Any
    version: int = 0
    waiting: bool = False


def bsp(optimizer: optax.GradientTransformation) -> Rule:
    """Bulk synchronous: `x <- x - γ (1/n) Σ g_i`, by an all-reduce that waits for the slowest worker.

    The method of `jd.distribute`, and the baseline of the other rules. A step takes the longest of n computations and
    one all-reduce.

    On the wire: an all-reduce of the gradient per step.

    State: replicated model and optimizer state.

    Examples:
      >>> import optax
      >>> from jaxdist.asynchronous import replay, durations, rules
      >>> run = replay.run(rules.bsp(optax.sgd(0.1)), durations=durations.constant([1, 1, 3]), workers=3, seconds=300)
      >>> len(run.trace.steps)
      100

    References:
      Valiant, "A bridging model for parallel computation", 1990.
    """
    start, step = optimizer_on_values(optimizer, shared=True)

    def init(site: Site, params: Any) -> Reaction:
        return _BSPState(site, params, start(params)), (Compute(params, 0),)

    def on_gradient(state: _BSPState, message: Message) -> Reaction:
        site, version = state.site, state.version
        actions = GradientRecord(site.index, version, version), reduce_all(site, version, message.value)
        return state._replace(waiting=True), actions

    def on_mean(state: _BSPState, message: Message) -> Reaction:
        site, version = state.site, state.version
        # x <- x - γ (1/n) Σ g_i
        params, opt_state = step(state.params, state.opt_state, message.value)
        records = step_records(site, version + 1, version)
        return _BSPState(site, params, opt_state, version + 1), (*records, Compute(params, version + 1))

    return collective_rule("bsp", init, on_gradient, on_mean, is_computing=lambda state: not state.waiting)


class _PipeState(NamedTuple):
    """A worker's model and iteration, gradients that wait for an all-reduce, and means that wait to be applied."""

    site: Site
    params: Any
    opt_state: Any
    # Steps of the model, and gradients computed: W - 1 more.
    version: int = 0
    iteration: int = 0
    computing: bool = True
    reducing: bool = False
    # As `(iteration, gradient)` and `(iteration, mean)`, oldest first.
    outbox: tuple[Any, ...] = ()
    means: tuple[Any, ...] = ()


def pipe_sgd(optimizer: optax.GradientTransformation, *, width: int = 2) -> Rule:
    """Synchronous SGD whose all-reduce is hidden: `x_{t+1} = x_t - γ ḡ_{t-(W-1)}`, with gradients W - 1 steps old.

    The gradient of iteration t is reduced while the next ones are computed, one all-reduce after the other, and all
    workers apply it W - 1 iterations later. With W = 2 an iteration takes the maximum of computation and communication;
    a larger W helps only if these times vary. All workers still wait for the slowest. The first W - 1 iterations apply
    no gradient.

    On the wire: an all-reduce of the gradient per step, kind `"reduced"`.

    State: replicated model and optimizer state, and up to W gradients per worker.

    Args:
      optimizer: the optimizer of every worker. Momentum compounds the delay: lower it, or the rate.
      width: W. 1 is `bsp`.

    Examples:
      >>> import optax
      >>> from jaxdist.asynchronous import links, replay, rules
      >>> slow = links.alpha_beta(0.4)  # an all-reduce of 2 workers: 0.8 s
      >>> for rule in (rules.bsp(optax.sgd(0.1)), rules.pipe_sgd(optax.sgd(0.1))):
      ...     print(len(replay.run(rule, workers=2, seconds=180, links=slow).trace.steps))
      100
      179

    References:
      Li et al., "Pipe-SGD: a decentralized pipelined SGD framework for distributed deep net training",
      arXiv:1811.03619, 2018.
    """
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}: 1 waits for each all-reduce, 2 hides it")
    start, step = optimizer_on_values(optimizer, shared=True)

    def init(site: Site, params: Any) -> Reaction:
        return _PipeState(site, params, start(params)), (Compute(params, 0),)

    def on_gradient(state: _PipeState, message: Message) -> Reaction:
        # The gradient of iteration t makes version t + 1.
        record = GradientRecord(state.site.index, message.version, state.iteration)
        state = state._replace(computing=False, outbox=(*state.outbox, (state.iteration, message.value)))
        state, actions = _advance_pipe(step, width, state)
        return state, (record, *actions)

    def on_mean(state: _PipeState, message: Message) -> Reaction:
        state = state._replace(reducing=False, means=(*state.means, (message.tag, message.value)))
        return _advance_pipe(step, width, state)

    return collective_rule("pipe_sgd", init, on_gradient, on_mean, is_computing=lambda state: state.computing)


def _advance_pipe(step: Callable[..., Any], width: int, state: _PipeState) -> Reaction:
    """Begins the next all-reduce, and the next iteration if its mean is known."""
    actions = ()
    # One all-reduce runs at a time: two at once would share the same bandwidth.
    if state.outbox and not state.reducing:
        (iteration, gradient), *rest = state.outbox
        state = state._replace(reducing=True, outbox=tuple(rest))
        actions = (reduce_all(state.site, iteration, gradient),)
    # The first W - 1 iterations have no mean to apply; a mean that arrives early waits for its iteration.
    due = state.iteration + 1 >= width
    if state.computing or (due and not state.means):
        return state, actions
    state = state._replace(iteration=state.iteration + 1, computing=True)
    if due:
        # x_{t+1} = x_t - γ ḡ_{t-(W-1)}
        (iteration, mean), *rest = state.means
        params, opt_state = step(state.params, state.opt_state, mean)
        state = state._replace(params=params, opt_state=opt_state, version=state.version + 1, means=tuple(rest))
        actions += step_records(state.site, state.version, max(0, iteration - width + 1))
    return state, (*actions, Compute(state.params, state.version))


class _DelayByOneState(NamedTuple):
    """A worker's site, model, optimizer state, iteration, and this iteration's gradient and mean (None until known)."""

    site: Site
    params: Any
    opt_state: Any
    version: int = 0
    gradient: Any = None
    mean: Any = None


def delay_by_one(optimizer: optax.GradientTransformation) -> Rule:
    """Averages all models while gradients are computed: `x_i <- x̄ - γ g(x_i)`.

    An iteration takes the maximum of the slowest gradient and the all-reduce. The gradient is computed at the worker's
    own model, without the other workers' last gradients: it is one version old. The fastest rule for workers of equal
    speed; it waits for the slowest worker as `bsp` does. Equivalent to `d_psgd` with `order="combine_then_adapt"` on
    the complete graph, with an all-reduce.

    On the wire: an all-reduce of the model per iteration.

    State: a worker's model and optimizer.

    Examples:
      >>> import optax
      >>> from jaxdist.asynchronous import replay, rules, links
      >>> slow = links.alpha_beta(latency=0.125)  # 0.75 s for an all-reduce of 4, beside gradients of 1 s
      >>> run = replay.run(rules.delay_by_one(optax.sgd(0.1)), links=slow, workers=4, seconds=100)
      >>> len(run.trace.steps), replay.step_delays(run.trace)[1:].max().item()
      (100, 1)

    References:
      Cui et al., "Asynchronous decentralized distributed training of acoustic models", arXiv:2110.11199, 2021.
    """
    # x_i <- x̄ - γ g(x_i): the update is computed at the worker's own model and applied to the mean.
    start, step = optimizer_on_values(optimizer, partial(combine_and_adapt, lambda params, mean: mean))

    def init(site: Site, params: Any) -> Reaction:
        state = _DelayByOneState(site, params, start(params))
        return state, _begin_iteration(state)

    return collective_rule(
        "delay_by_one",
        init,
        lambda state, message: _try_advance(step, state._replace(gradient=message.value)),
        lambda state, message: _try_advance(step, state._replace(mean=message.value)),
        is_computing=lambda state: state.gradient is None,
    )


def _begin_iteration(state: _DelayByOneState) -> Actions:
    # The gradient and the all-reduce of the same models run concurrently.
    return Compute(state.params, state.version), reduce_all(state.site, state.version, state.params)


def _try_advance(step: Callable[..., Any], state: _DelayByOneState) -> Reaction:
    """Begins the next iteration once both the gradient and the mean of this one are known."""
    if state.gradient is None or state.mean is None:
        return state, ()
    site, version = state.site, state.version
    params, opt_state = step(state.params, state.opt_state, state.gradient, state.mean)
    # The model of iteration 0 is the same everywhere; afterwards the other workers' last gradients are missing in it.
    read = max(version - 1, 0)
    records = GradientRecord(site.index, read, version), *step_records(site, version + 1, read)
    state = _DelayByOneState(site, params, opt_state, version + 1)
    return state, (*records, *_begin_iteration(state))
