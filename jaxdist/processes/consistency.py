"""Checks before the first step that all processes build the same program, through JAX's coordination service.

Each process has a fingerprint (versions, settings, tree shapes): a dictionary of text, `{section: {name: value}}`, so
that a difference reads ``leaf `w` is float32[3] in process 1 and float32[4] in process 0``.
"""

import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import platform
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._core.compat import coordination_client, shard_map
from .._core.trees import describe_structure, is_key, named_leaves
from .._core.types import Number, PyTree
from ..comm.over import over
from ..state.marks import is_mark
from .cluster import AgreementError, MismatchError, MissingProcessError
from .rendezvous import missing

Fingerprint = dict[str, dict[str, str]]

PACKAGES = ("jaxdist", "jax", "jaxlib", "optax", "numpy", "flax")
# Settings that change results, or programs.
SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
)
FIXES = {
    "version of": "install the same versions everywhere",
    "setting": "set the same value everywhere before JAX starts",
    "mesh": "all processes must make the same mesh",
    "recipe": "start all processes with the same options",
    "batch": "all processes must pass the same number of examples per worker, of the same types",
    "leaf": "all processes must build the same model",
    "tree": "all processes must build the same model",
}
LONGEST_VALUE = 60
GRACE_SECONDS = 5.0
_calls = itertools.count()


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
      recipe: what else must be the same: options, text, a dictionary or a dataclass of them, such as the seed, the
        batch size, the data set.
      timeout_seconds: how long to wait for the others; longer if some of them compile or read data first.

    Raises:
      MismatchError: a process has another leaf, mesh or recipe than process 0; the message names both.
      MissingProcessError: a process did not come in time.
      ValueError: the recipe contains something other than numbers and text.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> mesh = jd.make_mesh({"data": 1})
      >>> jd.processes.check_consistency({"w": jnp.ones(3)}, mesh=mesh, recipe={"learning_rate": 0.1, "data": "digits"})
    """
    own = fingerprint_state(state, mesh, recipe)
    compare(own, f"agree/{next(_calls)}", float(timeout_seconds), do="call check_consistency()")
    if mesh is not None:
        _open_connections(mesh)


def compare(own: Fingerprint, place: str, seconds: float, *, do: str, wrong: str = "") -> None:
    """Checks that all processes have the same fingerprint; else raises the same error in all.

    `place` is a name of this comparison, the same in all processes and new in each call; `do` is what a missing process
    failed to do, for the message. With `wrong`, an error in its own fingerprint, a process does not wait, and the
    others raise that error too.
    """
    processes = jax.process_count()
    if processes > 1:
        place, process = f"jaxdist/{place}", jax.process_index()
        error = exchange(coordination_client(), own, process, processes, place, seconds, do=do, wrong=wrong)
        if error is not None:
            raise error


def exchange(
    store: Any, own: Fingerprint, process: int, processes: int, place: str, seconds: float, *, do: str, wrong: str = ""
) -> AgreementError | None:
    """Returns what is wrong, the same for all: each compares itself with process 0, which collects the findings.

    `store` is JAX's coordination client: `key_value_set` writes each key once, and `blocking_key_value_get` waits.
    """
    if process == 0:
        return _collect(store, own, processes, place, seconds, do, wrong)
    until = time.monotonic() + seconds
    if wrong:
        # The process will raise its own error, so the others must not wait for it.
        store.key_value_set(f"{place}/found/{process}", wrong)
        return MismatchError(wrong, (process,))
    # 64 characters, where the fingerprint of a large model is long.
    digest = _read(store, f"{place}/digest", until)
    if digest is None:
        return MissingProcessError(f"process 0 did not {do} within {seconds:g} s: check what it is doing", (0,))
    # The full fingerprint of process 0 is read only to name a difference.
    reference = own if digest == _digest(own) else json.loads(_read(store, f"{place}/card", until) or "{}")
    store.key_value_set(f"{place}/found/{process}", find_difference(own, reference, process))
    answer = _read(store, f"{place}/answer", until + seconds + GRACE_SECONDS)
    if answer is None:
        return MissingProcessError(f"process 0 ended, or stopped responding, and did not {do}: check its output", (0,))
    return _decode_error(json.loads(answer))


def _collect(
    store: Any, own: Fingerprint, processes: int, place: str, seconds: float, do: str, wrong: str
) -> AgreementError | None:
    """Runs process 0: publishes its fingerprint, collects the findings, and answers."""
    until = time.monotonic() + seconds
    store.key_value_set(f"{place}/card", json.dumps(own))
    store.key_value_set(f"{place}/digest", _digest(own))
    findings = {0: wrong}
    for other in range(1, 1 if wrong else processes):
        if (text := _read(store, f"{place}/found/{other}", until)) is not None:
            findings[other] = text
    guilty = [other for other, text in findings.items() if text]
    answer: dict[str, Any] = {"processes": guilty, "text": findings[guilty[0]] if guilty else ""}
    # A difference that is known counts more than a process that is missing, perhaps because of it.
    if not guilty and len(findings) < processes:
        late = missing(processes, set(findings), seconds, do)
        answer = {"processes": late.processes, "text": str(late), "missing": True}
    store.key_value_set(f"{place}/answer", json.dumps(answer))
    return _decode_error(answer)


def _read(store: Any, key: str, until: float) -> str | None:
    """Waits for a value; returns None if it does not arrive in time."""
    try:
        return store.blocking_key_value_get(key, max(1, int(1e3 * (until - time.monotonic()))))
    # jaxlib has its own type for it.
    except Exception as problem:
        if "DEADLINE_EXCEEDED" not in str(problem):
            raise
        return None


def _digest(own: Fingerprint) -> str:
    return hashlib.sha256(json.dumps(own).encode()).hexdigest()


def _decode_error(answer: dict[str, Any]) -> AgreementError | None:
    kind = MissingProcessError if answer.get("missing") else MismatchError
    return kind(answer["text"], tuple(answer["processes"])) if answer["text"] else None


def _open_connections(mesh: Mesh) -> None:
    """Sends a first message over every set of axes, if the devices are CPUs of several processes."""
    # Gloo waits at most 30 s for the other processes when it opens a connection, and forever on an open one. Opening
    # all of them now lets a process compile or read data for longer than the others later.
    if jax.process_count() == 1 or mesh.devices.flat[0].platform != "cpu":
        return
    names = mesh.axis_names
    groups = [group for count in range(1, len(names) + 1) for group in itertools.combinations(names, count)]
    sharding = NamedSharding(mesh, PartitionSpec(*names))

    # Gloo has a connection for each set of axes that a collective runs over.
    def local(x):
        return sum(over(group).sum(x) for group in groups)

    spec, shape = sharding.spec, mesh.devices.shape
    run = shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=set(names), check_vma=True)
    zeros = jax.make_array_from_callback(shape, sharding, lambda index: np.zeros([1] * len(shape), jnp.int32))
    jax.jit(run)(zeros).block_until_ready()


# ---- fingerprints


def fingerprint_process() -> Fingerprint:
    """Returns the versions of packages, and the settings that change results."""
    versions = {"python": ".".join(platform.python_version_tuple()[:2])}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "missing"
    return {"version of": versions, "setting": {name: str(getattr(jax.config, name)) for name in SETTINGS}}


def fingerprint_state(state: PyTree, mesh: Mesh | None, recipe: Any) -> Fingerprint:
    """Returns names, shapes, dtypes, marks and shardings of the leaves, the mesh, and the entries of the recipe."""
    leaves, names = {}, (name for name, _ in named_leaves(state))
    for leaf in jax.tree.leaves(state, is_leaf=is_mark):
        mark = f" {type(leaf).__name__}" if is_mark(leaf) else ""
        leaves |= {next(names): f"{_describe_leaf(x)}{mark}" for x in jax.tree.leaves(leaf)}
    structure = {"structure": describe_structure(state)}
    # The first section that differs is named: a recipe explains the leaves, and leaves the tree.
    found = {"recipe": _flat_recipe(recipe), "mesh": {}, "leaf": leaves, "tree": structure}
    if mesh is not None:
        devices = mesh.devices.ravel().tolist()
        found["mesh"] = {
            "axes": str(dict(mesh.shape)),
            "devices": " ".join(sorted({device.device_kind for device in devices})),
            "order": " ".join(f"{device.process_index}:{device.id}" for device in devices),
        }
    return found


def fingerprint_batch(batch: PyTree, workers: int) -> Fingerprint:
    """Returns what all processes must have in common: names, dtypes and shapes of the arrays, with rows per worker."""

    def describe(x: np.ndarray) -> str:
        first = [f"{x.shape[0] // max(workers, 1)} a worker"] if x.ndim else []
        return f"{jax.dtypes.canonicalize_dtype(x.dtype).name}[{', '.join([*first, *map(str, x.shape[1:])])}]"

    return {"batch": {name: describe(x) for name, x in named_leaves(batch, "batch")}}


def find_difference(
    own: Mapping[str, Mapping[str, str]], reference: Mapping[str, Mapping[str, str]], process: int
) -> str:
    """Describes the first difference between a fingerprint and that of process 0 in one line; empty if equal."""
    found = []
    for section, wanted in reference.items():
        have = own.get(section, {})
        for name in {**wanted, **have}:
            what = f"{section} `{name}`"
            if name not in have:
                found.append((f"process {process} has no {what}, which process 0 has", section))
            elif name not in wanted:
                found.append((f"process {process} has {what}, which process 0 lacks", section))
            elif have[name] != wanted[name]:
                mine, other = _shorten(have[name], wanted[name])
                found.append((f"{what} is {mine} in process {process} and {other} in process 0", section))
    if not found:
        return ""
    sentence, section = found[0]
    return f"{sentence}{f' (and {len(found) - 1} more)' if len(found) > 1 else ''}: {FIXES[section]}"


def _describe_leaf(leaf: Any) -> str:
    """Describes dtype, shape, sharding and weak type: what a program is compiled for."""
    if not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    dtype = leaf.dtype if is_key(leaf) else np.dtype(leaf.dtype).name
    sharding = getattr(leaf, "sharding", None)
    cut = f" {sharding.spec}" if isinstance(sharding, NamedSharding) and any(sharding.spec) else ""
    weak = " weakly typed" if getattr(leaf, "weak_type", False) else ""
    return f"{dtype}[{','.join(map(str, leaf.shape))}]{cut}{weak}"


def _flat_recipe(recipe: Any) -> dict[str, str]:
    """Flattens a recipe to named entries, so that a difference can be named."""
    if dataclasses.is_dataclass(recipe) and not isinstance(recipe, type):
        recipe = dataclasses.asdict(recipe)
    if not isinstance(recipe, Mapping):
        recipe = {} if recipe is None else {"recipe": recipe}
    flat = {}
    for name, value in named_leaves(recipe, is_leaf=_is_entry):
        try:
            flat[name] = json.dumps(value.item() if isinstance(value, np.generic) else value)
        except TypeError:
            raise ValueError(
                f"recipe: `{name}` is a {type(value).__name__}; pass numbers, text, or its str(...)"
            ) from None
    return flat


def _is_entry(x: Any) -> bool:
    """None and empty containers, of which JAX would see nothing."""
    return x is None or (isinstance(x, dict | list | tuple) and not x)


def _shorten(left: str, right: str) -> tuple[str, str]:
    """Cuts two long values to the part where they differ."""
    if max(len(left), len(right)) <= LONGEST_VALUE:
        return left, right
    # A third of the text before the first difference, as its context.
    same = next((i for i, pair in enumerate(zip(left, right)) if pair[0] != pair[1]), min(len(left), len(right)))
    start = max(0, same - LONGEST_VALUE // 3)
    first, second = (f"{'…' if start else ''}{text[start : start + LONGEST_VALUE]}" for text in (left, right))
    return first, second
