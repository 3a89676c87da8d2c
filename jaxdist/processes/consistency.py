"""Do all processes build the same thing? Asked before the first step, through JAX's coordination service."""

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
from .cluster import connect
from .errors import AgreementError, MismatchError, MissingProcessError
from .rendezvous import missing

GRACE_SECONDS = 5.0
_calls = itertools.count()


@runtime_checkable
class Store(Protocol):
    """A dictionary of text that all processes share; a value can be waited for."""

    def key_value_set(self, key: str, value: str) -> None:
        """Writes a value, once."""
        ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Waits for a value; raises when it does not come in time."""
        ...


def check_consistency(
    state: PyTree, *, mesh: Mesh | None = None, recipe: Any = None, timeout_seconds: Number = 60
) -> None:
    """Raises, in all processes alike, unless all of them build the same state, mesh and recipe. Before the first step.

    It compares what programs are compiled from: the names of the leaves, their shapes, dtypes, marks and shardings, the
    axes and the order of the devices, and the recipe. Different programs would wait for each other for ever, or be
    stopped. Values are not looked at: see `processes.assert_same` for values and `runtime.disagreement` for placed
    ones.

    *On the wire*: before all agree, no collective: each process exchanges a few short texts with process 0; one that
    differs reads the whole description. Then, where CPUs of several processes are a mesh, 4 bytes over each set of its
    axes, so that connections are open while all are here: in a first message gloo waits 30 s for the others, later as
    long as it takes.

    Args:
      state: arrays, marks, or the shapes that `jax.eval_shape` gives.
      mesh: the mesh of the run.
      recipe: what else must be the same: options, text, a dictionary or a dataclass of them. Say the seed, the batch
        size, the data.
      timeout_seconds: how long to wait for the others. Those that compile or read data before need more.

    Raises:
      MismatchError: a process has another leaf, mesh or recipe than process 0; the message names both.
      MissingProcessError: a process did not come in time.
      ValueError: the recipe holds something else than numbers and text.

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> mesh = jd.make_mesh({"data": 1})
      >>> jd.processes.check_consistency({"w": jnp.ones(3)}, mesh=mesh, recipe={"learning_rate": 0.1, "data": "digits"})
    """
    compare(
        fingerprint.of_state(state, mesh, recipe),
        f"agree/{next(_calls)}",
        float(timeout_seconds),
        do="come to check_consistency()",
    )
    if mesh is not None:
        connect(mesh)


def compare(card: fingerprint.Card, place: str, seconds: float, *, do: str, wrong: str = "") -> None:
    """Raises, in all processes alike, unless all come to the place with the same card.

    Args:
      card: what must be the same everywhere.
      place: a name that all processes give, new in each call.
      seconds: how long to wait for the others.
      do: what a process that does not come fails to do.
      wrong: what this process knows to be wrong with its own card: it waits for nobody, and the others hear of it.
    """
    processes = jax.process_count()
    if processes > 1:
        told = (card, jax.process_index(), processes, f"jaxdist/{place}", seconds)
        error = exchange(coordination_client(), *told, do=do, wrong=wrong)
        if error is not None:
            raise error


def exchange(
    store: Store,
    card: fingerprint.Card,
    process: int,
    processes: int,
    place: str,
    seconds: float,
    *,
    do: str,
    wrong: str = "",
) -> AgreementError | None:
    """What is wrong, the same for all: each compares itself with process 0, which gathers what they found."""
    until = time.monotonic() + seconds
    digest = hashlib.sha256(json.dumps(card).encode()).hexdigest()

    def read(key: str, last: float) -> str | None:
        try:
            return store.blocking_key_value_get(f"{place}/{key}", max(1, int(1e3 * (last - time.monotonic()))))
        except Exception as problem:  # a type of jaxlib's own
            if "DEADLINE_EXCEEDED" not in str(problem):
                raise
            return None

    def write(key: str, value: str) -> None:
        store.key_value_set(f"{place}/{key}", value)

    if wrong and process > 0:
        write(f"found/{process}", wrong)
        return MismatchError(wrong, (process,))
    if process > 0:
        common = read("digest", until)
        if common is None:
            return MissingProcessError(f"process 0 did not {do} within {seconds:g} s: see what it does", (0,))
        reference = json.loads(read("card", until) or "{}") if common != digest else card
        write(f"found/{process}", fingerprint.difference(card, reference, process))
        text = read("answer", until + seconds + GRACE_SECONDS)
        if text is None:
            return MissingProcessError(f"process 0 ended, or fell silent, and did not {do}: see what it printed", (0,))
        return _error(json.loads(text))
    write("card", json.dumps(card))
    write("digest", digest)
    said = {0: wrong}
    for other in range(1, 1 if wrong else processes):
        text = read(f"found/{other}", until)
        if text is not None:
            said[other] = text
    guilty = [other for other, text in said.items() if text]
    answer: dict[str, Any] = {"processes": guilty, "text": said[guilty[0]] if guilty else ""}
    if not guilty and len(said) < processes:
        late = missing(processes, set(said), seconds, do)
        answer = {"processes": late.processes, "text": str(late), "missing": True}
    write("answer", json.dumps(answer))
    return _error(answer)


def _error(answer: dict[str, Any]) -> AgreementError | None:
    kind = MissingProcessError if answer.get("missing") else MismatchError
    return kind(answer["text"], tuple(answer["processes"])) if answer["text"] else None
