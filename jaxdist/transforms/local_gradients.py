"""Checks that gradients are each worker's own, and their weighted mean."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._core.compat import mesh_axes_left_over, types_are_checked, unreduced_axes, varying_axes
from .._core.dtypes import explain_dtype, working_dtype
from .._core.trees import is_overwritten, leaves_with_collections
from .._core.types import Array, AxisNames, PyTree, State, Updates
from ..comm.base import Comm
from ..comm.over import over
from ..reducers.reducer import Reducer, Use, check_use
from ..state.marks import (
    Sharded,
    axis_tuple,
    is_mark,
    name_leaf,
)
from .extra_args import has_type
from .overwritten import explain_overwritten
from .weights import keep_unsent, scale_leaves, weight_of, weight_of_worker, widen_weight, zero_unless


def check_leaves(tree: PyTree, *, sharded: bool = False) -> None:
    """Checks that all leaves have a mean over workers: no integers, no second parameters, no `Sharded` leaves.

    With `sharded`, leaves may be sharded over another axis.
    """
    refuse_two_sets(tree)
    for path, leaf in leaves_with_collections(tree, is_mark):
        name = jax.tree_util.keystr(path) or "the gradient"
        if is_overwritten(path):
            raise ValueError(explain_overwritten(name))
        if isinstance(leaf, Sharded) and sharded:
            leaf = leaf.value
        if isinstance(leaf, Sharded):
            raise ValueError(
                f"{name} is Sharded: workers have different parts of it, so it has no mean over workers; "
                "use zero_redundancy for sharded parameters"
            )
        if is_mark(leaf):
            continue
        if problem := explain_dtype(leaf.dtype):
            raise ValueError(f"{name} has dtype {leaf.dtype}: {problem}")
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"{name} has dtype {leaf.dtype}: only floating leaves have gradients to reduce; keep counters and "
                "random keys out of the parameters, as nnx.split(model, nnx.Param, ...) does, or exclude the leaf "
                "with optax.masked or optax.partition"
            )


def check_shards(params: PyTree, axis: AxisNames) -> None:
    """Checks that parameters are sharded over other axes than that of the workers that synchronize them."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(params, is_leaf=is_mark)[0]:
        if isinstance(leaf, Sharded) and (leaf.axis is None or set(axis_tuple(leaf.axis)) & set(axis_tuple(axis))):
            where = "without the name of an axis" if leaf.axis is None else f"over axis {leaf.axis!r}"
            raise ValueError(
                f"{name_leaf('the parameter', path)} is Sharded {where}, and models differ over axis {axis!r}: name "
                "another axis, whose workers share a model, zero.shard(params, axis='chip'), and synchronize over "
                "axis='pod'"
            )


