"""Wavelet: the backward pass of one wave of data beside the forward pass of another."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._core.trees import is_key, tree_where
from .._core.types import Array, AxisNames, Bool, Float, PyTree, State
from ..comm.over import over
from ..reducers.reducer import Reducer, check_reducer
from ..state.marks import PerWorker, bind, is_mark
from ..transforms.extra_args import with_extra_args
from ..transforms.local_value_and_grad import to_varying
from .layer_passes import Gradient, Layered, LoopPasses, Mean, SequencePasses, WaveModel, add, floating, identity
from .pipeline_stages import value_and_grad_in_stages


class Wave(NamedTuple):
    """A wave between its forward and its backward pass, every field `PerWorker`.

    `slots` are the inputs of the layers, stacked `[L, ...]` or a tuple; `gradient` is that of the loss by the floating
    leaves of the last layer's output, `head` that by the head's parameters.
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
      opt_state: the state of the optimizer.
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
    """Runs the backward pass of one wave of data beside the forward pass of another, in the memory of one (Wavelet).

    Layer `L-1-i` backward and layer `i` forward share an iteration and do not depend on each other, so that one can
    hide the collectives of the other. The backward pass computes layers again.

    `mode="pair"` replaces `local_value_and_grad`: the mean gradient of waves that see the same parameters, bit for bit
    as with `micro_batches`. `mode="rolling"` takes wave `w-1` backward, wave `w` forward and updates:
    `θ[w+1] = θ[w] + U(g[w-1](θ[w-1]))`, one update late.

    *On the wire*: nothing in `"pair"`; in `"rolling"` the bytes of `tx` for every wave. With `stages` an activation and
    its gradient in each of `k + 2S - 1` steps, then a sum of the gradients of `embed` and `head`.

    *State* (`"rolling"`): `WaveletState`, with activations and parameters twice.

    Args:
      layer: `layer(params, x) -> x` of layers that are alike, or a sequence of such functions, which may change the
        shape of `x`. Keys and integers in `x` have no gradients.
      head: `head(params, x, batch) -> loss`, a mean over the examples of the wave.
      tx: for `"rolling"`: the optimizer, with `all_reduce` in it.
      embed: `embed(params, batch) -> x`, the input of the layers; by default `batch[0]`.
      mode: `"pair"` for exact gradients or slow networks; `"rolling"` for the most overlap.
      reducer: for `"rolling"`: averages each layer's gradient in its iteration, in place of `all_reduce`; only
        `exact()`.
      stages: a further mesh axis over which the layers are cut, `L/S` to a stage (`"pair"`, layers that are alike).

    Returns:
      In `"pair"` a function `(params, waves) -> (loss, gradients)` of `Layered` parameters and at least two batches. In
      `"rolling"` a `Wavelet` of `init`, `step` and `flush`; flush before an evaluation and before batches or the number
      of workers change.

    Examples:
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
      Wang et al., "Wavelet: Efficient DNN Training with Tick-Tock Scheduling", MLSys, 2021. The paper runs a second
      model replica on another GPU stream; this is one program, with a stash of the parameters only where waves see
      different ones. The paper's model-parallel form moves weights; this one moves activations.
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
    mean = identity if reducer is None else _layer_mean(reducer, axis)
    model = WaveModel(layer if callable(layer) else tuple(layer), head, embed or (lambda params, batch: batch[0]))
    if stages is not None:
        if mode != "pair" or not callable(layer):
            raise ValueError(
                f'stages={stages!r} is for mode="pair" and one function of layers that are alike: waves stay under way '
                "between the stages"
            )
        return partial(_check_and_run, model, partial(value_and_grad_in_stages, model, stages, axis))
    passes = LoopPasses(layer, mean) if callable(layer) else SequencePasses(tuple(layer), mean)
    if mode == "pair":
        return partial(_check_and_run, model, partial(_pair_value_and_grad, model, passes, axis))
    if tx is None:
        raise ValueError('mode="rolling" updates parameters: pass tx, optax.chain(all_reduce(exact()), optax.sgd(0.1))')
    made = _Wavelet(model, passes, with_extra_args(tx), axis, mean)
    return Wavelet(made.init, made.step, made.flush)


def _check_and_run(
    model: WaveModel, value_and_grad: Callable[..., Any], params: PyTree, waves: Sequence[PyTree]
) -> tuple[Array, PyTree]:
    if not isinstance(waves, tuple | list) or len(waves) < 2:
        raise ValueError(
            f"the batch must be a tuple of two waves or more, (tick, tock), got {type(waves).__name__}"
            + (f" of {len(waves)}" if isinstance(waves, tuple | list) else "")
        )
    for wave in waves:
        model.check(params, wave)
    return value_and_grad(params, waves)


def _pair_value_and_grad(
    model: WaveModel, passes: LoopPasses | SequencePasses, axis: AxisNames, params: Layered, waves: Sequence[PyTree]
) -> tuple[Array, Layered]:
    """Returns the mean loss and gradient of all waves, each backward pass beside the forward pass of the next wave."""
    params, waves = to_varying((params, waves), axis)
    losses, sums, flipped = [], Layered(None, None, None), False
    # Each wave leaves its slots in the opposite order for the next one.
    x, slots = passes.forward(params.layers, to_varying(model.embed(params.embed, waves[0]), axis))
    for wave, next_wave in zip(waves, [*waves[1:], None], strict=True):
        loss, of_head, g = model.loss_and_gradients(params.head, x, wave)
        losses.append(loss)
        if next_wave is None:
            # The last wave goes backward alone.
            layers, g = passes.backward(params.layers, slots, flipped, g, sums.layers)
        else:
            x = to_varying(model.embed(params.embed, next_wave), axis)
            layers, g, x, slots = passes.both(params.layers, params.layers, slots, flipped, g, x, sums.layers)
            # The gradients of the first wave begin the sums, in float32 or better.
            layers = layers if sums.layers is not None else add(None, layers)
            flipped = not flipped
        of_embed = model.embed_gradient(params.embed, wave, g)
        sums = Layered(add(sums.embed, of_embed), layers, add(sums.head, of_head))
    mean = jax.tree.map(lambda total, x: (total / len(waves)).astype(x.dtype), sums, params)
    return sum(losses[1:], losses[0]) / len(waves), mean


def _layer_mean(reducer: Reducer, axis: AxisNames) -> Mean:
    """Returns the mean over workers by a reducer without state."""
    check_reducer(reducer)
    if jax.tree.leaves(reducer.init({"w": jnp.zeros((8, 8))})):
        raise ValueError(
            "the reducer of wavelet averages layer by layer and keeps nothing from wave to wave, and this one has a "
            "state (error feedback, a key): put it into all_reduce, in tx"
        )

    def mean(gradients):
        return reducer.reduce(gradients, reducer.init(gradients), over(axis))[0].mean

    return mean


class _Wavelet(NamedTuple):
    """The arguments of `mode="rolling"`; gradients of `passes` are means over workers already, by `mean`."""

    model: WaveModel
    passes: LoopPasses | SequencePasses
    tx: optax.GradientTransformationExtraArgs
    axis: AxisNames
    mean: Mean

    def init(self, params: PyTree, batch: PyTree) -> WaveletState:
        self.model.check(params, batch)

        def forward(params, batch):
            x, slots = self.passes.forward(params.layers, to_varying(self.model.embed(params.embed, batch), self.axis))
            return slots, floating(x)

        slots, gradient = jax.eval_shape(forward, params, batch)
        wave = Wave(*(_mark(jax.tree.map(_zeros, part), self.axis) for part in (slots, gradient, params.head, batch)))
        # The stash is a copy, since a donated state must not contain an array twice.
        stash = jax.tree.map(jnp.copy, params)
        return WaveletState(params, stash, self.tx.init(params), wave, jnp.zeros((), bool), jnp.zeros((), bool))

    def step(self, state: WaveletState, batch: PyTree, **extra_args: Any) -> tuple[WaveletState, Array]:
        self.model.check(state.params, batch)
        wave = _unmark(state.wave)
        _check_batch(batch, wave.batch)
        old, new, batch, wave = to_varying((state.stash, state.params, batch, wave), self.axis)
        # The wave under way goes backward with the parameters of its forward pass, the new one forward with the newest.
        x = to_varying(self.model.embed(new.embed, batch), self.axis)
        layers, g, x, slots = self.passes.both(
            old.layers, new.layers, wave.slots, state.flipped, wave.gradient, x, None
        )
        params, opt_state = self._apply_wave(state, layers, g, extra_args)
        loss, head, gradient = self.model.loss_and_gradients(new.head, x, batch)
        next_wave = Wave(*(_mark(part, self.axis) for part in (slots, gradient, head, batch)))
        return WaveletState(params, state.params, opt_state, next_wave, jnp.ones((), bool), ~state.flipped), loss

    def flush(self, state: WaveletState, **extra_args: Any) -> WaveletState:
        old, wave = to_varying((state.stash, _unmark(state.wave)), self.axis)
        layers, g = self.passes.backward(old.layers, wave.slots, state.flipped, wave.gradient, None)
        params, opt_state = self._apply_wave(state, layers, g, extra_args)
        return state._replace(params=params, opt_state=opt_state, pending=jnp.zeros((), bool))

    def _apply_wave(
        self, state: WaveletState, layers: PyTree, g: Gradient, extra_args: dict[str, Any]
    ) -> tuple[PyTree, State]:
        """Returns parameters and optimizer state after the update by the wave under way, unchanged if there is none.

        `layers` are the gradients of the layers, `g` the gradient by the first layer's input.
        """
        if given := sorted({"examples", "active"} & set(extra_args)):
            raise ValueError(
                f"{given[0]}= of this call would weight the gradient of the previous wave: weight the loss of each "
                'worker, or use mode="pair"'
            )
        wave = _unmark(state.wave)
        embed = self.model.embed_gradient(to_varying(state.stash.embed, self.axis), wave.batch, g)
        embed, head = self.mean((embed, wave.head))
        gradients = state.params._replace(embed=embed, layers=layers, head=head)
        # θ[w+1] = θ[w] + U(g[w-1](θ[w-1])): the gradient of the stash, the update of the newest parameters.
        updates, opt_state = self.tx.update(gradients, state.opt_state, state.params, **extra_args)
        new = optax.apply_updates(state.params, updates), opt_state
        return tree_where(state.pending, new, (state.params, state.opt_state))


def _mark(tree: PyTree, axis: AxisNames) -> PyTree:
    # New workers copy the waves of others, since a mean of tokens or of slots is not a wave.
    return bind(jax.tree.map(lambda x: PerWorker(x, resize="copy"), tree), axis)


def _unmark(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.value if is_mark(x) else x, tree, is_leaf=is_mark)


def _zeros(x: Any) -> Array:
    if is_key(x):
        return jnp.broadcast_to(jax.random.key(0, impl=str(jax.random.key_impl(x))), x.shape)
    return jnp.zeros(x.shape, x.dtype)


def _check_batch(batch: PyTree, previous: PyTree) -> None:
    found, expected = (jax.tree.map(lambda x: (x.shape, str(x.dtype)), tree) for tree in (batch, previous))
    if found != expected:
        raise ValueError(
            f"the batch has the shapes {found}, but the state was made for {expected}: all batches must be alike; pass "
            "init(params, batch) a batch as one worker sees it, or flush and init again to change the shapes"
        )
