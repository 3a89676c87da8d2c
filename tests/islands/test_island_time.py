"""No call waits longer than its deadline, whatever a store does; and what is under way then is neither lost nor doubled."""

import threading

import jax
import jax.numpy as jnp
import optax
import pytest
from island_stores import wrap
from islands_run import wait_for_threads

import jaxdist as jd
from jaxdist import islands
from jaxdist.islands import run
from jaxdist.islands.connection import Connection

# Seconds after `round_timeout` in which every call ends.
SLACK = 1.0


class Gate:
    """A store whose calls for which `holds(name, arguments)` is true wait until the gate is open."""

    def __init__(self, store, holds):
        self._open, self._holds = threading.Event(), holds
        self.held = []
        self.base, self.store = store, wrap(store, self._around)

    def _around(self, number, name, function, arguments):
        if not self._open.is_set() and self._holds(name, arguments):
            self.held.append(name)
            self._open.wait()
        return function(*arguments)

    def open(self):
        self._open.set()


def is_body(name, arguments):
    return name == "put" and arguments[0].startswith("bodies/")


def counting():
    """A transformation that takes sums of steps as they are, and a step of so many examples."""
    tx = jd.local_steps(optax.sgd(0.5), optax.sgd(1.0), sync_period=2, axis=None)

    @jax.jit
    def step(state, examples):
        updates, opt = tx.update(jnp.ones(()), state["opt"], state["params"], sync=(), examples=examples)
        return {"params": state["params"] + updates, "opt": opt}

    return tx, step, {"params": jnp.zeros(()), "opt": tx.init(jnp.zeros(()))}


def train_round(step, state, examples=3.0):
    for _ in range(2):
        state = step(state, jnp.float32(examples))
    return state


def commits_of(store):
    commits = [run.read_commit(Connection(store), number) for number in run.ended_rounds(Connection(store))]
    return [commit for commit in commits if commit is not None]


@pytest.mark.parametrize("overlap", [False, True])
def test_an_upload_of_three_rounds_loses_and_doubles_nothing(overlap):
    """The island moves the run as far as one that sends each round, and its examples are those that it trained on."""
    tx, step, state = counting()
    gate = Gate(islands.memory(), is_body)
    options = {"round_timeout": 0.2, "overlap": overlap, "patience": 60}
    with (
        islands.join(gate.store._replace(), tx, name="slow", **options) as slow,
        islands.join(gate.store, tx, name="fast", **options | {"overlap": False, "round_timeout": 0.01}) as fast,
    ):
        # The parameters that the run begins with need no gate.
        gate.open()
        mine, other = slow.enter(state), fast.enter(state)
        gate._open.clear()
        fast._store.store = slow_free(gate)
        trained = 0.0
        for _ in range(3):
            mine, trained = train_round(step, mine), trained + 6.0
            mine, report = slow.meet(mine)
            assert report.uploading
            assert not report.offline
            assert not report.counted
            assert report.wait_seconds < 0.2 + SLACK
            for _ in range(2):
                other, _ = fast.meet(other)
        assert float(mine["opt"].examples.value[0]) == trained
        gate.open()
        wait_for_threads(slow)
        sums = []
        for _ in range(20):
            mine, report = slow.meet(mine)
            sums.append(report.examples)
            wait_for_threads(slow)
            other, _ = fast.meet(other)
            if sum(sums) == trained:
                break
        assert sum(sums) == trained
    found = [member for commit in commits_of(gate.store) for member in commit.members if member.name == "slow"]
    assert sum(member.examples for member in found) == trained
    # A sum of rounds has the weight of one.
    assert {member.weight for member in found if member.examples} == {6.0}


def slow_free(gate):
    """The store behind a gate, for an island that it does not hold."""
    return gate.store._replace(put=lambda name, body: gate.base.put(name, body))


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_slow_island_moves_a_run_as_far_as_one_that_sends_each_round(rounds):
    """In the linear case, alone: six steps of a constant gradient, sent in two drifts or in six."""
    tx, step, state = counting()
    gate = Gate(islands.memory(), is_body)
    gate.open()
    with islands.join(gate.store, tx, name="a", round_timeout=0.05) as island:
        state = island.enter(state)
        if rounds > 1:
            gate._open.clear()
        for number in range(6):
            if number == 3:
                gate.open()
                wait_for_threads(island)
            state, report = island.meet(train_round(step, state))
        for _ in range(5):
            state, report = island.meet(state)
    assert float(jd.local_sgd.global_params(state["opt"])) == pytest.approx(-0.5 * 12)
    assert sum(member.examples for commit in commits_of(gate.store) for member in commit.members) == 36
