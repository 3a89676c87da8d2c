"""Fills a state from a checkpoint: leaves are read in place, converted by their marks, or new."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._core.trees import is_key
from .._core.types import Array, Like, Shape, State
from ..state.marks import (
    PerWorker,
    Resize,
    Sharded,
    cutting_marks,
    merging_rules,
    order_of,
    show_orders,
    warn_if_uneven,
)
from ..state.placement import copy_to_workers, refit
from ._files import ARRAYS, MANIFEST
from ._manifest import PACKING, Leaf, Manifest, name_leaves, orbax, packed_leaves, path_of
from .errors import CheckpointDamagedError

# Leaves to convert pass through host memory, about this many bytes at a time (a leaf is never split): the leaves of
# more workers than there are now may not fit on the devices.
_PORTION_BYTES = 256 << 20


class Filled(NamedTuple):
    """A state and the origin of its leaves; the fields are those of `Resumed`."""

    state: State
    new: tuple[str, ...]
    dropped: tuple[str, ...]
    converted: tuple[str, ...]


def fill(folder: Path, shown: Path | str, manifest: Manifest, like: State, changed: Sequence[str]) -> Filled:
    """Reads a checkpoint into the shardings of `like`. Leaves that do not fit must be in `changed`, and stay new.

    Its files are in `folder`; `shown` is what messages call the checkpoint.
    """
    stored, wanted = manifest.leaves, name_leaves(like)
    unfit = {name: why for name in wanted if (why := _why_unfit(name, stored.get(name), wanted[name], shown))}
    if manifest.packing != PACKING:
        unfit |= {name: _other_packing(name, shown) for name in packed_leaves(like) if name not in unfit}
    other = f"{shown} is a checkpoint of another state"
    unfit |= {name: f"{other}: it also has `{name}`" for name in stored if name not in wanted}
    _check_changed(unfit, wanted, changed)
    # What is unfit stays new.
    counts = ((name, () if name in unfit else _counts(stored[name], *wanted[name])) for name in wanted)
    warn_if_uneven(like, counts)
    # Leaves with unchanged shape and marks go straight to their devices; the others by way of host memory.
    in_place, others, found, same = {}, [], {}, {}
    rules = dict(zip(wanted, merging_rules(like), strict=True))
    for name, (marks, leaf) in wanted.items():
        if name in unfit:
            found[name] = leaf
        elif not leaf.size:
            # Orbax stores no empty arrays.
            found[name] = jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding if _is_committed(leaf) else None)
        else:
            same[name] = stored[name].shape == leaf.shape and same_kinds(stored[name].marks, marks)
            if same[name] and _is_committed(leaf):
                in_place[name] = leaf
            else:
                others.append(name)
    found |= _read_in_place(folder, in_place)
    for names in _portions(others, stored):
        for name, array in read_to_host(folder, {name: stored[name] for name in names}).items():
            marks, leaf = wanted[name]
            if not same[name]:
                array = _convert_leaf(stored[name].marks, array, marks, leaf, rules[name])
            found[name] = _place(array, leaf)
    return Filled(
        jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in wanted]),
        tuple(name for name in unfit if name in wanted),
        tuple(name for name in unfit if name not in wanted),
        tuple(name for name in others if not same_kinds(stored[name].marks, wanted[name][0])),
    )


def _check_changed(
    unfit: Mapping[str, str], wanted: Mapping[str, tuple[tuple[Any, ...], Like]], changed: Sequence[str]
) -> None:
    """Checks that leaves that do not fit are in `changed`, and that new ones have values."""
    for name, why in unfit.items():
        if not any(name == part or name.startswith(f"{part}.") for part in changed):
            others = len(unfit) - 1
            more = f", and {others} more leaves do not fit" if others else ""
            raise ValueError(f"{why}{more}; list the changed sub-states in resume(..., changed=)")
        if name in wanted and isinstance(wanted[name][1], jax.ShapeDtypeStruct):
            raise ValueError(f"leaf `{name}` is new and `like` has only its shape: pass its array in `like`")


def read_to_host(folder: Path, leaves: Mapping[str, Leaf]) -> dict[str, np.ndarray]:
    """Reads global arrays into host memory, keys as their words."""
    empty = {name for name, leaf in leaves.items() if 0 in leaf.shape}
    kind = orbax().RestoreArgs(restore_type=np.ndarray)
    found = _read(folder, {name: 0 for name in leaves if name not in empty}, dict.fromkeys(leaves.keys() - empty, kind))
    for name, array in found.items():
        shape, dtype = leaves[name].shape, leaves[name].dtype
        # The words of a key are an axis of uint32 after its own.
        words = dtype.startswith("key<")
        if not isinstance(array, np.ndarray) or (array.shape[:-1] if words else array.shape) != shape:
            raise _mismatch(folder, name)
        if str(array.dtype) != ("uint32" if words else dtype):
            raise _mismatch(folder, name)
    return found | {name: _empty(leaves[name]) for name in empty}


def _mismatch(folder: Path, name: str) -> CheckpointDamagedError:
    """The error for a manifest that was edited, and sealed again, and no longer describes the arrays."""
    what = f"does not belong to `{ARRAYS}`, where {f'leaf `{name}`' if name else 'a leaf'} is another or missing"
    return CheckpointDamagedError(folder / MANIFEST, int(folder.stem), what)


def _why_unfit(name: str, was: Leaf | None, now: tuple[tuple[Any, ...], Like], shown: Path | str) -> str:
    """Returns why a leaf cannot be filled; empty if it can."""
    marks, leaf = now
    if was is None:
        return f"{shown} is a checkpoint of another state: it lacks `{name}`"
    if was.dtype != str(leaf.dtype):
        return f"leaf `{name}` of {shown} is {was.dtype}, the state to fill has {leaf.dtype}"
    if whole_shape(was.marks, was.shape) != whole_shape(marks, leaf.shape):
        return (
            f"leaf `{name}` was saved as {list(was.shape)}, the state to fill has {list(leaf.shape)}, and the number "
            "of workers does not explain the difference"
        )
    order = order_of(marks)
    if was.order is not None and order is not None and was.order != order:
        stored, wanted = show_orders(was.order, order)
        return (
            f"leaf `{name}` of {shown} has entries of several leaves one after another, {stored}, "
            f"and in the state to fill of {wanted}: give the leaves the names, shapes and order that "
            "they were saved with, or let this part of the state be new, from zero"
        )
    return ""


def _counts(was: Leaf, marks: tuple[Any, ...], leaf: Like) -> Iterator[tuple[int, int]]:
    """The numbers of workers that a leaf was saved for, and that it is filled for, along each of its cut dimensions."""
    return ((before, now) for before, now, _ in zip(was.shape, leaf.shape, cutting_marks(marks), strict=False))


def _other_packing(name: str, shown: Path | str) -> str:
    return (
        f"leaf `{name}` of {shown} has packed codes in the order of another version of jaxdist: read it with that "
        "version and save what it decodes to, or let the leaf be new, with changed= of resume"
    )


def _portions(names: Sequence[str], stored: Mapping[str, Leaf]) -> Iterator[list[str]]:
    """Groups the names so that the leaves of a group fit into host memory."""
    group, total = [], 0
    for name in names:
        # At most: complex128, or the words of a key.
        size = int(np.prod(stored[name].shape)) * 16
        if group and total + size > _PORTION_BYTES:
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    if group:
        yield group


def _read_in_place(folder: Path, leaves: Mapping[str, Like]) -> dict[str, Array]:
    """Reads leaves directly into their shardings."""
    # Orbax restores each array with the sharding of its target.
    target = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for name, leaf in leaves.items()
    }
    try:
        return _read(folder, target, orbax().checkpoint_utils.construct_restore_args(target))
    except ValueError as error:
        # Orbax's message for a different shape.
        if "stored shape" not in str(error):
            raise
        raise _mismatch(folder, "") from error


def _read(folder: Path, target: dict[str, Any], restore_args: dict[str, Any]) -> dict[str, Any]:
    # Orbax refuses to read nothing.
    if not target:
        return {}
    ocp = orbax()
    with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
        arguments = ocp.args.PyTreeRestore(item=target, restore_args=restore_args, partial_restore=True)
        found = handler.restore(path_of(folder / ARRAYS), args=arguments)
    if missing := target.keys() - found.keys():
        raise _mismatch(folder, min(missing))
    return found


def _is_committed(leaf: Like) -> bool:
    """Returns whether a leaf is committed to devices; an uncommitted one must stay so, to follow its operands."""
    return leaf.sharding is not None and getattr(leaf, "committed", True)


def _place(new: np.ndarray, leaf: Like) -> Array:
    if is_key(leaf):
        key = _wrap_words(new, leaf)
        return jax.device_put(key, leaf.sharding) if _is_committed(leaf) else key
    if not _is_committed(leaf):
        # A weakly typed number (`0.1`) stays one: as float32 it would promote products with bfloat16.
        return jnp.asarray(new.item() if leaf.weak_type and not leaf.ndim else new)
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: new[index])


def _wrap_words(words: np.ndarray, leaf: Like) -> Array:
    impl = jax.random.key_impl(jnp.zeros(0, leaf.dtype))  # `leaf` may be a shape only
    return jax.random.wrap_key_data(jnp.asarray(words), impl=impl)


def _empty(leaf: Leaf) -> np.ndarray:
    if leaf.dtype.startswith("key"):
        return np.zeros((*leaf.shape, 0), np.uint32)
    return np.zeros(leaf.shape, jnp.dtype(leaf.dtype))


def whole_shape(marks: Sequence[Any], shape: Shape) -> Shape:
    """Returns the shape of the array that the marks distribute: unsharded, and without worker dimensions."""
    cuts = cutting_marks(marks)
    return tuple(cuts[-1].shape) if cuts and isinstance(cuts[-1], Sharded) else shape[len(cuts) :]


def same_kinds(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Returns whether two leaves have the same kinds of marks, over any number of workers."""
    return [type(mark) for mark in cutting_marks(left)] == [type(mark) for mark in cutting_marks(right)]


