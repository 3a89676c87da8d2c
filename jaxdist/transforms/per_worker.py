"""Runs an optax transformation on each worker's own gradient, before the mean over workers."""

import optax

from .._core.types import AxisNames
from ..state.marks import PerWorker, axis_tuple, bind, is_mark, with_value
from .extra_args import with_extra_args
from .in_plain_jit import axes_of_terms, map_update, take_terms, workers_outside_map
from .weights import keep_unused, weight_of_leaves, zero_unless


def per_worker(tx: optax.GradientTransformation, *, axis: AxisNames = None) -> optax.GradientTransformationExtraArgs:
    """Runs a transformation on local gradients, before `all_reduce` (momentum, clipping, noise), with its own state.

    On a worker without examples in a step, `update(..., examples=0)` or `active=False`, the transformation gets zeros
    in place of a gradient of no data, which may be NaN, and the state stays as it is; with a tree of numbers, that of
    the leaves with 0.

    Under plain `jit` it maps itself over the gradients of `per_worker_value_and_grad`.

    *On the wire*: nothing.

    *State*: the state of `tx` as `PerWorker`.

    Args:
      tx: the transformation of local gradients.
      axis: the workers with a state of their own. `None`: those of the train state; name the fast axis inside
        `local_steps` or `noloco` over another one, `axis="chip"`.

    Examples:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = optax.chain(jd.transforms.per_worker(optax.trace(0.9)), jd.all_reduce(jd.exact()), optax.sgd(0.1))
      >>> type(tx.init(jnp.zeros(3))[0]).__name__
      'PerWorker'
    """
    tx = with_extra_args(tx)

    def init_fn(params):
        return PerWorker(tx.init(params), axis=axis, resize="mean")

    def update_one(updates, state, params=None, **extra_args):
        # A state that is a whole field of the train state has no mark inside the step; it is restored afterwards.
        old = state.value if is_mark(state) else state
        weight = weight_of_leaves(extra_args.get("examples"), extra_args.get("active"), updates)
        if weight is None:
            updates, value = tx.update(updates, old, params, **extra_args)
        else:
            like = updates
            updates, value = tx.update(zero_unless(weight > 0, updates), old, params, **extra_args)
            value = keep_unused(weight > 0, value, old, tx.init, like)
        return updates, with_value(state, value) if is_mark(state) else value

    of_one = optax.GradientTransformationExtraArgs(init_fn, update_one)  # pyright: ignore[reportArgumentType]

    def update_fn(updates, state, params=None, **extra_args):
        updates = take_terms(axis_tuple(axis) or axes_of_terms(updates), updates)
        names = workers_outside_map(updates)
        if not names:
            return update_one(updates, state, params, **extra_args)
        return map_update(of_one, names, updates, bind(state, names), params, extra_args, averages=False)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)  # pyright: ignore[reportArgumentType]
