"""Heartbeats of the processes of a job: the step that each has started, and that it is alive.

Each process writes a line of JSON to the key-value store of JAX's coordination service. The service runs in process 0
in separate threads, which Python cannot block.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from .._core import compat
from .._core.checks import Portable


class StepTimeoutError(Portable, RuntimeError):
    """A step has not ended in time: `step`. The others wait for `process`; None if all have started the step."""

    def __init__(self, message: str, process: int | None, step: int):
        super().__init__(message)
        self.process, self.step = process, step


class ProcessLostError(Portable, RuntimeError):
    """A process, of number `process`, has died, or shows no sign of life; `step` is the last that it started."""

    def __init__(self, message: str, process: int, step: int):
        super().__init__(message)
        self.process, self.step = process, step


class Heartbeat(NamedTuple):
    """The last step that a process has started, a counter, whether the process is done, and whether it compiles."""

    step: int
    count: int
    done: bool = False
    compiling: bool = False


class Channel(NamedTuple):
    """Where heartbeats are exchanged: `write(process, text)`, and `read()` for the last text of every process."""

    write: Callable[[int, str], None]
    read: Callable[[], dict[int, str]]


class Received(NamedTuple):
    """The last heartbeat of a process, and when it arrived."""

    heartbeat: Heartbeat
    when: float


def open_channel(name: str) -> Channel:
    """Opens a channel between the processes of a job; `name` is new, and the same in all of them."""
    client = compat.coordination_client()
    folder = f"jaxdist/{name}/"

    def write(process: int, text: str) -> None:
        client.key_value_set(f"{folder}{process}", text, allow_overwrite=True)

    def read() -> dict[int, str]:
        return {int(key.rpartition("/")[2]): text for key, text in client.key_value_dir_get(folder)}

    return Channel(write, read)


def merge(received: Mapping[int, Received], texts: Mapping[int, str], now: float) -> dict[int, Received]:
    """Updates the heartbeats of the processes whose counter has changed; the others have been silent."""
    found = dict(received)
    for process, text in texts.items():
        # By the clock of the reader, and by its counter: clocks of machines differ, and text may be old.
        heartbeat = Heartbeat(**json.loads(text))
        if process not in received or received[process].heartbeat.count != heartbeat.count:
            found[process] = Received(heartbeat, now)
    return found


def silent_processes(
    received: Mapping[int, Received], others: Iterable[int], now: float, seconds: float
) -> tuple[int, ...]:
    """Returns those of the others that are not done and have sent no heartbeat for `seconds`."""

    def is_silent(process: int) -> bool:
        last = received.get(process)
        return last is None or (not last.heartbeat.done and now - last.when > seconds)

    return tuple(filter(is_silent, others))


def any_compiling(received: Mapping[int, Received], silent: tuple[int, ...]) -> bool:
    """Returns whether a process that is alive is compiling."""
    alive = (last.heartbeat for process, last in received.items() if process not in silent)
    return any(heartbeat.compiling and not heartbeat.done for heartbeat in alive)


def lost_error(received: Mapping[int, Received], silent: tuple[int, ...]) -> ProcessLostError:
    """Makes the error that names the first of the silent processes."""
    process, step, since = silent[0], -1, " and never did" if received else ""
    if process in received:
        step = received[process].heartbeat.step
        since = f" since it started step {step}"
    return ProcessLostError(f"process {process} shows no sign of life{since}: it died or is stopped", process, step)


def timeout_error(
    received: Mapping[int, Received], silent: tuple[int, ...], own: int, step: int, seconds: float
) -> StepTimeoutError:
    """Makes the error of a step in process `own`, which names the process that blocks the step."""
    timeout, waiting = f"step {step} timed out after {round(seconds, 1):g} s", f"(process {own} is waiting)"
    # A silent process is a better answer than one that is alive and late: it may be the reason for that.
    if silent:
        return StepTimeoutError(f"{timeout}: {lost_error(received, silent)} {waiting}", silent[0], step)
    # All are alive: the step waits for a process that has not started it.
    behind = [process for process, last in sorted(received.items()) if last.heartbeat.step < step]
    if not behind:
        return StepTimeoutError(f"{timeout} in process {own}, but all processes have started it", None, step)
    last = received[behind[0]].heartbeat
    missing = "it" if last.step + 1 == step else f"step {last.step + 1}"
    what = f"left after step {last.step}" if last.done else f"is alive but has not started {missing}"
    return StepTimeoutError(f"{timeout}: process {behind[0]} {what} {waiting}", behind[0], step)