def check_local(updates: Updates, axis: AxisNames, *, reduced: str = "") -> None:
    """Checks, under `shard_map` with checked types, that gradients vary over the axis and so are not summed yet.

    `reduced` is another cause, with its cure, for transformations that take gradients after `all_reduce` too.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(updates)[0]:
        if unreduced_axes(leaf) & set(axis_tuple(axis)):
            raise ValueError(
                f"{name_leaf('the gradient', path)} is typed unreduced over axis {axis!r}: each worker has a term of "
                "its sum, which all_reduce, accumulate and zero_redundancy over this axis take; for other methods "
                f"compute it with local_value_and_grad(loss, axis={axis!r})"
            )
        if varies_nowhere(leaf, axis):
            raise ValueError(
                f"{name_leaf('the gradient', path)} is the same on all workers of axis {axis!r}: {reduced}jax.grad "
                "of replicated parameters has summed it already, so compressing now saves nothing and averaging is "
                f"wrong; compute it with local_value_and_grad(loss, axis={axis!r})"
            )


def varies_nowhere(leaf: Array, axis: AxisNames) -> bool:
    """Returns whether, under `shard_map` with checked types, a value is typed as equal on all workers of the axis."""
    axes = axis_tuple(axis)
    return types_are_checked(axes) and not varying_axes(leaf).issuperset(axes)


def varies_somewhere(leaf: Array, axis: AxisNames) -> bool:
    """Returns whether, under `shard_map` with checked types, a value is typed as differing between the workers."""
    return bool(varying_axes(leaf) & set(axis_tuple(axis)))


def reduce_weighted(
    reduce: Callable[[Updates, State], tuple[Updates, State]],
    updates: Updates,
    state: State,
    comm: Comm,
    examples: Array | None,
    *,
    plain: bool,
    divide: bool = True,
    reducer: Reducer | None = None,
) -> tuple[Updates, State, Array | bool]:
    """Returns the mean of updates weighted by `examples / mean(examples)`; four bytes more on the wire.

    Also returns the new state of `reduce(updates, state) -> (mean, state)`, and a flag that is true if any worker had
    an example: if not, the mean is zero and the state is unchanged. With weights of leaves the flag is `[leaves]`.

    Args:
      examples: the number of examples behind this worker's updates, or `[leaves]`, those behind each leaf, for four
        bytes each; `None`: all workers have the same weight.
      plain: reduces the count together with the updates, in the same collective.
      divide: divides by the mean number of examples; otherwise weights are the examples themselves.
      reducer: what `reduce` runs, which may weight workers itself or refuse to; `None`: a plain mean.
    """
    if examples is None:
        mean, new_state = reduce(updates, state)
        return mean, new_state, True
    is_weighted = reducer is not None and reducer.forms.weighted
    if reducer is not None:
        check_use(Use.EXAMPLES, reducer)
    if examples.ndim and is_weighted:
        raise ValueError(
            "a median or a trimmed mean takes one number as examples=, got a tree: pass the number of this worker's "
            "examples, or use a mean"
        )
    examples = widen_weight(examples, updates)
    # A linear reducer averages n_w g_w and n_w together: Σ n_w g_w / Σ n_w in one collective. Not in float16, whose
    # largest number is 65504: a batch of 512 tokens would turn gradients of 200 into infinity.
    if plain and not any(x.dtype == jnp.float16 for x in jax.tree.leaves(updates)):
        (mean, count), new_state = reduce((scale_leaves(updates, examples), comm.varying(examples)), state)
        some = count > 0
        mean = scale_leaves(mean, 1 / jnp.where(some, count, 1)) if divide else mean
    elif is_weighted:
        # A maximum of flags, not a sum of counts: NaN for a number of examples must not end the round for all.
        some = comm.max(comm.varying((examples > 0).astype(jnp.float32))) > 0
        mean, new_state = reduce(updates, state)
    # A compressor needs the weight first: entries must not grow with the number of examples.
    else:
        weight, some = weight_of(examples, comm)
        mean, new_state = reduce(scale_leaves(updates, weight if divide else examples), state)
    # Without any example the step is skipped, residuals included.
    return zero_unless(some, mean), keep_unsent(some, new_state, state, updates), some


def refuse_model_axes(what: str, advice: str) -> None:
    """Checks that the mesh has no further axes that the compiler shards: flattening leaves would gather them."""
    left = mesh_axes_left_over()
    if left:
        raise ValueError(
            f"the mesh has further axes {left} that the compiler shards, and {what} flattens leaves, which would "
            f"gather them: {advice}"
        )


def local_gradients(
    updates: Updates, axis: AxisNames, examples: Any, active: Any, *, name: str
) -> tuple[Updates, Comm]:
    """Checks the gradients for an optimizer that communicates, weighs them, and converts them to float32 or better."""
    check_leaves(updates)
    comm = over(axis)
    check_local(updates, axis)
    refuse_model_axes("this optimizer", "use all_reduce(reducer, specs=) and an optimizer of optax")
    updates = jax.tree.map(lambda x: x.astype(working_dtype(x.dtype)), updates)
    weight = weight_of_worker(examples, active, name=name)
    if weight is not None:
        updates = scale_leaves(updates, weight_of(widen_weight(weight, updates), comm)[0])
    return updates, comm


def refuse_two_sets(params: PyTree) -> None:
    """Refuses the parameters of `optax.lookahead`."""
    if has_type(params, optax.LookaheadParams):
        raise ValueError(
            "optax.lookahead keeps two sets of parameters, of which one has gradients; use "
            "local_steps(inner, optax.sgd(slow_step_size), sync_period=k), whose anchor is the slow set, or "
            "optax.chain(all_reduce(reducer), optax.lookahead(...))"
        )


def with_gradients(params: PyTree) -> PyTree:
    """Returns the parameters that have gradients; of `optax.lookahead`, the fast ones."""
    # The slow parameters follow the fast ones, without gradients.
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def check_shapes(updates: Updates, params: PyTree | None) -> None:
    """Checks that gradients have the shapes of their parameters; gradients of single examples have not."""
    if jax.tree.structure(updates) != jax.tree.structure(params):
        return
    for (path, leaf), param in zip(jax.tree_util.tree_leaves_with_path(updates), jax.tree.leaves(params), strict=True):
        if leaf.shape != param.shape:
            raise ValueError(
                f"the gradient {jax.tree_util.keystr(path)} has shape {leaf.shape} and its parameter {param.shape}; "
                "workers average one gradient each. Put a transformation of the gradients of single examples in front: "
                "optax.chain(per_worker(optax.contrib.differentially_private_aggregate(...)), ...)"
            )


def check_outer(outer: optax.GradientTransformationExtraArgs, params: PyTree) -> None:
    """Checks that an outer optimizer needs only the drift and a learning rate: it sees no loss."""
    likes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    try:
        # Traced with shapes only: the mistake shows before the first round.
        jax.eval_shape(lambda p: outer.update(p, outer.init(p), p, learning_rate=0.1), likes)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the outer optimizer gets the mean drift and learning_rate= alone, and fails with them: {error}. Use "
            "one that needs no loss, optax.sgd(0.7, momentum=0.9, nesterov=True)"
        ) from error
