"""Dynamic loss scaling: float16 gradients without underflow."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._core.dtypes import working_dtype
from .._core.types import Array, AxisNames, Float, Int, State
from .skip_nonfinite import skip_nonfinite


class LossScaleState(NamedTuple):
    """Replicated: `scale`, and the steps `since` it changed or a step was skipped.

    `inner`: the state of the guarded chain, with the number of steps that were `skipped`.
    """

    inner: State
    scale: Float[Array, ""]
    since: Int[Array, ""]


def dynamic_loss_scale(
    tx: optax.GradientTransformation,
    *,
    initial: float | int = 2.0**15,
    growth_interval: int = 2000,
    factor: float | int = 2.0,
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """Divides gradients by the scale of the loss, skips steps that overflow on all workers, and adapts the scale.

    `loss' = S loss`, so that small gradients do not become zero in float16 (below 6e-8; below 6e-5 they lose digits);
    `g = grad loss' / S` in float32. If any worker has a gradient that is not finite, all workers skip the step, as in
    `skip_nonfinite`, and `S` becomes `S / factor`; after `growth_interval` steps without a skip it becomes `factor S`.

    Wrap the whole chain, since clipping, decay and residuals must see gradients of their true size:

        inner = optax.chain(jd.all_reduce(jd.exact()), optax.clip_by_global_norm(1.0), adam)
        tx = jd.transforms.dynamic_loss_scale(inner)
        scale = jd.transforms.loss_scale(state.opt)
        loss, gradients = jd.local_value_and_grad(loss_fn, scale=scale)(state.params, batch)

    With parameters in float16 use `zero_redundancy(..., master_dtype=jnp.float32)`, which also preserves small steps.
    bfloat16 needs no loss scale: it has the exponents of float32.

    *On the wire*: four bytes, as `skip_nonfinite`. Reducers get float32: `compressed(cast(jnp.bfloat16))` sends half.

    *State*: replicated, a number and two counts; the state of `tx`.

    Args:
      tx: the whole chain, `all_reduce` or `zero_redundancy` included.
      initial: the first `S`. Too large costs a few skipped steps at first, too small some thousand inexact ones.
      growth_interval: steps until a larger `S` is tried. Fewer follow the gradients sooner and skip more steps.
      factor: the factor by which `S` grows and shrinks; a power of two, so that nothing is rounded.
      axis: the mesh axis of the workers.

    Returns:
      The guarded chain. Its updates are in float32; `optax.apply_updates` casts them.

    Raises:
      ValueError: an argument is out of range; at trace time, if the axis is not bound.

    Example:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = jd.transforms.dynamic_loss_scale(optax.sgd(1.0), initial=4.0, growth_interval=2, axis=None)
      >>> state = tx.init(jnp.zeros(1))
      >>> scales = []
      >>> for gradient in (8.0, jnp.inf, 4.0, 2.0):
      ...     updates, state = tx.update(jnp.array([gradient]), state)
      ...     scales.append(float(jd.transforms.loss_scale(state)))
      >>> scales, updates.tolist()
      ([4.0, 2.0, 2.0, 4.0], [-1.0])

    References:
      Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, 2018.
    """
    if not 1 <= initial < float("inf"):
        raise ValueError(f"initial must be finite and at least 1, got {initial}")
    if growth_interval < 1:
        raise ValueError(f"growth_interval must be at least 1, got {growth_interval}")
    if not 1 < factor < float("inf"):
        raise ValueError(f"factor must be above 1, got {factor}")
    guarded = skip_nonfinite(tx, axis=axis)
    # A larger scale would overflow float32 within a step or two.
    largest = 2.0**100

    def init_fn(params) -> State:
        # Moments take the dtype of the parameters, but their gradients arrive in float32.
        wide = jax.tree.map(lambda p: p.astype(working_dtype(p.dtype)), params)
        return LossScaleState(guarded.init(wide), jnp.asarray(initial, jnp.float32), jnp.zeros((), jnp.int32))

    def update_fn(updates, state, params=None, **extra_args):
        unscaled = jax.tree.map(lambda g: g.astype(working_dtype(g.dtype)) / state.scale, updates)
        inner: Any
        updates, inner = guarded.update(unscaled, state.inner, params, **extra_args)
        skipped = inner.skipped != state.inner.skipped
        since = jnp.where(skipped, 0, state.since + 1)
        grows = since >= growth_interval
        # S / factor after a skip, factor S after `growth_interval` steps without one.
        factors = jnp.where(skipped, 1 / factor, jnp.where(grows, factor, 1.0))
        scale = jnp.clip(state.scale * factors, 1.0, largest)
        return updates, LossScaleState(inner, scale, jnp.where(grows, 0, since))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def loss_scale(opt_state: State) -> Array:
    """Returns the factor for the loss of this step.

    Args:
      opt_state: an optimizer state with `dynamic_loss_scale` anywhere inside, placed or as a worker sees it.

    Returns:
      A scalar, equal on all workers, for `local_value_and_grad(loss, scale=)`.

    Raises:
      ValueError: the state contains no `dynamic_loss_scale`.

    Example:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> float(jd.transforms.loss_scale(jd.transforms.dynamic_loss_scale(optax.sgd(0.1)).init(jnp.zeros(2))))
      32768.0

    References:
      Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, 2018.
    """
    for node in jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, LossScaleState)):
        if isinstance(node, LossScaleState):
            return node.scale
    raise ValueError(
        "this optimizer state has no dynamic_loss_scale inside, and so no scale; wrap the chain in dynamic_loss_scale"
    )
