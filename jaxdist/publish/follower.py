"""Follows published parameters."""

import os
import time
from collections.abc import Iterator
from typing import Literal

import jax

from .._core.checks import check_range
from .._core.types import Number, PyTree
from .._stores.base import SharedStore, place_of
from .._stores.opening import open_store
from .base import PublishDamagedError
from .chain import Chain
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

    *Memory*: one copy of the published bytes on the host, and what is yielded, which is the caller's.

    Args:
      url: what the trainer opened, which may still be empty: then the first state is waited for.
      like: a tree of the same names and shapes, of arrays or `jax.ShapeDtypeStruct`: each leaf is put to its sharding.
        Leaves have the published dtype, whatever that of `like`.
      start: "newest" begins with the newest state, and leaves out states that were overtaken while the caller was busy,
        for rollouts; "oldest" begins with the oldest one that is kept and leaves out none, for evaluation.
      poll: seconds between two looks for a new state.
      timeout: seconds without a new state after which the iteration ends; `None` waits for ever.
      patience: seconds for which a store that fails, or a state that is damaged, is waited for.

    Raises:
      PublishMismatchError: what is published has other names or shapes, or another format, or was replaced.
      PublishDamagedError: a state is missing or damaged, and no anchor came after it within `patience`.
      PublishOfflineError: the store refuses requests, or was out of reach for `patience` seconds.
      ValueError: an argument is out of range, or a leaf of `like` is split over several processes.

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
    for leaf in jax.tree.leaves(like):
        sharding = getattr(leaf, "sharding", None)
        if sharding is not None and not sharding.is_fully_addressable:
            raise ValueError(
                f"a leaf of like is split over several processes, as {sharding}, which may see different states; "
                "follow in each process with a mesh of its own devices"
            )
    name = place_of(url)
    chain = Chain(Requests(open_store(url), patience), name)
    return _follow(chain, name, like, start == "oldest", float(poll), timeout, float(patience))


def _follow(
    chain: Chain, name: str, like: PyTree, each: bool, poll: float, timeout: Number | None, patience: float
) -> Iterator[tuple[PyTree, int]]:
    seen, is_checked = time.monotonic(), False
    while True:
        if chain.open() and not is_checked:
            check_like(chain.leaves, like, name)
            is_checked = True
        if is_checked and _advance(chain, each):
            assert chain.words is not None
            assert chain.newest is not None
            yield place(join(chain.words, chain.leaves, chain.layout), like), chain.newest.step
            # The caller's time does not count.
            seen = time.monotonic()
            continue
        now = time.monotonic()
        if chain.problem is not None and now - chain.problem_at >= patience:
            raise PublishDamagedError(
                f"no sound anchor in {name} for {patience:.0f} s: {chain.problem}; let the trainer publish on, or "
                "publish to an empty place"
            )
        if timeout is not None and now - seen >= timeout:
            return
        time.sleep(poll if timeout is None else min(poll, max(seen + timeout - now, 0)))


def _advance(chain: Chain, each: bool) -> bool:
    """Moves on by one state, or to the newest one; returns whether there is a new state that is whole."""
    if each:
        return chain.advance(from_oldest=chain.number == 0)
    moved = 0
    while moved < MOST_OVERTAKEN and chain.advance():
        moved += 1
    return moved > 0 and chain.words is not None
