"""The format of a checkpoint: orbax's, of the arrays, and the manifest, a JSON description of the leaves.

Both suffice to read a checkpoint without the program.
"""

import json
import math
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._core.types import Array, Like, Shape, State
from ..state.marks import (
    MARKS,
    LeafOrder,
    OnHost,
    PerWorker,
    Sharded,
    axis_tuple,
    cutting_marks,
    flatten_marks,
    is_mark,
    order_of,
    with_value,
)
from ..transforms.quantized_state import is_coded
from .errors import CheckpointDamagedError

FORMAT = 1
# Of the words of `compressors.pack`: 2 has them in planes. Only leaves that hold such words depend on it.
PACKING = 2
_KINDS = {kind.__name__: kind for kind in MARKS}


def orbax() -> Any:
    """Returns orbax, which is imported late since the core of the library does not need it."""
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError("checkpoints need orbax: pip install '.[train]' in a clone of jaxdist") from error
    return orbax.checkpoint


def path_of(folder: Path) -> Any:
    """Converts a path to the type that orbax takes."""
    from etils import epath  # comes with orbax

    return epath.Path(folder)


class Leaf(NamedTuple):
    """One leaf: the shape of its global array, its dtype (for a key `"key<fry>"`), its marks, the outermost first.

    `order` has the leaves that a flat array consists of; `None` for others, and in checkpoints of earlier versions.
    """

    shape: Shape
    dtype: str
    marks: tuple[Any, ...]
    order: LeafOrder | None


class Manifest(NamedTuple):
    """The contents of `manifest.json`: steps done, the caller's data, all leaves, empty ones too, and their packing."""

    step: int
    data: Any
    leaves: dict[str, Leaf]
    packing: int


def name_leaves(state: State) -> dict[str, tuple[tuple[Any, ...], Like]]:
    """Returns marks and leaf by path, in the order of `jax.tree.leaves`. Marks are not part of the path.

    The marks of codes and of fp8 statistics have their own rules for another number of workers, as in `resize`.
    """
    found: list[tuple[str, tuple[tuple[Any, ...], Like]]] = []
    for leaf in flatten_marks(state):
        name = jax.tree_util.keystr(leaf.path, simple=True, separator=".") or "state"
        found.append(
            (name, (leaf.marks, leaf.value if hasattr(leaf.value, "sharding") else _as_array(name, leaf.value)))
        )
    leaves = dict(found)
    if len(leaves) < len(found):
        names = [name for name, _ in found]
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise ValueError(f"two leaves have the name `{twice}`: rename the dict key that contains a dot")
    return leaves


def packed_leaves(state: State) -> list[str]:
    """Returns the names of leaves with packed codes: fewer bytes than entries, and neither scales nor exponents."""
    found: list[str] = []

    def walk(path: tuple[Any, ...], entries: int, tree: Any) -> None:
        for more, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: is_mark(x) or is_coded(x)):
            name = jax.tree_util.keystr((*path, *more), simple=True, separator=".")
            if is_mark(node):
                walk((*path, *more), entries, node.value)
            elif is_coded(node):
                walk((*path, *more, jax.tree_util.GetAttrKey("payload")), math.prod(node.shape), node.payload)
            elif entries and _holds_codes(name, node, entries):
                found.append(name)

    walk((), 0, state)
    return found


def _holds_codes(name: str, leaf: Like, entries: int) -> bool:
    has_fewer = leaf.dtype == jnp.uint8 and len(leaf.shape) > 0 and leaf.shape[-1] < entries
    return has_fewer and not name.endswith((".scales", ".exponents"))


def _as_array(name: str, leaf: Any) -> Array:
    """Converts a leaf of NumPy or Python as JAX does for a step."""
    try:
        array = jnp.asarray(leaf)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"leaf `{name}` cannot be a JAX array: {leaf!r:.80}") from error
    if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype != array.dtype:
        raise ValueError(
            f"leaf `{name}` is a NumPy array of {leaf.dtype}, which JAX would convert to {array.dtype}: cast it, or "
            "set jax_enable_x64"
        )
    return array


