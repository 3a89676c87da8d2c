"""A loop over layers whose parameters are gathered one layer ahead, forward and backward."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._core.types import Array, PyTree


class _Scan(NamedTuple):
    """`layer(params, x, floats, integers) -> x`, and `gather(params)`, which makes a layer's parameters whole."""

    layer: Callable[..., PyTree]
    gather: Callable[[PyTree], PyTree]
    count: int


def scan_with_prefetch(
    layer: Callable[..., PyTree], gather: Callable[[PyTree], PyTree], stacked: PyTree, x: PyTree, args: tuple[Any, ...]
) -> PyTree:
    """Computes `x = layer(gather(params), x, *args)` for each of the stacked `params` in turn.

    The loop computes with parameters that the previous round has gathered, and gathers those of the next, so that
    neither waits for the other. Automatic differentiation would save every loop carry, here every whole layer; so the
    backward pass is written out: a reversed loop, also one layer ahead. It starts with the last layer, still whole from
    the forward pass. The last layer of the forward loop and the first of the backward loop are outside of the loops,
    which would otherwise gather parameters that are never used.

    Args:
      layer: `layer(params, x, *args) -> x`.
      gather: gathers the parameters of a layer; its gradient averages.
      stacked: parameters of `L` layers, as `gather` takes those of one layer.
      x: the input of the first layer.
      args: passed to each layer.

    Returns:
      The last `x`.
    """
    leaves, tree = jax.tree.flatten(args)
    is_float = [jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in leaves]
    # Arrays that `layer` closes over have gradients too, so they become arguments.
    shapes = jax.eval_shape(lambda stacked: gather(_layer_at(stacked, 0)), stacked)
    closed_layer, consts = jax.closure_convert(layer, shapes, x, *args)
    floats = ([leaf for leaf, flag in zip(leaves, is_float, strict=True) if flag], list(consts))
    integers = [leaf for leaf, flag in zip(leaves, is_float, strict=True) if not flag]

    def call_layer(params, x, floats, integers):
        given, consts = floats
        first, second = iter(given), iter(integers)
        args = tree.unflatten([next(first) if flag else next(second) for flag in is_float])
        return closed_layer(params, x, *args, *consts)

    scan = _Scan(call_layer, gather, jax.tree.leaves(stacked)[0].shape[0])

    @jax.custom_vjp
    def run(stacked, x, floats, integers) -> Array:
        return _forward(scan, stacked, x, floats, integers)[0]

    run.defvjp(partial(_forward, scan), partial(_backward, scan))
    return run(stacked, x, floats, integers)


def _layer_at(tree: PyTree, l: Any) -> PyTree:
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, l, keepdims=False), tree)


def _forward(scan: _Scan, stacked: PyTree, x: PyTree, floats: PyTree, integers: PyTree) -> tuple[PyTree, tuple]:
    """The last `x`, and the residuals: every layer's output, and the last layer's whole parameters."""

    def body(carry, l):
        x, params = carry
        # Independent of `x`, so the gather can overlap the layer's computation.
        following = scan.gather(_layer_at(stacked, l + 1))
        x = scan.layer(params, x, floats, integers)
        return (x, following), x

    start = (x, scan.gather(_layer_at(stacked, 0)))
    (last, params), outputs = lax.scan(body, start, jnp.arange(scan.count - 1)) if scan.count > 1 else (start, ())
    return scan.layer(params, last, floats, integers), (stacked, x, outputs, params, floats, integers)


def _backward(scan: _Scan, saved: tuple, g: PyTree) -> tuple[PyTree, PyTree, PyTree, None]:
    stacked, x, outputs, params, floats, integers = saved

    def pull_back(params, x, g):
        layer = partial(_call_without_integers, scan, integers)
        return jax.vjp(layer, params, x, floats)[1](g)

    def store(gradients, l, of_whole):
        # The gradient of the gather is the reduce-scatter.
        (sharded,) = jax.vjp(scan.gather, _layer_at(stacked, l))[1](of_whole)
        return jax.tree.map(lambda all, new: lax.dynamic_update_index_in_dim(all, new, l, 0), gradients, sharded)

    def body(carry, l):
        g, params, gradients, sums = carry
        # The next round's parameters, one layer further down.
        ahead = scan.gather(_layer_at(stacked, l - 1))
        of_whole, g, of_floats = pull_back(params, _layer_at(outputs, l - 1), g)
        return (g, ahead, store(gradients, l, of_whole), jax.tree.map(jnp.add, sums, of_floats)), None

    # `floats` are used by every layer, so their gradients are summed over the layers.
    carry = (g, params, jax.tree.map(jnp.zeros_like, stacked), jax.tree.map(jnp.zeros_like, floats))
    if scan.count > 1:
        carry, _ = lax.scan(body, carry, jnp.arange(1, scan.count), reverse=True)
    g, params, gradients, sums = carry
    of_whole, g, of_floats = pull_back(params, x, g)
    return store(gradients, 0, of_whole), g, jax.tree.map(jnp.add, sums, of_floats), None


def _call_without_integers(scan: _Scan, integers: PyTree, params: PyTree, x: PyTree, floats: PyTree) -> PyTree:
    return scan.layer(params, x, floats, integers)
