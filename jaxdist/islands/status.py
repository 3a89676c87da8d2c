"""What a run in a store looks like from outside: for people, and for programs that evaluate."""

import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._core.types import PyTree
from ..local_sgd.local_steps import method_of
from . import protocol, run
from .connection import Connection
from .protocol import Member, round_name, see
from .run import Replay
from .store import SharedStore, open_store

# For so long `read` tries again when the store is out of reach.
READ_SECONDS = 60.0
# For so long `status` waits for an answer.
STATUS_SECONDS = 10.0


class RoundStatus(NamedTuple):
    """A round: its number, the islands that count, those that were waited for in vain, and the bytes of each."""

    round: int
    members: tuple[str, ...]
    missing: tuple[str, ...]
    sent_bytes: dict[str, int]


class RunStatus(NamedTuple):
    """A run, as its store shows it.

    Attributes:
      round: the open round: so many have ended.
      kept: the rounds before which global parameters are kept.
      sessions: for each island, how many processes have joined under its name.
      present: islands that have sent a drift in the open round, or are expected in it.
      rounds: the last rounds, oldest first.
    """

    round: int
    kept: tuple[int, ...]
    sessions: dict[str, int]
    present: tuple[str, ...]
    rounds: tuple[RoundStatus, ...]


def status(url: "str | os.PathLike[str] | SharedStore", *, last: int = 10) -> RunStatus:
    """Reads which islands take part in a run, without joining it. Writes nothing.

    Args:
      url: of the run, as in `join`.
      last: how many rounds to read, at most.

    Raises:
      ValueError: there is no run in this store.

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
    store = Connection(open_store(url))
    store.deadline = store.now() + STATUS_SECONDS
    _check_run(store.get("run.json"), url)
    numbers = run.ended_rounds(store)
    sessions: dict[str, int] = {}
    for name in store.list("names/"):
        island, number = name.split("/")[1:3]
        sessions[island] = max(int(number), sessions.get(island, 0))
    open_round = numbers[-1] + 1 if numbers else 0
    names = store.list(round_name(open_round, ""))
    seen = see(name.removeprefix(round_name(open_round, "")) for name in names)
    before = run.read_commit(store, open_round - 1) if numbers else None
    expected = frozenset(before.expected if before is not None else ())
    return RunStatus(
        open_round,
        tuple(int(name.rpartition("/")[2]) for name in store.list("anchors/")),
        dict(sorted(sessions.items())),
        tuple(sorted((seen.drifts | seen.here | expected) - seen.left)),
        tuple(found for number in numbers[-last:] if (found := _read_round(store, number)) is not None),
    )


def _read_round(store: Connection, number: int) -> RoundStatus | None:
    """A round, or `None` if it was deleted since it was listed."""
    commit = run.read_commit(store, number)
    if commit is None:
        return None
    sizes = {member.name: _body_size(store, member) for member in commit.members}
    return RoundStatus(number, tuple(sizes), commit.missing, sizes)


def _body_size(store: Connection, member: Member) -> int:
    return len(store.get(protocol.body_name(member.body)) or b"")


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
      ValueError: there is no run in this store.
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
    store = open_store(url)
    _check_run(store.get("run.json"), url)
    connection = Connection(store)
    connection.deadline = connection.now() + READ_SECONDS
    replay = Replay(connection, method_of(tx))
    local: Any = tx.init(jax.tree.map(jnp.asarray, params))
    replay.open(local)
    params = replay.follow(local).anchor
    return replay.round, params


def _check_run(description: bytes | None, url: Any) -> None:
    if description is None:
        place = "this store" if isinstance(url, SharedStore) else url
        raise ValueError(f"there is no run of islands in {place}: it has no run.json; give the URL that islands join")
    run.read_description(description)
