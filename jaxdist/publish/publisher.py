"""Publishes the parameters of a trainer, in a thread of its own."""

import os
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Literal

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
from .patches import encode_patch
from .protocol import Publication
from .requests import Requests, logger
from .states import DeviceState, HostState, State
from .words import PublishedLeaf, check_equal, describe, digest_of, gather


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

    Args:
      url: a folder, `s3://...`, `gs://...`, `az://...`, or a store of `jaxdist.islands`. It must be empty, or hold
        what another publisher of the same tree has left.
      dtype: in which wider floating-point leaves are published; all others keep their own.
      compare_on: "host" copies all words to host memory in `put`; "device" copies within device memory, compares there,
        and copies changed words alone. Streams are equal.
      anchor_every: states from one anchor to the next, which a newcomer reads besides an anchor.
      keep: how many states are kept at least, and the anchor before them; older ones are deleted. A follower that is
        further behind goes on with the newest anchor.
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
    return Publisher(Requests(open_store(url), patience), place_of(url), dtype, take, anchor_every, keep)


class Publisher:
    """What `open` returns: a place to put parameters. Use it in a `with` block, or call `close`.

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
    ):
        self.newest: Publication | None = None
        self.skipped = 0
        self._requests, self._place, self._dtype, self._take = requests, place, dtype, take
        self._anchor_every, self._keep = anchor_every, keep
        # Where a job has several processes, all call `put`, and one publishes.
        self._is_first = jax.process_index() == 0
        self._changed = threading.Condition()
        self._pending: tuple[State, int] | None = None
        self._is_closing = self._is_busy = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._leaves: list[PublishedLeaf] | None = None
        # What the thread has published last: its words, if they are known, and the copy that they are from, its number,
        # the hash of its record, and the last anchor.
        self._words: list[np.ndarray] | None = None
        self._state: State | None = None
        self._number, self._hash, self._anchored = 0, "", 0
        if self._is_first:
            body = requests.get(protocol.DESCRIPTION)
            self._described = None if body is None else protocol.read_description(body, place)
            self._session = _claim(requests, place)

    def put(self, params: PyTree, *, step: int) -> None:
        """Publishes parameters; returns once they are copied, or with `compare_on="device"` at once.

        A thread encodes and sends them. While it is busy one state waits, and a newer one takes its place: where the
        uplink is slower than the puts, followers get fewer states, never late ones, and the trainer does not wait.
        Three copies of the published bytes are in host memory at most, and one on the device during the copy; with
        `compare_on="device"` one in host memory, and three on the devices.

        Args:
          params: the tree; the same names, shapes and dtypes each time. Sharded leaves are assembled. In a job of
            several processes all call this, and process 0 publishes; a leaf that is split over them is gathered, one
            after the other, while all wait.
          step: any number of the caller, such as that of the step; followers get it with the parameters.

        Raises:
          SecondPublisherError: a newer publisher has been opened. The thread found out, as with all but the next.
          PublishMismatchError: the tree differs from what is published here.
          PublishOfflineError: the store was out of reach for `patience` seconds.
          ValueError: `step` is no whole number of at least 0, or a leaf is a key.
        """
        check_count("step", step, 0)
        self._raise_error()
        if self._is_closing:
            raise PublishError(f"the publisher of {self._place} is closed; open it again")
        leaves = describe(params, self._dtype)
        arrays = gather(params, leaves)
        if not self._is_first:
            return
        self._check_leaves(leaves)
        state = self._take(arrays, leaves)
        with self._changed:
            self.skipped += self._pending is not None
            self._pending = state, int(step)
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="jaxdist.publish")
            self._thread.start()

    def flush(self) -> None:
        """Waits until the last state that was put is in the store. Raises as `put`."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or not (self._pending or self._is_busy))
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
            self._is_closing, self._pending = True, None
            self._changed.notify_all()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _check_leaves(self, leaves: list[PublishedLeaf]) -> None:
        known = self._leaves or (self._described and self._described[1])
        if known is not None:
            check_equal(protocol.shapes_of(known), protocol.shapes_of(leaves), self._place)
        self._leaves = leaves

    # In the thread

    def _run(self) -> None:
        try:
            self._resume()
            while True:
                with self._changed:
                    self._is_busy = False
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._pending or self._is_closing)
                    if self._pending is None:
                        return
                    (state, step), self._pending, self._is_busy = self._pending, None, True
                self._publish(state, step)
        except BaseException as error:
            with self._changed:
                self._error, self._is_busy = error, False
                self._changed.notify_all()

    def _resume(self) -> None:
        """Finds the end of the chain, and its state if that is whole."""
        leaves = self._leaves
        assert leaves is not None
        if self._described is None:
            self._requests.create(protocol.DESCRIPTION, protocol.write_description(uuid.uuid4().hex, leaves))
            body = self._requests.get(protocol.DESCRIPTION)
            if body is None:
                raise PublishDamagedError(f"{protocol.DESCRIPTION} in {self._place} was created and is gone")
            # Of several that begin at once one is the first.
            self._described = protocol.read_description(body, self._place)
            check_equal(protocol.shapes_of(self._described[1]), protocol.shapes_of(leaves), self._place)
        chain = Chain(self._requests, self._place)
        chain.open()
        while chain.advance():
            pass
        names = self._requests.list("commits/")
        last = max(chain.number, protocol.number_in(names[-1]) if names else 0)
        if chain.words is not None and chain.number == last:
            self._words, self._number, self._hash = chain.words, last, chain.hash
            self._anchored = chain.anchored
        else:
            self._skip_to(last)

    def _skip_to(self, number: int) -> None:
        """Goes on behind a record whose state is not here: with an anchor."""
        body = self._requests.get(protocol.commit_name(number)) if number else None
        self._words, self._number, self._hash = None, number, "" if body is None else hash_of(body)

    def _publish(self, state: State, step: int) -> None:
        patch, words = self._encode(state)
        while True:
            if self._requests.get(protocol.publisher_name(self._session + 1)) is not None:
                self._refuse("it was opened")
            number = self._number + 1
            publication = self._send(number, patch, words, step)
            name, body = protocol.commit_name(number), protocol.write_publication(publication)
            if self._requests.create(name, body):
                break
            self._yield_to(name)
            # It was one of the state before, which another state follows now.
            patch = None
        self._words, self._state, self._number, self._hash = words, state, number, hash_of(body)
        self.newest = publication
        if publication.anchor:
            self._anchored = number
            self._clean_up()

    def _encode(self, state: State) -> tuple[bytes | None, list[np.ndarray]]:
        """The patch from the state before, if its words are known, and the words of this one."""
        assert self._leaves is not None
        if self._words is None:
            return None, state.words_after(None, [])
        changes = state.find_changes(self._state, self._words)
        patch = encode_patch(changes, self._words, self._leaves)
        return patch, state.words_after(self._words, changes)

    def _send(self, number: int, patch: bytes | None, words: list[np.ndarray], step: int) -> Publication:
        """Puts the bytes of a state, and returns the record that names them."""
        sizes, names = {"patches": 0, "anchors": 0}, {"patches": "", "anchors": ""}
        whole = len(protocol.ANCHOR_MAGIC) + sum(x.nbytes for x in words)
        has_patch = patch is not None and len(patch) < whole
        bodies = {"patches": patch} if patch is not None and has_patch else {}
        if not has_patch or number - self._anchored >= self._anchor_every:
            bodies["anchors"] = protocol.write_anchor(words)
        for kind, body in bodies.items():
            names[kind], sizes[kind] = protocol.body_name(kind, number, body), len(body)
            self._requests.put(names[kind], body)
        return Publication(
            number,
            step,
            self._session,
            round(time.time(), 3),
            self._hash,
            digest_of(words),
            names["patches"],
            sizes["patches"],
            names["anchors"],
            sizes["anchors"],
        )

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
