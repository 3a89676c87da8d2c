"""Training waves that never stop: each call takes one wave backward, the next one forward, and updates."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from .._core.types import Array, AxisNames, Bool, Float, PyTree, State
from ..comm.over import over
from ..reducers.base import Reducer
from ..state.marks import PerWorker, bind, is_mark
from ..transforms.local_value_and_grad import to_varying
from ..transforms.skip_nonfinite import check_skips
from .waves import Layers, floating, select


class Wave(NamedTuple):
    """A wave between its forward and its backward pass, every field `PerWorker`.

    Attributes:
      slots: the inputs of the layers, stacked `[L, ...]` or a tuple.
      gradient: of the loss by what the last layer gave, its floating leaves.
      head: the gradient of the head's parameters.
      batch: what the wave is about.
    """

    slots: PyTree
    gradient: PyTree
    head: PyTree
    batch: PyTree


class WaveletState(NamedTuple):
    """The state of `wavelet(mode="rolling")`, to be placed and checkpointed like any other.

    Attributes:
      params: the current parameters, agreed.
      stash: those that the wave under way went forward with, agreed.
      opt_state: that of the optimizer.
      wave: the wave under way.
      pending: whether there is one.
      flipped: whether the input of the first layer lies in the last slot.
    """

    params: PyTree
    stash: PyTree
    opt_state: State
    wave: Wave
    pending: Bool[Array, ""]
    flipped: Bool[Array, ""]


class Wavelet(NamedTuple):
    """What `wavelet(mode="rolling")` returns.

    Attributes:
      init: `(params, batch) -> WaveletState`. `batch` is that of one worker, or its shapes.
      step: `(state, batch, **extra_args) -> (state, loss)`: one wave backward, one forward, an update. The loss is that
        of the new wave on this worker.
      flush: `(state, **extra_args) -> state`: the backward pass and update of the last wave; nothing if there is none.
    """

    init: Callable[..., WaveletState]
    step: Callable[..., tuple[WaveletState, Float[Array, ""]]]
    flush: Callable[..., WaveletState]


def averaged(reducer: Reducer, axis: AxisNames) -> Callable[[PyTree], PyTree]:
    """The mean over workers by a reducer that keeps nothing from call to call."""
    if jax.tree.leaves(reducer.init({"w": jnp.zeros((8, 8))})):
        raise ValueError(
            "the reducer of wavelet averages layer by layer and keeps nothing from wave to wave, and this one has a "
            "state (error feedback, a key): put it into all_reduce, in tx"
        )

    def mean(gradients):
        return reducer.reduce(gradients, reducer.init(gradients), over(axis))[0].mean

    return mean


def rolling(
    through: Layers,
    ends: Any,
    tx: optax.GradientTransformation,
    axis: AxisNames,
    mean: Callable[[PyTree], PyTree] | None,
) -> Wavelet:
    """The three functions.

    Args:
      through: how to go through the layers, whose gradients are means if there is a `mean`.
      ends: the two ends of the model.
      tx: the optimizer.
      axis: that of the workers.
      mean: of gradients over workers.
    """
    tx = optax.with_extra_args_support(tx)

    def init(params, batch):
        ends.check(params, batch)

        def shapes(params, batch):
            x, slots = through.forward(params.layers, ends.start(params.embed, batch))
            return slots, floating(x)

        slots, gradient = jax.eval_shape(shapes, params, batch)
        wave = Wave(*(_marked(jax.tree.map(_zeros, part), axis) for part in (slots, gradient, params.head, batch)))
        # A copy: the two versions are given away by themselves.
        return WaveletState(
            params, jax.tree.map(jnp.copy, params), tx.init(params), wave, jnp.zeros((), bool), jnp.zeros((), bool)
        )

    def update(state, layers, g, **extra_args):
        """Parameters and optimizer state after the wave under way, or as they were if there is none."""
        wave = _unmarked(state.wave)
        embed = ends.pull_start(to_varying(state.stash.embed, axis), wave.batch, g)
        embed, head = (embed, wave.head) if mean is None else mean((embed, wave.head))
        gradients = type(state.params)(embed, layers, head)
        updates, opt_state = tx.update(gradients, state.opt_state, state.params, **extra_args)
        new = (optax.apply_updates(state.params, updates), opt_state)
        return select(state.pending, new, (state.params, state.opt_state))

    def step(state, batch, **extra_args):
        ends.check(state.params, batch)
        wave = _unmarked(state.wave)
        _check_alike(batch, wave.batch)
        old, new, batch, wave = to_varying((state.stash, state.params, batch, wave), axis)
        x = ends.start(new.embed, batch)
        layers, g, x, slots = through.both(old.layers, new.layers, wave.slots, state.flipped, wave.gradient, x, None)
        params, opt_state = update(state, layers, g, **extra_args)
        loss, head, gradient = ends.finish(new.head, x, batch)
        following = Wave(*(_marked(part, axis) for part in (slots, gradient, head, batch)))
        return WaveletState(params, state.params, opt_state, following, jnp.ones((), bool), ~state.flipped), loss

    def flush(state, **extra_args):
        old, wave = to_varying((state.stash, _unmarked(state.wave)), axis)
        layers, g = through.backward(old.layers, wave.slots, state.flipped, wave.gradient, None)
        params, opt_state = update(state, layers, g, **extra_args)
        return state._replace(params=params, opt_state=opt_state, pending=jnp.zeros((), bool))

    return Wavelet(init, step, flush)


def _marked(tree: PyTree, axis: AxisNames) -> PyTree:
    # New workers take over waves of others: means of tokens or of slots are no waves.
    return bind(jax.tree.map(lambda x: PerWorker(x, resize="copy"), tree), axis)


def _unmarked(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.value if is_mark(x) else x, tree, is_leaf=is_mark)


def _zeros(x: Any) -> Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0, impl=str(jax.random.key_impl(x))), x.shape)
    return jnp.zeros(x.shape, x.dtype)


def _check_alike(batch: PyTree, before: PyTree) -> None:
    found, expected = (jax.tree.map(lambda x: (x.shape, str(x.dtype)), tree) for tree in (batch, before))
    if found != expected:
        raise ValueError(
            f"a batch of shapes {found} for a state that was made for {expected}: init(params, batch) wants a batch as "
            "one worker sees it, and all batches are alike; flush, and init again, to change them"
        )


def with_skip_checks(run: Any) -> Any:
    """The compiled step, which raises `TooManySkips` before a call whose state has gone through too many.

    To look is to wait for the step before, so it is done only when the limit may have been reached: in every
    `max_consecutive + 1`-th call as long as nothing is skipped. All processes look in the same calls.
    """
    wait = 0

    @functools.wraps(run)
    def checked(state, batch, **static):
        nonlocal wait
        if wait:
            wait -= 1
        elif not any(isinstance(x, Tracer) for x in jax.tree.leaves(state)):
            wait = check_skips(state)
        return run(state, batch, **static)

    # What callers of a compiled function expect to find.
    for name in ("lower", "trace", "eval_shape", "clear_cache", "_cache_size"):
        setattr(checked, name, getattr(run, name))
    return checked
