"""Training with a wave always under way: each call takes one wave backward, the next one forward, and updates."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._core.trees import tree_where
from .._core.types import Array, AxisNames, Bool, Float, PyTree, State
from ..comm.over import over
from ..reducers.base import Reducer
from ..state.marks import PerWorker, bind, is_mark
from ..transforms.local_value_and_grad import to_varying
from .layer_passes import LayerPasses, Mean, floating
from .wave_model import WaveModel, check_model, embed_gradient, loss_and_gradients


class Wave(NamedTuple):
    """A wave between its forward and its backward pass, every field `PerWorker`.

    Attributes:
      slots: the inputs of the layers, stacked `[L, ...]` or a tuple.
      gradient: of the loss by the floating leaves of the last layer's output.
      head: the gradient of the head's parameters.
      batch: the wave's data.
    """

    slots: PyTree
    gradient: PyTree
    head: PyTree
    batch: PyTree


class WaveletState(NamedTuple):
    """The state of `wavelet(mode="rolling")`, to be placed and checkpointed like any other.

    Attributes:
      params: the current parameters (replicated).
      stash: the parameters of the forward pass of the wave under way (replicated).
      opt_state: of the optimizer.
      wave: the wave under way.
      pending: whether there is one.
      flipped: whether the input of the first layer is in the last slot.
    """

    params: PyTree
    stash: PyTree
    opt_state: State
    wave: Wave
    pending: Bool[Array, ""]
    flipped: Bool[Array, ""]


class Wavelet(NamedTuple):
    """The functions of `wavelet(mode="rolling")`.

    Attributes:
      init: `(params, batch) -> WaveletState`, with the batch of one worker, or its shapes.
      step: `(state, batch, **extra_args) -> (state, loss)`: one wave backward, one forward, an update. The loss is that
        of the new wave on this worker.
      flush: `(state, **extra_args) -> state`: the backward pass and update of the last wave, if there is one.
    """

    init: Callable[..., WaveletState]
    step: Callable[..., tuple[WaveletState, Float[Array, ""]]]
    flush: Callable[..., WaveletState]


def rolling_waves(
    model: WaveModel, passes: LayerPasses, tx: optax.GradientTransformation, axis: AxisNames, mean: Mean | None
) -> Wavelet:
    """Makes the three functions.

    Args:
      model: the functions before and after the layers.
      passes: through the layers; their gradients are means over workers if there is a `mean`.
      tx: the optimizer.
      axis: the mesh axis of the workers.
      mean: averages gradients over workers.
    """
    cfg = _Config(model, passes, optax.with_extra_args_support(tx), axis, mean)
    return Wavelet(partial(_init, cfg), partial(_step, cfg), partial(_flush, cfg))


class _Config(NamedTuple):
    model: WaveModel
    passes: LayerPasses
    tx: optax.GradientTransformationExtraArgs
    axis: AxisNames
    mean: Mean | None


def layer_mean(reducer: Reducer, axis: AxisNames) -> Mean:
    """Returns the mean over workers by a reducer without state."""
    if jax.tree.leaves(reducer.init({"w": jnp.zeros((8, 8))})):
        raise ValueError(
            "the reducer of wavelet averages layer by layer and keeps nothing from wave to wave, and this one has a "
            "state (error feedback, a key): put it into all_reduce, in tx"
        )

    def mean(gradients):
        return reducer.reduce(gradients, reducer.init(gradients), over(axis))[0].mean

    return mean


def _init(cfg: _Config, params: PyTree, batch: PyTree) -> WaveletState:
    check_model(cfg.model, params, batch)
    slots, gradient = jax.eval_shape(partial(_forward, cfg), params, batch)
    wave = Wave(*(_mark(jax.tree.map(_zeros, part), cfg.axis) for part in (slots, gradient, params.head, batch)))
    # The stash is a copy, since a donated state must not contain an array twice.
    stash = jax.tree.map(jnp.copy, params)
    return WaveletState(params, stash, cfg.tx.init(params), wave, jnp.zeros((), bool), jnp.zeros((), bool))


def _forward(cfg: _Config, params: PyTree, batch: PyTree) -> tuple[PyTree, list[Array]]:
    """The slots of a wave, and the floating leaves of the last layer's output."""
    x, slots = cfg.passes.forward(params.layers, cfg.model.embed(params.embed, batch))
    return slots, floating(x)


