"""Layers in a loop whose parameters are gathered one layer ahead, forward and backward."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._core.types import Array, PyTree


def prefetched_scan(
    layer: Callable[..., PyTree], whole: Callable[[PyTree], PyTree], stacked: PyTree, x: PyTree, args: tuple[Any, ...]
) -> PyTree:
    """`x = layer(whole(params), x, *args)` for each of the stacked `params` in turn.

    The loop computes with parameters that the round before has gathered, and gathers those of the next, so that neither
    waits for the other. Automatic differentiation would keep what goes round a loop, here every whole layer; so the
    backward pass is written out: a loop the other way, one layer ahead as well. It begins with the last layer still
    whole from the forward pass. The first round of the one and the last round of the other stand outside of the loop,
    lest they gather something that nobody uses.

    Args:
      layer: `layer(params, x, *args) -> x`.
      whole: gathers the parameters of a layer; its gradient averages.
      stacked: parameters of `L` layers, as `whole` takes those of one.
      x: what goes through the layers.
      args: passed to each.

    Returns:
      The last `x`.
    """
    count = jax.tree.leaves(stacked)[0].shape[0]
    leaves, tree = jax.tree.flatten(args)
    smooth = [jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in leaves]

    def at(tree, l):
        return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, l, keepdims=False), tree)

    # What `layer` closes over has gradients too.
    shapes = jax.eval_shape(lambda stacked: whole(at(stacked, 0)), stacked)
    layer, consts = jax.closure_convert(layer, shapes, x, *args)
    floats = ([leaf for leaf, is_float in zip(leaves, smooth, strict=True) if is_float], list(consts))
    others = [leaf for leaf, is_float in zip(leaves, smooth, strict=True) if not is_float]

    def one(params, x, floats, others):
        first, second = iter(floats[0]), iter(others)
        joined = [next(first) if is_float else next(second) for is_float in smooth]
        return layer(params, x, *tree.unflatten(joined), *floats[1])

    def forward(stacked, x, floats, others):
        def body(carry, l):
            x, params = carry
            following = whole(at(stacked, l + 1))
            x = one(params, x, floats, others)
            return (x, following), x

        start = (x, whole(at(stacked, 0)))
        (last, params), after = lax.scan(body, start, jnp.arange(count - 1)) if count > 1 else (start, ())
        return one(params, last, floats, others), (stacked, x, after, params, floats, others)

    def backward(saved, g):
        stacked, x, after, params, floats, others = saved

        def through(params, x, g):
            return jax.vjp(lambda params, x, floats: one(params, x, floats, others), params, x, floats)[1](g)

        def put(gradients, l, of_whole):
            (cut,) = jax.vjp(whole, at(stacked, l))[1](of_whole)
            return jax.tree.map(lambda all, one: lax.dynamic_update_index_in_dim(all, one, l, 0), gradients, cut)

        def body(carry, l):
            g, params, gradients, sums = carry
            ahead = whole(at(stacked, l - 1))
            of_whole, g, of_floats = through(params, at(after, l - 1), g)
            return (g, ahead, put(gradients, l, of_whole), jax.tree.map(jnp.add, sums, of_floats)), None

        carry = (g, params, jax.tree.map(jnp.zeros_like, stacked), jax.tree.map(jnp.zeros_like, floats))
        if count > 1:
            carry, _ = lax.scan(body, carry, jnp.arange(1, count), reverse=True)
        g, params, gradients, sums = carry
        of_whole, g, of_floats = through(params, x, g)
        return put(gradients, 0, of_whole), g, jax.tree.map(jnp.add, sums, of_floats), None

    @jax.custom_vjp
    def run(stacked, x, floats, others) -> Array:
        return forward(stacked, x, floats, others)[0]

    run.defvjp(forward, backward)
    return run(stacked, x, floats, others)
