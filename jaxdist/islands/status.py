"""What a run in a store looks like from outside: for people, and for programs that evaluate."""

import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._core.checks import check_count
from .._core.types import PyTree
from .._stores.base import SharedStore, place_of
from ..local_sgd.local_steps import method_of
from . import identity, run
from .cleanup import KEPT_ANCHORS
from .connection import Connection
from .protocol import Commit, number_in, round_name, see
from .run import Replay
from .store import open_store

# For so long `read` tries again when the store is out of reach.
READ_SECONDS = 60.0
# For so long `status` waits for an answer.
STATUS_SECONDS = 10.0


class RoundStatus(NamedTuple):
    """A round that has ended.

    Attributes:
      round: its number.
      members: the islands that count.
      missing: those that were waited for in vain.
      sent_bytes: for each member, the bytes of its progress.
      examples: for each member, the weight of its progress, such as its number of examples.
    """

    round: int
    members: tuple[str, ...]
    missing: tuple[str, ...]
    sent_bytes: dict[str, int]
    examples: dict[str, float]


class RunStatus(NamedTuple):
    """A run, as its store shows it.

    Attributes:
      round: the open round: so many have ended.
      kept: the rounds before which global parameters are kept.
      sessions: for each island, how many processes have joined under its name.
      present: islands that have sent a drift in the open round, or are expected in it.
      rounds: the last rounds, oldest first.
      run: the number of the run, 32 hexadecimal digits.
      keep_every: the number of rounds between kept global parameters.
      uploading: islands that are expected in the open round, or announced themselves in it, and have sent nothing yet.
    """

    round: int
    kept: tuple[int, ...]
    sessions: dict[str, int]
    present: tuple[str, ...]
    rounds: tuple[RoundStatus, ...]
    run: str
    keep_every: int
    uploading: tuple[str, ...]


def status(url: "str | os.PathLike[str] | SharedStore", *, last: int = 10) -> RunStatus:
    """Reads which islands take part in a run, without joining it. Writes nothing, and downloads records alone.

    Args:
      url: of the run, as in `join`.
      last: how many rounds to read, at most.

    Raises:
      RunMissingError: there is no run in this store.
      ValueError: `last` is negative.

    Examples:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> store, tx = jd.islands.memory(), jd.local_steps(optax.sgd(0.1), optax.sgd(1.0), sync_period=2, axis=None)
      >>> with jd.islands.join(store, tx, name="here") as island:
      ...     state = island.enter({"params": jnp.zeros(2), "opt": tx.init(jnp.zeros(2))})
      ...     state, _ = island.meet(state)
      >>> found = jd.islands.status(store)
      >>> found.round, found.sessions, [one.members for one in found.rounds]
      (1, {'here': 1}, [('here',)])
    """
    check_count("last", last, 0)
    store = Connection(open_store(url))
    store.deadline = store.now() + STATUS_SECONDS
    description = identity.find_run(store.get, place_of(url))
    anchors = store.list("anchors/")
    # From the kept parameters on: a list of all rounds is long.
    open_round = run.open_round(store, number_in(anchors[-1]) if anchors else 0)
    sessions: dict[str, int] = {}
    for name in store.list("names/"):
        island, number = name.split("/")[1:3]
        sessions[island] = max(int(number), sessions.get(island, 0))
    names = store.list(round_name(open_round, ""))
    seen = see(name.removeprefix(round_name(open_round, "")) for name in names)
    shown = range(max(open_round - last, 0), open_round)
    commits = {number: run.read_commit(store, number) for number in shown or range(open_round)[-1:]}
    before = commits.get(open_round - 1)
    expected = frozenset(before.expected if before is not None else ())
    present = (seen.drifts | seen.here | expected) - seen.left
    return RunStatus(
        open_round,
        tuple(int(name.rpartition("/")[2]) for name in anchors[-KEPT_ANCHORS:]),
        dict(sorted(sessions.items())),
        tuple(sorted(present)),
        tuple(_describe(number, commit) for number in shown if (commit := commits[number]) is not None),
        description.get("id", ""),
        description.get("keep_every", 0),
        tuple(sorted(present - seen.drifts)),
    )


def _describe(number: int, commit: Commit) -> RoundStatus:
    sizes = {member.name: member.bytes for member in commit.members}
    examples = {member.name: member.examples for member in commit.members}
    return RoundStatus(number, tuple(sizes), commit.missing, sizes, examples)


def read(
    url: "str | os.PathLike[str] | SharedStore", tx: optax.GradientTransformation, params: PyTree
) -> tuple[int, PyTree]:
    """Reads the newest global parameters of a run, for evaluation, without joining it. Writes nothing.

    Args:
      url: of the run, as in `join`.
      tx: the transformation that its islands pass to `join`.
      params: parameters of the right shapes; their values do not matter.

    Returns:
      The number of rounds behind them, and the parameters: a tree like `params`, in float32 or better.

    Raises:
      RunMismatchError: the run has another model or method.
      RunMissingError: there is no run in this store.
      ConnectionError: the store is out of reach for a minute.

    Examples:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> store, tx = jd.islands.memory(), jd.local_steps(optax.sgd(0.1), optax.sgd(1.0), sync_period=2, axis=None)
      >>> with jd.islands.join(store, tx, name="here") as island:
      ...     state = island.enter({"params": jnp.ones(2), "opt": tx.init(jnp.ones(2))})
      ...     state, _ = island.meet(state)
      >>> rounds, params = jd.islands.read(store, tx, jnp.zeros(2))
      >>> rounds, params.tolist()
      (1, [1.0, 1.0])
    """
    connection = Connection(open_store(url))
    connection.deadline = connection.now() + READ_SECONDS
    replay = Replay(connection, method_of(tx))
    local: Any = tx.init(jax.tree.map(jnp.asarray, params))
    replay.open(local, None, place=place_of(url))
    params = replay.follow(local).anchor
    return replay.round, params
