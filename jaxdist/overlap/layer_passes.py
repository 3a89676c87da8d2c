"""Two passes through the layers of a model, one backward and one forward, in the memory of one.

The memory of a layer's input is a slot. While the backward pass of one wave frees slots from the last layer to the
first, the forward pass of another fills them from the first layer to the last.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._core.dtypes import working_dtype
from .._core.types import Array, Like, PyTree

Layer = Callable[[PyTree, PyTree], PyTree]
Mean = Callable[[PyTree], PyTree]


class LayerPasses(NamedTuple):
    """The passes through the layers of a model; `g` is the gradient by the floating leaves of `x`, a list.

    Attributes:
      forward: `(params, x) -> (x, slots)`.
      backward: `(params, slots, flipped, g, sums) -> (gradients, g)`. Gradients are added to `sums`, in its memory, or
        returned as they are if it is `None`.
      both: `(old, new, slots, flipped, g, x, sums) -> (gradients, g, x, slots)`: backward with the parameters `old`
        beside forward with `new`. The slots it returns are in the opposite order.
    """

    forward: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
    backward: Callable[..., tuple[PyTree, list[Array]]]
    both: Callable[..., tuple[PyTree, list[Array], PyTree, PyTree]]


def loop_passes(layer: Layer, mean: Mean | None = None) -> LayerPasses:
    """Passes through layers that are alike, in a loop; leaves of parameters and slots begin with the number of layers.

    One iteration of the loop takes layer `j` backward and layer `L-1-j` forward. They are independent except for the
    index of the slot, which is known only when the slot has been read: without that XLA has no order of reading and
    writing, and copies all slots twice in each iteration.

    Args:
      layer: the function of a layer.
      mean: averages the gradient of a layer over workers, in its iteration; not together with `sums`.
    """
    mean = mean or _identity
    return LayerPasses(
        partial(_loop_forward, layer), partial(_loop_backward, layer, mean), partial(_loop_both, layer, mean)
    )


def _loop_forward(layer: Layer, params: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
    return lax.scan(lambda x, layer_params: (layer(layer_params, x), x), x, params)


def _loop_backward(
    layer: Layer, mean: Mean, params: PyTree, slots: PyTree, flipped: Any, g: list[Array], sums: PyTree | None
) -> tuple[PyTree, list[Array]]:
    num_layers = _length(params)

    def body(carry, numbered):
        (g, sums), (j, layer_params) = carry, numbered
        slot = row(slots, jnp.where(flipped, num_layers - 1 - j, j))
        gradient, g = pull_back(layer, layer_params, slot, g)
        sums, out = _collect(mean, gradient, sums, j)
        return (g, sums), out

    (g, sums), out = lax.scan(body, (g, sums), (jnp.arange(num_layers), params), reverse=True)
    return (out if sums is None else sums), g


def _loop_both(
    layer: Layer,
    mean: Mean,
    old: PyTree,
    new: PyTree,
    slots: PyTree,
    flipped: Any,
    g: list[Array],
    x: PyTree,
    sums: PyTree | None,
) -> tuple[PyTree, list[Array], PyTree, PyTree]:
    num_layers = _length(old)

    def body(carry, numbered):
        (g, sums, x, slots), (j, layer_params) = carry, numbered
        # Layer j goes backward and frees its slot, which layer i fills on its way forward.
        i = num_layers - 1 - j
        s = jnp.where(flipped, i, j)
        gradient, g = pull_back(layer, layer_params, row(slots, s), g)
        sums, out = _collect(mean, gradient, sums, j)
        slots = set_row(slots, known_after(s, (gradient, g)), x)
        return (g, sums, layer(row(new, i), x), slots), out

    (g, sums, x, slots), out = lax.scan(body, (g, sums, x, slots), (jnp.arange(num_layers), old), reverse=True)
    return (out if sums is None else sums), g, x, slots


def _collect(mean: Mean, gradient: PyTree, sums: PyTree | None, j: Array) -> tuple[PyTree | None, PyTree | None]:
    """Adds the gradient of layer `j` to the sums, or averages it as an output of the loop."""
    if sums is None:
        return None, mean(gradient)
    return set_row(sums, j, add(row(sums, j), gradient)), None


def sequence_passes(layers: Sequence[Layer], mean: Mean | None = None) -> LayerPasses:
    """Passes through layers of any kind, unrolled; parameters and slots are tuples, and slots are never flipped.

    Each layer waits for the one before, by words that are always zero (`_delay`): a compiler that ran all of one pass
    first would keep the activations of both. Waiting also prevents that the recomputation in the backward pass is
    merged with the forward pass.

    Args:
      layers: the functions.
      mean: as in `loop_passes`.
    """
    layers, mean = tuple(layers), mean or _identity
    return LayerPasses(
        partial(_sequence_forward, layers),
        partial(_sequence_backward, layers, mean),
        partial(_sequence_both, layers, mean),
    )


def _sequence_forward(layers: Sequence[Layer], params: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
    slots = []
    for layer, layer_params in zip(layers, params, strict=True):
        slots.append(x)
        x = layer(layer_params, x)
    return x, tuple(slots)


def _sequence_backward(
    layers: Sequence[Layer],
    mean: Mean,
    params: PyTree,
    slots: PyTree,
    flipped: Any,
    g: list[Array],
    sums: PyTree | None,
) -> tuple[PyTree, list[Array]]:
    del flipped
    gradients = []
    for j in reversed(range(len(layers))):
        gradient, g = _delay_gradient(layers[j], params[j], slots[j], g, None if sums is None else sums[j])
        gradients.append(mean(gradient))
    return tuple(reversed(gradients)), g


def _sequence_both(
    layers: Sequence[Layer],
    mean: Mean,
    old: PyTree,
    new: PyTree,
    slots: PyTree,
    flipped: Any,
    g: list[Array],
    x: PyTree,
    sums: PyTree | None,
) -> tuple[PyTree, list[Array], PyTree, PyTree]:
    del flipped
    gradients, inputs, gradient = [], [], ()
    for i, j in enumerate(reversed(range(len(layers)))):
        x = _delay(x, (g, gradient))
        gradient, g = _delay_gradient(layers[j], old[j], slots[j], g, None if sums is None else sums[j])
        gradients.append(mean(gradient))
        inputs.append(x)
        x = layers[i](new[i], x)
    return tuple(reversed(gradients)), g, x, tuple(inputs)


def _delay_gradient(
    layer: Layer, params: PyTree, slot: PyTree, g: list[Array], sums: PyTree | None
) -> tuple[PyTree, list[Array]]:
    gradient, g = pull_back(layer, params, _delay(slot, g), g)
    return (gradient if sums is None else add(sums, gradient)), g


def pull_back(f: Layer, params: PyTree, x: PyTree, g: list[Array]) -> tuple[PyTree, list[Array]]:
    """The gradients of `f(params, x)` by its parameters and by the floating leaves of `x`."""

    def between_floating(params, leaves):
        return floating(f(params, with_floating(x, leaves)))

    return jax.vjp(between_floating, params, floating(x))[1](g)


def add(sums: PyTree | None, gradients: PyTree) -> PyTree:
    """Adds gradients to sums in float32 or better."""
    wide = jax.tree.map(lambda x: x.astype(working_dtype(x.dtype)), gradients)
    return wide if sums is None else jax.tree.map(jnp.add, sums, wide)


def floating(tree: PyTree) -> list[Like]:
    """The leaves that have gradients."""
    return [leaf for leaf in jax.tree.leaves(tree) if _is_floating(leaf)]


def with_floating(tree: PyTree, leaves: Sequence[Array]) -> PyTree:
    """Replaces the leaves that have gradients."""
    remaining = iter(leaves)
    return jax.tree.map(lambda leaf: next(remaining) if _is_floating(leaf) else leaf, tree)


def row(tree: PyTree, i: Any) -> PyTree:
    """Row `i` of every leaf."""
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, i, keepdims=False), tree)


def set_row(tree: PyTree, i: Any, values: PyTree) -> PyTree:
    """Replaces row `i` of every leaf."""
    return jax.tree.map(lambda leaf, value: lax.dynamic_update_index_in_dim(leaf, value, i, 0), tree, values)


def known_after(number: Array, tree: PyTree) -> Array:
    """The same number, in a form that a compiler cannot know before the arrays of the tree are computed."""
    return jnp.minimum(number, number + _any_positive(tree))


def _delay(x: PyTree, tree: PyTree) -> PyTree:
    """The same bits, once the arrays of the tree are computed."""
    # min(0 or 1, 0): always zero, which no compiler derives.
    zero = jnp.minimum(_any_positive(tree), 0)
    return with_floating(x, [_xor(leaf, zero) for leaf in floating(x)])


def _xor(leaf: Array, number: Array) -> Array:
    # On the bits, since NaN would leak through arithmetic.
    if jnp.iscomplexobj(leaf):
        return lax.complex(_xor(leaf.real, number), _xor(leaf.imag, number))
    words = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[leaf.dtype.itemsize]
    return lax.bitcast_convert_type(lax.bitcast_convert_type(leaf, words) ^ number.astype(words), leaf.dtype)


def _any_positive(tree: PyTree) -> Array:
    """1 if the first entry of some floating leaf is positive, else 0; NaN is not positive."""
    signs = [leaf[(0,) * leaf.ndim].real > 0 for leaf in floating(tree) if leaf.size]
    return jnp.stack(signs).any().astype(jnp.int32) if signs else jnp.zeros((), jnp.int32)


def _identity(tree: PyTree) -> PyTree:
    return tree


def _is_floating(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def _length(tree: PyTree) -> int:
    return jax.tree.leaves(tree)[0].shape[0]
