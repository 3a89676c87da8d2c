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
from jaxdist.islands import exchange, protocol, run
from jaxdist.islands.connection import Connection
from jaxdist.islands.fragments import divide, schedule_of
from jaxdist.islands.owners import PieceLayout
from jaxdist.local_sgd.fragments import merge
from jaxdist.local_sgd.local_steps import method_of

H = 4
GOALS = np.random.default_rng(0).normal(size=(8, 12, 5)).astype(np.float32)
REDUCERS = {
    "exact": jd.exact,
    "rounded": lambda: jd.compressed(jd.compressors.int8()),
    "4 bits with feedback": lambda: jd.error_feedback(jd.compressed(jd.qsgd(4))),
    "sparse with feedback": lambda: jd.error_feedback(jd.compressed(jd.top_k(0.1))),
}
# Each message has a round.
REDUCERS_OF_TWO_MESSAGES = {
    "low rank": lambda: jd.power_sgd(1, min_compression_rate=0),
    "low rank with feedback": lambda: jd.error_feedback(jd.power_sgd(1, min_compression_rate=0)),
}


class State(NamedTuple):
    params: Any
    opt: Any


def outer():
    return optax.sgd(0.7, momentum=0.9, nesterov=True)


# The programs of a meeting belong to a method: tests with an equal one compile them once.
sgd = cache(optax.sgd)


def make_method(reducer="exact", *, inner=None, sync_period=H, outer=outer, **options):
    """A method of its own, of which nothing has been compiled."""
    inner, options = inner or optax.adam(0.05), {"sync_period": sync_period, "axis": None, **options}
    return jd.local_steps(inner, outer(), reducer=(REDUCERS | REDUCERS_OF_TWO_MESSAGES)[reducer](), **options)


method = cache(make_method)


def begin(tx, fill=0.0):
    params = {"w": jnp.full((12, 5), fill), "b": jnp.ones(3)}
    return State(params, tx.init(params))


@cache
def step_of(tx):
    """A step towards a goal of the island's own."""

    @jax.jit
    def step(state, goal):
        gradient = {"w": state.params["w"] - goal, "b": state.params["b"]}
        updates, opt = tx.update(gradient, state.opt, state.params, sync=())
        return State(optax.apply_updates(state.params, updates), opt)

    return step


def on_a_mesh(tx, steps, examples=None):
    """Trains three workers of `local_steps` on one mesh."""

    def step(state, batch):
        goal, *given = jax.tree.map(lambda x: x[0], batch)
        gradient = {"w": state.params["w"] - goal, "b": state.params["b"]}
        given = {"examples": given[0]} if given else {}
        updates, opt = tx.update(gradient, state.opt, state.params, **given)
        return State(optax.apply_updates(state.params, updates), opt), {}

    params = begin(tx).params
    state = jd.place(State(jd.PerWorker(params), tx.init(params)), 3)
    run_step = jd.simulate(step, workers=3)
    for _ in range(steps):
        state, _ = run_step(state, (GOALS[:3], *([] if examples is None else [jnp.asarray(examples)])))
    return global_params(state)


def assert_within_ulps(found, expected, ulps):
    """Up to so many units in the last place of the largest entry of a leaf."""
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert np.max(np.abs(x - y)) <= ulps * np.spacing(np.max(np.abs(np.asarray(y))))


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


def train_together(
    store, tx, names, rounds, *, prepare=lambda island, number: None, thread=threading.Thread, **options
):
    """Several islands in threads, over one store; what they return, by name. An error in one is raised."""
    found: dict[str, Any] = {}

    def run(number, name):
        settings = {"goal": number, "begin_with": len(names), "step": step, "patience": 60, **options}
        try:
            found[name] = train(store, tx, name, rounds, prepare=partial(prepare, number=number), **settings)
        except BaseException as error:
            found[name] = error

    step = step_of(tx)
    threads = [thread(target=run, args=pair) for pair in enumerate(names)]
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


