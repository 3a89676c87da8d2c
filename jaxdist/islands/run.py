"""A run in a store: its description, the names of its islands, and the kept global parameters."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .._core.trees import leaf_name
from ..local_sgd.state import LocalStepsState
from . import records
from .connection import Connection
from .errors import DamagedError, RunMismatchError
from .exchange import RoundMethod
from .records import Anchor, Commit

KEPT_ANCHORS = 2


def describe(method: RoundMethod, local: LocalStepsState, payload: Sequence[Any]) -> dict[str, Any]:
    """What all islands of a run must have in common, as JSON can hold it."""
    reducer, outer = jax.eval_shape(method.reducer.init, local.anchor), local.outer[0]
    return {
        "format": records.FORMAT,
        "parameters": _shapes(local.anchor),
        "outer optimizer": _shapes(outer),
        "reducer": _shapes(reducer),
        "payload": [f"{x.dtype}{list(x.shape)}" for x in payload],
        "code": None if method.reducer.forms.codec is None else method.reducer.forms.codec.name,
        "outer step": _numbers_in(method, local),
    }


def _shapes(tree: Any) -> dict[str, str]:
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {leaf_name(path): f"{x.dtype}{list(x.shape)}" for path, x in found}


def _numbers_in(method: RoundMethod, local: LocalStepsState) -> list[str]:
    """The literals of the outer step: rates and momenta, which have no place in shapes."""
    zeros = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), local.anchor)
    traced = jax.make_jaxpr(lambda g, s, p: method.outer.update(g, s, p, learning_rate=1.0))(
        zeros, local.outer[0], zeros
    )
    return sorted({str(x.val) for equation in traced.jaxpr.eqns for x in equation.invars if hasattr(x, "val")})


def check_or_open(store: Connection, own: dict[str, Any]) -> None:
    """Opens the run, or compares its description with one's own.

    Raises:
      RunMismatchError: they differ; it names the first difference. Nothing was written.
    """
    body = store.get("run.json")
    if body is None and not store.create("run.json", records.to_json(own)):
        body = store.get("run.json")
    if body is None:
        return
    try:
        theirs = json.loads(body)
        differences = [(key, theirs.get(key), own.get(key)) for key in own if theirs.get(key) != own.get(key)]
    except (ValueError, AttributeError) as error:
        raise DamagedError(f"run.json is no description of a run: {error}") from error
    if differences:
        key, its, ours = differences[0]
        if isinstance(its, dict) and isinstance(ours, dict):
            key, its, ours = next(
                (f"{key} {name!r}", its.get(name), ours.get(name))
                for name in sorted({*its, *ours})
                if its.get(name) != ours.get(name)
            )
        raise RunMismatchError(
            f"the run in this store has other {key}: {its}, and this island {ours}; use the same model and "
            "method, or begin a new run in an empty folder"
        )


def claim(store: Connection, name: str) -> int:
    """Takes a name; the process with the highest number has it, and older ones stop at their next meeting."""
    number = newest_session(store, name)
    while True:
        number += 1
        if store.create(f"names/{name}/{number:06d}", b"{}"):
            return number


def newest_session(store: Connection, name: str) -> int:
    """The number of the last session of an island, 0 before its first."""
    return max((int(found.rpartition("/")[2]) for found in store.list(f"names/{name}/")), default=0)


def newest_anchor(store: Connection) -> Anchor | None:
    """The last kept global parameters, or `None` before the run has begun."""
    while names := store.list("anchors/"):
        body = store.get(names[-1])
        # Otherwise the run has gone on so far since the listing that this name is forgotten.
        if body is not None:
            return records.parse(Anchor, names[-1], body)
    return None


def is_forgotten(store: Connection, number: int) -> bool:
    """Whether a round may have been deleted. If not, what was read of it before this call is what all islands read.

    The two newest anchors are never deleted, so that a round is deleted only after this has become true for good.
    """
    names = store.list("anchors/")
    return len(names) >= KEPT_ANCHORS and _round_of(names[-KEPT_ANCHORS]) > number


def read_commit(store: Connection, number: int) -> Commit | None:
    """The commit of a round, or `None` before it is decided."""
    name = records.round_name(number, "commit")
    body = store.get(name)
    return None if body is None else records.parse(Commit, name, body)


def ended_rounds(store: Connection) -> list[int]:
    """The rounds that have ended and are not deleted yet, in order."""
    names = (name.split("/") for name in store.list("rounds/"))
    return sorted(int(number) for _, number, kind, *_ in names if kind == "commit")


def open_round(store: Connection, number: int) -> int:
    """The first round, from this one on, that has no commit."""
    while read_commit(store, number) is not None:
        number += 1
    return number


def keep_anchor(
    store: Connection, number: int, digest: str, counted: Mapping[str, str], arrays: Sequence[np.ndarray]
) -> None:
    """Keeps the global parameters before round `number`, unless another island has kept these or later ones."""
    name = records.anchor_name(number)
    if any(kept >= name for kept in store.list("anchors/")):
        return
    body = records.pack(name, arrays)
    place = records.hash_of(body)
    store.put(records.body_name(place), body)
    store.create(name, records.to_json(Anchor(number, place, digest, tuple(counted.items()))))


def forget_rounds(store: Connection) -> None:
    """Deletes rounds that are older than the last kept global parameters but one, and what they name."""
    names = store.list("anchors/")
    if len(names) <= KEPT_ANCHORS:
        return
    oldest = _round_of(names[-KEPT_ANCHORS])
    for name in names[:-KEPT_ANCHORS]:
        # The record first: it must not name a body that is gone.
        body = store.get(name)
        store.delete(name)
        if body is not None:
            store.delete(records.body_name(records.parse(Anchor, name, body).body))
    for name in store.list("rounds/"):
        number, kind = name.split("/")[1:3]
        if int(number) < oldest:
            body = store.get(name) if kind == "drift" else None
            store.delete(name)
            if body is not None:
                store.delete(records.body_name(records.parse(records.Drift, name, body).body))


def _round_of(anchor: str) -> int:
    return int(anchor.rpartition("/")[2])
