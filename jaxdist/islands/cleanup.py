"""Keeping the global parameters, and deleting what no island will read again: by one island, while it trains.

Names are deleted in an order that lets a process die, or pause, at any point: bodies first, then what islands said in a
round, then the records of global parameters. What is cut short is gone on with by the next one, which lists everything
again. Commits stay, some hundred bytes a round: an island that made a long pause could otherwise create a second one,
and all that read a commit would have to ask whether it is the first.
"""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from . import protocol
from .bodies import Body
from .connection import Connection
from .protocol import Anchor, number_in

KEPT_ANCHORS = 2
# No probe of an island that joins takes so many seconds: older ones are those of processes that died.
PROBE_SECONDS = 600.0


def last_forgotten(anchors: Sequence[str], rounds: int) -> int:
    """The last round that may be deleted, -1 if none may, from the names of kept global parameters.

    From the last kept ones but one every round can be followed: their commits, and the bodies of up to `rounds` rounds
    before that these count. So a round goes when it is older than all of these, and its bodies go with it.
    """
    return number_in(anchors[-KEPT_ANCHORS]) - rounds if len(anchors) >= KEPT_ANCHORS else -1


def keep_anchor(
    store: Connection, number: int, digest: str, counted: Sequence[tuple[str, str]], arrays: Sequence[np.ndarray]
) -> None:
    """Keeps the global parameters before round `number`, unless another island has kept these or later ones."""
    name = protocol.anchor_name(number)
    if any(kept >= name for kept in store.list("anchors/")):
        return
    body = Body(number, name, arrays)
    store.put_body(body)
    store.create(name, protocol.to_json(Anchor(number, body.place, digest, tuple(counted))))


def forget_rounds(store: Connection, rounds: int) -> None:
    """Deletes the bodies of rounds that are older than any island needs, and what islands said in them."""
    anchors = store.list("anchors/")
    last = last_forgotten(anchors, rounds)
    if last >= 0:
        for kind in ("bodies/", "means/"):
            store.delete_many([name for name in store.list(kind) if number_in(name) <= last])
        # Those of islands have one part more than commits.
        said = [name for name in store.list("rounds/") if name.count("/") == 3]
        store.delete_many([name for name in said if number_in(name) <= last])
    # The first record stays, so that whoever enters by a listing that is late can begin no second run.
    store.delete_many([name for name in anchors[:-KEPT_ANCHORS] if number_in(name)])


class Cleaner:
    """Keeps global parameters and deletes old rounds in a thread of process 0, one time after another."""

    def __init__(self, store: Connection):
        self._store = store.in_background(urgent=False, cleans=True)
        self._thread: threading.Thread | None = None
        # When a clean-up first saw each probe.
        self._probes: dict[str, float] = {}
        self._problem: BaseException | None = None

    def start(
        self, number: int, digest: str, counted: Sequence[tuple[str, str]], arrays: Sequence[np.ndarray], rounds: int
    ) -> None:
        """Begins, unless the last time goes on; what this leaves out, the next time does."""
        if self._problem is not None:
            raise self._problem
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self._run, args=(number, digest, tuple(counted), arrays, rounds), daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Begins no request any more."""
        self._store.closed.set()

    def join(self) -> None:
        """Waits for what goes on."""
        if self._thread is not None:
            self._thread.join()

    def _run(
        self, number: int, digest: str, counted: Sequence[tuple[str, str]], arrays: Sequence[np.ndarray], rounds: int
    ) -> None:
        try:
            with suppress(ConnectionError):
                keep_anchor(self._store, number, digest, counted, arrays)
                forget_rounds(self._store, rounds)
                now = time.monotonic()
                self._probes = {name: self._probes.get(name, now) for name in self._store.list("probe/")}
                old = [name for name, seen in self._probes.items() if now - seen >= PROBE_SECONDS]
                self._store.delete_many(old)
        # For the thread that starts the next one: this is no error of a store.
        except BaseException as problem:
            self._problem = problem
