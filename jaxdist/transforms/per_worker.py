"""Marks the state of a transformation as differing between workers."""

import optax

from ..state.marks import PerWorker, is_mark, with_value


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
