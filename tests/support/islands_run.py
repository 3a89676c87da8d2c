"""Islands that train a small model: in threads over one store, or one after another."""

import contextlib
import itertools
import threading
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdist as jd
from jaxdist import islands
from jaxdist.islands import exchange, protocol
from jaxdist.local_sgd.local_steps import method_of

H = 4
GOALS = np.random.default_rng(0).normal(size=(8, 12, 5)).astype(np.float32)
REDUCERS = {
    "exact": jd.exact,
    "rounded": lambda: jd.compressed(jd.compressors.int8()),
    "4 bits with feedback": lambda: jd.error_feedback(jd.compressed(jd.qsgd(4))),
    "sparse with feedback": lambda: jd.error_feedback(jd.compressed(jd.top_k(0.1))),
}


class State(NamedTuple):
    params: Any
    opt: Any


def outer():
    return optax.sgd(0.7, momentum=0.9, nesterov=True)


def method(reducer="exact", *, inner=None, sync_period=H, outer=outer, **options):
    inner, options = inner or optax.adam(0.05), {"sync_period": sync_period, "axis": None, **options}
    return jd.local_steps(inner, outer(), reducer=REDUCERS[reducer](), **options)


def begin(tx, fill=0.0):
    params = {"w": jnp.full((12, 5), fill), "b": jnp.ones(3)}
    return State(params, tx.init(params))


def step_of(tx):
    """A step towards a goal of the island's own."""

    @jax.jit
    def step(state, goal):
        gradient = {"w": state.params["w"] - goal, "b": state.params["b"]}
        updates, opt = tx.update(gradient, state.opt, state.params, sync=())
        return State(optax.apply_updates(state.params, updates), opt)

    return step


def train(
    store, tx, name, rounds, *, goal=0, step=None, state=None, prepare=lambda island: None, examples=None, **options
):
    """Trains for so many rounds as an island, which `prepare` may change; returns the state and the reports.

    `examples` has the weight of each island by its name.
    """
    step, reports = step or step_of(tx), []
    with islands.join(store, tx, name=name, **{"round_timeout": 30, **options}) as island:
        prepare(island)
        state = island.enter(begin(tx) if state is None else state)
        for number in itertools.count():
            state = step(state, GOALS[goal])
            if island.due(number):
                state, report = island.meet(state, examples=examples and examples[name])
                reports.append(report)
                island._cleaner.join()
                if len(reports) == rounds:
                    return state, reports


def train_together(store, tx, names, rounds, *, prepare=lambda island, number: None, **options):
    """Several islands in threads, over one store; what they return, by name. An error in one is raised."""
    found: dict[str, Any] = {}

    def run(number, name):
        settings = {"goal": number, "begin_with": len(names), "step": step, "patience": 60, **options}
        try:
            found[name] = train(store, tx, name, rounds, prepare=partial(prepare, number=number), **settings)
        except BaseException as error:
            found[name] = error

    step = step_of(tx)
    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(names)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in found.values():
        if isinstance(result, BaseException):
            raise result
    return found


def global_params(state):
    return jd.local_sgd.global_params(state.opt)


def total(tree):
    """The leaves in float64, for sums."""
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def contribution(store, name, number, tx, state):
    """What a round took of an island's drift, decoded from the bytes in the store."""
    commit = protocol.parse(protocol.Commit, "", store.get(protocol.round_name(number, "commit")))
    body = next(member.body for member in commit.members if member.name == name)
    return decoded(store.get(protocol.body_name(body)), body, tx, state)


def decoded(body, place, tx, state):
    payload, decode = decoder(tx)
    arrays = [jnp.asarray(x) for x in protocol.unpack(place, body, payload)]
    return total(decode(state.opt.anchor, arrays, state.opt.reducer[0])[0])


@cache
def decoder(tx):
    """The shapes of what an island sends, and what decodes it, compiled once."""
    reducer = method_of(tx).reducer
    return exchange.check_reducer(reducer, begin(tx).opt.anchor), jax.jit(partial(exchange.decode, reducer))


def left_of(state):
    """What no round has taken: progress ahead of the anchor, and the residual."""
    local = state.opt
    ahead = jax.tree.map(lambda a, p: a - p, total(local.anchor), total(state.params))
    residual = getattr(local.reducer[0], "residual", None)
    return ahead if residual is None else jax.tree.map(np.add, ahead, total(residual.value))


@contextlib.contextmanager
def compiled_programs():
    """Collects the events of programs that are compiled inside the block."""
    compiled = []

    def listen(event, duration_secs, **kwargs):
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def wait_for_upload(island):
    """Until its drift is in the store."""
    if island._outbox._sender is not None:
        island._outbox._sender.is_sent.wait()


def wait_for_threads(island):
    """Until what an island does beside its steps is done: it sends a drift, reads ahead, and cleans up."""
    if island._outbox._sender is not None:
        island._outbox._sender.join()
    island._cleaner.join()
