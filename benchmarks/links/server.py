"""One process of one system: builds a mode at its first use, runs some steps, and reports their times.

The driver sends it lines of JSON on its input, so that two systems and all their modes take turns within seconds.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

WARM_UP = 4


class Way(NamedTuple):
    """One way to train.

    Attributes:
      step: `step(number) -> loss`, one optimizer step; what it sends may still be on its way when it returns.
      finish: waits for what is on its way. Its time counts with the steps of a turn if `counts`.
      counts: whether `finish` belongs to the steps, as an update that is missing does, or is a pause between turns.
    """

    step: Callable[[int], float]
    finish: Callable[[], Any] = lambda: None
    counts: bool = False


def serve(build: Callable[[str], Way], about: dict[str, Any]) -> None:
    """Answers requests until the input ends. `build(mode)` makes the way of a mode."""
    # Frameworks print; answers keep the real output to themselves.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    ways: dict[str, Way] = {}
    done: dict[str, int] = {}
    answers.write(json.dumps({"ready": about}) + "\n")
    for line in sys.stdin:
        asked = json.loads(line)
        mode = asked["mode"]
        if mode not in ways:
            start = time.perf_counter()
            ways[mode] = build(mode)
            losses = [ways[mode].step(number) for number in range(WARM_UP)]
            ways[mode].finish()
            done[mode] = WARM_UP
            answer = {"build_seconds": time.perf_counter() - start, "first_losses": losses}
        else:
            answer = _run(ways[mode], done[mode], asked["steps"])
            done[mode] += asked["steps"]
        answers.write(json.dumps(answer) + "\n")


def _run(way: Way, first: int, count: int) -> dict[str, Any]:
    times, loss = [], 0.0
    cpu = _cpu_seconds()
    for number in range(first, first + count):
        start = time.perf_counter()
        loss = way.step(number)
        times.append(time.perf_counter() - start)
    start = time.perf_counter()
    way.finish()
    if way.counts and times:
        times[-1] += time.perf_counter() - start
    return {"seconds": times, "cpu_seconds": (_cpu_seconds() - cpu) / max(count, 1), "loss": loss}


def _cpu_seconds() -> float:
    used = os.times()
    return used.user + used.system
