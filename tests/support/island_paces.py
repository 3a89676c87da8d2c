"""Islands of unequal speed in threads, on a clock that only sleeps move: what follows is the same on every machine."""

import math
import random
import threading
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from island_stores import wrap
from islands_run import bodies_under_way, method, sgd, wait_for_upload
from virtual_clock import VirtualClock

from jaxdist import islands
from jaxdist.islands.fragments import divide
from jaxdist.local_sgd.local_steps import method_of

FRAGMENTS = 4
# Of each step, so that sums of them show what was counted.
EXAMPLES = 3.0


class Played(NamedTuple):
    """What became of an island.

    Attributes:
      reports: of its meetings.
      ends: when each of them ended, in seconds since the islands began.
      trained: the examples of all of its steps.
      ahead: for each fragment, those that no round has taken as far as the island knows.
      under_way: the bodies that it waits for: a round may have taken them since.
    """

    reports: list[Any]
    ends: list[float]
    trained: float
    ahead: list[float]
    under_way: set[str]


@cache
def stepping(fragments, reducer="exact"):
    """A transformation with a meeting after each step, the step, and a state to begin with."""
    tx = method(reducer, inner=sgd(0.1), sync_period=fragments, fragments=fragments)

    @jax.jit
    def step(state):
        updates, opt = tx.update(state["params"], state["opt"], state["params"], sync=(), examples=EXAMPLES)
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    params = [jnp.ones((2, 3))] * FRAGMENTS
    return tx, step, {"params": params, "opt": tx.init(params)}


def play_paces(
    patch,
    names,
    pace,
    *,
    store,
    meetings=10**9,
    seconds=math.inf,
    request_seconds=0.0,
    fragments=1,
    reducer="exact",
    **options,
):
    """Lets islands train for `pace(name, draws)` seconds before each meeting; returns what became of each, by name.

    Each ends after so many meetings, or the first one after so many seconds. Requests take `request_seconds` in the
    mean; with `overlap` these must be none, since they are under way beside the training.
    """
    tx, step, begin = stepping(fragments, reducer)
    clock, found = VirtualClock(len(names)), {}
    clock.rule(patch)
    began = clock.monotonic()
    settings: dict[str, Any] = {"begin_with": len(names), "round_timeout": 120, "keep_every": 100, **options}

    def train(name, number):
        # Of their own, so that the number of requests changes no pace.
        paces, delays = random.Random(name), random.Random(f"{name}'s requests")

        def delay(number, kind, function, arguments):
            if request_seconds:
                clock.sleep(request_seconds * (0.5 + delays.expovariate(2.0)))
            return function(*arguments)

        # One after another, so that the order of events is always the same.
        clock.sleep(1e-3 * (1 + number))
        with islands.join(wrap(store, delay), tx, name=name, **settings) as island:
            state, reports, ends = island.enter(begin), [], []
            while len(reports) < meetings and clock.monotonic() - began < seconds:
                clock.sleep(pace(name, paces))
                state, report = island.meet(step(state))
                # It takes no time on this clock, but it does take some.
                wait_for_upload(island)
                reports.append(report)
                ends.append(clock.monotonic() - began)
            counted = np.maximum(np.asarray(state["opt"].examples.value), 0)
            ahead = [float(counted[places[0]]) for places in divide(method_of(tx), state["opt"].anchor).places]
            return Played(reports, ends, EXAMPLES * len(reports), ahead, bodies_under_way(island))

    def collect(name, number):
        try:
            found[name] = train(name, number)
        finally:
            clock.leave()

    threads = [threading.Thread(target=collect, args=(name, number)) for number, name in enumerate(names)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {name: found[name] for name in names}
