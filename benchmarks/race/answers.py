"""The loop of one process in the race: the driver sends lines of JSON, and every process answers each of them."""

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol


class Racer(Protocol):
    """One mode, ready to train."""

    def start(self, rate: float, seed: int) -> None: ...

    def step(self, number: int) -> float: ...

    def evaluate(self) -> float: ...

    def cost(self) -> dict[str, Any]: ...

    def link(self) -> dict[str, float]: ...


def serve(build: Callable[[str], Racer], about: dict[str, Any]) -> None:
    """Answers until the input ends: `start` a mode, `run` some steps of it or of another one that was started,
    `evaluate`, tell the `cost` of a step, or measure the `link`.
    """
    # Frameworks print; answers keep the real output to themselves.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    racers: dict[str, Racer] = {}
    done: dict[str, int] = {}
    mode = ""
    answers.write(json.dumps({"ready": about}) + "\n")
    for line in sys.stdin:
        asked = json.loads(line)
        begin = time.perf_counter()
        if asked["do"] == "start":
            mode = asked["mode"]
            racers[mode] = racers.get(mode) or build(mode)
            done[mode] = 0
            racers[mode].start(asked["rate"], asked["seed"])
            # What compiling left behind is many objects, and looking through them would stop a step for 0.3 s.
            gc.collect()
            gc.freeze()
            answer = {}
        elif asked["do"] == "run":
            other = asked.get("mode", mode)
            times, loss = [], 0.0
            for number in range(done[other], done[other] + asked["steps"]):
                start = time.perf_counter()
                loss = racers[other].step(number)
                times.append(time.perf_counter() - start)
            done[other] += asked["steps"]
            answer = {"seconds": times, "loss": loss}
        elif asked["do"] == "evaluate":
            answer = {"held_out": racers[mode].evaluate()}
        elif asked["do"] == "cost":
            answer = racers[mode].cost()
        else:
            answer = racers[mode].link()
        answers.write(json.dumps(answer | {"took": time.perf_counter() - begin}) + "\n")
