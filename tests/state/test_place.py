"""A runner without Ray, on networks that repeat, reorder and lose, and processes that die at any time."""

import json
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdist as jd
from jaxdist.asynchronous import SERVER, After, Message, Role, Rule, Send, Site, replay, rules
from jaxdist.asynchronous.portable import flat, read, write
from jaxdist.asynchronous.ray_engine import state_store
from jaxdist.asynchronous.ray_engine.role_runner import Envelope, Records, RoleRunner
from jaxdist.asynchronous.ray_engine.state_store import ActorReport, StatePacker, StateStore
from jaxdist.asynchronous.replay.base import gradient_function

WORKERS = 3
SGD = optax.sgd(0.1, momentum=0.5)
GOALS = np.array([0.0, 1.0, 5.0], np.float32)
TASK = replay.Task(
    {"w": np.zeros(3, np.float32)},
    lambda x, goal: 0.5 * jnp.sum((x["w"] - goal) ** 2),
    lambda seed, worker, job: GOALS[worker] + np.float32(0.01 * job),
)
GRADIENT = gradient_function(TASK, 0)
RULES = {
    "asgd": rules.asgd(SGD),
    "ssp": rules.ssp(1, SGD),
    "bsp": rules.bsp(SGD),
    "ringleader": rules.ringleader(SGD),
    "coded": rules.compressed(rules.asgd(SGD), {"gradient": jd.top_k(0.4)}, feedback=("gradient",)),
    "coded bsp": rules.compressed(rules.bsp(SGD), {"reduced": jd.top_k(0.4)}, feedback=("reduced",)),
}


class World:
    """Places, a store and a network in one thread; the dice decide what happens next, and what goes wrong."""

    def __init__(self, rule, dice, *, faults):
        self.rule, self.dice, self.faults, self.ticks = rule, dice, faults, 0
        self.store, self.network, self.deaths = StateStore(b""), [], 0
        self.runners, self.packers, self.lives = {}, {}, {}
        for index in ([SERVER] if rule.server else []) + list(range(WORKERS)):
            self.start(index)

    def now(self):
        self.ticks += 1
        return self.ticks

    def start(self, index):
        entry = self.store.enter(index)
        runner = RoleRunner(self.rule, Site(index, WORKERS), TASK.params, self.now)
        self.runners[index], self.lives[index] = runner, entry.life
        self.packers[index] = StatePacker(entry.life)
        if entry.kept is None:
            runner.begin()
        else:
            runner.restore(read(entry.kept[0], entry.kept[1].__getitem__))
        if entry.life > 1:
            for other in self.runners.values():
                other.resend(index)

    def kill(self, index):
        self.deaths += 1
        self.start(index)

    def round(self, index):
        """What a process does between two looks into its inbox; it may die before it keeps, and before it sends."""
        runner = self.runners[index]
        if self.faults and self.dice.random() < 0.02:
            return self.kill(index)
        if runner.changed:
            packed = self.packers[index].pack(runner.content(), runner.role.params(runner.state.role))
            assert self.store.commit(index, self.lives[index], packed, runner.take_records(), ActorReport())
        if self.faults and self.dice.random() < 0.02:
            return self.kill(index)
        for to, (number, letters) in runner.post().items():
            for _ in range(self.dice.choice([0, 1, 1, 2]) if self.faults else 1):
                self.network.append((to, index, number, letters))

    def step(self):
        index = self.dice.choice(sorted(self.runners))
        runner = self.runners[index]
        what = self.dice.random()
        if what < 0.6 and self.network:
            chosen = self.dice.randrange(len(self.network)) if self.faults else 0
            index, source, number, letters = self.network.pop(chosen)
            runner = self.runners[index]
            runner.acknowledge(source, number)
            for letter in letters:
                runner.arrive(source, letter)
        elif what < 0.9 and runner.state.running is not None:
            running = runner.state.running
            runner.on_gradient(running.job, GRADIENT(running.params, index, running.job).read())
        elif what < 0.95 and self.faults:
            runner.resend(self.dice.choice(sorted(self.runners)))  # as after a time without an answer
        runner.fire_timers()
        self.round(index)

    def run(self, steps):
        while len(self.store.records.steps) < steps:
            self.step()
        return self.store.records


