"""The fingerprint of a process (versions, settings, tree shapes), and how two of them are compared.

A fingerprint is a dictionary of text, `{section: {name: value}}`, so that a difference reads ``leaf `w` is float32[3]
in process 1 and float32[4] in process 0``.
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


def of_this_process() -> Fingerprint:
    """Returns the versions of packages, and the settings that change results."""
    versions = {"python": ".".join(platform.python_version_tuple()[:2])}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "missing"
    return {"version of": versions, "setting": {name: str(getattr(jax.config, name)) for name in SETTINGS}}


def of_state(state: PyTree, mesh: Mesh | None, recipe: Any) -> Fingerprint:
    """Returns names, shapes, dtypes, marks and shardings of the leaves, the mesh, and the entries of the recipe."""
    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_mark):
        inner = jax.tree_util.tree_leaves_with_path(leaf)
        mark = f" {type(leaf).__name__}" if is_mark(leaf) else ""
        leaves |= {leaf_name((*path, *below)): f"{_describe_leaf(x)}{mark}" for below, x in inner}
    found = {
        "recipe": _flat_recipe(recipe),
        "mesh": {},
        "leaf": leaves,
        "tree": {"structure": str(jax.tree.structure(state))},
    }
    if mesh is not None:
        devices = mesh.devices.ravel().tolist()
        found["mesh"] = {
            "axes": str(dict(mesh.shape)),
            "devices": " ".join(sorted({device.device_kind for device in devices})),
            "order": " ".join(f"{device.process_index}:{device.id}" for device in devices),
        }
    return found


def of_batch(batch: PyTree, workers: int) -> Fingerprint:
    """Returns what all processes must have in common: names, dtypes and shapes of the arrays, with rows per worker."""

    def describe(x: np.ndarray) -> str:
        first = [f"{x.shape[0] // max(workers, 1)} a worker"] if x.ndim else []
        return f"{jax.dtypes.canonicalize_dtype(x.dtype).name}[{', '.join([*first, *map(str, x.shape[1:])])}]"

    return {"batch": {leaf_name(path, "batch"): describe(x) for path, x in jax.tree_util.tree_leaves_with_path(batch)}}


def difference(own: Mapping[str, Mapping[str, str]], reference: Mapping[str, Mapping[str, str]], process: int) -> str:
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
    dtype = leaf.dtype if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else np.dtype(leaf.dtype).name
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
    for path, value in jax.tree_util.tree_flatten_with_path(recipe, is_leaf=lambda x: x is None)[0]:
        try:
            flat[leaf_name(path)] = json.dumps(value)
        except TypeError:
            raise ValueError(
                f"recipe: `{leaf_name(path)}` is a {type(value).__name__}; pass numbers, text, or its str(...)"
            ) from None
    return flat


def _shorten(left: str, right: str) -> tuple[str, str]:
    """Cuts two long values to the part where they differ."""
    if max(len(left), len(right)) <= LONGEST_VALUE:
        return left, right
    same = next((i for i, pair in enumerate(zip(left, right)) if pair[0] != pair[1]), min(len(left), len(right)))
    start = max(0, same - LONGEST_VALUE // 3)
    first, second = (f"{'…' if start else ''}{text[start : start + LONGEST_VALUE]}" for text in (left, right))
    return first, second
