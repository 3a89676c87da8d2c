"""A step with NaN or Inf in any worker's gradient does not happen, on any worker."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._typing import Array, AxisNames, Int, State
from ..comm import over


class SkipNonfiniteState(NamedTuple):
    """`skipped` counts the steps that did not happen (agreed; of each worker inside `local_steps` and `gossip`)."""

    inner: State
    skipped: Int[Array, ""]


def skip_nonfinite(
    tx: optax.GradientTransformation, *, axis: AxisNames = "data"
) -> optax.GradientTransformationExtraArgs:
    """Skips the whole chain on all workers if one of them has a gradient that is not finite.

    Wrap the whole chain: Adam and weight decay move parameters even on a zero gradient, and a residual that has taken
    up a NaN never recovers. The chain runs on zeros (so that its collectives happen on all workers); its updates are
    then replaced by zeros and its new state by the old one, residuals included. Workers with `examples=0` do not count.

    Around `local_steps` and `gossip` it makes all workers meet in every step, which they are there to avoid. Inside,
    `local_steps(skip_nonfinite(inner, axis=None), ...)`, a worker sits its own step out, as with `active=False`, and
    nobody waits. With `gradient_tracking`, which keeps the gradients themselves, it must stand around.

    *On the wire*: one all-reduce of 4 bytes before those of `tx`; with `axis=None` nothing.

    *State*: that of `tx`, and a count.

    Args:
      tx: the whole chain, `all_reduce` included.
      axis: the mesh axis of the workers; `None` where each decides for itself, inside `local_steps` and `gossip`.

    Returns:
      The guarded chain.

    Raises:
      ValueError: at trace time, if the axis is not bound.

    Example:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = jd.skip_nonfinite(optax.chain(jd.all_reduce(jd.exact(), axis=None), optax.adam(0.1)), axis=None)
      >>> params = jnp.ones(2)
      >>> updates, state = tx.update(jnp.array([1.0, jnp.nan]), tx.init(params), params)
      >>> updates.tolist(), int(state.skipped)
      ([0.0, 0.0], 1)

    References:
      Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, 2018 (skipping steps that overflow).
    """
    tx = optax.with_extra_args_support(tx)

    def init(params):
        return SkipNonfiniteState(tx.init(params), jnp.zeros((), jnp.int32))

    def update(updates, state, params=None, **extra_args):
        comm = over(axis)
        bad = [~jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(updates)]
        here = jnp.stack(bad).any() if bad else jnp.zeros((), bool)
        if "examples" in extra_args:  # without examples a mean is 0/0; all_reduce leaves it out
            here = here & (jnp.asarray(extra_args["examples"]) > 0)
        skip = comm.max(comm.varying(here.astype(jnp.int32))) > 0
        clean = jax.tree.map(lambda x: jnp.where(skip, jnp.zeros_like(x), x), updates)
        new_updates, inner = tx.update(clean, state.inner, params, **extra_args)
        new_updates = jax.tree.map(lambda x: jnp.where(skip, jnp.zeros_like(x), x), new_updates)
        inner = jax.tree.map(lambda new, old: jnp.where(skip, old, new), inner, state.inner)
        return new_updates, SkipNonfiniteState(inner, state.skipped + skip.astype(jnp.int32))

    return optax.GradientTransformationExtraArgs(init, update)
