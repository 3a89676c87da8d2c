"""Two waves of training data, one in its backward pass while the other is in its forward pass."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._core.types import Array, AxisNames, PyTree
from ..reducers.base import Reducer
from ..state.marks import is_mark
from ..transforms.local_value_and_grad import to_varying
from .rolling import averaged, rolling
from .staged import staged
from .waves import Layers, add, at, floating, stacked, unrolled, with_floating


class Layered(NamedTuple):
    """The parameters of a model for `wavelet`, and their gradients.

    Attributes:
      embed: those of what comes before the layers.
      layers: one tree whose leaves begin with the number of layers; for a sequence of layer functions a tuple of trees.
      head: those of what comes after them.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> layers = [{"w": jnp.ones((2, 2))} for _ in range(3)]
      >>> stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
      >>> jd.overlap.Layered((), stacked, jnp.ones(2)).layers["w"].shape
      (3, 2, 2)
    """

    embed: PyTree
    layers: PyTree
    head: PyTree


class _Ends(NamedTuple):
    """What a wave does before and after the layers."""

    start: Callable[[PyTree, PyTree], PyTree]
    pull_start: Callable[[PyTree, PyTree, list[Array]], PyTree]
    finish: Callable[[PyTree, PyTree, PyTree], tuple[Array, PyTree, list[Array]]]
    check: Callable[[PyTree, PyTree], None]


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

    While the backward pass of the tick wave goes from layer `L-1` to `0` and frees what it has used, the forward pass
    of the tock wave goes from `0` to `L-1` and fills what has become free. Layer `L-1-i` of the one and layer `i` of
    the other stand in one round of one program and do not depend on each other: compiler and device may run them
    together, and hide the collectives of one behind the arithmetic of the other.

    `mode="pair"` is for use in place of `local_value_and_grad`: all waves see the same parameters, and the gradient is
    their mean, as if they had come one after the other (`micro_batches`), to the bit. With forward and backward times
    `F` and `B`, `k` waves take at best `F + (k-1) max(F, B) + B` instead of `k (F + B)`.

    `mode="rolling"` never drains: a call takes wave `w-1` backward, wave `w` forward and then updates. At best
    `max(F, B)` a wave. Every gradient is one update late and is that of the parameters which its wave set off with:
    `θ[w+1] = θ[w] + U(g[w-1](θ[w-1]))`. SGD on a curvature `λ` is stable for `ηλ < 1` instead of `2`.

    Only the inputs of layers are kept, and each layer is computed again on its way back: compare times with a loss
    under `jax.checkpoint`. What is gained depends on the device, see the how-to "Hide the communication"; nothing is
    on CPU.

    *On the wire*: nothing in `"pair"`, and so one reduction for all its waves; in `"rolling"` what `tx` sends, for
    every wave: twice the bytes of a pair.

    With `stages`, a pipeline whose waves are whole batches: on each stage, one wave goes back beside another that goes
    forward. All waves must see the same parameters, so it drains: `k` waves through `S` stages take `k + 2S - 1` steps
    of `max(F, B)/S`; give it many more waves than stages. A stage keeps at most `2S-1` waves, about `2A` in all. Each
    step sends one activation and one gradient of it to the neighbors; at the end the gradients of `embed` and `head`,
    which are computed on one stage each, are summed over the stages.

    *Memory*: with activations `A` and parameters `P`, a pair takes `A`, gradients of `P` entries in float32 and what
    the two layers at work need; a batch of twice the size takes `2A`. `"rolling"` keeps `A` in its state and the
    parameters twice. Sequences of layer functions depend on how well the compiler packs what is not alike, and can
    take more.

    *State* of `"rolling"`: `WaveletState`; the wave under way is per worker, all else agreed but for what `tx` says.

    Args:
      layer: `layer(params, x) -> x` of layers that are alike, compiled once in a loop; or a sequence of such functions,
        which may change the shape of `x`. `x` is any tree; keys and integers in it (for dropout: a key that each layer
        folds) have no gradients. Every wave begins with its own.
      head: `head(params, x, batch) -> loss`, a mean over the examples of the wave.
      tx: for `"rolling"`: the optimizer, with `all_reduce` in it.
      embed: `embed(params, batch) -> x`, what comes before the layers; by default `batch[0]`.
      mode: `"pair"` where it has to be synchronous SGD, or the network is slow; `"rolling"` for the most overlap.
      reducer: for `"rolling"`: averages the gradient of each layer in the round of the loop that computes it, where the
        forward pass of the other wave can hide that: as many collectives as layers, the same bytes. It must be
        stateless, `exact()`, and `tx` then has no `all_reduce`.
      stages: a further mesh axis over which the layers are cut, `L/S` to a stage (`"pair"`, layers that are alike).
      axis: the mesh axis of the workers.

    Returns:
      In `"pair"` a function `(params, waves) -> (loss, gradients)`, of `Layered` parameters and a tuple of two batches
      or more, each as one worker sees it. In `"rolling"` a `Wavelet` of `init`, `step` and `flush`. Flush before an
      evaluation, and before batches or the number of workers change.

    Raises:
      ValueError: `mode` and `tx` do not go together; parameters are not `Layered`, not floating or cut; layers do not
        fit together; the loss is no number; fewer than two waves; batches of different shapes in `"rolling"`.

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
      Wang, Wang, Jiang, Li, Stoica, "Wavelet: Efficient DNN Training with Tick-Tock Scheduling", MLSys 2021. There a
      second model replica on another GPU stream; here one program, with a stash of the parameters only where waves
      see different ones. Its model-parallel form moves weights; moving activations is the same here.
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
    mean = None if reducer is None else averaged(reducer, axis)
    through = stacked(layer, mean) if callable(layer) else unrolled(tuple(layer), mean)
    ends = _ends(layer, head, embed or _first)
    if stages is not None:
        if mode != "pair" or not callable(layer):
            raise ValueError(
                f'stages={stages!r} is for mode="pair" and one function of layers that are alike: waves stay under way '
                "between the stages"
            )
        return _checked(staged(layer, ends, stages, axis), ends)
    if mode == "pair":
        return _checked(_pair(through, ends, axis), ends)
    if tx is None:
        raise ValueError('mode="rolling" updates parameters: pass tx, optax.chain(all_reduce(exact()), optax.sgd(0.1))')
    return rolling(through, ends, tx, axis, mean)


def _first(params: PyTree, batch: PyTree) -> PyTree:
    del params
    return batch[0]


def _checked(value_and_grad: Callable, ends: _Ends) -> Callable[[PyTree, Sequence[PyTree]], tuple[Array, PyTree]]:
    def checked(params, waves):
        if not isinstance(waves, tuple | list) or len(waves) < 2:
            raise ValueError(
                f"the batch must be a tuple of two waves or more, (tick, tock), got {type(waves).__name__}"
                + (f" of {len(waves)}" if isinstance(waves, tuple | list) else "")
            )
        for wave in waves:
            ends.check(params, wave)
        return value_and_grad(params, waves)

    return checked


def _pair(through: Layers, ends: _Ends, axis: AxisNames) -> Callable[[PyTree, Sequence[PyTree]], tuple[Array, PyTree]]:
    def value_and_grad(params, waves):
        params, waves = to_varying((params, waves), axis)
        losses, sums, flipped = [], Layered(None, None, None), False
        x, slots = through.forward(params.layers, ends.start(params.embed, waves[0]))
        for wave, following in zip(waves, [*waves[1:], None], strict=True):
            loss, of_head, g = ends.finish(params.head, x, wave)
            losses.append(loss)
            if following is None:
                layers, g = through.backward(params.layers, slots, flipped, g, sums.layers)
            else:
                x = ends.start(params.embed, following)
                layers, g, x, slots = through.both(params.layers, params.layers, slots, flipped, g, x, sums.layers)
                layers, flipped = (layers if sums.layers is not None else add(None, layers)), not flipped
            of_embed = ends.pull_start(params.embed, wave, g)
            sums = Layered(add(sums.embed, of_embed), layers, add(sums.head, of_head))
        mean = jax.tree.map(lambda total, x: (total / len(waves)).astype(x.dtype), sums, params)
        return sum(losses[1:], losses[0]) / len(waves), mean

    return value_and_grad


def _ends(layer: Any, head: Callable, embed: Callable) -> _Ends:
    def pull_start(params, batch, g):
        return jax.vjp(lambda params: floating(embed(params, batch)), params)[1](g)[0]

    def finish(params, x, batch):
        def loss(params, leaves):
            return head(params, with_floating(x, leaves), batch)

        value, (of_head, g) = jax.value_and_grad(loss, argnums=(0, 1))(params, floating(x))
        return value, of_head, g

    def check(params, batch):
        if not isinstance(params, Layered):
            raise ValueError(
                f"the parameters must be a Layered(embed, layers, head), got {type(params).__name__}: stack the "
                "parameters of layers that are alike with jax.tree.map(lambda *x: jnp.stack(x), *layers)"
            )
        for path, leaf in jax.tree_util.tree_flatten_with_path(params, is_leaf=is_mark)[0]:
            name = jax.tree_util.keystr(path)
            if is_mark(leaf):
                raise ValueError(f"{name} is {type(leaf).__name__}: wavelet wants whole parameters")
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise ValueError(f"{name} has dtype {leaf.dtype}, which has no gradient: pass it in the batch")
        if callable(layer):
            _check_stacked(params.layers)
        elif not isinstance(params.layers, tuple) or len(params.layers) != len(layer):
            raise ValueError(f"{len(layer)} layer functions need a tuple of as many trees of parameters")

        def once(params, batch):
            x = embed(params.embed, batch)
            if callable(layer):
                out = layer(at(params.layers, 0), x)
                _check_kept(x, out)
                return head(params.head, out, batch)
            for f, one in zip(layer, params.layers, strict=True):
                x = f(one, x)
            return head(params.head, x, batch)

        loss = jax.eval_shape(once, params, batch)
        if getattr(loss, "shape", None) != () or not jnp.issubdtype(loss.dtype, jnp.floating):
            raise ValueError(f"head(params, x, batch) must return the mean loss, one floating number, got {loss}")

    return _Ends(embed, pull_start, finish, check)


def _check_stacked(params: PyTree) -> None:
    leaves = jax.tree.leaves(params)
    counts = {leaf.shape[0] if leaf.ndim else None for leaf in leaves}
    if len(counts) != 1 or counts & {0, None}:
        raise ValueError(
            "the parameters of stacked layers must all begin with the number of layers, got the shapes "
            f"{[leaf.shape for leaf in leaves]}; for layers that differ pass a sequence of functions"
        )


def _check_kept(x: PyTree, out: PyTree) -> None:
    found, expected = (jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), tree) for tree in (out, x))
    if found != expected:
        raise ValueError(
            f"a stacked layer must return what it is given, {expected}, got {found}; for layers that differ pass a "
            "sequence of functions"
        )
