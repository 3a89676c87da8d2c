"""The parts that rules with a parameter server share: the worker, and the server's step and replies."""

from collections.abc import Callable
from functools import partial
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
    GradientRecord,
    Message,
    Role,
    Rule,
    Send,
    Site,
    StepRecord,
)
from ...values import numeric
from ..base import params_of, replace_at, unknown_message

# A worker sends GRADIENT, or PULL after a failure; the server replies with PARAMS, or with AGAIN if the worker has the
# current parameters already.
GRADIENT, PARAMS, AGAIN, PULL = "gradient", "params", "again", "pull"


class WorkerState(NamedTuple):
    """A worker's parameters, their version, and whether it is computing a gradient."""

    params: Any
    version: int
    computing: bool


class Core(NamedTuple):
    """A server's parameters, optimizer state and step count, and the version last sent to each worker."""

    params: Any
    opt_state: Any
    version: int
    reads: tuple[int, ...]


class Stepper(NamedTuple):
    """`init(site, params) -> core`; `step(core, gradient, rate, oldest) -> (core, record)`."""

    init: Callable[[Site, Any], Core]
    step: Callable[[Core, Any, float, int], tuple[Core, StepRecord]]


def stepper(optimizer: optax.GradientTransformation) -> Stepper:
    """Makes a server's step from an optax transformation; the update is multiplied by a rate."""
    return Stepper(
        partial(_init_core, numeric(optimizer.init)),
        partial(_step_core, numeric(partial(_apply_scaled, optimizer), outputs=2)),
    )


def _apply_scaled(
    optimizer: optax.GradientTransformation, params: PyTree, opt_state: PyTree, gradient: PyTree, rate: Any
) -> tuple[PyTree, PyTree]:
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    # The update is scaled and not the gradient, so that the rate also acts on Adam-like optimizers.
    return optax.apply_updates(params, jax.tree.map(lambda leaf: leaf * rate, updates)), opt_state


def _init_core(start: Callable[..., Any], site: Site, params: Any) -> Core:
    return Core(params, start(params), 0, (0,) * site.workers)


@no_type_check
def _step_core(apply: Any, core: Core, gradient: Any, rate: float, oldest: int) -> tuple[Core, StepRecord]:
    params, opt_state = apply(core.params, core.opt_state, gradient, rate)
    version = core.version + 1
    return Core(params, opt_state, version, core.reads), StepRecord(version, oldest)


@no_type_check
def reply(core: Core, worker: int) -> tuple[Core, Send]:
    """Sends a worker the current parameters, or a message without a value if it has them already."""
    if core.reads[worker] == core.version:
        return core, reuse_params(core, worker)
    return send_params(core, worker)


@no_type_check
def reuse_params(core: Core, worker: int) -> Send:
    """Requests another gradient at the parameters that the worker has."""
    return Send(worker, Message(AGAIN, None, core.reads[worker]))


@no_type_check
def send_params(core: Core, worker: int) -> tuple[Core, Send]:
    """Sends a worker the current parameters, even if it has them."""
    # The version sent tells later which gradients of the worker are outdated.
    params, opt_state, version, reads = core
    core = Core(params, opt_state, version, replace_at(reads, worker, version))
    return core, Send(worker, Message(PARAMS, core.params, core.version))


def broadcast_params(core: Core) -> tuple[Core, Actions]:
    """Sends every worker the current parameters; workers discard the gradient that they are computing."""
    sends = tuple([Send(i, Message(PARAMS, core.params, core.version)) for i in range(len(core.reads))])
    return core._replace(reads=(core.version,) * len(core.reads)), sends


@no_type_check
def is_outdated(core: Core, worker: int, message: Message) -> bool:
    """Checks whether a gradient was sent before newer parameters reached its worker; their reply is on its way."""
    return message.version < core.reads[worker]


@no_type_check
def discard(core: Core, worker: int, message: Message) -> Actions:
    """Logs that a gradient was not used."""
    return (GradientRecord(worker, message.version, core.version, accepted=False),)


def _init_worker(site: Site, params: Any) -> tuple[WorkerState, Actions]:
    return WorkerState(params, 0, True), (Compute(params, 0),)


@no_type_check
def _receive_worker(state: WorkerState, sender: int, message: Message) -> tuple[WorkerState, Actions]:
    kind = message.kind
    if kind == COMPUTED:
        gradient = Send(SERVER, Message(GRADIENT, message.value, message.version, message.tag))
        return WorkerState(state.params, state.version, False), (gradient,)
    if kind == PARAMS:
        start = Compute(message.value, message.version)
        return WorkerState(message.value, message.version, True), ((Cancel(), start) if state.computing else (start,))
    if kind == AGAIN:
        # After two failures it pulled twice, and the second reply finds it computing.
        if state.computing:
            return state, ()
        return WorkerState(state.params, state.version, True), (Compute(state.params, state.version),)
    if kind == RECOVERED:
        return state._replace(computing=False), (Send(SERVER, Message(PULL, None, state.version)),)
    raise unknown_message("a worker of a parameter server", message)


def _worker_waits_for(state: WorkerState) -> tuple[int, ...]:
    return () if state.computing else (SERVER,)


# Reads the parameters, computes a gradient, sends it to the server and waits for the next parameters.
WORKER = Role(_init_worker, _receive_worker, params_of, _worker_waits_for)


def server_rule(
    name: str,
    init: Callable[[Site, Any], Any],
    on_gradient: Callable[[Any, int, Message], tuple[Any, Actions]],
    *,
    core: Callable[[Any], Core] = lambda state: state.core,
    on_pull: Callable[[Any, int, Message], tuple[Any, Actions]] | None = None,
    waits_for: Callable[[Any], tuple[int, ...]] = lambda state: (),
) -> Rule:
    """Makes a rule from the server's reaction to a gradient; a state that is not a `Core` has one as `state.core`."""

    def send_current(state: Any, worker: int, message: Message) -> tuple[Any, Actions]:
        new, sent = send_params(core(state), worker)
        return (new if core(state) is state else state._replace(core=new)), (sent,)

    pull = on_pull or send_current

    @no_type_check
    def receive(state: Any, sender: int, message: Message) -> tuple[Any, Actions]:
        if message.kind == GRADIENT:
            return on_gradient(state, sender, message)
        if message.kind == PULL:
            return pull(state, sender, message)
        raise unknown_message(f"the server of {name}", message)

    def start(site: Site, params: Any) -> tuple[Any, Actions]:
        return init(site, params), ()

    return Rule(name, WORKER, Role(start, receive, lambda state: core(state).params, waits_for))
