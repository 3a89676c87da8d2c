"""Islands that train, meet, stop, leave and lose the store in any order: nothing is lost, and all of them agree."""

import collections
from functools import cache

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from island_stores import archived, wrap, written_once
from islands_run import (
    GOALS,
    begin,
    bodies_under_way,
    decoded,
    left_of,
    method,
    received_before,
    rounds_of,
    sgd,
    step_of,
    total,
)
from problems import assert_close

from jaxdist import islands
from jaxdist.islands import protocol

NAMES = "abc"
ACTIONS = ["train", "meet", "meet", "meet", "stop", "leave", "offline"]
SCHEDULES = st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(ACTIONS)), max_size=25)
# With a grace of none a round ends as soon as its quorum is there.
OPTIONS = st.fixed_dictionaries(
    {
        "overlap": st.booleans(),
        "quorum": st.sampled_from([1, 2]),
        "grace": st.sampled_from([None, 0.0, 0.001]),
        "owners": st.sampled_from([0, 2, 3]),
    }
)
LEFT_AND_JOINED = [("a", "train"), ("a", "leave"), ("a", "train"), ("a", "meet")]
# `rounded` has no feedback: what it rounds off is lost on purpose.
CODED = ["4 bits with feedback", "sparse with feedback"]
REDUCERS = ["exact", "low rank with feedback", *CODED]


@cache
def trained_with(reducer, fragments):
    tx = method(reducer, inner=sgd(0.1), fragments=fragments)
    return tx, step_of(tx)


class Session:
    """An island from `enter` to its end: how far it has moved, and which drifts it has put into the store."""

    def __init__(self, store, name, tx, step, options):
        self._owners = options.get("owners", 0)
        self.name, self._step, self.drifts, self.is_away = name, step, set(), False
        self._context = islands.join(
            wrap(store, self._call), tx, name=name, round_timeout=0.004, keep_every=3, **options
        )
        self.island = self._context.__enter__()
        self.state = self.island.enter(begin(tx))
        self.moved = jax.tree.map(np.zeros_like, total(self.state.params))

    def _call(self, number, function_name, function, arguments):
        if self.is_away:
            raise ConnectionError("no route")
        answer = function(*arguments)
        # Not the bodies that it puts: one may equal that of an earlier session, whose drift is the one that counts.
        if function_name == "create" and "/drift/" in arguments[0] and answer:
            self.drifts.add(protocol.parse(protocol.Drift, *arguments).body)
        return answer

    def train(self):
        before = total(self.state.params)
        self.state = self._step(self.state, GOALS[NAMES.index(self.name)])
        self.moved = jax.tree.map(lambda m, b, a: m + b - a, self.moved, before, total(self.state.params))

    def meet(self, *, is_away=False):
        self.is_away = is_away
        self.state, report = self.island.meet(self.state)
        self.is_away = False
        return report

    def end(self, *, leaves):
        if leaves:
            self.state, _ = self.island.leave(self.state)
        self.island._entered = False  # killed: it says nothing more
        self.island._stop_threads()
        self._context.__exit__(None, None, None)

    def check(self, bodies, commits, tx):
        """Moved = taken by rounds + residual + ahead of the global parameters."""
        # Drifts that are under way are still ahead of this island's own copy of them.
        under_way = bodies_under_way(self.island)
        members = [member.body for commit in commits.values() for member in commit.members]
        # Only rounds of the last message take anything.
        merges = rounds_of(tx).merges_in
        drifts = [
            body
            for body in members
            if body in self.drifts and body not in under_way and merges(protocol.round_of(body))
        ]
        taken = [
            decoded(
                bodies[body],
                body,
                tx,
                self.state,
                received_before(body, bodies, commits, tx, self._owners),
                self._owners,
            )
            for body in drifts
        ]
        assert_close(jax.tree.map(lambda *terms: sum(terms), left_of(self.state), *taken), self.moved, tolerance=1e-5)


def play(reducer, options, fragments, schedule):
    if reducer in CODED:
        options = options | {"owners": 0}
    tx, step = trained_with(reducer, fragments)
    store, bodies, commits = archived(written_once())
    sessions, digests = {}, collections.defaultdict(set)
    for name, action in schedule:
        if name not in sessions:
            sessions[name] = Session(store, name, tx, step, options)
        session = sessions[name]
        if action == "train":
            session.train()
        elif action in ("meet", "offline"):
            report = session.meet(is_away=action == "offline")
            digests[report.round].add(report.digest)
        else:
            session.end(leaves=action == "leave")
            session.check(bodies, commits, tx)
            del sessions[name]
    for session in sessions.values():
        session.check(bodies, commits, tx)
        session.end(leaves=False)
    assert {number: found for number, found in digests.items() if len(found) > 1} == {}


@pytest.mark.slow
@settings(max_examples=10)
@given(st.sampled_from(REDUCERS), OPTIONS, st.sampled_from([1, 2]), SCHEDULES)
@example("exact", {}, 1, LEFT_AND_JOINED)
@example("exact", {}, 2, LEFT_AND_JOINED)
@example("exact", {"owners": 2}, 2, LEFT_AND_JOINED)
def test_nothing_is_lost_in_any_schedule(reducer, options, fragments, schedule):
    play(reducer, options, fragments, schedule)


@pytest.mark.slow
@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("reducer", REDUCERS)
@settings(max_examples=150)
@given(OPTIONS, SCHEDULES)
def test_nothing_is_lost_in_many_schedules(reducer, fragments, options, schedule):
    play(reducer, options, fragments, schedule)
