"""What the processes of `peers.py` share: a problem in NumPy, memory, and a loop that answers lines of JSON.

It imports NumPy and the standard library alone, since some of the processes run under a Python without JAX.
"""

import ctypes
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

RATE, DECAY, EPSILON = 1e-3, 0.01, 1e-8
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
Batch = tuple[np.ndarray, np.ndarray]


class Problem(NamedTuple):
    """A residual network, `x + relu(normalize(x) @ weight + bias)` in each block, that imitates a random teacher.

    Attributes:
      width: of the blocks.
      blocks: how many.
      inputs: entries of an example.
      classes: of the labels.
      examples: of a worker's batch.
    """

    width: int = 1024
    blocks: int = 16
    inputs: int = 256
    classes: int = 10
    examples: int = 64

    def parameters(self) -> int:
        ends = (self.inputs + 1) * self.width + (self.width + 1) * self.classes
        return ends + self.blocks * (self.width + 2) * self.width


def initial_params(problem: Problem) -> dict[str, Any]:
    """Initial values, the same in every system: matrices `[in, out]`, in a list for the blocks."""
    random = np.random.default_rng(0)

    def draw(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
        return (scale * random.standard_normal((rows, columns)) / rows**0.5).astype(np.float32)

    width = problem.width
    return {
        "first": {"weight": draw(problem.inputs, width), "bias": np.zeros(width, np.float32)},
        "blocks": [
            {
                "gain": np.ones(width, np.float32),
                "weight": draw(width, width, 0.5),
                "bias": np.zeros(width, np.float32),
            }
            for _ in range(problem.blocks)
        ],
        "last": {"weight": draw(width, problem.classes), "bias": np.zeros(problem.classes, np.float32)},
    }


def draw_batch(problem: Problem, rank: int, step: int) -> Batch:
    """A worker's batch of a step."""
    teacher = np.random.default_rng(1).standard_normal((problem.inputs, problem.classes))
    x = np.random.default_rng((2, rank, step)).standard_normal((problem.examples, problem.inputs))
    return x.astype(np.float32), (x @ teacher).argmax(1).astype(np.int32)


def read_memory() -> dict[str, int]:
    """Resident bytes of this process now, and at most since the last `reset_peak`."""
    found = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return {name: 1024 * int(found[key].split()[0]) for name, key in (("now", "VmRSS"), ("peak", "VmHWM"))}


def reset_peak() -> None:
    """Gives freed memory back to the system, and has the kernel count its peak from here on."""
    ctypes.CDLL(None).malloc_trim(0)
    CLEAR.write_text("5")


def bytes_at_start() -> int:
    """Resident bytes before there is a model, without freed memory, which the figures to compare with lack too."""
    reset_peak()
    return read_memory()["now"]


def take_output() -> TextIO:
    """Keeps the output to the caller; what frameworks print from now on goes to the errors."""
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return output


def serve(output: TextIO, about: dict[str, Any], step: Callable[[int], float]) -> None:
    """Takes as many steps as each line of the input asks for; answers with times, losses and memory."""
    print(json.dumps(about), file=output)
    done = 0
    for line in sys.stdin:
        count = json.loads(line)["steps"]
        reset_peak()
        seconds, losses = [], []
        for number in range(done, done + count):
            start = time.perf_counter()
            losses.append(step(number))
            seconds.append(time.perf_counter() - start)
        done += count
        print(json.dumps({"seconds": seconds, "losses": losses, **read_memory()}), file=output)


def open_log(folder: str, name: str) -> Callable[..., None]:
    """Returns a function that appends a line of JSON with the time, which is the same clock in all processes."""
    path = Path(folder, f"{name}.{os.getpid()}.jsonl")

    def append(**fields: Any) -> None:
        with path.open("a") as file:
            file.write(json.dumps({"time": time.monotonic()} | fields) + "\n")

    return append


def describe(arrays: Iterable[np.ndarray]) -> dict[str, Any]:
    """A hash of the bits of parameters, and the sum of their sizes, which shows how far others are apart."""
    found, magnitude = hashlib.sha1(), 0.0
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
        magnitude += float(np.abs(array, dtype=np.float64).sum())
    return {"digest": found.hexdigest()[:12], "magnitude": magnitude}
