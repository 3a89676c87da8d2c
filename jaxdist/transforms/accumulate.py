"""Accumulates the gradients of several steps on each worker and communicates once."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._core.checks import check_count
from .._core.compat import vary_like, zeros_like_shape
from .._core.dtypes import working_dtype
from .._core.trees import next_count, tree_where
from .._core.types import Array, AxisNames, Bool, Int, Like, PyTree, State, Updates
from ..state.marks import PerWorker, bind, is_mark, with_value
from .extra_args import with_extra_args
from .in_plain_jit import with_own_map
from .local_gradients import check_leaves, check_local
from .skip_nonfinite import is_guarded
from .weights import divide_leaves, number_per_leaf, scale_leaves, weight_of_leaves


class AccumulateState(NamedTuple):
    """Each worker's sums since the last sync: `total` of gradients, `examples` behind each leaf; `count` (replicated).

    `shards` are the sums for parameters that are sharded themselves (`Sharded`, with `None` in place of the others), or
    `()`; `total` has `None` in their place.
    """

    inner: State
    total: PerWorker
    examples: PerWorker
    count: Int[Array, ""]
    shards: PyTree = ()

    def drop_pending(self, drop: Bool[Array, ""]) -> "AccumulateState":
        """Begins the sums again, with which every further sync would fail as one did that `skip_nonfinite` skipped."""
        sums = (self.total, self.examples, self.count, self.shards)
        total, examples, count, shards = tree_where(drop, jax.tree.map(jnp.zeros_like, sums), sums)
        return self._replace(total=total, examples=examples, count=count, shards=shards)


def accumulate(
    tx: optax.GradientTransformation, steps: int | None = None, *, axis: AxisNames = "data"
) -> optax.GradientTransformationExtraArgs:
    """Sums the gradients of `steps` calls locally and passes their mean to `tx` in the last one: DDP's `no_sync`.

    The distributed counterpart of `optax.MultiSteps`: it can wrap `all_reduce`, and only the last call of each cycle
    communicates. If the whole batch is available at once, `local_value_and_grad(micro_batches=)` does it without state.

    *On the wire*: the collectives of `tx` in one of `steps` calls; nothing in the others.

    *State*: the state of `tx`; for each worker a sum like the parameters in float32 and a number of examples
    for each leaf; a count.
    The sums for `Sharded` parameters (`zero_redundancy` in stage 3) are sharded: their gradients are means already.

    Args:
      tx: the whole chain, `all_reduce` and the optimizer. `skip_nonfinite` and `dynamic_loss_scale` go inside, which
        skip all calls of a sync together (also for a loss `value=` of one of them); schedules in it count syncs.
      steps: the number of calls for one update. `None`: the caller decides in each call with `sync=`.

    Returns:
      The transformation. Its updates are zero between two syncs. `update` takes `sync=`, a Python bool that replaces
      the count, so that the program for `False` has no collective (`distribute(..., static_argnames=("sync",))`), and
      `examples=`, a number or, in all calls of a sync, a tree of numbers for single leaves, which weighs calls as well
      as workers; and `active=`: a call that is not active adds nothing, and a worker is active in the update if it was
      in one of the calls.

    Raises:
      ValueError: `steps` is below 1; at trace time, if there is neither `steps` nor `sync=`, if `sync=` is an array, if
        `all_reduce` would refuse the gradients, or for `examples=` or `active=` with `Sharded` parameters.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = jd.accumulate(optax.chain(jd.all_reduce(jd.exact(), axis=None), optax.sgd(1.0)), 2, axis=None)
      >>> params = jnp.zeros(())
      >>> state = tx.init(params)
      >>> for gradient in (1.0, 3.0):
      ...     updates, state = tx.update(jnp.array(gradient), state, params)
      ...     print(updates)
      0.0
      -2.0
    """
    if steps is not None:
        check_count("steps", steps, 1)
    method = _Accumulate(with_extra_args(tx), steps, axis)
    return with_own_map(optax.GradientTransformationExtraArgs(method.init, method.update), axis)


class _Accumulate(NamedTuple):
    tx: optax.GradientTransformationExtraArgs
    steps: int | None
    axis: AxisNames

    def init(self, params: PyTree) -> State:
        check_leaves(params, sharded=True)
        total, shards = _split(jax.tree.map(lambda x: jnp.zeros(x.shape, working_dtype(x.dtype)), params))
        # Another number of workers takes the mean of the sums: nothing that was accumulated is lost.
        marked = bind((PerWorker(total, resize="mean"), number_per_leaf(params)), self.axis)
        return AccumulateState(
            self.tx.init(params), marked[0], marked[1], jnp.zeros((), jnp.int32), bind(shards, self.axis)
        )

    def update(
        self,
        updates: Updates,
        state: State,
        params: PyTree | None = None,
        *,
        examples: Any = None,
        active: Any = None,
        sync: Any = None,
        **extra_args: Any,
    ) -> tuple[Updates, State]:
        check_leaves(updates, sharded=True)
        check_local(updates, self.axis)
        if state.shards != () and (examples is not None or active is not None):
            raise ValueError(
                "examples= and active= cannot weigh the gradients of Sharded parameters, which are averaged over the "
                "workers already: weigh the loss by the examples"
            )
        sums = _join(state.total.value, state.shards)
        # Without examples, each call counts as one, and an inactive one as none.
        weight = weight_of_leaves(examples, active, updates)
        number = jnp.ones((), jnp.float32) if weight is None else weight
        is_tree = number.ndim > 0
        # Summed in float32: a sum of half-precision gradients would lose the small ones.
        wide = jax.tree.map(lambda x, t: x.astype(t.dtype), updates, sums)
        if extra_args.get("value") is not None and is_guarded(state.inner):
            # Only the loss of the last call is passed on: a gradient of NaN stands for those of the others.
            loss = jnp.asarray(extra_args["value"])
            wide = jax.tree.map(lambda x: jnp.where(jnp.isnan(loss).any(), jnp.nan, x), wide)
            extra_args["value"] = jnp.where((number > 0).any(), loss, jnp.zeros_like(loss))
        total = jax.tree.map(jnp.add, sums, wide if weight is None else scale_leaves(wide, number))
        seen = state.examples.value + number
        count = next_count(state.count)

        def communicate(total, seen, inner):
            mean = jax.tree.map(lambda t, x: t.astype(x.dtype), divide_leaves(total, seen), updates)
            # One number for a sum of numbers, since not all that communicates weighs single leaves.
            numbers = jax.tree.structure(updates).unflatten(list(seen)) if is_tree else seen[0]
            passed = extra_args if examples is None else {**extra_args, "examples": numbers}
            passed = passed if active is None else {**passed, "active": (seen > 0).any()}
            return self.tx.update(mean, inner, params, **passed)

        due = _is_due(sync, self.steps, count)
        if isinstance(due, bool):
            # Known while tracing: the program has the collective in every call, or in none.
            # The zeros are equal on all workers, whose gradients are not.
            zeros = _zeros(jax.eval_shape(lambda: updates))
            out, inner = communicate(total, seen, state.inner) if due else (zeros, state.inner)
        else:
            # Updates may be wider than gradients, as those of a master copy in float32.
            like = jax.eval_shape(communicate, total, seen, state.inner)

            def wait(total, seen, inner):
                # Typed as the other branch is, whose updates are each worker's own in local steps.
                return jax.tree.map(vary_like, (_zeros(like[0]), inner), like)

            out, inner = jax.lax.cond(due, communicate, wait, total, seen, state.inner)
        # A sync starts the sums again.
        total, seen = jax.tree.map(lambda x: jnp.where(due, jnp.zeros_like(x), x), (total, seen))
        total, shards = _split(total)
        return out, AccumulateState(
            inner, with_value(state.total, total), with_value(state.examples, seen), jnp.where(due, 0, count), shards
        )


def _split(tree: PyTree) -> tuple[PyTree, PyTree]:
    """The leaves of each worker, and those that are sharded (or `()`), with `None` in place of the others."""
    if not any(map(is_mark, jax.tree.leaves(tree, is_leaf=is_mark))):
        return tree, ()
    own, sharded = (
        jax.tree.map(lambda x, flag=flag: x if is_mark(x) == flag else None, tree, is_leaf=is_mark)
        for flag in (False, True)
    )
    return own, sharded


def _join(own: PyTree, sharded: PyTree) -> PyTree:
    """The inverse of `_split`."""
    if sharded == ():
        return own
    return jax.tree.map(lambda x, y: y if x is None else x, own, sharded, is_leaf=lambda x: x is None)


def _zeros(like: PyTree[Like]) -> Updates:
    return jax.tree.map(lambda x: zeros_like_shape(x, x.dtype), like)


def _is_due(sync: Any, steps: int | None, count: Int[Array, ""]) -> Array | bool:
    if isinstance(sync, jax.Array):
        raise ValueError("sync chooses the program, so it must be static: distribute(..., static_argnames=('sync',))")
    if isinstance(sync, bool | np.bool_):
        return bool(sync)
    if sync is not None:
        raise ValueError(f"sync must be True or False, or None to count the steps, got {sync!r}")
    if steps is None:
        raise ValueError("accumulate needs to know when to communicate; set steps=, or pass sync= to the update")
    # With one step in a cycle no branch is needed.
    return True if steps == 1 else count >= steps
