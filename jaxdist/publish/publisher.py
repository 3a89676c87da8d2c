"""Publishes the parameters of a trainer, in a thread of its own."""

import os
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .._core.checks import check_count, check_range
from .._core.types import Number, PyTree
from .._stores.base import SharedStore, hash_of, place_of
from .._stores.opening import open_store
from . import protocol
from .base import PublishDamagedError, PublishError, PublishOfflineError, SecondPublisherError
from .chain import Chain
from .cleaning import forget
from .group import Group, Message, open_group
from .layout import ShardLayout, cut, lay_out, write_layout
from .patches import encode_patch
from .protocol import Publication, PublicationPart
from .requests import Requests, logger
from .states import DeviceState, HostState, State
from .words import PublishedLeaf, check_equal, describe, digest_of, signature_of

# Seconds for which process 0 waits for a state that another process has not put yet; then it asks how far that is.
ASK_AGAIN = 5.0


def open(
    url: "str | os.PathLike[str] | SharedStore",
    *,
    dtype: DTypeLike | None = None,
    compare_on: Literal["host", "device"] = "host",
    anchor_every: int = 50,
    keep: int = 100,
    patience: Number = 600.0,
) -> "Publisher":
    """Opens a folder or a bucket to publish the parameters of a trainer, bit for bit, for any number of followers.

    A state is sent as a *patch*, the words that differ from the state before, or as an *anchor*, all words, where that
    is smaller; each `anchor_every`-th is sent as both. See `Publisher.put`, and the page of the format.

    *On the wire*: for a change of `k` of `d` words about `log2(d choose k) + k` bits where a step changes words by one
    unit in the last place; three requests a state and some 500 bytes of records. Followers read the store.

    *One publisher.* The last one that was opened may publish, and goes on with the chain that it finds. Every earlier
    one gets `SecondPublisherError`.

    *Several processes* of a job all open, put, flush and close. Each publishes its shards, and process 0 the record of
    a state when all are there; it begins with an anchor.

    Args:
      url: a folder, `s3://...`, `gs://...`, `az://...`, or a store of `jaxdist.islands`. It must be empty, or hold
        what another publisher of the same tree has left.
      dtype: in which wider floating-point leaves are published; all others keep their own.
      compare_on: "host" copies all words to host memory in `put`; "device" copies within device memory, compares there,
        and copies changed words alone. Streams are equal.
      anchor_every: states from one anchor to the next, which a newcomer reads besides an anchor.
      keep: how many states are kept at least, and the anchor before them; older ones are deleted. A follower that is
        further behind goes on with an anchor that is left.
      patience: seconds for which a request that fails is tried again.

    Raises:
      SecondPublisherError: others open it at the same moment, again and again.
      PublishError: the store ignores "create if absent".
      PublishMismatchError, PublishDamagedError: it holds another format, or a description that is damaged.
      PublishOfflineError: the store refuses requests, or is out of reach.
      ValueError: an argument is out of range.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> store = jd.islands.memory()
      >>> with jd.publish.open(store, dtype=jnp.bfloat16) as out:
      ...     out.put({"w": jnp.arange(3.0)}, step=10)
      >>> params, step = next(jd.publish.follow(store, like={"w": jnp.zeros(3)}))
      >>> step, params["w"].tolist(), str(params["w"].dtype)
      (10, [0.0, 1.0, 2.0], 'bfloat16')

    References:
      Miahi, Belilovsky, "Understanding and Exploiting Weight Update Sparsity for Communication-Efficient
      Distributed RL", arXiv:2602.03839, 2026 (PULSESync). The code of the patches and the protocol are others here.
    """
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype must be a floating-point type, or None to keep each leaf's, got {dtype}")
    check_count("anchor_every", anchor_every, 1)
    check_count("keep", keep, 1)
    check_range("patience", patience, 0)
    if compare_on not in ("host", "device"):
        raise ValueError(f'compare_on must be "host" or "device", got {compare_on!r}')
    take = HostState if compare_on == "host" else DeviceState
    return Publisher(Requests(open_store(url), patience), place_of(url), dtype, take, anchor_every, keep, open_group())


class _Put(NamedTuple):
    """A state that waits: how many were put before it and with it, the step of the caller, and the part here."""

    number: int
    step: int
    layout: ShardLayout
    state: State


