"""Wavelet: the backward pass of one wave of data beside the forward pass of another."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import optax

from .._core.types import Array, AxisNames, PyTree
from ..reducers.base import Reducer
from ..transforms.local_value_and_grad import to_varying
from .layer_passes import LayerPasses, add, loop_passes, sequence_passes
from .pipeline_stages import value_and_grad_in_stages
from .rolling_waves import layer_mean, rolling_waves
from .wave_model import Layered, WaveModel, check_waves, embed_gradient, first_of_batch, loss_and_gradients


def wavelet(
    layer: Callable[[PyTree, PyTree], PyTree] | Sequence[Callable[[PyTree, PyTree], PyTree]],
    head: Callable[[PyTree, PyTree, PyTree], Array],
    tx: optax.GradientTransformation | None = None,
    *,
    embed: Callable[[PyTree, PyTree], PyTree] | None = None,
    mode: Literal["pair", "rolling"] = "pair",
    reducer: Reducer | None = None,
    stages: str | None = None,
    axis: AxisNames = "data",
) -> Any:
    """The backward pass of one wave of data beside the forward pass of another, in the memory of one (Wavelet).

    The backward pass of the tick wave goes from layer `L-1` to `0` and frees the memory of activations; the forward
    pass of the tock wave goes from `0` to `L-1` and fills it again. Layer `L-1-i` of the one and layer `i` of the other
    are in one iteration of one program and do not depend on each other: compiler and device may run them together, and
    hide the collectives of one behind the arithmetic of the other.

    `mode="pair"` replaces `local_value_and_grad`: all waves see the same parameters, and the gradient is their mean, to
    the bit as if they had been computed one after the other (`micro_batches`). With forward and backward times `F` and
    `B`, `k` waves take at best `F + (k-1) max(F, B) + B` instead of `k (F + B)`.

    `mode="rolling"` never drains: a call takes wave `w-1` backward, wave `w` forward and then updates. At best
    `max(F, B)` a wave. Every gradient is one update late, and is taken at the parameters of its wave's forward pass:
    `θ[w+1] = θ[w] + U(g[w-1](θ[w-1]))`. SGD on a curvature `λ` is stable for `ηλ < 1` instead of `2`.

    Only the inputs of layers are kept, and each layer is computed again in the backward pass: compare times with a loss
    under `jax.checkpoint`. The gain depends on the device, see the how-to "Hide the communication"; on CPU there is
    none.

    *On the wire*: nothing in `"pair"`, and so one reduction for all its waves; in `"rolling"` the bytes of `tx`, for
    every wave: twice the bytes of a pair.

    With `stages`, a pipeline whose waves are whole batches: on each stage, one wave goes backward beside another that
    goes forward. All waves must see the same parameters, so it drains: `k` waves through `S` stages take `k + 2S - 1`
    steps of `max(F, B)/S`; give it many more waves than stages. A stage keeps at most `2S-1` waves, about `2A` in all.
    Each step sends one activation and one gradient of it to the neighbors; at the end the gradients of `embed` and
    `head`, which are computed on one stage each, are summed over the stages.

    *Memory*: with activations `A` and parameters `P`, a pair takes `A`, gradients of `P` entries in float32 and the
    memory of the two layers at work; a batch of twice the size takes `2A`. `"rolling"` keeps `A` in its state and the
    parameters twice. Sequences of layer functions depend on how well the compiler packs buffers that are not alike, and
    can take more.

    *State* of `"rolling"`: `WaveletState`; the wave under way is per-worker, all else replicated except in the state of
    `tx`.

    Args:
      layer: `layer(params, x) -> x` of layers that are alike, compiled once in a loop; or a sequence of such functions,
        which may change the shape of `x`. `x` is any tree; keys and integers in it (for dropout: a key that each layer
        folds) have no gradients. Each wave has its own.
      head: `head(params, x, batch) -> loss`, a mean over the examples of the wave.
      tx: for `"rolling"`: the optimizer, with `all_reduce` in it.
      embed: `embed(params, batch) -> x`, the input of the layers; by default `batch[0]`.
      mode: `"pair"` for synchronous SGD, or if the network is slow; `"rolling"` for the most overlap.
      reducer: for `"rolling"`: averages the gradient of each layer in the iteration that computes it, where the forward
        pass of the other wave can hide that: one collective for each layer, the same bytes. It must be stateless,
        `exact()`, and `tx` then has no `all_reduce`.
      stages: a further mesh axis over which the layers are cut, `L/S` to a stage (`"pair"`, layers that are alike).
      axis: the mesh axis of the workers.

    Returns:
      In `"pair"` a function `(params, waves) -> (loss, gradients)`, of `Layered` parameters and a tuple of two batches
      or more, each as one worker sees it. In `"rolling"` a `Wavelet` of `init`, `step` and `flush`. Flush before an
      evaluation, and before batches or the number of workers change.

    Raises:
      ValueError: `mode` and `tx` do not go together; parameters are not `Layered`, not floating or sharded; layers do
        not fit together; the loss is not a number; fewer than two waves; batches of different shapes in `"rolling"`.

    Example:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> params = jd.overlap.Layered(embed=(), layers=jnp.array([2.0, 3.0]), head=())
      >>> layer, head = lambda p, x: p * x, lambda p, x, batch: jnp.mean(x)
      >>> tick, tock = (jnp.ones(4),), (jnp.zeros(4),)
      >>> loss, grads = jd.overlap.wavelet(layer, head)(params, (tick, tock))
      >>> float(loss), grads.layers.tolist()
      (3.0, [1.5, 1.0])
      >>> tx = optax.chain(jd.all_reduce(jd.exact(), axis=None), optax.sgd(0.1))
      >>> rolling = jd.overlap.wavelet(layer, head, tx, mode="rolling", axis=None)
      >>> state = rolling.init(params, tick)
      >>> state, loss = rolling.step(state, tick)
      >>> float(loss), state.params.layers.tolist()  # forward only
      (6.0, [2.0, 3.0])
      >>> [round(float(x), 3) for x in rolling.flush(state).params.layers]
      [1.7, 2.8]

    References:
      Wang, Wang, Jiang, Li, Stoica, "Wavelet: Efficient DNN Training with Tick-Tock Scheduling", MLSys 2021. The
      paper runs a second model replica on another GPU stream; this is one program, with a stash of the parameters only
      where waves see different ones. The paper's model-parallel form moves weights; this one moves activations.
    """
    if mode not in ("pair", "rolling"):
        raise ValueError(f'mode must be "pair" or "rolling", got {mode!r}')
    if mode == "pair" and tx is not None:
        raise ValueError(
            'mode="pair" returns gradients, and the step updates: leave out tx, or use it in mode="rolling"'
        )
    if not callable(layer) and not layer:
        raise ValueError("wavelet needs at least one layer, got an empty sequence")
    if reducer is not None and mode == "pair":
        raise ValueError('reducer= is for mode="rolling"; the gradients of mode="pair" go to all_reduce(reducer)')
    mean = None if reducer is None else layer_mean(reducer, axis)
    model = WaveModel(layer if callable(layer) else tuple(layer), head, embed or first_of_batch)
    if stages is not None:
        if mode != "pair" or not callable(layer):
            raise ValueError(
                f'stages={stages!r} is for mode="pair" and one function of layers that are alike: waves stay under way '
                "between the stages"
            )
        return partial(_check_and_run, model, partial(value_and_grad_in_stages, model, stages, axis))
    passes = loop_passes(layer, mean) if callable(layer) else sequence_passes(layer, mean)
    if mode == "pair":
        return partial(_check_and_run, model, partial(_pair_value_and_grad, model, passes, axis))
    if tx is None:
        raise ValueError('mode="rolling" updates parameters: pass tx, optax.chain(all_reduce(exact()), optax.sgd(0.1))')
    return rolling_waves(model, passes, tx, axis, mean)


def _check_and_run(
    model: WaveModel, value_and_grad: Callable[..., Any], params: PyTree, waves: Sequence[PyTree]
) -> tuple[Array, PyTree]:
    check_waves(model, params, waves)
    return value_and_grad(params, waves)


def _pair_value_and_grad(
    model: WaveModel, passes: LayerPasses, axis: AxisNames, params: Layered, waves: Sequence[PyTree]
) -> tuple[Array, Layered]:
    """The mean loss and gradient of all waves, each backward pass beside the forward pass of the next wave."""
    params, waves = to_varying((params, waves), axis)
    losses, sums, flipped = [], Layered(None, None, None), False
    x, slots = passes.forward(params.layers, model.embed(params.embed, waves[0]))
    for wave, next_wave in zip(waves, [*waves[1:], None], strict=True):
        loss, of_head, g = loss_and_gradients(model, params.head, x, wave)
        losses.append(loss)
        if next_wave is None:
            # The last wave goes backward alone.
            layers, g = passes.backward(params.layers, slots, flipped, g, sums.layers)
        else:
            x = model.embed(params.embed, next_wave)
            layers, g, x, slots = passes.both(params.layers, params.layers, slots, flipped, g, x, sums.layers)
            # The gradients of the first wave begin the sums, in float32 or better.
            layers = layers if sums.layers is not None else add(None, layers)
            flipped = not flipped
        of_embed = embed_gradient(model, params.embed, wave, g)
        sums = Layered(add(sums.embed, of_embed), layers, add(sums.head, of_head))
    mean = jax.tree.map(lambda total, x: (total / len(waves)).astype(x.dtype), sums, params)
    return sum(losses[1:], losses[0]) / len(waves), mean