def _step(cfg: _Config, state: WaveletState, batch: PyTree, **extra_args: Any) -> tuple[WaveletState, Array]:
    check_model(cfg.model, state.params, batch)
    wave = _unmark(state.wave)
    _check_batch(batch, wave.batch)
    old, new, batch, wave = to_varying((state.stash, state.params, batch, wave), cfg.axis)
    # The wave under way goes backward with the parameters of its forward pass, the new one forward with the newest.
    x = cfg.model.embed(new.embed, batch)
    layers, g, x, slots = cfg.passes.both(old.layers, new.layers, wave.slots, state.flipped, wave.gradient, x, None)
    params, opt_state = _apply_wave(cfg, state, layers, g, extra_args)
    loss, head, gradient = loss_and_gradients(cfg.model, new.head, x, batch)
    next_wave = Wave(*(_mark(part, cfg.axis) for part in (slots, gradient, head, batch)))
    return WaveletState(params, state.params, opt_state, next_wave, jnp.ones((), bool), ~state.flipped), loss


def _flush(cfg: _Config, state: WaveletState, **extra_args: Any) -> WaveletState:
    old, wave = to_varying((state.stash, _unmark(state.wave)), cfg.axis)
    layers, g = cfg.passes.backward(old.layers, wave.slots, state.flipped, wave.gradient, None)
    params, opt_state = _apply_wave(cfg, state, layers, g, extra_args)
    return state._replace(params=params, opt_state=opt_state, pending=jnp.zeros((), bool))


def _apply_wave(
    cfg: _Config, state: WaveletState, layers: PyTree, g: list[Array], extra_args: dict[str, Any]
) -> tuple[PyTree, State]:
    """Parameters and optimizer state after the update by the wave under way, or unchanged if there is none.

    Args:
      cfg: the configuration.
      state: the state before.
      layers: the gradients of the layers.
      g: the gradient by the floating leaves of the first layer's input.
      extra_args: for the optimizer.
    """
    wave = _unmark(state.wave)
    embed = embed_gradient(cfg.model, to_varying(state.stash.embed, cfg.axis), wave.batch, g)
    embed, head = (embed, wave.head) if cfg.mean is None else cfg.mean((embed, wave.head))
    gradients = type(state.params)(embed, layers, head)
    updates, opt_state = cfg.tx.update(gradients, state.opt_state, state.params, **extra_args)
    new = (optax.apply_updates(state.params, updates), opt_state)
    return tree_where(state.pending, new, (state.params, state.opt_state))


def _mark(tree: PyTree, axis: AxisNames) -> PyTree:
    # New workers copy the waves of others, since a mean of tokens or of slots is not a wave.
    return bind(jax.tree.map(lambda x: PerWorker(x, resize="copy"), tree), axis)


def _unmark(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.value if is_mark(x) else x, tree, is_leaf=is_mark)


def _zeros(x: Any) -> Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0, impl=str(jax.random.key_impl(x))), x.shape)
    return jnp.zeros(x.shape, x.dtype)


def _check_batch(batch: PyTree, previous: PyTree) -> None:
    found, expected = (jax.tree.map(lambda x: (x.shape, str(x.dtype)), tree) for tree in (batch, previous))
    if found != expected:
        raise ValueError(
            f"the batch has the shapes {found}, but the state was made for {expected}: all batches must be alike; pass "
            "init(params, batch) a batch as one worker sees it, or flush and init again to change the shapes"
        )
