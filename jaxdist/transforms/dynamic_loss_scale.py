"""Scales the loss for float16, and halves the scale when gradients overflow."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._core.checks import check_count, check_range
from .._core.dtypes import explain_dtype, widen, working_dtype
from .._core.trees import leaf_name
from .._core.types import Array, AxisNames, Float, Int, PyTree, State
from ..state.marks import axis_tuple
from .in_plain_jit import take_terms
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
    `g = grad loss' / S` in float32. If any worker has a gradient that is not finite, or a loss `value=` that is NaN,
    all workers skip the step, as in `skip_nonfinite`, and `S` becomes `S / factor`; after `growth_interval` steps
    without a skip it becomes `factor S`.

    Wrap the whole chain, since clipping, decay and residuals must see gradients of their true size:

        inner = optax.chain(jd.all_reduce(jd.exact()), optax.clip_by_global_norm(1.0), adam)
        tx = jd.transforms.dynamic_loss_scale(inner)
        scale = jd.transforms.loss_scale(state.opt)
        loss, gradients = jd.local_value_and_grad(loss_fn, scale=scale)(state.params, batch)

    With parameters in float16 use `zero_redundancy(..., master_dtype=jnp.float32)`, which also preserves small steps.
    bfloat16 needs no loss scale: it has the exponents of float32.

    Its updates are in float32; `optax.apply_updates` casts them.

    *On the wire*: four bytes, as `skip_nonfinite`. Reducers get float32: `compressed(cast(jnp.bfloat16))` sends half.

    *State*: replicated, a number and two counts; the state of `tx`.

    Args:
      initial: the first `S`. Too large costs a few skipped steps at first, too small some thousand inexact ones.
      growth_interval: steps until a larger `S` is tried. Fewer follow the gradients sooner and skip more steps.
      factor: the factor by which `S` grows and shrinks; a power of two, so that nothing is rounded.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = jd.transforms.dynamic_loss_scale(optax.sgd(1.0), initial=4.0, growth_interval=2, axis=None)
      >>> state, update = tx.init(jnp.zeros(1)), jax.jit(tx.update)
      >>> scales = []
      >>> for gradient in (8.0, jnp.inf, 4.0, 2.0):
      ...     updates, state = update(jnp.array([gradient]), state)
      ...     scales.append(float(jd.transforms.loss_scale(state)))
      >>> scales, updates.tolist()
      ([4.0, 2.0, 2.0, 4.0], [-1.0])

    References:
      Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740, 2018.
    """
    check_range("initial", initial, 1)
    check_count("growth_interval", growth_interval, 1)
    check_range("factor", factor, 1, ends="()")
    guarded = skip_nonfinite(tx, axis=axis)
    # A larger scale would overflow float32 within a step or two.
    largest = 2.0**100

    def init_fn(params) -> State:
        # Moments take the dtype of the parameters, but their gradients arrive in float32. What has no gradient, or none
        # that could be averaged, stays as it is, for the chain to refuse or to leave out.
        wide = jax.tree.map(lambda p: widen(p) if _has_gradient(p) else p, params)
        return LossScaleState(guarded.init(wide), jnp.asarray(initial, jnp.float32), jnp.zeros((), jnp.int32))

    def update_fn(updates, state, params=None, **extra_args):
        # Cast first: g / S underflows in float16.
        own = take_terms(axis_tuple(axis), updates)
        unscaled = jax.tree.map(lambda g: g.astype(working_dtype(g.dtype)) / state.scale, own)
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

    Raises:
      ValueError: the state has no `dynamic_loss_scale` inside, or several, which are named.

    Examples:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> float(jd.transforms.loss_scale(jd.transforms.dynamic_loss_scale(optax.sgd(0.1)).init(jnp.zeros(2))))
      32768.0
    """
    scales = named_loss_scales(opt_state)
    if len(scales) == 1:
        return scales[0][1]
    if scales:
        raise ValueError(
            "this optimizer state has a loss scale in each of "
            f"{', '.join(repr(name) for name, _ in scales)}, and a loss has one: put one around all of them, "
            "dynamic_loss_scale(optax.partition(...)), or, with a loss for each, pass the state of one"
        )
    raise ValueError(
        "this optimizer state has no dynamic_loss_scale inside, and so no scale; wrap the chain in dynamic_loss_scale"
    )


def named_loss_scales(opt_state: State) -> list[tuple[str, Array]]:
    """The scales in an optimizer state, those inside another one too, with the names of their nodes."""
    found: list[tuple[str, Array]] = []

    def search(above: tuple[Any, ...], tree: PyTree) -> None:
        nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, LossScaleState))
        for path, node in nodes:
            if isinstance(node, LossScaleState):
                path = (*above, *path)
                found.append((leaf_name(path, "this state"), node.scale))
                search((*path, jax.tree_util.GetAttrKey("inner")), node.inner)

    search((), opt_state)
    return found


def _has_gradient(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) and explain_dtype(x.dtype) is None
