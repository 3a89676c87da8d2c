"""How many requests an island and round take: they follow from the protocol, not from how long islands wait."""

import random
import statistics
import threading

import jax.numpy as jnp
import optax
import pytest
from island_stores import wrap
from virtual_clock import VirtualClock

import jaxdist as jd
from jaxdist import islands

NAMES = ("a", "b", "c", "d")
ROUNDS = 14
# The first rounds, in which islands learn for how long they wait, are not counted.
COUNTED = 10
FRAGMENTS = 4


def steady(name, draws):
    return 1.0


def uneven(name, draws):
    """Each island takes a second longer than the one before."""
    return 1.0 + NAMES.index(name)


def far_apart(name, draws):
    """One island takes a minute longer than all others."""
    return 60.0 if name == "c" else 0.1


def loaded(name, draws):
    """As on a machine that does other work."""
    return 1.0 + draws.expovariate(2.0)


def play(patch, pace, request_seconds, fragments):
    """The reports of four islands of this pace, over a store whose requests take so long in the mean.

    They meet after each step.
    """
    tx = jd.local_steps(optax.sgd(0.1), optax.sgd(1.0), sync_period=fragments, fragments=fragments, axis=None)
    params = [jnp.ones(2)] * FRAGMENTS
    clock, found = VirtualClock(len(NAMES)), {}
    clock.rule(patch)
    base = islands.memory()

    def train(name):
        # Of their own, so that the number of requests changes no pace.
        paces, delays = random.Random(name), random.Random(f"{name}'s requests")

        def delay(number, kind, function, arguments):
            clock.sleep(request_seconds * (0.5 + delays.expovariate(2.0)))
            return function(*arguments)

        # One after another, so that the order of events is always the same.
        clock.sleep(1e-3 * (1 + NAMES.index(name)))
        options = {"begin_with": len(NAMES), "round_timeout": 120, "keep_every": 100}
        with islands.join(wrap(base, delay), tx, name=name, **options) as island:
            state = island.enter({"params": params, "opt": tx.init(params)})
            for _ in range(ROUNDS):
                clock.sleep(pace(name, paces))
                state, report = island.meet(state)
                yield report

    def collect(name):
        try:
            found[name] = list(train(name))
        finally:
            clock.leave()

    threads = [threading.Thread(target=collect, args=(name,)) for name in NAMES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [report for name in NAMES for report in found[name][-COUNTED:]]


@pytest.mark.parametrize("fragments", [1, FRAGMENTS])
@pytest.mark.parametrize("request_seconds", [0.02, pytest.param(0.2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("pace", [steady, uneven, far_apart, loaded], ids=lambda pace: pace.__name__)
def test_an_island_and_round_take_at_most_ten_requests(pace, request_seconds, fragments, monkeypatch):
    """On a clock that only sleeps move, so that the number is the same on every machine; a fragment's is a round."""
    reports = play(monkeypatch, pace, request_seconds, fragments)
    assert all(report.counted and not report.late for report in reports)
    assert statistics.mean(report.requests for report in reports) <= 10