def _convert_leaf(was: Sequence[Any], found: np.ndarray, marks: Sequence[Any], leaf: Like, rule: Resize) -> np.ndarray:
    """Converts a global array to the marks and the shape of a leaf; keys are given and returned as their words."""
    if not is_key(leaf):
        return np.asarray(convert(was, found, marks, leaf.shape, rule))
    return np.asarray(jax.random.key_data(convert(was, _wrap_words(found, leaf), marks, leaf.shape, rule)))


def convert(
    was: Sequence[Any], found: Array | np.ndarray, marks: Sequence[Any], shape: Shape, rule: Resize = "mean"
) -> Array | np.ndarray:
    """Converts a global array to other marks and another shape; `rule` merges workers into one."""
    # Different kinds of marks are converted by way of the unsharded array.
    if not same_kinds(was, marks):
        found = _distribute(marks, _unshard(was, found, rule), shape)
    return refit(marks, found, shape)


def _unshard(marks: Sequence[Any], found: Array | np.ndarray, rule: Resize) -> Array | np.ndarray:
    """Undoes the marks like `jd.consensus`: per-worker values are merged, shards are joined."""
    # Each mark owns the first dimension that is left; only the last one can be Sharded, with padding at its end.
    for mark in cutting_marks(marks):
        if isinstance(mark, Sharded):
            found = found[: math.prod(mark.shape)].reshape(*mark.shape, *found.shape[1:])
        else:
            # Even if workers would get a copy or zero; `...` keeps scalars arrays.
            one = PerWorker(None, axis=mark.axis, resize="max" if mark.resize == "max" else rule)
            found = refit([one], found, (1, *found.shape[1:]))[0, ...]
    return found


def _distribute(marks: Sequence[Any], whole: Array | np.ndarray, shape: Shape) -> Array | np.ndarray:
    """Applies the marks like `jd.place`, the innermost first: each adds or shards its dimension."""
    cuts = cutting_marks(marks)
    for dimension in reversed(range(len(cuts))):
        mark, length = cuts[dimension], shape[dimension]
        if isinstance(mark, Sharded):
            flat = whole.reshape(math.prod(mark.shape), *whole.shape[len(mark.shape) :])
            whole = np.pad(flat, [(0, length - len(flat))] + [(0, 0)] * (flat.ndim - 1))
        else:
            whole = copy_to_workers(whole, length)
    return whole
