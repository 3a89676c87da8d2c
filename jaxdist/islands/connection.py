"""The connection through which the processes of an island ask a store: threads ask, callers wait until a deadline.

A request that has not been answered by the deadline stays under way, and the next call for the same waits for the same
request. So a slow or silent store delays an island by its deadline, never by what one request takes.
"""

import heapq
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from .._stores.base import SharedStore, deletions
from .._stores.problems import is_refusal
from ..processes.broadcast import broadcast
from . import base, bodies, protocol
from .base import IslandError, StoreUnusableError
from .bodies import Body, BodyReader
from .protocol import is_of_run

logger = logging.getLogger("jaxdist.islands")

FIRST_PAUSE, LONGEST_PAUSE = 0.005, 1.0
# Seconds after the deadline that a request may still take: a deadline of a few milliseconds is one for other islands.
GRACE = 0.5
# Seconds that it has in any case: what the devices take counts, too, and a store that answers at once is there.
LEAST_SECONDS = 0.1
# Processes that wait for process 0 do so in a collective, which has a time limit of its own; and a log says what takes
# longer.
SLICE = 5.0
# The requests that return bytes.
READS = ("get", "get_range", "get_body")
# Pieces of a long body that are put before a more urgent request may be.
PIECES_AT_ONCE = 2 * bodies.TOGETHER
# Seconds between two warnings of failures of one kind, at first and where they go on.
LEAST_SILENCE, MOST_SILENCE = 1.0, 60.0


class _RefusedError(ConnectionError):
    """The store refuses a request in a way that no second try mends."""


class _UnansweredError(ConnectionError):
    """A request is still under way at the deadline; `name` is what it asks for."""

    def __init__(self, message: str, name: str):
        super().__init__(message)
        self.name = name


class StoreTraffic(NamedTuple):
    """What went to and from the store: bytes, requests, those of them that were tried again, and the last problem."""

    sent: int = 0
    received: int = 0
    requests: int = 0
    retries: int = 0
    problem: str | None = None


