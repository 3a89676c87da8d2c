"""Follows published parameters."""

import os
import time
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from jax.sharding import AbstractMesh

from .._core.checks import check_range
from .._core.trees import named_leaves
from .._core.types import Number, PyTree
from .._stores.base import SharedStore, place_of
from .._stores.opening import open_store
from .base import PublishDamagedError
from .chain import Chain
from .group import Group, Message, alone, open_group
from .layout import join
from .requests import Requests
from .words import check_like, place

# So many states in a row are read and not shown: a trainer may publish faster than this process reads.
MOST_OVERTAKEN = 100


def follow(
    url: "str | os.PathLike[str] | SharedStore",
    *,
    like: PyTree,
    start: Literal["newest", "oldest"] = "newest",
    poll: Number = 1.0,
    timeout: Number | None = None,
    patience: Number = 600.0,
) -> Iterator[tuple[PyTree, int]]:
    """Yields the parameters that a trainer publishes with `jaxdist.publish.open`, each with its step.

    A newcomer reads an anchor and the patches since; then one patch a state. A state is yielded when all of its bits
    have the hash that its record says, and never in part. Where bytes are missing or damaged, a warning is logged to
    `jaxdist.publish`, and the next anchor is waited for.

    *On the wire*: reads alone; besides the bytes of patches two requests a state, and one each time it looks in vain.
    A long anchor is hashed while it arrives.

    *Several processes*: where a leaf of `like` is split over them, all processes of the job call this, and each `next`
    yields the same state in all. Each reads all parts. `timeout` is that of process 0.

    *Memory*: one copy of the published bytes on the host, and what is yielded, which is the caller's.

    Args:
      url: what the trainer opened, which may still be empty: then the first state is waited for.
      like: a tree of the same names and shapes, of arrays or `jax.ShapeDtypeStruct`: each leaf is put to its sharding.
        Leaves have the published dtype, whatever that of `like`; for one of 64 bits `jax_enable_x64` must be set.
      start: "newest" begins with the newest state, and leaves out states that were overtaken while the caller was busy,
        for rollouts; "oldest" begins with the oldest one that is kept and leaves out none, for evaluation, but what is
        damaged and what follows up to the next anchor.
      poll: seconds between two looks for a new state.
      timeout: seconds without a new state after which the iteration ends; `None` waits for ever.
      patience: seconds for which a store that fails, or a state that is damaged, is waited for.

    Raises:
      PublishMismatchError: what is published has other names or shapes, or another format, or was replaced.
      PublishDamagedError: a state is missing or damaged, and no anchor came after it within `patience`.
      PublishOfflineError: the store refuses requests, or was out of reach for `patience` seconds.
      ValueError: an argument is out of range, or a sharding of `like` has no devices.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> store = jd.islands.memory()
      >>> with jd.publish.open(store) as out:
      ...     for step in range(3):
      ...         out.put(jnp.full(4, step), step=step)
      ...         out.flush()
      >>> [step for _, step in jd.publish.follow(store, like=jnp.zeros(4), start="oldest", timeout=0)]
      [0, 1, 2]
    """
    if start not in ("newest", "oldest"):
        raise ValueError(f'start must be "newest" or "oldest", got {start!r}')
    check_range("poll", poll, 0)
    check_range("patience", patience, 0)
    if timeout is not None:
        check_range("timeout", timeout, 0)
    is_split = any(not _is_here(name, leaf) for name, leaf in named_leaves(like, "params"))
    name = place_of(url)
    chain = Chain(Requests(open_store(url), patience), name)
    group = open_group() if is_split else alone()
    following = _Following(chain, group, name, like, start == "oldest", float(poll), float(patience))
    return following.lead(timeout) if group.process == 0 else following.serve()


def _is_here(name: str, leaf: Any) -> bool:
    """Whether this process has all devices that a leaf is wanted on."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(getattr(sharding, "mesh", None), AbstractMesh):
        raise ValueError(
            f"like has `{name}` on an abstract mesh, {sharding}, which has no devices: give "
            "jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec)), or arrays"
        )
    return sharding is None or sharding.is_fully_addressable


class _Following(NamedTuple):
    """A follower, or one process of a job that follows, all of which see the same states."""

    chain: Chain
    group: Group
    place: str
    like: PyTree
    each: bool
    poll: float
    patience: float

    def lead(self, timeout: Number | None) -> Iterator[tuple[PyTree, int]]:
        """Yields states in process 0, which chooses them."""
        try:
            yield from self._lead(timeout)
        except Exception as error:
            self.group.fail(error)
            raise
        self.group.end()

    def serve(self) -> Iterator[tuple[PyTree, int]]:
        """Yields the same states in another process."""
        while (question := self.group.serve(self._reach)) is not None:
            if "show" in question:
                yield self._show()

    def _lead(self, timeout: Number | None) -> Iterator[tuple[PyTree, int]]:
        seen, is_checked = time.monotonic(), False
        while True:
            if self.chain.open() and not is_checked:
                check_like(self.chain.leaves, self.like, self.place)
                is_checked = True
            if is_checked and self._advance():
                self._meet()
                yield self._show()
                # The caller's time does not count.
                seen = time.monotonic()
                continue
            self._check_patience()
            now = time.monotonic()
            if timeout is not None and now - seen >= timeout:
                return
            time.sleep(self.poll if timeout is None else min(self.poll, max(seen + timeout - now, 0)))

    def _show(self) -> tuple[PyTree, int]:
        chain = self.chain
        assert chain.words is not None
        assert chain.newest is not None
        return place(join(chain.words, chain.leaves, chain.layout), self.like), chain.newest.step

    def _advance(self) -> bool:
        """Moves on by one state, or to the newest one; returns whether there is a new state that is whole."""
        if self.each:
            return self._move()
        moved = 0
        while moved < MOST_OVERTAKEN and self.chain.advance():
            moved += 1
        return moved > 0 and self.chain.words is not None

    def _move(self) -> bool:
        return self.chain.advance(from_oldest=self.each)

    def _meet(self) -> None:
        """Moves all processes on to one state: one that has gone on with a later anchor cannot go back."""
        number = 0
        while self.group.size > 1 and number != self.chain.number:
            number = self.chain.number
            found = [answer["number"] for answer in self.group.ask({"reach": number}, self._reach)]
            if max(found) > number:
                self._reach({"reach": max(found)})
        self.group.tell({"show": True})

    def _reach(self, question: Message) -> Message | None:
        """Moves on to a state that another process has, or to the next one that can be read here."""
        if "show" in question:
            return None
        while not self.chain.open():
            time.sleep(self.poll)
        check_like(self.chain.leaves, self.like, self.place)
        while self.chain.words is None or self.chain.number < question["reach"]:
            if not self._move():
                self._check_patience()
                time.sleep(self.poll)
        return {"number": self.chain.number}

    def _check_patience(self) -> None:
        chain = self.chain
        if chain.problem is not None and time.monotonic() - chain.problem_at >= self.patience:
            raise PublishDamagedError(
                f"no sound anchor in {self.place} for {self.patience:.0f} s: {chain.problem}; let the trainer publish "
                "on, or publish to an empty place"
            )