def commits_of(store):
    """The ends of all rounds, in order."""
    store = Connection(store)
    return [run.read_commit(store, number) for number in range(run.open_round(store, 0))]


def contribution(store, name, number, tx, state):
    """What a round took of an island's drift, decoded from the bytes in the store."""
    commit = protocol.parse(protocol.Commit, "", store.get(protocol.round_name(number, "commit")))
    body = next(member.body for member in commit.members if member.name == name)
    return decoded(store.get(protocol.body_name(body)), body, tx, state)


def unpacked(body, place, like, owners=0):
    """The arrays of a body, which with owners is cut into pieces."""
    if not owners:
        return protocol.unpack(place, body, like)
    layout = PieceLayout(owners, tuple(like))
    (rows,) = protocol.unpack(place, body, [jax.ShapeDtypeStruct((owners, layout.size), np.uint8)])
    return layout.join([row.tobytes() for row in rows])


def decoded(body, place, tx, state, received=(), owners=0):
    """What a body adds: of a fragment, with zeros for the leaves of the others."""
    config, local, fragment = method_of(tx), state.opt, rounds_of(tx).fragment_in(protocol.round_of(place))
    division = divide(config, local.anchor)
    parts = division.split_locals(local)
    plan, decode = decoder(tx, fragment)
    arrays = [jnp.asarray(x) for x in unpacked(body, place, plan.messages[-1], owners)]
    trees = [jax.tree.map(np.zeros_like, total(part.anchor)) for part in parts]
    trees[fragment] = total(decode(parts[fragment].anchor, arrays, parts[fragment].reducer[0], received=received)[0])
    return merge(trees, division.labels)


def received_before(place, bodies, commits, tx, owners=0):
    """The means of the messages before that of a body, from the bodies and the commits of all rounds."""
    rounds, number = rounds_of(tx), protocol.round_of(place)
    messages = decoder(tx, rounds.fragment_in(number))[0].messages
    ends = [
        commits[protocol.round_name(before, "commit")] for before in range(number - rounds.message_in(number), number)
    ]
    return [
        exchange.mean_of(
            [unpacked(bodies[member.body], member.body, like, owners) for member in end.members],
            [member.weight for member in end.members],
            like,
        )
        for end, like in zip(ends, messages)
    ]


def rounds_of(tx):
    """The fragments and messages of the rounds of a run."""
    return schedule_of(method_of(tx))._replace(messages=len(decoder(tx, 0)[0].messages))


@cache
def decoder(tx, fragment):
    """The shapes of what an island sends for a fragment, and what decodes it, compiled once."""
    config, local = method_of(tx), begin(tx).opt
    anchor = divide(config, local.anchor).split_locals(local)[fragment].anchor
    return exchange.check_reducer(config.reducer, anchor), jax.jit(partial(exchange.decode, config.reducer))


def left_of(state):
    """What no round has taken: progress ahead of the anchor, and the residual."""
    local = state.opt
    ahead = jax.tree.map(lambda a, p: a - p, total(local.anchor), total(state.params))
    # Each has the leaves of one fragment.
    residuals = [x for one in local.reducer for x in jax.tree.leaves(getattr(one, "residual", None))]
    if not residuals:
        return ahead
    kept = [one.residual.value for one in local.reducer]
    residual = jax.tree.map(lambda *xs: next(x for x in xs if x is not None), *kept, is_leaf=lambda x: x is None)
    return jax.tree.map(np.add, ahead, total(residual))


def bodies_under_way(island):
    """The places of its drifts that are still ahead of its own copy of the global parameters."""
    return {outbox.flight.body for outbox in island._outboxes if outbox.flight is not None}


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
    """Until its drifts are in the store."""
    for outbox in island._outboxes:
        if outbox._sender is not None:
            outbox._sender.is_sent.wait()


def wait_for_threads(island):
    """Until what an island does beside its steps is done: it sends a drift, reads ahead, and cleans up."""
    for outbox in island._outboxes:
        if outbox._sender is not None:
            outbox._sender.join()
    island._cleaner.join()
