"""One process of one system: builds a mode at its first use, runs some steps, and reports their times.

The driver sends it lines of JSON on its input, so that two systems and all their modes take turns within seconds.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

# `step(number) -> loss`: one optimizer step, finished when it returns.
Step = Callable[[int], float]

WARM_UP = 4


def serve(build: Callable[[str], Step], about: dict[str, Any]) -> None:
    """Answers requests until the input ends. `build(mode)` makes the step of a mode."""
    # Frameworks print; answers keep the real output to themselves.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    steps: dict[str, Step] = {}
    done: dict[str, int] = {}
    answers.write(json.dumps({"ready": about}) + "\n")
    for line in sys.stdin:
        asked = json.loads(line)
        mode = asked["mode"]
        if mode not in steps:
            start = time.perf_counter()
            steps[mode], done[mode] = build(mode), 0
            losses = [steps[mode](number) for number in range(WARM_UP)]
            done[mode] = WARM_UP
            answer = {"build_seconds": time.perf_counter() - start, "first_losses": losses}
        else:
            answer = _run(steps[mode], done[mode], asked["steps"])
            done[mode] += asked["steps"]
        answers.write(json.dumps(answer) + "\n")


def _run(step: Step, first: int, count: int) -> dict[str, Any]:
    times, loss = [], 0.0
    cpu = _cpu_seconds()
    for number in range(first, first + count):
        start = time.perf_counter()
        loss = step(number)
        times.append(time.perf_counter() - start)
    return {"seconds": times, "cpu_seconds": (_cpu_seconds() - cpu) / max(count, 1), "loss": loss}


def _cpu_seconds() -> float:
    used = os.times()
    return used.user + used.system