def model(world, index):
    text, arrays = world.store.models((index,))[index]
    return read(text, arrays.__getitem__)["w"]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(2))
def test_nothing_is_lost_or_counted_twice(rule, seed):
    world = World(RULES[rule], random.Random(seed), faults=True)
    books = world.run(45)
    assert world.deaths > 5
    assert [version for _, version, _ in sorted(books.steps)] == list(range(1, len(books.steps) + 1))
    if rule == "ssp":
        completed = np.cumsum([np.eye(WORKERS, dtype=int)[row[1]] for row in books.gradients], axis=0)
        assert (completed.max(1) - completed.min(1)).max() <= 2
    if rule == "ringleader":
        assert max(version - 1 - oldest for _, version, oldest in books.steps) <= 2 * WORKERS - 2


@pytest.mark.sampled(9)
@pytest.mark.parametrize("rule", ["bsp", "coded bsp"])
def test_the_very_models_of_a_run_in_which_nobody_died(rule):
    world, undisturbed = (World(RULES[rule], random.Random(5), faults=faults) for faults in (True, False))
    steps = len(world.run(30).steps)
    undisturbed.run(steps)
    assert world.deaths > 5
    np.testing.assert_array_equal(model(world, 0), model(undisturbed, 0))
    if rule == "bsp":
        expected = replay.run(RULES["bsp"], TASK, workers=WORKERS, steps=steps).params["w"]
        np.testing.assert_array_equal(model(world, 0), expected)


def talker(receive):
    return Role(lambda site, params: ((), ()), receive, lambda state: None)


def placed(rule, index=0):
    runner = RoleRunner(rule, Site(index, 2), TASK.params, lambda: 0)
    runner.begin()
    return runner


def test_letters_are_read_in_order_and_once():
    runner = placed(Rule("ears", talker(lambda state, sender, message: ((*state, message.tag), ()))))
    for number in (2, 1, 1, 4, 2, 3, 4):
        runner.arrive(1, Envelope(number, Message("word", None, 0, number)))
    assert runner.state.role == (1, 2, 3, 4)
    assert runner.post() == {1: (4, ())}


def test_letters_stay_until_they_are_acknowledged():
    def tell(state, sender, message):
        return state, (Send(1, message),)

    runner = placed(Rule("mouth", talker(tell)))
    for number in (1, 2, 3):
        runner.arrive(1, Envelope(number, Message("word", None, 0, number)))

    def posted():
        return [letter.number for _, letters in runner.post().values() for letter in letters]

    assert posted() == [1, 2, 3]
    assert posted() == []
    runner.acknowledge(1, 2)
    runner.resend(1)
    assert posted() == [3]
    runner.forget(1)
    runner.resend(1)
    assert posted() == []


def test_a_timer_survives():
    now = [0]
    rule = Rule(
        "clock",
        Role(
            lambda site, params: (0, (After(2.0, 7),)),
            lambda state, sender, message: (message.tag, ()),
            lambda state: None,
        ),
    )
    first = RoleRunner(rule, Site(0, 1), None, lambda: now[0])
    first.begin()
    second = RoleRunner(rule, Site(0, 1), None, lambda: now[0])
    second.restore(first.content())
    second.fire_timers()
    assert second.state.role == 0
    now[0] = 2 * 10**9
    second.fire_timers()
    assert second.state.role == 7


def test_a_process_that_was_replaced_keeps_nothing_any_more():
    store = StateStore(b"")
    store.enter(0)
    runner, packer = placed(RULES["bsp"]), StatePacker(1)
    packed = packer.pack(runner.content(), TASK.params)
    assert store.commit(0, 1, packed, runner.take_records(), ActorReport())
    store.enter(0)
    assert not store.commit(0, 1, packed, runner.take_records(), ActorReport())
    assert not store.beat(0, 1)


