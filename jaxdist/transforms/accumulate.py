"""Gradients of several calls of the step, kept by each worker and sent once."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._core.dtypes import working_dtype
from .._core.trees import next_count
from .._core.types import Array, AxisNames, Int, State, Updates
from ..state.marks import PerWorker, bind, with_value
from .local_gradients import check_leaves, check_local, scale


class AccumulateState(NamedTuple):
    """`total` and `examples` are each worker's sums since the last sync, `count` the calls since then (agreed)."""

    inner: State
    total: PerWorker
    examples: PerWorker
    count: Int[Array, ""]


def accumulate(
    tx: optax.GradientTransformation, steps: int | None = None, *, axis: AxisNames = "data"
) -> optax.GradientTransformationExtraArgs:
    """DDP's `no_sync`: gradients of `steps` calls are summed where they are, and `tx` sees their mean in the last one.

    What `optax.MultiSteps` is to one worker: it may stand around `all_reduce`, and calls in between send nothing. Where
    the whole batch is at hand, `local_value_and_grad(micro_batches=)` needs no state for it.

    *On the wire*: what `tx` sends, in one call of `steps`; nothing in the others.

    *State*: that of `tx`; a sum like the parameters in float32 and a number of examples for each worker; a count.

    Args:
      tx: the whole chain, `all_reduce` and the optimizer. `skip_nonfinite` and `dynamic_loss_scale` go inside, and
        schedules in it count syncs.
      steps: how many calls make one update. `None`: the caller says so each time with `sync=`.
      axis: the mesh axis of the workers.

    Returns:
      The transformation. Its updates are zero between two syncs. `update` takes `sync=`, a Python bool that decides in
      place of the count, so that the program for `False` has no collective in it
      (`distribute(..., static_argnames=("sync",))`), and `examples=`, which weighs calls as well as workers.

    Raises:
      ValueError: `steps` is below 1; at trace time, neither `steps` nor `sync=`, a `sync=` that is an array, and
        gradients that `all_reduce` would refuse.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = jd.accumulate(optax.chain(jd.all_reduce(jd.exact(), axis=None), optax.sgd(1.0)), 2, axis=None)
      >>> params = jnp.zeros(())
      >>> state = tx.init(params)
      >>> for gradient in (1.0, 3.0):
      ...     updates, state = tx.update(jnp.array(gradient), state, params)
      ...     print(updates)
      0.0
      -2.0

    References:
      Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", arXiv 2006.15704, 2020.
    """
    if steps is not None and steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    tx = optax.with_extra_args_support(tx)

    def init(params) -> State:
        check_leaves(params)
        total = jax.tree.map(lambda x: jnp.zeros(x.shape, working_dtype(x.dtype)), params)
        marked = bind((PerWorker(total, resize="mean"), PerWorker(jnp.zeros((), jnp.float32), resize="mean")), axis)
        return AccumulateState(tx.init(params), marked[0], marked[1], jnp.zeros((), jnp.int32))

    def update(updates, state, params=None, *, examples=None, sync: Any = None, **extra_args) -> tuple[Updates, State]:
        check_leaves(updates)
        check_local(updates, axis)
        number = jnp.asarray(1 if examples is None else examples, jnp.float32)
        wide = jax.tree.map(lambda x, t: x.astype(t.dtype), updates, state.total.value)
        total = jax.tree.map(jnp.add, state.total.value, wide if examples is None else scale(wide, number))
        heard = state.examples.value + number
        count = next_count(state.count)

        def talk(total, heard, inner):
            mean = jax.tree.map(lambda t, x: (t / jnp.where(heard > 0, heard, 1)).astype(x.dtype), total, updates)
            given = extra_args if examples is None else {**extra_args, "examples": heard}
            return tx.update(mean, inner, params, **given)

        def wait(total, heard, inner):
            del total, heard
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), updates), inner

        due = _due(sync, steps, count)
        if isinstance(due, bool):
            found, inner = (talk if due else wait)(total, heard, state.inner)
        else:
            found, inner = jax.lax.cond(due, talk, wait, total, heard, state.inner)
        total, heard = jax.tree.map(lambda x: jnp.where(due, jnp.zeros_like(x), x), (total, heard))
        return found, AccumulateState(
            inner, with_value(state.total, total), with_value(state.examples, heard), jnp.where(due, 0, count)
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _due(sync: Any, steps: int | None, count: Int[Array, ""]) -> Array | bool:
    if isinstance(sync, jax.Array):
        raise ValueError("sync chooses the program, so it must be static: distribute(..., static_argnames=('sync',))")
    if sync is not None:
        return bool(sync)
    if steps is None:
        raise ValueError("accumulate without steps does not know when to talk: pass sync=True or False to the update")
    return True if steps == 1 else count >= steps
