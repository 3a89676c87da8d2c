"""Converts a state between global arrays and one worker's view, and checks what a step returns."""

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

# The rooms whose NamedTuples are states of reducers and transformations.
ROOMS = ("decentralized", "local_sgd", "offload", "online", "optimizers", "reducers", "transforms", "zero")
STATE_MODULES = tuple(f"{__name__.partition('.')[0]}.{room}." for room in ROOMS)


def manual_specs(state: State, axes: Sequence[str]) -> PyTree:
    """Returns PartitionSpecs over these axes only; all other axes are left to the compiler."""
    return map_marked(lambda marks, _: PartitionSpec(*(_spec_entry(mark, axes) for mark in cutting(marks))), state)


def open_state(state: State, axes: Sequence[str]) -> State:
    """Removes the worker dimensions of length 1, and the marks around whole fields, inside the mapped function."""

    def squeeze_leaf(marks, leaf):
        return jnp.squeeze(leaf, _worker_dimensions(marks, axes))

    return _map_fields(lambda field: field.value if is_mark(field) else field, map_marked(squeeze_leaf, state))


def run_step(step: Callable[..., Any], state: State, batch: PyTree, **static: Any) -> Any:
    """Runs the step of one worker, and adds a note to the error of a step that looks for a removed mark."""
    try:
        return step(state, batch, **static)
    except AttributeError as error:
        if error.name == "value":
            error.add_note(
                "jaxdist: a mark around the whole state, or around a whole field, is removed before the step sees it. "
                'The state of a transformation or a reducer needs its marks: nest it deeper, {"opt": tx.init(x)}.'
            )
        raise


def close_state(new: State, like: State, axes: Sequence[str]) -> State:
    """Undoes `open_state`; `like` is the state before the step, with its marks."""
    marked = _map_fields(
        lambda field, old: with_value(old, field) if is_mark(old) and not is_mark(field) else field, new, like
    )

    def expand_leaf(marks, leaf):
        return jnp.expand_dims(leaf, _worker_dimensions(marks, axes))

    return map_marked(expand_leaf, marked)


def is_spec(x: Any) -> bool:
    """Returns whether `x` is a PartitionSpec, which JAX would flatten as a tuple."""
    return isinstance(x, PartitionSpec)


def _worker_dimensions(marks: Sequence[Any], axes: Sequence[str]) -> list[int]:
    """Returns the dimensions of a leaf that index workers."""
    return [i for i, mark in enumerate(cutting(marks)) if isinstance(mark, PerWorker) and _spec_entry(mark, axes)]


def _spec_entry(mark: Any, axes: Sequence[str]) -> Any:
    """Returns the mesh axes of a mark as an entry of a PartitionSpec over `axes`: all of them or none."""
    names = axis_tuple(mark.axis)
    if not set(names) <= set(axes):
        return None
    return names[0] if len(names) == 1 else names


def _map_fields(f: Any, state: State, *rest: State) -> State:
    """Maps over the direct children of a state: the fields of a NamedTuple, the entries of a dict."""

    def fields(tree):
        return jax.tree.flatten(tree, is_leaf=lambda x: x is not tree)

    # The states of reducers and transformations keep their marks, which their own functions look for.
    if type(state).__module__.startswith(STATE_MODULES):
        return state
    if is_mark(state) or (rest and is_mark(rest[0])) or jax.tree_util.all_leaves([state]):
        return f(state, *rest)
    children, structure = fields(state)
    others = [fields(tree)[0] for tree in rest]
    # A step that adds or drops fields is reported by `check_same`.
    if any(len(other) != len(children) for other in others):
        return state
    return structure.unflatten([f(*group) for group in zip(children, *others, strict=True)])


def check_same(new: State, old: State) -> None:
    """Checks that a step returns a state with the tree, shapes and dtypes of the one that it received."""
    found, expected = jax.tree.structure(new), jax.tree.structure(old)
    if found != expected:
        raise ValueError(
            f"the step returned a state with another tree than it received:\n  received {expected}\n  returned {found}"
        )
    for (path, leaf), before in zip(jax.tree_util.tree_flatten_with_path(new)[0], jax.tree.leaves(old), strict=True):
        if leaf.shape != before.shape or leaf.dtype != before.dtype:
            name = f"leaf `{leaf_name(path)}` of the state" if path else "the state"
            raise ValueError(
                f"{name} was {before.dtype}{list(before.shape)} before the step and is now "
                f"{leaf.dtype}{list(leaf.shape)}: a step must keep shapes and dtypes"
            )


def as_weak_as(new: State, old: State) -> State:
    """Returns the new state with the weak types of the old one, so that the next call is not traced again.

    Weak types are kept, as they decide promotions: 0.1 times bfloat16 is bfloat16, but float32 with a strong 0.1.
    """
    return jax.tree.map(lambda x, before: with_weak_type(x, jax.typeof(before).weak_type), new, old)


def check_agreed(tree: PyTree, axes: Sequence[str], *, what: str, advice: str) -> None:
    """Checks that no leaf outside marks is typed as differing between workers."""

    def check_leaf(marks, path, leaf):
        over = {name for mark in cutting(marks) for name in axis_tuple(mark.axis)}
        differs = varying_axes(leaf) & set(axes) - over
        if differs:
            name = f"{what} `{leaf_name(path)}`" if path else what
            raise ValueError(f"{name} differs between workers (axis {', '.join(sorted(differs))}): {advice}")

    map_marked_with_path(check_leaf, tree)
