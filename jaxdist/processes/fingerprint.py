"""What a process says of itself, and how two of them are compared: plain dictionaries of text, no processes needed.

A card is `{section: {name: value}}`, so that a difference reads ``leaf `w` is float32[3] in process 1 and float32[4] in
process 0``.
"""

import dataclasses
import importlib.metadata
import json
import platform
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from .._core.trees import leaf_name
from .._core.types import PyTree
from ..state.marks import is_mark

Card = dict[str, dict[str, str]]

PACKAGES = ("jaxdist", "jax", "jaxlib", "optax", "numpy", "flax")
# They change the numbers, or the program.
SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
)
CURES = {
    "version of": "install the same versions everywhere",
    "setting": "set it alike before JAX starts",
    "mesh": "all processes must make the same mesh",
    "recipe": "start all processes with the same options",
    "batch": "all processes must pass as many examples for each worker, of the same kind",
    "leaf": "all processes must build the same model",
    "tree": "all processes must build the same model",
}
LONGEST = 60


def of_this_process() -> Card:
    """Versions, and the settings that change numbers."""
    versions = {"python": ".".join(platform.python_version_tuple()[:2])}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "missing"
    return {"version of": versions, "setting": {name: str(getattr(jax.config, name)) for name in SETTINGS}}


def of_state(state: PyTree, mesh: Mesh | None, recipe: Any) -> Card:
    """Names, shapes, dtypes, marks and shardings of the leaves; the mesh; the recipe, entry by entry."""
    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_mark):
        inner = jax.tree_util.tree_leaves_with_path(leaf)
        mark = f" {type(leaf).__name__}" if is_mark(leaf) else ""
        leaves |= {leaf_name((*path, *below)): f"{_described(x)}{mark}" for below, x in inner}
    card = {
        "recipe": _flat_recipe(recipe),
        "mesh": {},
        "leaf": leaves,
        "tree": {"structure": str(jax.tree.structure(state))},
    }
    if mesh is not None:
        devices = mesh.devices.ravel().tolist()
        card["mesh"] = {
            "axes": str(dict(mesh.shape)),
            "devices": " ".join(sorted({device.device_kind for device in devices})),
            "order": " ".join(f"{device.process_index}:{device.id}" for device in devices),
        }
    return card


def of_batch(batch: PyTree, workers: int) -> Card:
    """Names, dtypes and shapes of arrays, as far as all processes must have them alike: rows for each worker."""

    def described(x: np.ndarray) -> str:
        first = [f"{x.shape[0] // max(workers, 1)} a worker"] if x.ndim else []
        return f"{jax.dtypes.canonicalize_dtype(x.dtype).name}[{', '.join([*first, *map(str, x.shape[1:])])}]"

    return {"batch": {leaf_name(path, "batch"): described(x) for path, x in jax.tree_util.tree_leaves_with_path(batch)}}


def difference(card: Mapping[str, Mapping[str, str]], reference: Mapping[str, Mapping[str, str]], process: int) -> str:
    """The first difference of a process's card from that of process 0, in a line; empty where there is none."""
    found = []
    for section, wanted in reference.items():
        have = card.get(section, {})
        for name in {**wanted, **have}:
            what = f"{section} `{name}`"
            if name not in have:
                found.append((f"process {process} has no {what}, which process 0 has", section))
            elif name not in wanted:
                found.append((f"process {process} has {what}, which process 0 has not", section))
            elif have[name] != wanted[name]:
                told, other = _shown(have[name], wanted[name])
                found.append((f"{what} is {told} in process {process} and {other} in process 0", section))
    if not found:
        return ""
    sentence, section = found[0]
    return f"{sentence}{f' (and {len(found) - 1} more)' if len(found) > 1 else ''}: {CURES[section]}"


def _described(leaf: Any) -> str:
    if not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    dtype = leaf.dtype if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else np.dtype(leaf.dtype).name
    sharding = getattr(leaf, "sharding", None)
    cut = f" {sharding.spec}" if isinstance(sharding, NamedSharding) and any(sharding.spec) else ""
    weak = " weakly typed" if getattr(leaf, "weak_type", False) else ""
    return f"{dtype}[{','.join(map(str, leaf.shape))}]{cut}{weak}"


def _flat_recipe(recipe: Any) -> dict[str, str]:
    """Entry by entry, so that a difference is named."""
    if dataclasses.is_dataclass(recipe) and not isinstance(recipe, type):
        recipe = dataclasses.asdict(recipe)
    if not isinstance(recipe, Mapping):
        recipe = {} if recipe is None else {"recipe": recipe}
    flat = {}
    for path, value in jax.tree_util.tree_flatten_with_path(recipe, is_leaf=lambda x: x is None)[0]:
        try:
            flat[leaf_name(path)] = json.dumps(value)
        except TypeError:
            raise ValueError(
                f"recipe: `{leaf_name(path)}` is a {type(value).__name__}; give numbers, text, or str(...) of it"
            ) from None
    return flat


def _shown(left: str, right: str) -> tuple[str, str]:
    """Both values, in a line; of long ones the part where they part."""
    if max(len(left), len(right)) <= LONGEST:
        return left, right
    same = next((i for i, pair in enumerate(zip(left, right)) if pair[0] != pair[1]), min(len(left), len(right)))
    start = max(0, same - LONGEST // 3)
    first, second = (f"{'…' if start else ''}{text[start : start + LONGEST]}" for text in (left, right))
    return first, second
