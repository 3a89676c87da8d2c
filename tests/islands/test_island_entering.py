"""What an island has that enters later: the step of the run in every schedule, and moments of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from island_stores import wrap
from islands_run import begin, method

import jaxdist as jd
from jaxdist import islands
from jaxdist.islands import cleanup, identity, run
from jaxdist.islands.connection import Connection
from jaxdist.local_sgd.local_steps import method_of

RATE = optax.warmup_cosine_decay_schedule(0.0, 1.0, 8, 40, 0.0)
# Rates are compared after 20 steps, which are 5 rounds.
INNERS = {
    "chain": lambda: optax.chain(optax.scale_by_adam(), optax.scale_by_learning_rate(RATE)),
    "scale_by_schedule": lambda: optax.scale_by_schedule(lambda count: -RATE(count)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(RATE),
    "multi_transform": lambda: optax.multi_transform(
        {"a": optax.adamw(RATE), "b": optax.sgd(RATE)}, {"w": "a", "b": "b"}
    ),
    "MultiSteps": lambda: optax.MultiSteps(optax.sgd(RATE), 2).gradient_transformation(),
    "MultiSteps of a varying number": lambda: optax.MultiSteps(
        optax.sgd(RATE), lambda count: jnp.where(count < 4, 2, 3)
    ).gradient_transformation(),
    "MultiSteps inside": lambda: optax.chain(
        optax.scale(1.0), optax.MultiSteps(optax.adam(RATE), 4).gradient_transformation()
    ),
    "accumulate": lambda: jd.accumulate(optax.sgd(RATE), 2, axis=None),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.sgd(RATE), 3),
}


def train_first(first, state, step):
    """Trains the first island for five rounds of four steps; returns its state, and that of step 11."""
    state, saved = first.enter(state), None
    for number in range(20):
        state, _ = step(state)
        if first.due(number):
            state, _ = first.meet(state)
        if number == 10:
            saved = state
    return state, saved


def rates_of(inner):
    """The step that an island takes after five rounds of four, and what one takes that enters then, or comes back."""
    tx = jd.local_steps(inner, optax.sgd(1.0), sync_period=4, axis=None)
    params = {"w": jnp.zeros(3), "b": jnp.zeros(2)}

    def fresh():
        return {"params": params, "opt": tx.init(params)}

    @jax.jit
    def step(state):
        ones = jax.tree.map(jnp.ones_like, params)
        updates, opt = tx.update(ones, state["opt"], state["params"], sync=())
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, updates

    def next_steps(state):
        found = []
        for _ in range(12):
            state, updates = step(state)
            found.append([float(updates["w"][0]), float(updates["b"][0])])
        return np.array(found)

    store = islands.memory()
    with islands.join(store, tx, name="first", round_timeout=60) as first:
        state, saved = train_first(first, fresh(), step)
        ahead = saved
        for _ in range(40):
            ahead, _ = step(ahead)
        found = []
        for name, start in (("late", fresh()), ("again", saved), ("ahead", ahead)):
            with islands.join(store, tx, name=name, round_timeout=60) as island:
                found.append(island.enter(start))
    return next_steps(state), [next_steps(x) for x in found]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", ["MultiSteps", *(name for name in INNERS if name != "MultiSteps")])
def test_schedules_go_on_at_the_step_of_the_run(name):
    """Fresh, from a checkpoint, and from one that is further on than the run, as of another run."""
    expected, found = rates_of(INNERS[name]())
    for steps, start in zip(found, ("fresh", "behind", "ahead"), strict=True):
        # Of a constant gradient Adam's step is the rate, whatever it has seen; where several gradients make one
        # update, a state that was saved between two has another phase.
        ours, theirs = (x[np.any(x != 0, 1)] for x in (steps, expected))
        count = min(len(ours), len(theirs))
        np.testing.assert_allclose(ours[:count], theirs[:count], rtol=2e-2, err_msg=start)


def scheduled(inner):
    """A run of five rounds of four steps, and what an island has that enters then, fresh or from `start`."""
    tx = jd.local_steps(inner, optax.sgd(1.0), sync_period=4, axis=None)

    def fresh():
        return {"params": jnp.zeros(3), "opt": tx.init(jnp.zeros(3))}

    @jax.jit
    def step(state):
        updates, opt = tx.update(jnp.ones(3), state["opt"], state["params"], sync=())
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, updates[0]

    store = islands.memory()
    with islands.join(store, tx, name="first", round_timeout=60) as first:
        state, saved = train_first(first, fresh(), step)
        found = []
        for name, start in (("late", fresh()), ("again", saved)):
            with islands.join(store, tx, name=name, round_timeout=60) as island:
                entered = island.enter(start)
                found.append((entered, step(entered)[1]))
        return state, step(state)[1], found


@pytest.mark.parametrize("injected", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_who_enters_late_takes_over_the_step_of_the_run(injected):
    """Schedules go on at step 20; Adam's moments and the count of their bias correction are the island's own."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, 8, 40, 0.0)
    inner = optax.inject_hyperparams(optax.adamw)(schedule) if injected else optax.adamw(schedule)
    state, rate, ((fresh, first_step), (again, next_step)) = scheduled(inner)
    assert [int(x["opt"].count) for x in (state, fresh, again)] == [20] * 3

    def counts(x):
        inner = x["opt"].inner.value
        return (
            [int(inner.count), int(inner.inner_state[0].count)]
            if injected
            else [int(inner[2].count), int(inner[0].count)]
        )

    assert [counts(x) for x in (state, fresh, again)] == [[20, 20], [20, 0], [20, 11]]
    # Of a constant gradient Adam's step is the rate, whatever it has seen.
    np.testing.assert_allclose([first_step, next_step], [rate] * 2, rtol=1e-2)
    moments = fresh["opt"].inner.value
    assert not np.asarray((moments.inner_state if injected else moments)[0].mu).any()


def test_what_an_island_computes_before_it_enters_is_no_wait_for_the_store(clock, monkeypatch):
    """On a busy machine, or for a large model, the description of the method takes longer than the patience."""
    describe, busy = identity.describe, []

    def describe_slowly(*arguments, **options):
        clock.sleep(100)
        busy.append(True)
        return describe(*arguments, **options)

    monkeypatch.setattr(identity, "describe", describe_slowly)
    base, tx = islands.memory(), method()

    def around(number, name, function, arguments):
        if busy:
            busy.clear()
            raise ConnectionError("503 SlowDown")
        return function(*arguments)

    with islands.join(wrap(base, around), tx, name="a", patience=60) as island:
        island.enter(begin(tx))


def test_a_body_that_is_deleted_with_an_earlier_round_leaves_who_reads_a_later_one_behind():
    """Progress may count in a later round than that in which it was sent, and is deleted with the earlier one."""
    store, tx = islands.memory(), method()
    replay = run.Replay(Connection(store), method_of(tx))
    # Both are read while round 898 is: of the kept parameters of 890, which another thread has deleted since.
    store.create("anchors/00000900", b"{}")
    store.create("anchors/00000910", b"{}")
    assert cleanup.last_forgotten(store.list("anchors/"), replay.rounds) == 892
    with pytest.raises(run._LeftBehindError):
        replay.body("00000892/0d48", 898)
    with pytest.raises(islands.DamagedError, match="no body 00000893/0d48"):
        replay.body("00000893/0d48", 898)
