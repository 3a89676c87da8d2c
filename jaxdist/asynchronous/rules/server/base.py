"""What the rules with a parameter server share: the worker, and the part of the server that steps and replies."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, no_type_check

import jax
import optax

from ...._core.types import PyTree
from ...protocol import (
    COMPUTED,
    RECOVERED,
    SERVER,
    Actions,
    Cancel,
    Compute,
    Counted,
    Message,
    Role,
    Rule,
    Send,
    Site,
    Stepped,
)
from ...values import numeric

GRADIENT, PARAMS, AGAIN, PULL = "gradient", "params", "again", "pull"


class WorkerState(NamedTuple):
    """The model that a worker computes at, which version that is, and whether it computes now."""

    params: Any
    version: int
    computing: bool


class Core(NamedTuple):
    """A server's model, optimizer state and count of updates, and the version that each worker was sent last."""

    params: Any
    opt_state: Any
    version: int
    reads: tuple[int, ...]


class Stepper(NamedTuple):
    """`init(site, params) -> core`; `step(core, gradient, rate, oldest) -> (core, action)`."""

    init: Callable[[Site, Any], Core]
    step: Callable[[Core, Any, float, int], tuple[Core, Stepped]]


def stepper(optimizer: optax.GradientTransformation) -> Stepper:
    """A server's step with any optax transformation; its update is multiplied by a rate that may follow the delay."""
    start = numeric(optimizer.init)

    def moved(params: PyTree, opt_state: PyTree, gradient: PyTree, rate: Any) -> tuple[PyTree, PyTree]:
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, jax.tree.map(lambda leaf: leaf * rate, updates)), opt_state

    move = numeric(moved, outputs=2)

    def init(site: Site, params: Any) -> Core:
        return Core(params, start(params), 0, (0,) * site.workers)

    @no_type_check
    def step(core: Core, gradient: Any, rate: float, oldest: int) -> tuple[Core, Stepped]:
        params, opt_state = move(core.params, core.opt_state, gradient, rate)
        version = core.version + 1
        return Core(params, opt_state, version, core.reads), Stepped(version, oldest)

    return Stepper(init, step)


def step_of(optimizer: optax.GradientTransformation) -> Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]:
    """`(params, opt_state, gradient) -> (params, opt_state)`, of arrays."""

    def moved(params: PyTree, opt_state: PyTree, gradient: PyTree) -> tuple[PyTree, PyTree]:
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return moved


def replica(optimizer: optax.GradientTransformation) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`start(params)` and `move(params, opt_state, gradient)`, for workers that all take the same steps: one does."""
    return numeric(optimizer.init, shared=True), numeric(step_of(optimizer), outputs=2, shared=True)


@functools.lru_cache(maxsize=16)  # one object, which is found in dictionaries without being compared
def everybody(workers: int) -> tuple[int, ...]:
    """The group of all workers."""
    return tuple(range(workers))


def others(site: Site) -> tuple[int, ...]:
    """All workers but this one."""
    return tuple(i for i in range(site.workers) if i != site.index)


# What is called for every event goes without the type checks of the test suite, which would take nearly all the time.
@no_type_check
def put(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    """The tuple with one entry changed."""
    return values[:index] + (value,) + values[index + 1 :]  # noqa: RUF005  several times faster for a thousand workers


@no_type_check
def reply(core: Core, worker: int) -> tuple[Core, Send]:
    """The current model for a worker, or no bytes where it has that."""
    if core.reads[worker] == core.version:
        return core, again(core, worker)
    return fresh(core, worker)


@no_type_check
def again(core: Core, worker: int) -> Send:
    """Another gradient at the model that the worker has."""
    return Send(worker, Message(AGAIN, None, core.reads[worker]))


@no_type_check
def fresh(core: Core, worker: int) -> tuple[Core, Send]:
    """The current model for a worker, whatever it has."""
    params, opt_state, version, reads = core
    core = Core(params, opt_state, version, put(reads, worker, version))
    return core, Send(worker, Message(PARAMS, core.params, core.version))


def to_all(core: Core) -> tuple[Core, Actions]:
    """The current model for every worker: those that compute give up."""
    sends = tuple([Send(i, Message(PARAMS, core.params, core.version)) for i in range(len(core.reads))])
    return core._replace(reads=(core.version,) * len(core.reads)), sends


@no_type_check
def outdated(core: Core, worker: int, message: Message) -> tuple[Actions, bool]:
    """Whether a worker sent this before it heard that it should give up; the reply is on its way then."""
    late = message.version < core.reads[worker]
    return ((Counted(worker, message.version, core.version, accepted=False),) if late else ()), late


def _init_worker(site: Site, params: Any) -> tuple[WorkerState, Actions]:
    return WorkerState(params, 0, True), (Compute(params, 0),)


@no_type_check
def _receive_worker(state: WorkerState, sender: int, message: Message) -> tuple[WorkerState, Actions]:
    kind = message.kind
    if kind == COMPUTED:
        sent = Send(SERVER, Message(GRADIENT, message.value, message.version, message.tag))
        return WorkerState(state.params, state.version, False), (sent,)
    if kind == PARAMS:
        start = Compute(message.value, message.version)
        return WorkerState(message.value, message.version, True), ((Cancel(), start) if state.computing else (start,))
    if kind == AGAIN:
        if state.computing:  # it asked twice, having failed twice
            return state, ()
        return WorkerState(state.params, state.version, True), (Compute(state.params, state.version),)
    if kind == RECOVERED:
        return state._replace(computing=False), (Send(SERVER, Message(PULL, None, state.version)),)
    raise ValueError(f"a worker of a parameter server does not know the message {kind!r}")


def _worker_waits_for(state: WorkerState) -> tuple[int, ...]:
    return () if state.computing else (SERVER,)


def _params_of(state: Any) -> Any:
    return state.params


# Reads a model, computes, sends the gradient to the server and waits for the next model.
WORKER = Role(_init_worker, _receive_worker, _params_of, _worker_waits_for)


def server_rule(
    name: str,
    init: Callable[[Site, Any], Any],
    on_gradient: Callable[[Any, int, Message], tuple[Any, Actions]],
    *,
    core: Callable[[Any], Core] = lambda state: state.core,
    on_pull: Callable[[Any, int, Message], tuple[Any, Actions]] | None = None,
    waits_for: Callable[[Any], tuple[int, ...]] = lambda state: (),
) -> Rule:
    """A rule from what the server does with a gradient; a state other than a `Core` has one as `state.core`."""

    def pulled(state: Any, worker: int, message: Message) -> tuple[Any, Actions]:
        new, sent = fresh(core(state), worker)
        return (new if core(state) is state else state._replace(core=new)), (sent,)

    pull = on_pull or pulled

    @no_type_check
    def receive(state: Any, sender: int, message: Message) -> tuple[Any, Actions]:
        if message.kind == GRADIENT:
            return on_gradient(state, sender, message)
        if message.kind == PULL:
            return pull(state, sender, message)
        raise ValueError(f"the server of {name} does not know the message {message.kind!r}")

    def start(site: Site, params: Any) -> tuple[Any, Actions]:
        return init(site, params), ()

    return Rule(name, WORKER, Role(start, receive, lambda state: core(state).params, waits_for))
