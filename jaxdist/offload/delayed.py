"""Updates that are applied a step later, so that the host can compute them while the device computes gradients."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._core.checks import check_count
from .._core.trees import tree_where
from .._core.types import Array, Bool, Int, PyTree, State
from ..transforms.extra_args import with_extra_args
from ..transforms.mistakes import communicates


class DelayedState(NamedTuple):
    """`inner`: the optimizer's state; `pending`: the gradients of the last step; `count` of steps.

    `dropped`: whether `pending` is not to be applied, since a step with it was skipped.
    """

    inner: State
    pending: PyTree
    count: Int[Array, ""]
    dropped: Bool[Array, ""]

    def drop_pending(self, drop: Bool[Array, ""]) -> "DelayedState":
        """Drops the last gradients, on which every further step would fail as one did that `skip_nonfinite` skipped."""
        return self._replace(dropped=tree_where(drop, jnp.ones_like(self.dropped), self.dropped))


def delayed(inner: optax.GradientTransformation, start: int = 0) -> optax.GradientTransformationExtraArgs:
    """Applies the gradients of one step in the next: `θ_{t+1} = θ_t + U(g_{t-1})` from step `start` on.

    The update does not depend on the gradients of its own step, so that the host can compute it while the device
    computes those. Steps before `start` are ordinary ones; step `start` applies nothing, and keeps its gradients. All
    of `inner` sees the gradients of the last step, including norms for clipping.

    Delay costs stability: on a quadratic of curvature `λ`, SGD converges for `ηλ < 1` instead of 2.

    *On the wire*: nothing. Around a transformation that communicates it would keep gradients that differ between
    workers; put it inside, `zero_redundancy(offload.delayed(inner))`, where it keeps this worker's shard of the mean.

    *State*: `inner`'s, and the gradients (replicated, or sharded by `zero_redundancy`).

    Args:
      inner: the optimizer.
      start: the first delayed step, counted from 0: 40 in the paper, because training is least stable at its start.
        While `start` is positive, the compiled step must handle both cases, and each update waits for its own
        gradients; pass `delay=True` to `update` in a program for steps from `start` on, `delay=False` in one for
        earlier steps.

    Returns:
      A gradient transformation. Its `update` takes `delay=`: a Python `bool`, False if all steps of this program are
      before `start`, True if none is.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from jaxdist import offload
      >>> tx = offload.delayed(optax.sgd(1.0))
      >>> state = tx.init(jnp.zeros(()))
      >>> first, state = tx.update(jnp.array(3.0), state)
      >>> second, state = tx.update(jnp.array(5.0), state)
      >>> float(first), float(second)
      (0.0, -3.0)
    """
    check_count("start", start, 0)
    inner = with_extra_args(inner)

    def init_fn(params) -> DelayedState:
        return DelayedState(
            inner.init(params), jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.int32), jnp.array(False)
        )

    def update_fn(updates, state, params=None, *, delay: Any = None, **extra_args):
        given = sorted({"examples", "active"} & set(extra_args))
        if given and delay is not False and any(map(communicates, jax.tree.leaves(state.inner, is_leaf=communicates))):
            raise ValueError(
                f"{given[0]}= of this call would weight the gradients of the last one: put delayed inside, "
                "zero_redundancy(offload.delayed(inner)), or use all_reduce(reducer, delay=1)"
            )
        if delay is not None and not isinstance(delay, bool):
            raise ValueError(f"delay must be a Python bool: it chooses between two programs; got {delay!r}")
        kept = optax.tree.cast_like(updates, state.pending)
        if delay is False:
            used = updates
        elif delay or start == 0:
            used = optax.tree.cast_like(state.pending, updates)
        else:
            used = jax.tree.map(
                lambda g, old: jnp.where(state.count < start, g, old.astype(g.dtype)), updates, state.pending
            )
        steps, new = inner.update(used, state.inner, params, **extra_args)
        if delay is not False:
            # Step `start` has no earlier gradients to apply, nor has one after those were dropped.
            waits = (state.count == start) | ((state.count > start) & state.dropped)
            steps = jax.tree.map(lambda u: jnp.where(waits, jnp.zeros_like(u), u), steps)
            new = jax.tree.map(lambda after, before: jnp.where(waits, before, after), new, state.inner)
        count = jnp.asarray(optax.safe_increment(state.count))
        return steps, DelayedState(new, kept, count, jnp.zeros_like(state.dropped))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
