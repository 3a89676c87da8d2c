"""What a checkpoint says of its leaves, in JSON: enough to read them without the program that wrote them."""

import json
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._marks import MARKS, OnHost, PerWorker, Sharded, axis_tuple, is_mark, with_value
from .._typing import Array, Like, Shape, State

FORMAT = 1
_KINDS = {kind.__name__: kind for kind in MARKS}


class Leaf(NamedTuple):
    """How one leaf was saved.

    Attributes:
      shape: of its global array.
      dtype: its name; for a key that of its generator, as in `"key<fry>"`.
      marks: around it, from the outermost inwards.
    """

    shape: Shape
    dtype: str
    marks: tuple[Any, ...]


class Manifest(NamedTuple):
    """What `manifest.json` holds.

    Attributes:
      step: how many steps the state has done.
      data: what the caller wanted to keep beside the state.
      leaves: all of them, empty ones too.
    """

    step: int
    data: Any
    leaves: dict[str, Leaf]


def named(state: State) -> dict[str, tuple[tuple[Any, ...], Like]]:
    """The marks and the leaf under each path, in the order of `jax.tree.leaves`. Marks are no part of the path."""
    found: list[tuple[str, tuple[tuple[Any, ...], Like]]] = []

    def walk(path: tuple[Any, ...], marks: tuple[Any, ...], tree: Any) -> None:
        for more, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_mark):
            if is_mark(node):
                walk((*path, *more), (*marks, node), node.value)
            else:
                name = jax.tree_util.keystr((*path, *more), simple=True, separator=".") or "state"
                found.append((name, (marks, node if hasattr(node, "sharding") else _as_array(name, node))))

    walk((), (), state)
    leaves = dict(found)
    if len(leaves) < len(found):
        names = [name for name, _ in found]
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise ValueError(f"two leaves have the name `{twice}`: rename an entry of a dict that contains a dot")
    return leaves


def _as_array(name: str, leaf: Any) -> Array:
    """A leaf of numpy or Python, as a step would see it."""
    try:
        array = jnp.asarray(leaf)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"leaf `{name}` is no array that JAX holds: {leaf!r:.80}") from error
    if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype != array.dtype:
        raise ValueError(
            f"leaf `{name}` is an array of numpy's {leaf.dtype}, which JAX would make {array.dtype}: cast it, or set "
            "jax_enable_x64"
        )
    return array


def is_key(leaf: Like) -> bool:
    """Keys are written as their words, along one more axis."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def written(state: dict[str, tuple[tuple[Any, ...], Like]], step: int, data: Any) -> str:
    """The text of the manifest of a state."""
    leaves = {
        name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "marks": [_described(mark) for mark in marks]}
        for name, (marks, leaf) in state.items()
    }
    versions = {package: version(package) for package in ("jax", "orbax-checkpoint")}
    try:
        return json.dumps(
            {"format": FORMAT, "step": step, "data": data, "versions": versions, "leaves": leaves}, indent=1
        )
    except TypeError as error:
        raise ValueError(f"data must be what JSON holds (numbers, text, lists, dicts), got {data!r}") from error


def read(text: str) -> Manifest:
    """The inverse of `written`."""
    found = json.loads(text)
    if found["format"] != FORMAT:
        raise ValueError(f"the checkpoint has format {found['format']}, this version of jaxdist reads {FORMAT}")
    leaves = {
        name: Leaf(tuple(one["shape"]), one["dtype"], tuple(_mark(mark) for mark in one["marks"]))
        for name, one in found["leaves"].items()
    }
    return Manifest(found["step"], found["data"], leaves)


def marked(marks: tuple[Any, ...], value: Any) -> Any:
    """The value inside these marks."""
    for mark in reversed(marks):
        value = with_value(mark, value)
    return value


def _described(mark: Any) -> dict[str, Any]:
    described: dict[str, Any] = {"mark": type(mark).__name__}
    if not isinstance(mark, OnHost):
        described["axis"] = None if mark.axis is None else list(axis_tuple(mark.axis))
    if isinstance(mark, PerWorker):
        described["resize"] = mark.resize
    if isinstance(mark, Sharded):
        described |= {"shape": list(mark.shape), "multiple": mark.multiple}
    return described


def _mark(described: dict[str, Any]) -> Any:
    options = {name: value for name, value in described.items() if name != "mark"}
    for name in ("axis", "shape"):
        if options.get(name) is not None:
            options[name] = tuple(options[name])
    return _KINDS[described["mark"]](None, **options)