def dump(state: dict[str, tuple[tuple[Any, ...], Like]], step: int, data: Any) -> str:
    """Returns the text of the manifest of a state."""
    leaves = {
        name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "marks": [_describe(mark) for mark in marks]}
        | ({} if order_of(marks) is None else {"order": order_of(marks)})
        for name, (marks, leaf) in state.items()
    }
    # For readers of an old checkpoint; no version is refused.
    versions = {package: version(package) for package in ("jax", "orbax-checkpoint")}
    manifest = {
        "format": FORMAT,
        "packing": PACKING,
        "step": step,
        "data": data,
        "versions": versions,
        "leaves": leaves,
    }
    try:
        return json.dumps(manifest, indent=1)
    except TypeError as error:
        raise ValueError(f"data must be JSON (numbers, text, lists, dicts), got {data!r}") from error


def read(file: Path, step: int) -> Manifest:
    """Parses the text of `dump` for a step. Any other text is damage, even if its checksum is right."""
    try:
        found = json.loads(file.read_text())
        number, recorded, data, leaves = (found[name] for name in ("format", "step", "data", "leaves"))
        manifest = None
        if _count(number) == FORMAT:
            described = {name: _leaf(name, leaf) for name, leaf in leaves.items()}
            manifest = Manifest(_count(recorded), data, described, _count(found.get("packing", 1)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = f"is not a manifest that jaxdist wrote ({type(error).__name__}: {error})"
        raise CheckpointDamagedError(file, step, what) from error
    if manifest is None:
        raise ValueError(
            f"the checkpoint has format {number}, but this version of jaxdist reads {FORMAT}: use another version"
        )
    if manifest.step != step:
        what = f"is that of step {manifest.step}: the folder is a copy of another, or was renamed"
        raise CheckpointDamagedError(file, step, what)
    return manifest


def wrap(marks: tuple[Any, ...], value: Any) -> Any:
    """Puts a value inside these marks."""
    # The outermost mark is the first one.
    for mark in reversed(marks):
        value = with_value(mark, value)
    return value


def _describe(mark: Any) -> dict[str, Any]:
    described: dict[str, Any] = {"mark": type(mark).__name__}
    if not isinstance(mark, OnHost):
        described["axis"] = None if mark.axis is None else list(axis_tuple(mark.axis))
    if isinstance(mark, PerWorker):
        described["resize"] = mark.resize
    if isinstance(mark, Sharded):
        described |= {"shape": list(mark.shape), "multiple": mark.multiple}
    return described


def _leaf(name: str, described: dict[str, Any]) -> Leaf:
    """Parses and checks the entry of one leaf."""
    shape, dtype, marks = (
        tuple(map(_count, described["shape"])),
        described["dtype"],
        tuple(map(_mark, described["marks"])),
    )
    if not dtype.startswith("key<"):
        # Raises TypeError for an unknown name.
        jnp.dtype(dtype)
    # Only the innermost mark can be Sharded, and its dimension holds at least the entries of the whole array.
    cuts = cutting_marks(marks)
    last = cuts[-1] if cuts else None
    fits = len(shape) == len(cuts) and shape[-1] >= math.prod(last.shape) if isinstance(last, Sharded) else True
    if len(shape) < len(cuts) or not fits or any(isinstance(cut, Sharded) for cut in cuts[:-1]):
        raise ValueError(f"leaf `{name}` of shape {list(shape)} cannot have the marks {described['marks']}")
    order = described.get("order")
    return Leaf(
        shape, dtype, marks, None if order is None else tuple((str(x), tuple(map(_count, s))) for x, s in order)
    )


def _mark(described: dict[str, Any]) -> Any:
    options = {name: value for name, value in described.items() if name != "mark"}
    if options.get("axis") is not None:
        options["axis"] = tuple(options["axis"])
    if "shape" in options:
        options["shape"] = tuple(map(_count, options["shape"]))
    if "multiple" in options:
        options["multiple"] = _count(options["multiple"])
    return _KINDS[described["mark"]](None, **options)


def _count(number: Any) -> int:
    """Checks that a number is a count; Python would also accept `true` and 2.0."""
    if type(number) is not int or number < 0:
        raise ValueError(f"expected a count, got {number!r:.80}")
    return number
