"""Checks before the first step that all processes build the same program, through JAX's coordination service."""

import hashlib
import itertools
import json
import time
from typing import Any, Protocol, runtime_checkable

import jax
from jax.sharding import Mesh

from .._core.compat import coordination_client
from .._core.types import Number, PyTree
from . import fingerprint
from .cluster import open_connections
from .errors import AgreementError, MismatchError, MissingProcessError
from .rendezvous import missing

GRACE_SECONDS = 5.0
_calls = itertools.count()


@runtime_checkable
class KeyValueStore(Protocol):
    """The key-value store that all processes share."""

    def key_value_set(self, key: str, value: str) -> None:
        """Writes a value; each key once."""
        ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Waits for a value; raises an error if it does not arrive in time."""
        ...


def check_consistency(
    state: PyTree, *, mesh: Mesh | None = None, recipe: Any = None, timeout_seconds: Number = 60
) -> None:
    """Checks, before the first step, that all processes build the same state, mesh and recipe; else raises in all.

    It compares what programs are compiled from: names, shapes, dtypes, marks and shardings of the leaves, the axes and
    the order of the devices, and the recipe. Different programs would wait for each other forever, or abort. Values are
    not compared: see `processes.assert_same` for values and `runtime.disagreement` for placed states.

    *On the wire*: no collective for the comparison: each process exchanges a few short texts with process 0; one that
    differs reads the whole description. Then, on a mesh of CPUs of several processes, 4 bytes over each set of its
    axes, to open connections while all processes are present: for a first message gloo waits at most 30 s, later
    forever.

    Args:
      state: arrays, marks, or the shapes that `jax.eval_shape` gives.
      mesh: the mesh of the run.
      recipe: what else must be the same: options, text, a dictionary or a dataclass of them, such as the seed, the
        batch size, the data set.
      timeout_seconds: how long to wait for the others; longer if some of them compile or read data first.

    Raises:
      MismatchError: a process has another leaf, mesh or recipe than process 0; the message names both.
      MissingProcessError: a process did not come in time.
      ValueError: the recipe contains something other than numbers and text.

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> mesh = jd.make_mesh({"data": 1})
      >>> jd.processes.check_consistency({"w": jnp.ones(3)}, mesh=mesh, recipe={"learning_rate": 0.1, "data": "digits"})
    """
    compare(
        fingerprint.of_state(state, mesh, recipe),
        f"agree/{next(_calls)}",
        float(timeout_seconds),
        do="call check_consistency()",
    )
    if mesh is not None:
        open_connections(mesh)


def compare(own: fingerprint.Fingerprint, place: str, seconds: float, *, do: str, wrong: str = "") -> None:
    """Checks that all processes have the same fingerprint; else raises the same error in all.

    Args:
      own: the fingerprint of this process.
      place: a name of this comparison, the same in all processes and new in each call.
      seconds: how long to wait for the others.
      do: what a missing process failed to do, for the message.
      wrong: an error in this process's own fingerprint: it does not wait, and the others raise the error too.
    """
    processes = jax.process_count()
    if processes > 1:
        place, process = f"jaxdist/{place}", jax.process_index()
        error = exchange(coordination_client(), own, process, processes, place, seconds, do=do, wrong=wrong)
        if error is not None:
            raise error


def exchange(
    store: KeyValueStore,
    own: fingerprint.Fingerprint,
    process: int,
    processes: int,
    place: str,
    seconds: float,
    *,
    do: str,
    wrong: str = "",
) -> AgreementError | None:
    """Returns what is wrong, the same for all: each compares itself with process 0, which collects the findings."""
    until = time.monotonic() + seconds
    if process == 0:
        return _collect(store, own, processes, place, until, seconds, do, wrong)
    if wrong:
        store.key_value_set(f"{place}/found/{process}", wrong)
        return MismatchError(wrong, (process,))
    digest = _read(store, f"{place}/digest", until)
    if digest is None:
        return MissingProcessError(f"process 0 did not {do} within {seconds:g} s: check what it is doing", (0,))
    # The full fingerprint of process 0 is read only to name a difference.
    reference = own if digest == _digest(own) else json.loads(_read(store, f"{place}/card", until) or "{}")
    store.key_value_set(f"{place}/found/{process}", fingerprint.difference(own, reference, process))
    answer = _read(store, f"{place}/answer", until + seconds + GRACE_SECONDS)
    if answer is None:
        return MissingProcessError(f"process 0 ended, or stopped responding, and did not {do}: check its output", (0,))
    return _decode_error(json.loads(answer))


def _collect(
    store: KeyValueStore,
    own: fingerprint.Fingerprint,
    processes: int,
    place: str,
    until: float,
    seconds: float,
    do: str,
    wrong: str,
) -> AgreementError | None:
    """Runs process 0: publishes its fingerprint, collects the findings, and answers."""
    store.key_value_set(f"{place}/card", json.dumps(own))
    store.key_value_set(f"{place}/digest", _digest(own))
    findings = {0: wrong}
    for other in range(1, 1 if wrong else processes):
        text = _read(store, f"{place}/found/{other}", until)
        if text is not None:
            findings[other] = text
    guilty = [other for other, text in findings.items() if text]
    answer: dict[str, Any] = {"processes": guilty, "text": findings[guilty[0]] if guilty else ""}
    if not guilty and len(findings) < processes:
        late = missing(processes, set(findings), seconds, do)
        answer = {"processes": late.processes, "text": str(late), "missing": True}
    store.key_value_set(f"{place}/answer", json.dumps(answer))
    return _decode_error(answer)


def _read(store: KeyValueStore, key: str, until: float) -> str | None:
    """Waits for a value; returns None if it does not arrive in time."""
    try:
        return store.blocking_key_value_get(key, max(1, int(1e3 * (until - time.monotonic()))))
    except Exception as problem:  # jaxlib has its own type for it
        if "DEADLINE_EXCEEDED" not in str(problem):
            raise
        return None


def _digest(own: fingerprint.Fingerprint) -> str:
    return hashlib.sha256(json.dumps(own).encode()).hexdigest()


def _decode_error(answer: dict[str, Any]) -> AgreementError | None:
    kind = MissingProcessError if answer.get("missing") else MismatchError
    return kind(answer["text"], tuple(answer["processes"])) if answer["text"] else None
