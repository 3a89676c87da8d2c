"""From global arrays to what one worker sees, and back."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .._core.compat import varying_axes, with_weak_type
from .._core.trees import leaf_name
from .._core.types import PyTree, State
from ..state.marks import PerWorker, axis_tuple, is_mark, map_marked, map_marked_with_path, with_value
from ..state.placement import cutting

# The modules whose NamedTuples are states of reducers and transformations.
ROOMS = ("decentralized", "local_sgd", "offload", "online", "optimizers", "reducers", "transforms", "zero")
KEEPERS = tuple(f"{__name__.partition('.')[0]}.{room}." for room in ROOMS)


def manual_specs(state: State, axes: Sequence[str]) -> PyTree:
    """The PartitionSpecs over these axes alone: what lies along others is left to the compiler."""
    return map_marked(lambda marks, _: PartitionSpec(*(_along(mark, axes) for mark in cutting(marks))), state)


def open_state(state: State, axes: Sequence[str]) -> State:
    """Inside the mapped function: takes off the worker dimensions of length 1 and the marks around whole fields."""

    def one(marks, leaf):
        gone = [i for i, mark in enumerate(cutting(marks)) if isinstance(mark, PerWorker) and _along(mark, axes)]
        return jnp.squeeze(leaf, gone)

    return _map_fields(lambda field: field.value if is_mark(field) else field, map_marked(one, state))


def run_step(step: Callable[..., Any], state: State, batch: PyTree, **static: Any) -> Any:
    """The step of one worker, whose state is open; says so to what looks for a mark that has been taken off."""
    try:
        return step(state, batch, **static)
    except AttributeError as error:
        if error.name == "value":
            error.add_note(
                "jaxdist: a mark around the whole state, or around a whole field of it, is taken off before the step "
                'sees it. What a transformation or a reducer keeps wants its marks: put it deeper, {"opt": tx.init(x)}.'
            )
        raise


def close_state(new: State, like: State, axes: Sequence[str]) -> State:
    """The inverse of `open_state`; `like` is the state as it came in, marks on."""
    marked = _map_fields(
        lambda field, old: with_value(old, field) if is_mark(old) and not is_mark(field) else field, new, like
    )

    def one(marks, leaf):
        back = [i for i, mark in enumerate(cutting(marks)) if isinstance(mark, PerWorker) and _along(mark, axes)]
        return jnp.expand_dims(leaf, back)

    return map_marked(one, marked)


def _along(mark: Any, axes: Sequence[str]) -> Any:
    """The mesh axes of a mark as an entry of a PartitionSpec over `axes`: all of them or none."""
    names = axis_tuple(mark.axis)
    if not set(names) <= set(axes):
        return None
    return names[0] if len(names) == 1 else names


def _map_fields(f: Any, state: State, *rest: State) -> State:
    """Maps over the direct children of a state (the fields of a NamedTuple, the entries of a dict), whole."""

    def fields(tree):
        return jax.tree.flatten(tree, is_leaf=lambda x: x is not tree)

    # What a reducer or a transformation keeps is not opened: its own functions look for the marks.
    if type(state).__module__.startswith(KEEPERS):
        return state
    if is_mark(state) or (rest and is_mark(rest[0])) or jax.tree_util.all_leaves([state]):
        return f(state, *rest)
    children, structure = fields(state)
    others = [fields(tree)[0] for tree in rest]
    if any(len(other) != len(children) for other in others):
        return state  # the caller compares the trees and says what differs
    return structure.unflatten([f(*group) for group in zip(children, *others, strict=True)])


def check_same(new: State, old: State) -> None:
    """Raises unless a step returns the state it was given: same tree, shapes and dtypes."""
    found, expected = jax.tree.structure(new), jax.tree.structure(old)
    if found != expected:
        raise ValueError(
            f"the step returned a state with another tree than it was given:\n  given    {expected}\n  returned {found}"
        )
    for (path, leaf), before in zip(jax.tree_util.tree_flatten_with_path(new)[0], jax.tree.leaves(old), strict=True):
        if leaf.shape != before.shape or leaf.dtype != before.dtype:
            name = f"leaf `{leaf_name(path)}` of the state" if path else "the state"
            raise ValueError(
                f"{name} came in as {before.dtype}{list(before.shape)} and went out as "
                f"{leaf.dtype}{list(leaf.shape)}: a step must keep shapes and dtypes"
            )


def as_weak_as(new: State, old: State) -> State:
    """The new state with the weak types of the old one: with others the next call would be traced and compiled again.

    They are not taken away for good: a rate of 0.1 times bfloat16 is bfloat16, and as float32 it would be float32.
    """
    return jax.tree.map(lambda x, before: with_weak_type(x, jax.typeof(before).weak_type), new, old)


def check_agreed(tree: PyTree, axes: Sequence[str], *, what: str, advice: str) -> None:
    """Raises where a leaf outside marks is typed as differing between workers."""

    def one(marks, path, leaf):
        over = {name for mark in cutting(marks) for name in axis_tuple(mark.axis)}
        differs = varying_axes(leaf) & set(axes) - over
        if differs:
            name = f"{what} `{leaf_name(path)}`" if path else what
            raise ValueError(f"{name} differs between workers (axis {', '.join(sorted(differs))}): {advice}")

    map_marked_with_path(one, tree)
