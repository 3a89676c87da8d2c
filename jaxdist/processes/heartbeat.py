"""What the processes of a job tell each other beside their collectives: how far they are, and that they live.

Each writes a line of JSON to the dictionary of text that JAX's coordination service keeps in process 0, where threads
of its own serve it, whatever Python does.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from .._core import compat
from .._core.errors import Portable


class StepTimeout(Portable, RuntimeError):
    """A step has not ended in time.

    Attributes:
      process: whom the others wait for; None where all have begun the step.
      step: the step that has not ended.
    """

    def __init__(self, message: str, process: int | None, step: int):
        super().__init__(message)
        self.process, self.step = process, step


class WorkerLost(Portable, RuntimeError):
    """A process has died, or gives no sign of life.

    Attributes:
      process: its number.
      step: the last step that it began.
    """

    def __init__(self, message: str, process: int, step: int):
        super().__init__(message)
        self.process, self.step = process, step


class Sign(NamedTuple):
    """What a process says: the step that it began last, how often it has spoken, whether it is done, or compiles."""

    step: int
    count: int
    done: bool = False
    compiling: bool = False


class Board(NamedTuple):
    """Where signs are left: `post(process, text)`, and `read()` for those of all."""

    post: Callable[[int, str], None]
    read: Callable[[], dict[int, str]]


def shared_board(name: str) -> Board:
    """The board of a job of several processes; `name` is the same in all of them, and new."""
    client = compat.coordination_client()
    folder = f"jaxdist/{name}/"

    def post(process: int, text: str) -> None:
        client.key_value_set(f"{folder}{process}", text, allow_overwrite=True)

    def read() -> dict[int, str]:
        return {int(key.rpartition("/")[2]): text for key, text in client.key_value_dir_get(folder)}

    return Board(post, read)


class Seen(NamedTuple):
    """The last sign of a process, and when it was new."""

    sign: Sign
    when: float


def merge(seen: Mapping[int, Seen], texts: Mapping[int, str], now: float) -> dict[int, Seen]:
    """What is known of the processes, after another look at the board."""
    found = dict(seen)
    for process, text in texts.items():
        sign = Sign(**json.loads(text))
        if process not in seen or seen[process].sign.count != sign.count:
            found[process] = Seen(sign, now)
    return found


def silent(seen: Mapping[int, Seen], others: Iterable[int], now: float, seconds: float) -> tuple[int, ...]:
    """Which of the others have not been heard for so long, though they are not done."""
    return tuple(
        process
        for process in others
        if process not in seen or (not seen[process].sign.done and now - seen[process].when > seconds)
    )


def compiling(seen: Mapping[int, Seen], gone: tuple[int, ...]) -> bool:
    """Whether a process that is not silent compiles."""
    return any(one.sign.compiling and not one.sign.done for process, one in seen.items() if process not in gone)


def lost(seen: Mapping[int, Seen], gone: tuple[int, ...]) -> WorkerLost:
    """The error that names the first of the silent ones."""
    step = seen[gone[0]].sign.step if gone[0] in seen else -1
    since = f" since it began step {step}" if gone[0] in seen else " and never did" if seen else ""
    return WorkerLost(f"process {gone[0]} gives no sign of life{since}: it died or is stopped", gone[0], step)


def overdue(seen: Mapping[int, Seen], gone: tuple[int, ...], own: int, step: int, seconds: float) -> StepTimeout:
    """The error that names whom process `own` waits for in a step."""
    waits = f"process {own} has waited in step {step} for {round(seconds, 1):g} s"
    if gone:
        return StepTimeout(f"{lost(seen, gone)}; {waits}", gone[0], step)
    behind = [process for process, one in sorted(seen.items()) if one.sign.step < step]
    if behind:
        last = seen[behind[0]].sign
        what = f"left after step {last.step}" if last.done else f"lives and has not begun step {last.step + 1}"
        return StepTimeout(f"process {behind[0]} {what}; {waits}", behind[0], step)
    return StepTimeout(f"{waits}, which all have begun", None, step)


def speak(board: Board, own: int, sign: Sign) -> None:
    """Leaves a sign."""
    board.post(own, json.dumps(sign._asdict()))


def look(board: Board, seen: Mapping[int, Seen]) -> dict[int, Seen]:
    """Another look at the board."""
    return merge(seen, board.read(), time.monotonic())
