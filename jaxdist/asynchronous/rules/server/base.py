"""The parts that rules with a parameter server share: the worker, and the server's step and replies."""

from collections.abc import Callable
from typing import Any, NamedTuple, no_type_check

import jax
import optax

from ...._core.types import PyTree
from ... import protocol
from ...protocol import Actions, Cancel, Compute, GradientRecord, Message, Reaction, Role, Rule, Send, Site, StepRecord
from ..base import optimizer_on_values, params_of, replace_at, unknown_message

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
    start, apply = optimizer_on_values(optimizer, _apply_scaled)

    def init(site: Site, params: Any) -> Core:
        return Core(params, start(params), 0, (0,) * site.workers)

    @no_type_check
    def step(core: Core, gradient: Any, rate: float, oldest: int) -> tuple[Core, StepRecord]:
        params, opt_state = apply(core.params, core.opt_state, gradient, rate)
        version = core.version + 1
        return Core(params, opt_state, version, core.reads), StepRecord(version, oldest)

    return Stepper(init, step)


def _apply_scaled(
    optimizer: optax.GradientTransformation, params: PyTree, opt_state: PyTree, gradient: PyTree, rate: Any
) -> tuple[PyTree, PyTree]:
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    # The update is scaled and not the gradient, so that the rate also acts on Adam-like optimizers.
    return optax.apply_updates(params, jax.tree.map(lambda leaf: leaf * rate, updates)), opt_state


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


def _init_worker(site: Site, params: Any) -> Reaction:
    return WorkerState(params, 0, True), (Compute(params, 0),)


@no_type_check
def _receive_worker(state: WorkerState, sender: int, message: Message) -> Reaction:
    kind = message.kind
    if kind == protocol.COMPUTED:
        gradient = Send(protocol.SERVER, Message(GRADIENT, message.value, message.version, message.tag))
        return WorkerState(state.params, state.version, False), (gradient,)
    if kind == PARAMS:
        start = Compute(message.value, message.version)
        return WorkerState(message.value, message.version, True), ((Cancel(), start) if state.computing else (start,))
    if kind == AGAIN:
        # After two failures it pulled twice, and the second reply finds it computing.
        if state.computing:
            return state, ()
        return WorkerState(state.params, state.version, True), (Compute(state.params, state.version),)
    if kind == protocol.RECOVERED:
        return state._replace(computing=False), (Send(protocol.SERVER, Message(PULL, None, state.version)),)
    raise unknown_message("a worker of a parameter server", message)


# Reads the parameters, computes a gradient, sends it to the server and waits for the next parameters.
WORKER = Role(_init_worker, _receive_worker, params_of, lambda state: () if state.computing else (protocol.SERVER,))


def send_current(state: Any, worker: int, message: Message) -> Reaction:
    """Sends the current parameters to a worker that has recovered."""
    if isinstance(state, Core):
        state, sent = send_params(state, worker)
        return state, (sent,)
    core, sent = send_params(state.core, worker)
    return state._replace(core=core), (sent,)


def server_rule(
    name: str,
    step: Stepper,
    on_gradient: Callable[[Any, int, Message], Reaction],
    *,
    begin: Callable[[Core], Any] | None = None,
    on_pull: Callable[[Any, int, Message], Reaction] = send_current,
    waits_for: Callable[[Any], tuple[int, ...]] = lambda state: (),
    discard_outdated: bool = False,
) -> Rule:
    """Makes a rule from the server's reaction to a gradient.

    The server's state is `begin(core)`, a NamedTuple with the field `core`, or the core itself. A gradient is outdated
    if it was sent before newer parameters reached its worker, whose next one is on its way.
    """
    core_of = (lambda state: state) if begin is None else (lambda state: state.core)

    @no_type_check
    def receive(state: Any, sender: int, message: Message) -> Reaction:
        if message.kind == GRADIENT:
            core = core_of(state)
            if discard_outdated and message.version < core.reads[sender]:
                return state, (GradientRecord(sender, message.version, core.version, accepted=False),)
            return on_gradient(state, sender, message)
        if message.kind == PULL:
            return on_pull(state, sender, message)
        raise unknown_message(f"the server of {name}", message)

    def init(site: Site, params: Any) -> Reaction:
        core = step.init(site, params)
        return core if begin is None else begin(core), ()

    return Rule(name, WORKER, Role(init, receive, lambda state: core_of(state).params, waits_for))