def test_a_replacement_is_not_as_silent_as_the_process_before_it(monkeypatch):
    """It compiles before it says anything, and would be killed again and again meanwhile."""
    now = 100.0
    monkeypatch.setattr(state_store.time, "monotonic", lambda: now)
    store = StateStore(b"")
    store.enter(0)
    packed = StatePacker(1).pack(placed(RULES["bsp"]).content(), TASK.params)
    store.commit(0, 1, packed, Records([], [], []), ActorReport())
    now = 140.0
    assert store.status()[0][0].silent == 40
    store.enter(0)
    now = 143.0
    assert store.status()[0][0].silent == 3


def test_what_did_not_change_is_not_sent_again():
    big, packer, store = jnp.ones(1000), StatePacker(1), StateStore(b"")
    store.enter(0)
    for small, new in ((1.0, 2), (2.0, 1), (3.0, 1)):
        packed = packer.pack({"big": big, "small": np.float32(small) + np.zeros(1, np.float32)}, big)
        assert len(packed.new) == new
        store.commit(0, 1, packed, placed(RULES["bsp"]).take_records(), ActorReport())
    kept = store.enter(0).kept
    assert sum(array.nbytes for array in kept[1].values()) == 4004
    assert read(kept[0], kept[1].__getitem__)["small"] == 3


@pytest.mark.parametrize(
    "value",
    [
        np.zeros((0, 4), np.float32),
        np.float32(2.5),
        jnp.asarray([1.5, -2], jnp.bfloat16),
        {7: [np.arange(3), (True, None)], 3: np.asfortranarray(np.ones((2, 3)))},
        optax.adam(0.1).init({"w": jnp.ones(2)}),
    ],
)
def test_values_travel_as_text_and_bytes(value):
    arrays = []
    text = write(value, lambda one: arrays.append(flat(one)) or len(arrays) - 1)
    again = read(text, [np.array(one) for one in arrays].__getitem__)
    assert jax.tree.structure(value) == jax.tree.structure(again)
    for left, right in zip(jax.tree.leaves(value), jax.tree.leaves(again)):
        assert np.asarray(left).dtype == np.asarray(right).dtype
        np.testing.assert_array_equal(left, right)


def test_what_could_be_code_is_refused():
    with pytest.raises(ValueError, match="function cannot be written"):
        write({"f": lambda: 0}, len)
    with pytest.raises(ValueError, match=r"os\.system is not an imported NamedTuple"):
        read('{"nodes": [["named", "os", "system", ["true"]]], "root": {"is": 0}}', len)


# Modules that states have been in before, by the names that older files have.
FORMER = {
    "collective.any_batch": "_AnyBatchState",
    "collective.bsp": "_BSPState",
    "collective.delay_by_one": "_DelayByOneState",
    "collective.local": "_LocalState",
    "collective.pipe_sgd": "_PipeState",
    "collective.task_allocation": "_AllocationState",
    "peers.hierarchical_ad_psgd": "_HierarchicalState",
    "peers.neighbors": "Halves",
    "server.dude": "_DuDeState",
    "server.ringleader": "_RingleaderState",
    "server.ssp": "_SSPState",
    "collective.local_sgd": "_LocalState",
    "collective.synchronous": "_PipeState",
    "collective.uneven_rounds": "_AllocationState",
    "peers.ad_psgd": "_HierarchicalState",
    "server.asgd": "_DCASGDState",
    "server.minibatch": "_BackupState",
    "server.tables": "_DuDeState",
}


@pytest.mark.parametrize(("module", "name"), FORMER.items())
def test_files_from_before_a_state_was_moved_can_be_read(module, name):
    parts = next(len(kind._fields) for kind in tuple.__subclasses__() if kind.__name__ == name)
    node = ["named", f"jaxdist.asynchronous.rules.{module}", name, [None] * parts]
    state = read(json.dumps({"nodes": [node], "root": {"is": 0}}), len)
    assert type(state).__name__ == name
