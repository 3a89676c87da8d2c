"""A place without Ray, on networks that repeat, reorder and lose, and processes that die at any time."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdist as jd
from jaxdist.asynchronous import SERVER, After, Message, Role, Rule, Send, Site, replay, rules
from jaxdist.asynchronous.portable import flat, read, write
from jaxdist.asynchronous.ray_engine.keeper import Keeper, Report, Shelf
from jaxdist.asynchronous.ray_engine.place import Place
from jaxdist.asynchronous.ray_engine.state import Letter
from jaxdist.asynchronous.replay.task import gradients

WORKERS = 3
SGD = optax.sgd(0.1, momentum=0.5)
GOALS = np.array([0.0, 1.0, 5.0], np.float32)
TASK = replay.Task(
    {"w": np.zeros(3, np.float32)},
    lambda x, goal: 0.5 * jnp.sum((x["w"] - goal) ** 2),
    lambda seed, worker, job: GOALS[worker] + np.float32(0.01 * job),
)
GRADIENT = gradients(TASK, 0)
RULES = {
    "asgd": rules.asgd(SGD),
    "ssp": rules.ssp(1, SGD),
    "bsp": rules.bsp(SGD),
    "ringleader": rules.ringleader(SGD),
    "coded": rules.compressed(rules.asgd(SGD), {"gradient": jd.top_k(0.4)}, feedback=("gradient",)),
    "coded bsp": rules.compressed(rules.bsp(SGD), {"reduced": jd.top_k(0.4)}, feedback=("reduced",)),
}


class World:
    """Places, a keeper and a network in one thread; the dice decide what happens next, and what goes wrong."""

    def __init__(self, rule, dice, *, faults):
        self.rule, self.dice, self.faults, self.ticks = rule, dice, faults, 0
        self.keeper, self.network, self.deaths = Keeper(b""), [], 0
        self.places, self.shelves, self.lives = {}, {}, {}
        for index in ([SERVER] if rule.server else []) + list(range(WORKERS)):
            self.start(index)

    def now(self):
        self.ticks += 1
        return self.ticks

    def start(self, index):
        entry = self.keeper.enter(index)
        place = Place(self.rule, Site(index, WORKERS), TASK.params, self.now)
        self.places[index], self.lives[index] = place, entry.life
        self.shelves[index] = Shelf(entry.life)
        if entry.kept is None:
            place.begin()
        else:
            place.restore(read(entry.kept[0], entry.kept[1].__getitem__))
        if entry.life > 1:
            for other in self.places.values():
                other.again(index)

    def kill(self, index):
        self.deaths += 1
        self.start(index)

    def round(self, index):
        """What a process does between two looks into its inbox; it may die before it keeps, and before it sends."""
        place = self.places[index]
        if self.faults and self.dice.random() < 0.02:
            return self.kill(index)
        if place.changed:
            packed = self.shelves[index].pack(place.content(), place.role.params(place.state.role))
            assert self.keeper.commit(index, self.lives[index], packed, place.take_books(), Report())
        if self.faults and self.dice.random() < 0.02:
            return self.kill(index)
        for to, (number, letters) in place.post().items():
            for _ in range(self.dice.choice([0, 1, 1, 2]) if self.faults else 1):
                self.network.append((to, index, number, letters))

    def step(self):
        index = self.dice.choice(sorted(self.places))
        place = self.places[index]
        what = self.dice.random()
        if what < 0.6 and self.network:
            chosen = self.dice.randrange(len(self.network)) if self.faults else 0
            index, source, number, letters = self.network.pop(chosen)
            place = self.places[index]
            place.acknowledged(source, number)
            for letter in letters:
                place.arrive(source, letter)
        elif what < 0.9 and place.state.running is not None:
            running = place.state.running
            place.computed(running.job, GRADIENT(running.params, index, running.job).read())
        elif what < 0.95 and self.faults:
            place.again(self.dice.choice(sorted(self.places)))  # as after a time without an answer
        place.due()
        self.round(index)

    def run(self, steps):
        while len(self.keeper.books.steps) < steps:
            self.step()
        return self.keeper.books


def model(world, index):
    text, arrays = world.keeper.models((index,))[index]
    return read(text, arrays.__getitem__)["w"]


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
    place = Place(rule, Site(index, 2), TASK.params, lambda: 0)
    place.begin()
    return place


def test_letters_are_read_in_order_and_once():
    place = placed(Rule("ears", talker(lambda state, sender, message: ((*state, message.tag), ()))))
    for number in (2, 1, 1, 4, 2, 3, 4):
        place.arrive(1, Letter(number, Message("word", None, 0, number)))
    assert place.state.role == (1, 2, 3, 4)
    assert place.post() == {1: (4, ())}


def test_letters_stay_until_they_are_acknowledged():
    def tell(state, sender, message):
        return state, (Send(1, message),)

    place = placed(Rule("mouth", talker(tell)))
    for number in (1, 2, 3):
        place.arrive(1, Letter(number, Message("word", None, 0, number)))

    def posted():
        return [letter.number for _, letters in place.post().values() for letter in letters]

    assert posted() == [1, 2, 3]
    assert posted() == []
    place.acknowledged(1, 2)
    place.again(1)
    assert posted() == [3]
    place.without(1)
    place.again(1)
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
    first = Place(rule, Site(0, 1), None, lambda: now[0])
    first.begin()
    second = Place(rule, Site(0, 1), None, lambda: now[0])
    second.restore(first.content())
    second.due()
    assert second.state.role == 0
    now[0] = 2 * 10**9
    second.due()
    assert second.state.role == 7


def test_a_process_that_was_replaced_keeps_nothing_any_more():
    keeper = Keeper(b"")
    keeper.enter(0)
    place, shelf = placed(RULES["bsp"]), Shelf(1)
    packed = shelf.pack(place.content(), TASK.params)
    assert keeper.commit(0, 1, packed, place.take_books(), Report())
    keeper.enter(0)
    assert not keeper.commit(0, 1, packed, place.take_books(), Report())
    assert not keeper.beat(0, 1)


def test_what_did_not_change_is_not_sent_again():
    big, shelf, keeper = jnp.ones(1000), Shelf(1), Keeper(b"")
    keeper.enter(0)
    for small, new in ((1.0, 2), (2.0, 1), (3.0, 1)):
        packed = shelf.pack({"big": big, "small": np.float32(small) + np.zeros(1, np.float32)}, big)
        assert len(packed.new) == new
        keeper.commit(0, 1, packed, placed(RULES["bsp"]).take_books(), Report())
    kept = keeper.enter(0).kept
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
    with pytest.raises(ValueError, match="a function cannot be written"):
        write({"f": lambda: 0}, len)
    with pytest.raises(ValueError, match=r"os\.system is no NamedTuple"):
        read('{"nodes": [["named", "os", "system", ["true"]]], "root": {"is": 0}}', len)