class Request:
    """A call of a function of a store by another thread; `done` is set when `answer` or `error` is there."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...], kind: str = ""):
        self._function, self._arguments, self.kind = function, arguments, kind
        self.done, self.has_begun, self.is_dropped = threading.Event(), False, False
        self.answer: Any = None
        self.error: BaseException | None = None
        self.ended_at = self.seconds = 0.0

    @property
    def name(self) -> str:
        """What it asks for."""
        return _name_of(self._arguments)

    def describe(self) -> str:
        """The call, for messages."""
        return _describe(self.kind, self._arguments)

    def run(self) -> None:
        """Calls the function, unless it was dropped."""
        self.has_begun, began = True, time.monotonic()
        if not self.is_dropped:
            try:
                self.answer = self._function(*self._arguments)
            except BaseException as error:
                self.error = error
        self.ended_at = time.monotonic()
        self.seconds = self.ended_at - began
        self.done.set()


class Lane:
    """Runs requests one after another in a thread, urgent ones first. The thread is there while there is work.

    It never holds up the end of the process, not even inside a call that does not return.
    """

    def __init__(self):
        self._lock, self._count = threading.Lock(), itertools.count()
        self._waiting: list[tuple[bool, int, Request]] = []
        # Which the others wait for.
        self.running: Request | None = None
        self._is_running = False

    def submit(self, request: Request, *, urgent: bool) -> None:
        """Adds a request."""
        with self._lock:
            heapq.heappush(self._waiting, (not urgent, next(self._count), request))
            if not self._is_running:
                self._is_running = True
                # In dumps and profiles it has the name of the thread that asks.
                asks = threading.current_thread().name
                threading.Thread(target=self._run, name=asks, daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_running, self.running = False, None
                    return
                *_, request = heapq.heappop(self._waiting)
                self.running = request
            request.run()


class Connection:
    """The functions of a store, and a clock, with the same answers in all processes of an island.

    Decisions that follow from these answers alone are the same in all processes, so that no process waits in a
    collective which another does not enter. A function that raises is called again until `deadline`, by the clock of
    process 0; then, and `GRACE` later if there is no answer, `ConnectionError` is raised in all of them.

    One thread of process 0 puts bodies, one lists what to delete and deletes it, another one calls all other functions;
    those that put or read a long body have others for its pieces.

    Args:
      store: what process 0 asks.
      together: whether all processes call each function; otherwise this process asks by itself.
      foreground: the connection whose threads this one uses, from a thread of its own.
      urgent: whether its requests go before those that are not.
      cleans: whether its listings are those of a clean-up: of all rounds, which takes many seconds after a month.
    """

    def __init__(
        self,
        store: SharedStore,
        *,
        together: bool = True,
        foreground: "Connection | None" = None,
        urgent: bool = True,
        cleans: bool = False,
    ):
        self.store, self.deadline = store, float("inf")
        # Set by whoever wants none of its answers any more.
        self.closed = threading.Event()
        # Of the last request of this connection, if that failed.
        self.problem: str | None = None
        self._together = together and jax.process_count() > 1
        self._urgent, self._cleans = urgent, cleans
        shared = self if foreground is None else foreground
        if foreground is None:
            self._uploads, self._deletions, self._requests = Lane(), Lane(), Lane()
            self._lock, self._traffic = threading.Lock(), StoreTraffic()
            # Until when the log is told no more of failures of a kind, and for how long it was not told before.
            self._silences: dict[tuple[str, type[BaseException]], tuple[float, float]] = {}
            # Seconds that a small request takes.
            self._seconds = 0.0
            # Bytes that were read ahead, by name; never others than those in the store.
            self.read_ahead: dict[str, bytes | list[bytes]] = {}
        self._shared = shared
        self._under_way: dict[tuple[Any, ...], Request] = {}
        # Long bodies of which pieces have come.
        self._readers: dict[str, BodyReader] = {}

    def in_background(self, *, urgent: bool, cleans: bool = False) -> "Connection":
        """A connection for another thread of this process, over the same threads, without a deadline."""
        return Connection(self.store, together=False, foreground=self._shared, urgent=urgent, cleans=cleans)

    def create(self, name: str, body: bytes) -> bool:
        """Stores `body` under a new name, and returns false if the name exists."""
        return self.ask("create", name, body)

    def put(self, name: str, body: bytes) -> None:
        """Stores `body` under a name, and replaces what it has."""
        self.ask("put", name, body)

    def get(self, name: str) -> bytes | None:
        """The bytes under a name, or `None` if there are none."""
        return self.ask("get", name)

    def get_range(self, name: str, start: int, end: int) -> bytes | None:
        """The bytes under a name from `start` up to `end`, or `None` if there are none."""
        if self.store.get_range is not None:
            return self.ask("get_range", name, start, end)
        body = self.get(name)
        return None if body is None else body[start:end]

    def put_body(self, body: Body) -> None:
        """Stores a body under its place: of a long one first the pieces that the store has not yet, several at once."""
        name, missing = protocol.body_name(body.place), body.missing_pieces()
        # The first one alone, to see how long it takes.
        at_once, started = 1, self.now()
        while missing:
            self.ask("put_pieces", name, body, tuple(missing[:at_once]))
            if self.closed.is_set():
                raise ConnectionError("closed before all pieces were there")
            missing = missing[at_once:]
            at_once = PIECES_AT_ONCE if at_once > 1 or self.now() - started <= bodies.QUICK else 1
            started = self.now()
        self.put(name, body.stored)

    def get_body(self, place: str) -> "list[bytes] | None":
        """What is stored at a place, and its pieces if that is an index, for `bodies.unpack_found`; or `None`."""
        return self.ask("get_body", protocol.body_name(place))

    def get_range_of_body(self, place: str, size: int, start: int, end: int) -> bytes | None:
        """The bytes of a body that has so many, from `start` up to `end`, or `None` if some are missing."""
        name, length = protocol.body_name(place), bodies.PIECE
        if size <= bodies.LONGEST_WHOLE:
            return self.get_range(name, start, end)
        parts, hashes = [], bodies.hashes_in(place, self.get(name) or b"")
        for piece in range(start // length, -(-end // length)) if hashes else ():
            piece_name, first = bodies.piece_name(place, hashes[piece]), piece * length
            parts.append(self.get_range(piece_name, max(start - first, 0), min(end - first, length)) or b"")
        return b"".join(parts) if parts else None

    def list(self, prefix: str) -> list[str]:
        """The names with this prefix that may be of a run, sorted."""
        return [name for name in self.ask("list", prefix) if is_of_run(name)]

    def delete_many(self, names: "list[str]") -> None:
        """Deletes names, which may be missing."""
        for field, argument in deletions(self.store, names):
            self.ask(field, argument)

    def now(self) -> float:
        """Seconds on the monotonic clock of process 0. Clocks of different islands are never compared."""
        seconds = time.monotonic()
        return float(_share(np.float64(seconds))) if self._together else seconds

    def sleep(self, seconds: float) -> None:
        """Waits in this process."""
        time.sleep(seconds)

    def request_seconds(self) -> float:
        """How long a small request takes, as process 0 has measured it."""
        return self.agree(lambda: self._shared._seconds)

    def take_traffic(self) -> StoreTraffic:
        """What went to and from the store since the last call of this."""

        def take() -> list[Any]:
            with self._shared._lock:
                taken, self._shared._traffic = self._shared._traffic, StoreTraffic()
            return list(taken)

        return StoreTraffic(*self.agree(take))

    def keep_ahead(self, found: "dict[str, bytes | list[bytes]]") -> None:
        """Keeps bytes that were read ahead."""
        with self._shared._lock:
            self._shared.read_ahead |= found

    def drop_ahead(self) -> None:
        """Drops them."""
        with self._shared._lock:
            self._shared.read_ahead = {}

    def forget_answers(self) -> None:
        """Drops answers that came after their deadline and that were not asked for again."""
        self._under_way = {key: request for key, request in self._under_way.items() if not request.done.is_set()}
        names = {key[1] for key in self._under_way}
        self._readers = {name: reader for name, reader in self._readers.items() if name in names}

    def ask(self, kind: str, *arguments: Any) -> Any:
        """The answer of a function of the store, which is called again while it raises.

        Raises:
          _RefusedError: no second try would mend what it raises.
          _UnansweredError: a request is still under way at the deadline; it stays so.
          ConnectionError: the function raises until the deadline.
        """
        pause, tries = FIRST_PAUSE, 0
        asked_at = self.now()
        while True:
            state, answer = self.agree(self._attend, kind, arguments, tries, asked_at)
            if state == "answered":
                return answer
            if state == "refused":
                raise _RefusedError(answer)
            now = self.now()
            if state == "failed":
                tries += 1
                if now + pause > self.deadline or self.closed.is_set():
                    raise ConnectionError(f"the store is out of reach: {answer}")
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            elif now >= max(self.deadline + GRACE, asked_at + LEAST_SECONDS) or self.closed.is_set():
                self._let_go(kind, arguments)
                what, name = answer
                raise _UnansweredError(f"the store has not answered {what} within {now - asked_at:.1f} s", name)

    def call_within(self, seconds: float, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function that asks the store returns, called in another thread of process 0; JSON can hold it.

        Raises:
          IslandError: the one that the function raises, in all processes.
          StoreUnusableError: there is no answer after so many seconds.
        """
        request, end = Request(function, arguments), self.now() + seconds

        def begin() -> None:
            Lane().submit(request, urgent=True)

        self.agree(begin)
        while True:
            left = end - self.now()
            state, answer, problem = self.agree(_await_request, request, max(min(SLICE, left), 0.0))
            if state == "answered":
                return answer
            if state == "failed":
                # In process 0 with its cause.
                raise request.error or getattr(base, answer)(problem)
            if left <= 0:
                raise StoreUnusableError(
                    f"the store has not answered within patience={seconds:g} s; check its address and the link to it"
                )
            logger.warning("waiting for the store: no answer yet to the first requests")

    def agree(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function returns in process 0, in all processes.

        That is what JSON can hold, or a pair that ends in bytes, or in a list of bytes.
        """
        if not self._together:
            return function(*arguments)
        is_first = jax.process_index() == 0
        answer = function(*arguments) if is_first else None
        last: Any = answer[-1] if isinstance(answer, tuple) else None
        is_bytes = isinstance(last, bytes)
        is_list = isinstance(last, list) and bool(last) and isinstance(last[0], bytes)
        messages: Any = [last] if is_bytes else last if is_list else [json.dumps(answer).encode()]
        count, is_bytes, is_list = _share(np.array([len(messages), is_bytes, is_list])).tolist()
        arrived = [_share_bytes(message) for message in (messages if is_first else [b""] * count)]
        if is_list:
            return "answered", arrived
        return ("answered", arrived[0]) if is_bytes else json.loads(arrived[0])

    # In process 0

    def _attend(self, kind: str, arguments: tuple[Any, ...], tries: int, asked_at: float) -> tuple[str, Any]:
        """Waits for a request, which it begins if there is none; returns its state, and the answer or the problem."""
        if kind in READS and arguments[0] in self._shared.read_ahead:
            found = self._shared.read_ahead[arguments[0]]
            if kind == "get_body":
                # Whoever takes it uses it up.
                with self._shared._lock:
                    self._shared.read_ahead.pop(arguments[0], None)
            return "answered", found
        key, lane = (kind, *arguments), self._shared._lane_of(kind, cleans=self._cleans)
        request = self._under_way.get(key)
        # What was not there when an earlier call asked may have come.
        if request is None or (request.done.is_set() and request.ended_at < asked_at and _has_aged(kind, request)):
            request = Request(self._function_of(kind, arguments), _plain(arguments), kind)
            self._under_way[key] = request
            lane.submit(request, urgent=self._urgent)
        left = max(self.deadline + GRACE, asked_at + LEAST_SECONDS) - time.monotonic()
        if not request.done.wait(max(min(SLICE, left), 0.0)):
            # A request that has not begun waits for another one, which is the one to name.
            running = request if request.has_begun else lane.running or request
            if left > SLICE and not self.closed.is_set():
                logger.warning("waiting for the store: no answer yet to %s", running.describe())
            return "under way", [running.describe(), running.name]
        del self._under_way[key]
        if request.error is None:
            if kind == "get_body" and bodies.is_whole(request.answer):
                self._readers.pop(arguments[0], None)
            self._count(kind, arguments, request, tries)
            self._end_silences(kind)
            self.problem = None
            return "answered", request.answer
        if not isinstance(request.error, Exception):
            raise request.error
        problem = f"{type(request.error).__name__}: {request.error}"
        self._count(kind, arguments, request, tries, problem)
        self.problem = problem
        level = logging.WARNING if self._is_news(kind, type(request.error)) else logging.DEBUG
        logger.log(level, "%s failed, try %d: %s", _describe(kind, arguments), tries + 1, problem)
        return "refused" if is_refusal(request.error) else "failed", problem

    def _function_of(self, kind: str, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        """What answers a request: a function of the store, or one that calls it for the pieces of a body."""
        if kind == "put_pieces":
            return lambda name, body, pieces: body.put_pieces(self.store.put, pieces, self.closed)
        if kind == "get_body":
            reader = self._readers.setdefault(arguments[0], BodyReader(arguments[0]))
            return lambda name: reader.read(self.store.get, self.closed)
        return getattr(self.store, kind)

    def _is_news(self, kind: str, error: type[BaseException]) -> bool:
        """Whether the log is told of such a failure: a store that is away fails at once, for hours."""
        silences, now = self._shared._silences, time.monotonic()
        end, before = silences.get((kind, error), (now, 0.0))
        if now < end:
            return False
        seconds = min(max(2 * before, LEAST_SILENCE), MOST_SILENCE)
        silences[kind, error] = now + seconds, seconds
        return True

    def _end_silences(self, kind: str) -> None:
        """The next failure is news, but where some of every few requests fail."""
        for key, (end, seconds) in list(self._shared._silences.items()):
            if key[0] == kind and seconds:
                self._shared._silences[key] = end - seconds + LEAST_SILENCE, 0.0

    def _lane_of(self, kind: str, *, cleans: bool) -> Lane:
        if kind in ("put", "put_pieces"):
            return self._uploads
        is_cleaning = kind.startswith("delete") or (cleans and kind == "list")
        return self._deletions if is_cleaning else self._requests

    def _count(
        self, kind: str, arguments: tuple[Any, ...], request: Request, tries: int, problem: str | None = None
    ) -> None:
        shared, requests = self._shared, 1
        with shared._lock:
            traffic = shared._traffic
            if problem is None:
                sent = len(arguments[1]) if kind in ("put", "create") else 0
                received = len(request.answer or b"") if kind in READS else 0
                if kind == "put_pieces":
                    sent, requests = sum(map(arguments[1].length_of, arguments[2])), len(arguments[2])
                if kind == "get_body" and request.answer is not None:
                    # Equal pieces are read once.
                    unique = {id(one): len(one) for one in request.answer}
                    received, requests = sum(unique.values()), len(unique)
                traffic = traffic._replace(sent=traffic.sent + sent, received=traffic.received + received)
            shared._traffic = traffic._replace(
                requests=traffic.requests + requests,
                retries=traffic.retries + (tries > 0),
                problem=problem or traffic.problem,
            )
            if problem is None and kind in ("list", "create"):
                shared._seconds = 0.5 * (shared._seconds + request.seconds) if shared._seconds else request.seconds

    def _let_go(self, kind: str, arguments: tuple[Any, ...]) -> None:
        """Leaves a request under way if its answer stays true, and begins none that has not begun."""

        def let_go() -> None:
            request = self._under_way[(kind, *arguments)]
            request.is_dropped = not request.has_begun
            if kind == "list" or request.is_dropped:
                del self._under_way[(kind, *arguments)]

        if not self._together or jax.process_index() == 0:
            let_go()


def _await_request(request: Request, seconds: float) -> tuple[str, Any, str | None]:
    """In process 0: whether a request is done, and its answer, or the name and the message of its error."""
    if not request.done.wait(seconds):
        return "under way", None, None
    error = request.error
    if error is None:
        return "answered", request.answer, None
    if not isinstance(error, IslandError):
        raise error
    return "failed", type(error).__name__, str(error)


def _has_aged(kind: str, request: Request) -> bool:
    """Whether an answer to an earlier call may be another one now: bytes, once they are there, stay the same."""
    if request.error is not None or kind == "list":
        return True
    return not bodies.is_whole(request.answer) if kind == "get_body" else kind in READS and request.answer is None


def _plain(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(list(x) if isinstance(x, tuple) else x for x in arguments)


def _describe(kind: str, arguments: tuple[Any, ...]) -> str:
    what = f"{len(arguments[0])} names" if isinstance(arguments[0], tuple | list) else repr(arguments[0])
    return f"{kind}({what})"


def _name_of(arguments: tuple[Any, ...]) -> str:
    return arguments[0] if arguments and isinstance(arguments[0], str) else ""


def _share_bytes(message: bytes) -> bytes:
    """The bytes of process 0, in all processes."""
    is_first = jax.process_index() == 0
    size = int(_share(np.int64(len(message) if is_first else 0)))
    buffer = np.frombuffer(message, np.uint8) if is_first else np.zeros(size, np.uint8)
    return np.asarray(_share(buffer)).tobytes() if size else b""


def _share(value: Any) -> Any:
    """The value of process 0, in all processes."""
    try:
        return broadcast(value)
    except jax.errors.JaxRuntimeError as error:
        raise IslandError(
            f"process {jax.process_index()} cannot reach the others of this island: one of them has ended; start all "
            "of them again under the same name, and this island joins again"
        ) from error