class Publisher:
    """What `open` returns: a place to put parameters. Use it in a `with` block, or call `close`.

    A block that is left by an exception waits for nothing: a state that is not in the store by then may never be.

    Attributes:
      newest: the last state that is in the store, or `None`.
      skipped: how many states were not sent, since newer ones came before their turn.
    """

    def __init__(
        self,
        requests: Requests,
        place: str,
        dtype: DTypeLike | None,
        take: Callable[[list[Any], list[PublishedLeaf]], State],
        anchor_every: int,
        keep: int,
        group: Group,
    ):
        self.newest: Publication | None = None
        self.skipped = 0
        self._requests, self._place, self._dtype, self._take = requests, place, dtype, take
        self._anchor_every, self._keep, self._group = anchor_every, keep, group
        self._changed = threading.Condition()
        # How many states were put, those of them that wait, and the number of the one that was asked for.
        self._puts, self._chosen = 0, 0
        self._waiting: list[_Put] = []
        self._is_closing = self._is_busy = self._is_flushing = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._leaves: list[PublishedLeaf] | None = None
        self._signature: Any = None
        self._shardings: list[Any] = []
        self._layout = ShardLayout("", ())
        # What the thread has published last, or encodes: its words, if they are known, the copy that they are from,
        # their layout, and the patch that leads to them.
        self._words: list[np.ndarray] | None = None
        self._state: State | None = None
        self._encoded = ShardLayout("", ())
        self._patch: bytes | None = None
        # In process 0, of the last record: its number, its hash, and the last anchor; and the layout in the store.
        self._number, self._hash, self._anchored, self._stored = 0, "", 0, ""
        body = requests.get(protocol.DESCRIPTION)
        self._described = None if body is None else protocol.read_description(body, place)
        self._session = _claim(requests, place) if group.process == 0 else 0

    def put(self, params: PyTree, *, step: int) -> None:
        """Publishes parameters; returns once they are copied, or with `compare_on="device"` at once.

        A thread encodes and sends them. While it is busy one state waits, and a newer one takes its place: where the
        uplink is slower than the puts, followers get fewer states, never late ones, and the trainer does not wait.
        Three copies of the bytes that this process publishes are in host memory at most, and one on the device during
        the copy; with `compare_on="device"` two in host memory, and three on the devices. A patch takes some 20 bytes
        for each word that has changed beside them while it is encoded, and up to 1 GB.

        Args:
          params: the tree; the same names, shapes and dtypes each time. In a job of several processes all call this,
            and each publishes shards that it has, of one state; those that several have are shared among them. Leaves
            on the devices of one process, or of NumPy, are those of process 0.
          step: any number of the caller, such as that of the step; followers get it with the parameters.

        Raises:
          SecondPublisherError: a newer publisher has been opened. The thread found out, as with all but the next.
          PublishMismatchError: the tree differs from what is published here.
          PublishOfflineError: the store was out of reach for `patience` seconds.
          ValueError: `step` is no whole number of at least 0, or a leaf is a key or no array of numbers.
        """
        check_count("step", step, 0)
        self._raise_error()
        if self._is_closing:
            raise PublishError(f"the publisher of {self._place} is closed; open it again")
        leaves = self._describe(params)
        layout = self._lay_out(params, leaves)
        process = self._group.process
        state = self._take(cut(params, leaves, layout, process), layout.leaves_of(process, leaves))
        with self._changed:
            self._puts += 1
            kept = [one for one in self._waiting if one.number == self._chosen]
            self.skipped += len(self._waiting) - len(kept)
            self._waiting = [*kept, _Put(self._puts, int(step), layout, state)]
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="jaxdist.publish")
            self._thread.start()

    def flush(self) -> None:
        """Waits until the last state that was put is in the store; all processes of a job call it. Raises as `put`."""
        with self._changed:
            self._is_flushing = True
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._error or not (self._waiting or self._is_busy))
            finally:
                self._is_flushing = False
        self._raise_error()

    def close(self) -> None:
        """Sends what waits, and ends the thread. Raises as `put`."""
        try:
            self.flush()
        finally:
            self._stop()

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.close()
        else:
            # The trainer has failed: what it had to say comes first, and nothing is waited for.
            self._stop()

    def _stop(self) -> None:
        with self._changed:
            self._is_closing, self._waiting = True, []
            self._changed.notify_all()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _describe(self, params: PyTree) -> list[PublishedLeaf]:
        """The leaves of a tree, described and compared once: the caller waits, and small leaves are copied as fast."""
        leaves, signature = self._leaves, signature_of(params)
        if leaves is None or signature != self._signature:
            leaves = describe(params, self._dtype)
            self._check_leaves(leaves)
            self._signature = signature
        return leaves

    def _check_leaves(self, leaves: list[PublishedLeaf]) -> None:
        known = self._leaves or (self._described and self._described[1])
        if known is not None:
            check_equal(protocol.shapes_of(known), protocol.shapes_of(leaves), self._place)
        self._leaves = leaves

    def _lay_out(self, params: PyTree, leaves: list[PublishedLeaf]) -> ShardLayout:
        shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(params)]
        if not self._layout.parts or shardings != self._shardings:
            self._layout, self._shardings = lay_out(params, leaves, self._group.size), shardings
        return self._layout

    # In the thread of each process

    def _run(self) -> None:
        try:
            if self._group.process == 0:
                self._lead()
            else:
                while self._group.serve(self._answer, lambda: self._is_closing) is not None:
                    pass
        except BaseException as error:
            with self._changed:
                self._error, self._is_busy = error, False
                self._changed.notify_all()
            if self._group.process == 0 and isinstance(error, Exception):
                self._group.fail(error)

    def _answer(self, question: Message) -> Message | None:
        """Does what process 0 asks of each process: to hold a state, to encode it, to send it, to go on."""
        if "hold" in question:
            return self._hold(question["hold"])
        if "encode" in question:
            return self._encode(question["encode"])
        if "send" in question:
            return {"part": self._send(question["send"], question["patch"], question["anchor"])}
        self._finish(question["sent"], question["record"])
        return None

    def _hold(self, number: int) -> Message:
        """Waits until a state is here, but not for long, and not where it never will be.

        That is where it was dropped, or where an earlier one is flushed.
        """
        with self._changed:
            self._chosen = number
            self._changed.wait_for(
                lambda: self._is_closing or self._puts >= number or (self._is_flushing and self._waiting), ASK_AGAIN
            )
            if self._is_closing:
                raise PublishError(f"the publisher of {self._place} was closed before its states were sent")
            found = next((one for one in self._waiting if one.number == number), None)
            return {
                "holds": None if found is None else [found.step, found.layout.name],
                "newest": self._puts,
                "is_flushing": self._is_flushing and bool(self._waiting),
            }

    def _encode(self, number: int) -> Message:
        """Takes the state that all hold, and finds the patch from the one before, if its words are known."""
        with self._changed:
            found = [one for one in self._waiting if one.number <= number]
            if self._is_closing or not found:
                raise PublishError(f"the publisher of {self._place} was closed before its states were sent")
            self.skipped += len(found) - 1
            self._waiting = self._waiting[len(found) :]
            self._is_busy = True
        state, layout = found[-1].state, found[-1].layout
        assert self._leaves is not None
        if self._words is None or layout.name != self._encoded.name:
            self._patch, self._words = None, state.words_after(None, [])
        else:
            changes = state.find_changes(self._state, self._words)
            self._patch = encode_patch(changes, self._words, layout.leaves_of(self._group.process, self._leaves))
            self._words = state.words_after(self._words, changes)
        self._state, self._encoded = state, layout
        return {}

    def _send(self, number: int, has_patch: bool, has_anchor: bool) -> PublicationPart:
        """Puts the bytes of the part here, for the record of this number."""
        assert self._words is not None
        sizes, names = {"patches": 0, "anchors": 0}, {"patches": "", "anchors": ""}
        whole = len(protocol.ANCHOR_MAGIC) + sum(x.nbytes for x in self._words)
        bodies = {}
        if has_patch and self._patch is not None and len(self._patch) < whole:
            bodies["patches"] = self._patch
        if has_anchor or not bodies:
            bodies["anchors"] = protocol.write_anchor(self._words)
        for kind, body in bodies.items():
            names[kind], sizes[kind] = protocol.body_name(kind, number, body), len(body)
            self._requests.put(names[kind], body)
        digest = digest_of(self._words)
        return PublicationPart(digest, names["patches"], sizes["patches"], names["anchors"], sizes["anchors"])

    def _finish(self, name: str, record: str) -> None:
        with self._changed:
            self.newest = protocol.read_publication(name, record.encode())
            self._patch, self._is_busy = None, False
            self._changed.notify_all()

    # In the thread of process 0

    def _lead(self) -> None:
        self._resume()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
                if not self._waiting:
                    break
                number = self._chosen = self._waiting[-1].number
            self._publish(*self._choose(number))
        self._group.end()

    def _choose(self, number: int) -> tuple[int, int]:
        """Finds a state that all processes hold, this one or a later: its number, and its step."""
        ahead = 0
        while True:
            answers = self._group.ask({"hold": number}, self._answer)
            held = [answer["holds"] for answer in answers]
            if None not in held:
                break
            newest = max(answer["newest"] for answer in answers)
            flushed = [answer["newest"] for answer in answers if answer["is_flushing"]]
            if flushed and min(flushed) < newest:
                raise PublishError(
                    f"a process flushes after {min(flushed)} puts, and another one has put {newest} states: put in all "
                    "processes of the job equally often, and flush and close in all of them"
                )
            # First the newest, after which none may come for long; where that is dropped, too, so far ahead that all
            # hear of it in time. No process puts more while one flushes.
            is_dropped = any(answer["holds"] is None and answer["newest"] >= number for answer in answers)
            number = newest if flushed or not is_dropped else newest + ahead
            ahead = max(1, 2 * ahead) if is_dropped else 0
        for process, found in enumerate(held):
            if found != held[0]:
                raise PublishError(
                    f"process {process} puts step {found[0]} where process 0 puts step {held[0][0]}, or other "
                    "shardings: put the same tree, on the same mesh, in all processes of the job"
                )
        return number, held[0][0]

    def _resume(self) -> None:
        """Finds the end of the chain, and its state if that is whole."""
        leaves = self._leaves
        assert leaves is not None
        if self._described is None:
            description = protocol.write_description(uuid.uuid4().hex, leaves, self._group.size > 1)
            self._requests.create(protocol.DESCRIPTION, description)
            body = self._requests.get(protocol.DESCRIPTION)
            if body is None:
                raise PublishDamagedError(f"{protocol.DESCRIPTION} in {self._place} was created and is gone")
            # Of several that begin at once one is the first.
            self._described = protocol.read_description(body, self._place)
            check_equal(protocol.shapes_of(self._described[1]), protocol.shapes_of(leaves), self._place)
        chain = Chain(self._requests, self._place)
        # Of several processes each would have to read its part: they begin with an anchor.
        if self._group.size == 1:
            chain.open()
            while chain.advance():
                pass
        names = self._requests.list("commits/")
        last = max(chain.number, protocol.number_in(names[-1]) if names else 0)
        if chain.words is not None and chain.number == last and not chain.layout.name:
            (self._words,) = chain.words
            self._number, self._hash, self._anchored = last, chain.hash, chain.anchored
        else:
            self._skip_to(last)

    def _skip_to(self, number: int) -> None:
        """Goes on behind a record whose state is not that of the words here."""
        body = self._requests.get(protocol.commit_name(number)) if number else None
        self._number, self._hash = number, "" if body is None else hash_of(body)

    def _publish(self, put: int, step: int) -> None:
        self._group.ask({"encode": put}, self._answer)
        layout, has_patch = self._encoded, True
        while True:
            if self._requests.get(protocol.publisher_name(self._session + 1)) is not None:
                self._refuse("it was opened")
            number = self._number + 1
            has_anchor = number - self._anchored >= self._anchor_every
            question = {"send": number, "patch": has_patch, "anchor": has_anchor}
            parts = [protocol.read_part(answer["part"]) for answer in self._group.ask(question, self._answer)]
            if layout.name != self._stored:
                self._requests.put(layout.name, write_layout(layout))
                self._stored = layout.name
            publication = protocol.publication_of(
                parts,
                layout.name,
                number=number,
                step=step,
                session=self._session,
                time=round(time.time(), 3),
                previous=self._hash,
            )
            name, body = protocol.commit_name(number), protocol.write_publication(publication)
            if self._requests.create(name, body):
                break
            self._yield_to(name)
            # It was one of the state before, which another state follows now.
            has_patch = False
        self._number, self._hash = number, hash_of(body)
        if protocol.anchors_of(publication):
            self._anchored = number
            self._clean_up()
        news = {"sent": name, "record": body.decode()}
        self._group.tell(news)
        self._answer(news)

    def _yield_to(self, name: str) -> None:
        """Another publisher has created a record: an older one in its last moment, or a newer one."""
        body = self._requests.get(name)
        if body is not None:
            try:
                session = protocol.read_publication(name, body).session
            except PublishDamagedError as error:
                logger.warning("%s; going on behind it with an anchor", error)
                session = 0
            if session >= self._session:
                self._refuse(f"it has published {name}")
        self._skip_to(protocol.number_in(name))

    def _refuse(self, why: str) -> None:
        raise SecondPublisherError(
            f"another publisher writes to {self._place}, and {why} after this one, number {self._session}: stop this "
            "trainer, or give each a place of its own"
        )

    def _clean_up(self) -> None:
        try:
            forget(self._requests, self._keep)
        except PublishOfflineError as error:
            logger.warning("%s: old states stay for now: %s", self._place, error)


def _claim(requests: Requests, place: str) -> int:
    """Takes the next number of a publisher: from here on, older ones are refused."""
    for _ in range(100):
        names = requests.list("publishers/")
        session = protocol.number_in(names[-1]) + 1 if names else 1
        name, mark = protocol.publisher_name(session), uuid.uuid4().hex.encode()
        if requests.create(name, mark):
            if requests.create(name, b"again"):
                raise PublishError(
                    f"{place} ignores 'create if absent' (If-None-Match: *), without which two publishers mix their "
                    "states; use another store, or a newer version of its server"
                )
            return session
    raise SecondPublisherError(f"others open {place} again and again; give each trainer a place of its own")
