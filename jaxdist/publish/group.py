"""The processes of a job that publish or follow together: process 0 asks, and each of them answers."""

import itertools
import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax

from .._core import compat
from . import base
from .base import PublishError
from .requests import logger

# Seconds for which a request of a question waits; after each a process finds out whether it was closed.
PATIENCE = 1.0
# Seconds between two looks for answers, at first and at the longest, and seconds after which a warning names the late.
PAUSES, LATE = (0.002, 0.05), 60.0

_opened = itertools.count()

Message = dict[str, Any]


class Group:
    """Questions and answers over JAX's coordination service, a dictionary of text in process 0.

    A question has a number, and stays there until all have answered a later one. With one process all of it is a call.

    Attributes:
      process: the number of this one.
      size: how many there are.
    """

    def __init__(self, client: Any, name: str, process: int, size: int):
        self.process, self.size = process, size
        self._client, self._name = client, f"jaxdist/{name}"
        self._number, self._oldest = 0, 1

    def ask(self, question: Message, answer: Callable[[Message], Message | None]) -> list[Message]:
        """Asks all processes, of which this one answers by a call; returns the answers in their order.

        Raises:
          PublishError: one that another process had, and says so.
        """
        number = self.tell(question)
        own = answer(question)
        assert own is not None
        if self.size == 1:
            return [own]
        found = {0: own} | self._collect(number)
        # What was asked before has been read by all.
        for old in range(self._oldest, number):
            self._client.key_value_delete(self._question(old))
            self._client.key_value_delete(self._answers(old))
        self._oldest = number
        return [found[process] for process in range(self.size)]

    def tell(self, message: Message) -> int:
        """Tells the other processes something that they need not answer; returns its number."""
        if self.size > 1:
            self._number += 1
            self._client.key_value_set(self._question(self._number), json.dumps(message))
        return self._number

    def serve(
        self, answer: Callable[[Message], Message | None], is_closed: Callable[[], bool] = lambda: False
    ) -> Message | None:
        """Answers the next question of process 0, and returns it; `None` once one of the two has ended.

        Raises:
          PublishError: what process 0 had, or `answer` raises here, which process 0 is told.
        """
        self._number += 1
        try:
            question = self._wait(is_closed)
            if question is None or question.get("end"):
                return None
            _raise_error(question, 0)
            found = answer(question)
            if found is not None:
                self._answer(found)
            return question
        except Exception as error:
            # Where the service is gone, the error may be that.
            with suppress(Exception):
                self._answer(_write_error(error))
            raise

    def end(self) -> None:
        """Tells the other processes that nothing comes any more."""
        self.tell({"end": True})

    def fail(self, error: Exception) -> None:
        """Raises an error of process 0 in the other processes, too, as far as they can be told."""
        with suppress(Exception):
            self.tell(_write_error(error))

    def _answer(self, message: Message) -> None:
        self._client.key_value_set(f"{self._answers(self._number)}/{self.process}", json.dumps(message))

    def _wait(self, is_closed: Callable[[], bool]) -> Message | None:
        """The next question, or `None` once this process is closed; process 0 is told if it asks then."""
        name = self._question(self._number)
        while True:
            try:
                return json.loads(self._client.blocking_key_value_get(name, int(1e3 * PATIENCE)))
            # jaxlib has its own type for it.
            except Exception as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            if is_closed():
                self._answer(_write_error(PublishError("its publisher is closed")))
                return None

    def _collect(self, number: int) -> dict[int, Message]:
        pause, began, is_told = PAUSES[0], time.monotonic(), False
        while True:
            texts = self._client.key_value_dir_get(f"{self._answers(number)}/")
            found = {int(key.rpartition("/")[2]): json.loads(text) for key, text in texts}
            for process, message in found.items():
                _raise_error(message, process)
            if len(found) == self.size - 1:
                return found
            if not is_told and time.monotonic() - began > LATE:
                late = sorted({*range(1, self.size)} - found.keys())
                logger.warning("waiting for processes %s: all processes of a job make the same calls", late)
                is_told = True
            time.sleep(pause)
            pause = min(2 * pause, PAUSES[1])

    def _question(self, number: int) -> str:
        return f"{self._name}/questions/{number}"

    def _answers(self, number: int) -> str:
        return f"{self._name}/answers/{number}"


def open_group() -> Group:
    """The processes of this job, which all call this the same number of times."""
    return Group(
        compat.coordination_client(), f"publish/{next(_opened)}", jax.process_index(), max(jax.process_count(), 1)
    )


def alone() -> Group:
    """A group of this process alone."""
    return Group(None, "", 0, 1)


def _write_error(error: Exception) -> Message:
    return {"error": str(error), "kind": type(error).__name__}


def _raise_error(message: Message, process: int) -> None:
    if "error" in message:
        kind = getattr(base, message["kind"], PublishError)
        raise kind(f"process {process} has ended: {message['error']}")
