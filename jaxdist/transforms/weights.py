"""What `examples=` and `active=` of an update mean: how much this worker's gradient counts, leaf by leaf if need be.

Every transformation reads them here. A weight is one number in float32, or `[leaves]`, one for each leaf of the
gradient; a weight of 0 leaves the gradient out, whatever it holds.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import DTypeLike

from .._core.compat import varying_axes
from .._core.dtypes import factor_dtype, widen
from .._core.trees import tree_where
from .._core.types import Array, Bool, Float, PyTree, State, Updates
from ..comm.base import Comm
from ..state.marks import NO_PARAMETER, PerWorker, is_mark, parameter_indices
from ..wire.buffers import leaf_order


def weight_of_worker(examples: Any, active: Any, *, name: str) -> Float[Array, ""] | None:
    """Returns the weight of this worker's gradient: its examples, by default 1, or 0 if it is not active.

    `None` if neither was passed: all workers count alike. `name` is the transformation's, for messages.

    Raises:
      ValueError: `examples` is a tree, has a shape, or is a Python or NumPy number that is negative or not finite;
        `active` is not one boolean. Values that the step computes are not checked.
      TypeError: `examples` is no number.
    """
    if examples is not None and not jax.tree_util.all_leaves([examples]):
        raise ValueError(
            f"{name} takes one number as examples=, got a tree, {jax.tree.structure(examples)}: pass the number of "
            "this worker's examples; weights for single leaves are for all_reduce, local_steps, zero_redundancy and "
            "per_worker"
        )
    number = None if examples is None else as_number("examples", examples)
    return number if active is None else _mask(jnp.ones((), jnp.float32) if number is None else number, active)


def weight_of_leaves(examples: Any, active: Any, updates: Updates) -> Float[Array, "..."] | None:
    """Returns what `weight_of_worker` does, or `[leaves]` if `examples` is a tree of numbers: a prefix of `updates`.

    Raises:
      ValueError: the errors of `weight_of_worker`; the tree is no prefix of the gradient's.
    """
    if examples is None or jax.tree_util.all_leaves([examples]):
        return weight_of_worker(examples, active, name="this transformation")

    def repeat(number: Any, part: PyTree) -> list[Array]:
        return [as_number("examples", number)] * len(jax.tree.leaves(part))

    try:
        numbers = jax.tree.map(repeat, examples, updates)
    except (ValueError, TypeError) as error:
        if not jax.tree_util.all_leaves(jax.tree.leaves(examples)):
            raise
        raise ValueError(
            f"examples has the tree {jax.tree.structure(examples)}, which is no prefix of the gradient's, "
            f"{jax.tree.structure(updates)}: pass one number, or a tree of a number for each leaf or subtree ({error})"
        ) from error
    # `None` in place of a number would leave leaves without any.
    found = jax.tree.leaves(numbers)
    if len(found) != len(jax.tree.leaves(updates)):
        raise ValueError("examples has no number for some leaves of the gradient: pass one for each leaf or subtree")
    weights = jnp.stack(found) if found else jnp.zeros(0, jnp.float32)
    return weights if active is None else _mask(weights, active)


def number_per_leaf(params: PyTree) -> PerWorker:
    """Returns zeros `[leaves]`, this worker's number of examples behind each leaf, with the order of the leaves.

    Where the number of workers changes, each gets the mean: nothing that was counted is lost.
    """
    order = leaf_order(params)
    return PerWorker(jnp.zeros(len(order), jnp.float32), resize="mean", order=order)


def as_number(name: str, number: Any, kept: DTypeLike = jnp.float32) -> Float[Array, ""]:
    """Returns a number of examples of this worker in the dtype `kept`.

    Raises:
      ValueError: it has a shape, or is a Python or NumPy number that is negative or not finite.
      TypeError: it is no real number.
    """
    if isinstance(number, bool | int | float | np.number | np.ndarray | np.bool_):
        known = np.asarray(number)
        if known.dtype.kind in "biuf" and known.shape == () and not 0 <= float(known) < float("inf"):
            raise ValueError(f"{name} must be at least 0 and finite, got {number}")
    elif not isinstance(number, jax.Array):
        raise TypeError(f"{name} must be this worker's number of examples, got {number!r}")
    dtype = jnp.result_type(number)
    if not any(jnp.issubdtype(dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating)):
        raise TypeError(f"{name} must be a number, got an array of {dtype}")
    if jnp.shape(number) != ():
        raise ValueError(
            f"{name} must be one number, that of this worker, got shape {jnp.shape(number)}: a step sees one worker; "
            f"sum over its batch, or take the only entry, {name}[0]"
        )
    return jnp.asarray(number).astype(kept)


def as_flag(active: Any) -> Bool[Array, ""]:
    """Returns `active=` as a boolean of this worker.

    Raises:
      ValueError: it is a tree, or has a shape.
      TypeError: it is neither a boolean nor a number.
    """
    if not jax.tree_util.all_leaves([active]):
        raise ValueError(
            f"active must be one boolean, that of this worker, got a tree, {jax.tree.structure(active)}: to leave out "
            "single leaves pass numbers, as examples={'w': 1, 'b': 0}"
        )
    if not isinstance(active, bool | int | float | np.number | np.ndarray | np.bool_ | jax.Array):
        raise TypeError(f"active must be one boolean, that of this worker, got {active!r}")
    if jnp.shape(active) != ():
        raise ValueError(f"active must be one boolean, that of this worker, got shape {jnp.shape(active)}")
    flag = jnp.asarray(active)
    return flag if jnp.issubdtype(flag.dtype, jnp.bool_) else flag > 0


def widen_weight(weight: Array, tree: PyTree) -> Array:
    """Returns a weight in float64 if the tree has leaves in it: a quotient in float32 would round their mean."""
    return weight.astype(factor_dtype(tree))


def weight_of(examples: Array, comm: Comm) -> tuple[Array, Array]:
    """Returns `examples / mean(examples)`, for four bytes on the wire, and whether any worker has examples."""
    mean = comm.mean(comm.varying(examples))
    # n_w / mean(n): the weights have the mean 1, so that thresholds and scales of compressors keep their meaning.
    return examples / jnp.where(mean > 0, mean, 1), mean > 0


def check_shared(name: str, weight: Array, params: PyTree) -> None:
    """Checks that `weight`, of the argument with this name, is one for all workers that share a model.

    Raises:
      ValueError: under `shard_map` with checked types, it differs over an axis over which no parameter does.
    """
    shared = varying_axes(weight).difference(*(varying_axes(x) for x in jax.tree.leaves(params)))
    if shared:
        axis = sorted(shared)[0]
        raise ValueError(
            f"{name}= differs over the axis {axis!r}, whose workers share a model and take its steps together: pass "
            f"what all of them have, such as jax.lax.psum({name}, {axis!r}), and scale their losses if they count "
            "differently"
        )


def _mask(weight: Array, active: Any) -> Array:
    # Selected and not multiplied, since 0 times NaN is NaN.
    return jnp.where(as_flag(active), weight, 0)


def scale_leaves(tree: Updates, factor: Array) -> Updates:
    """Multiplies by `factor`, one number or `[leaves]`; a factor of 0 gives 0 even for NaN: a mean may be 0/0."""

    # In float32, where a product of half-precision numbers would overflow.
    def scale_leaf(x, factor):
        wide = widen(x)
        return jnp.where(factor == 0, 0, wide * factor.astype(wide.dtype)).astype(x.dtype)

    return _map_leaves(scale_leaf, tree, factor)


def divide_leaves(tree: Updates, number: Array) -> Updates:
    """Divides by `number`, one or `[leaves]`; by 1 where it is 0. Quotients are in float32 or better."""

    def divide_leaf(x, number):
        wide = widen(x)
        return wide / jnp.where(number > 0, number, 1).astype(wide.dtype)

    return _map_leaves(divide_leaf, tree, number)


def zero_unless(used: Array, tree: Updates) -> Updates:
    """Returns the tree with zeros in place of the leaves that are not `used`, one boolean or `[leaves]`."""
    return _map_leaves(lambda x, used: jnp.where(used, x, jnp.zeros_like(x)), tree, used)


def _map_leaves(f: Callable[[Array, Array], Array], tree: PyTree, numbers: Array) -> PyTree:
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten([f(x, numbers if numbers.ndim == 0 else numbers[i]) for i, x in enumerate(leaves)])


def keep_unused(used: Array, new: State, old: State, init: Callable[[PyTree], State], params: PyTree) -> State:
    """Returns the new state of an optimizer, and of what belongs to a leaf that is not `used` the old one.

    What belongs to no leaf, such as counts, is new if any leaf is used.
    """
    if used.ndim == 0:
        return tree_where(used, new, old)
    owners = jax.tree.leaves(parameter_indices(init, old, params))
    any_used = used.any()
    leaves, structure = jax.tree.flatten(new)
    return structure.unflatten(
        [
            tree_where(any_used if k == NO_PARAMETER else used[k], x, y)
            for k, x, y in zip(owners, leaves, jax.tree.leaves(old), strict=True)
        ]
    )


def keep_unsent(used: Array, new: State, old: State, updates: Updates) -> State:
    """Returns the new state of a reducer, and the old one of what belongs to leaves that no worker used.

    Replicated parts of one array for each leaf are kept as residuals are: what EF21 has of all workers must stay the
    mean of what they have. Numbers are those of the step.

    Raises:
      ValueError: weights are those of single leaves, and the reducer keeps what it has not sent in another form than
        one array for each leaf.
    """
    if used.ndim == 0:
        return tree_where(used, new, old)
    split = partial(_leaves_of, jax.tree.structure(updates), [x.shape for x in jax.tree.leaves(updates)])

    def is_by_leaf(node: Any) -> bool:
        return split(node) is not None

    def keep_node(after: Any, before: Any) -> Any:
        if is_mark(before):
            kept = jax.tree.map(keep_own, after.value, before.value, is_leaf=is_by_leaf)
            return jax.tree.unflatten(jax.tree.structure(after), jax.tree.leaves(kept))
        return keep_leaves(after, before) if is_by_leaf(before) else tree_where(used.any(), after, before)

    def keep_own(after: Any, before: Any) -> Any:
        if not is_by_leaf(before) and before.ndim:
            raise ValueError(
                f"weights for single leaves need a reducer that keeps its residuals leaf by leaf, and this one has "
                f"shape {before.shape}: use exact(), compressed(...) or error_feedback(compressed(...)), or pass one "
                "number as examples="
            )
        return keep_node(after, before)

    def keep_leaves(after: Any, before: Any) -> Any:
        pairs = zip(split(after) or [], split(before) or [], strict=True)
        kept = [None if x is None else tree_where(used[i], x, y) for i, (x, y) in enumerate(pairs)]
        return jax.tree.structure(updates).unflatten(kept)

    return jax.tree.map(keep_node, new, old, is_leaf=lambda node: is_mark(node) or is_by_leaf(node))


def _leaves_of(like: Any, shapes: list[tuple[int, ...]], node: Any) -> list[Any] | None:
    """The arrays of a tree of this structure, `None` for leaves that another part of the state has."""
    try:
        found = like.flatten_up_to(node)
    except (ValueError, TypeError):
        return None
    known = [(x, shape) for x, shape in zip(found, shapes, strict=True) if x is not None]
    return found if known and all(_is_like(x, shape) for x, shape in known) else None


def _is_like(x: Any, shape: tuple[int, ...]) -> bool:
    """Whether a part of a state has the entries of a leaf of this shape, or of all of its shards over other axes."""
    if not isinstance(x, PerWorker):
        return getattr(x, "shape", None) == shape
    inside = x.value
    while isinstance(inside, PerWorker):
        inside = inside.value
    return isinstance(inside, jax.Array) and inside.size == math.prod(shape)
