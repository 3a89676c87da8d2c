"""Local gradients: transformations of them, checks that they are not summed yet, and their weighted mean."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from .._core.compat import mesh_axes_being_mapped, mesh_axes_left_over, varying_axes
from .._core.dtypes import working_dtype
from .._core.types import Array, AxisNames, PyTree, State, Updates
from ..comm.base import Comm
from ..comm.over import over
from ..state.marks import PerWorker, Sharded, axis_tuple, is_mark, named, with_value
from .optax_wrappers import refuse_two_sets


def per_worker(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Runs a transformation on local gradients, before `all_reduce` (momentum, clipping, noise), with its own state.

    *On the wire*: nothing.

    *State*: the state of `tx` as `PerWorker`.

    Args:
      tx: any transformation without communication.

    Returns:
      The same transformation with its state marked.

    Example:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = optax.chain(jd.transforms.per_worker(optax.trace(0.9)), jd.all_reduce(jd.exact()), optax.sgd(0.1))
      >>> type(tx.init(jnp.zeros(3))[0]).__name__
      'PerWorker'

    References:
      Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training", arXiv
      1712.01887, 2018 (momentum before compression).
    """
    tx = optax.with_extra_args_support(tx)

    def init_fn(params):
        return PerWorker(tx.init(params), resize="mean")

    def update_fn(updates, state, params=None, **extra_args):
        # A state that is a whole field of the train state has no mark inside the step; it is restored afterwards.
        updates, value = tx.update(updates, state.value if is_mark(state) else state, params, **extra_args)
        return updates, with_value(state, value) if is_mark(state) else value

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)  # pyright: ignore[reportArgumentType]


def check_leaves(tree: PyTree) -> None:
    """Checks that all leaves have a mean over workers: no integers, no `Sharded` leaves, no second parameters."""
    refuse_two_sets(tree)
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_mark)[0]:
        name = jax.tree_util.keystr(path) or "the gradient"
        if isinstance(leaf, Sharded):
            raise ValueError(
                f"{name} is Sharded: workers have different parts of it, so it has no mean over workers; "
                "use zero_redundancy for sharded parameters"
            )
        if not is_mark(leaf) and not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"{name} has dtype {leaf.dtype}: only floating leaves have gradients to reduce; exclude it with "
                "optax.masked or optax.partition"
            )


def check_local(updates: Updates, axis: AxisNames) -> None:
    """Checks, under `shard_map` with checked types, that gradients vary over the axis and so are not summed yet."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(updates)[0]:
        if varies_nowhere(leaf, axis):
            raise ValueError(
                f"{named('the gradient', path)} is the same on all workers of axis {axis!r}: jax.grad of "
                "replicated parameters has summed it already, so compressing now saves nothing and averaging is wrong; "
                f"compute it with local_value_and_grad(loss, axis={axis!r})"
            )


def varies_nowhere(leaf: Array, axis: AxisNames) -> bool:
    """Returns whether, under `shard_map` with checked types, a value is typed as equal on all workers of the axis."""
    axes = axis_tuple(axis)
    mapped = bool(axes) and mesh_axes_being_mapped().issuperset(axes) and _types_are_checked(axes)
    return mapped and not varying_axes(leaf).issuperset(axes)


def varies_somewhere(leaf: Array, axis: AxisNames) -> bool:
    """Returns whether, under `shard_map` with checked types, a value is typed as differing between the workers."""
    return bool(varying_axes(leaf) & set(axis_tuple(axis)))


def _types_are_checked(axes: tuple[str, ...]) -> bool:
    return bool(varying_axes(jax.lax.axis_index(axes[0])))


def scale(tree: Updates, factor: Array) -> Updates:
    """Multiplies by `factor`; a factor of 0 gives 0 even for NaN, since a mean over no examples often is 0/0."""
    return jax.tree.map(
        lambda x: jnp.where(factor == 0, 0, x.astype(working_dtype(x.dtype)) * factor).astype(x.dtype), tree
    )


def reduce_weighted(
    reduce: Callable[[Updates, State], tuple[Updates, State]],
    updates: Updates,
    state: State,
    comm: Comm,
    examples: Array | None,
    *,
    plain: bool,
    divide: bool = True,
) -> tuple[Updates, State, Array | bool]:
    """Returns the mean of updates weighted by `examples / mean(examples)`; four bytes more on the wire.

    Args:
      reduce: `reduce(updates, state) -> (mean, state)`.
      updates: this worker's updates.
      state: the state of the reducer.
      comm: the group.
      examples: the number of examples behind this worker's updates; `None`: all workers have the same weight.
      plain: reduces the count together with the updates, in the same collective.
      divide: divides by the mean number of examples; otherwise weights are the examples themselves.

    Returns:
      The mean, the new state, and a flag that is true if any worker had an example: if not, the mean is zero and the
      state is unchanged.
    """
    if examples is None:
        mean, new_state = reduce(updates, state)
        return mean, new_state, True
    # A linear reducer averages n_w g_w and n_w together: Σ n_w g_w / Σ n_w in one collective.
    if plain:
        (mean, count), new_state = reduce((scale(updates, examples), comm.varying(examples)), state)
        some = count > 0
        mean = scale(mean, 1 / jnp.where(some, count, 1)) if divide else mean
    # A compressor needs the weight first: entries must not grow with the number of examples.
    else:
        weight, some = weight_of(examples, comm)
        mean, new_state = reduce(scale(updates, weight if divide else examples), state)
    # Without any example the step is skipped, residuals included.
    mean = jax.tree.map(lambda x: jnp.where(some, x, jnp.zeros_like(x)), mean)
    return mean, jax.tree.map(lambda new, old: jnp.where(some, new, old), new_state, state), some


def weight_of(examples: Array | int, comm: Comm) -> tuple[Array, Array]:
    """Returns `examples / mean(examples)`, for four bytes on the wire, and whether any worker has examples."""
    count = jnp.asarray(examples, jnp.float32)
    mean = comm.mean(comm.varying(count))
    return count / jnp.where(mean > 0, mean, 1), mean > 0


def refuse_model_axes(what: str, advice: str) -> None:
    """Checks that the mesh has no further axes that the compiler shards: flattening leaves would gather them."""
    left = mesh_axes_left_over()
    if left:
        raise ValueError(
            f"the mesh has further axes {left} that the compiler shards, and {what} flattens leaves, which would "
            f"gather them: {advice}"
        )


def local_gradients(updates: Updates, axis: AxisNames, examples: Array | int | None) -> tuple[Updates, Comm]:
    """Checks the gradients for an optimizer that communicates, and converts them to float32 or better.

    Args:
      updates: this worker's gradients.
      axis: the axis of the workers.
      examples: the number of examples behind them, which weighs them by `examples / mean(examples)`.

    Returns:
      The gradients, and the group of workers.
    """
    check_leaves(updates)
    comm = over(axis)
    check_local(updates, axis)
    refuse_model_axes("this optimizer", "use all_reduce(reducer, specs=) and an optimizer of optax")
    updates = jax.tree.map(lambda x: x.astype(working_dtype(x.dtype)), updates)
    if examples is not None:
        updates = scale(updates, weight_of(examples, comm)[0])
    return updates, comm
