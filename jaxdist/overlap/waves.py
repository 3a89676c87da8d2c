"""Two passes through the layers of a model, one backward and one forward, in the memory of one.

The memory of a layer's input is a slot. While the backward pass of one wave frees slots from the last layer to the
first, the forward pass of another fills them from the first layer to the last.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._core.dtypes import working_dtype
from .._core.types import Array, Like, PyTree


class Layers(NamedTuple):
    """How to go through the layers of a model; `g` is the gradient by the floating leaves of `x`, a list.

    Attributes:
      forward: `(params, x) -> (x, slots)`.
      backward: `(params, slots, flipped, g, sums) -> (gradients, g)`; `sums` is what gradients are added to, in its
        own memory, or `None`.
      both: `(old, new, slots, flipped, g, x, sums) -> (gradients, g, x, slots)`: backward with the parameters `old`
        beside forward with `new`. It leaves the slots in the opposite order.
    """

    forward: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
    backward: Callable[..., tuple[PyTree, list[Array]]]
    both: Callable[..., tuple[PyTree, list[Array], PyTree, PyTree]]


def floating(tree: PyTree) -> list[Like]:
    """The leaves that have gradients."""
    return [leaf for leaf in jax.tree.leaves(tree) if _is_floating(leaf)]


def with_floating(tree: PyTree, leaves: Sequence[Array]) -> PyTree:
    """The tree with other leaves that have gradients."""
    found = iter(leaves)
    return jax.tree.map(lambda leaf: next(found) if _is_floating(leaf) else leaf, tree)


def pull_back(
    f: Callable[[PyTree, PyTree], PyTree], params: PyTree, x: PyTree, g: list[Array]
) -> tuple[PyTree, list[Array]]:
    """The gradients of `f(params, x)` by its parameters and by the floating leaves of `x`."""

    def between(params, leaves):
        return floating(f(params, with_floating(x, leaves)))

    return jax.vjp(between, params, floating(x))[1](g)


def add(sums: PyTree | None, gradients: PyTree) -> PyTree:
    """Gradients in float32 or better, on top of what there is already."""
    wide = jax.tree.map(lambda x: x.astype(working_dtype(x.dtype)), gradients)
    return wide if sums is None else jax.tree.map(jnp.add, sums, wide)


def stacked(layer: Callable[[PyTree, PyTree], PyTree], mean: Callable[[PyTree], PyTree] | None = None) -> Layers:
    """Layers that are alike, in a loop; all leaves of parameters and slots begin with the number of layers.

    One round of the loop takes layer `j` backward and layer `L-1-j` forward. They do not depend on each other but for
    the number of the slot, which is known only when the slot has been read: without that XLA has no order of reading
    and writing, and copies all slots, twice in each round.

    Args:
      layer: the function of a layer.
      mean: of the gradient of a layer over workers, taken in its round; not together with `sums`.
    """
    mean = mean or _as_it_is

    def forward(params, x):
        return lax.scan(lambda x, one: (layer(one, x), x), x, params)

    def gradient(params, slots, j, s, g, sums):
        one, g = pull_back(layer, params, at(slots, s), g)
        if sums is None:
            return one, g, None, mean(one)
        return one, g, put(sums, j, add(at(sums, j), one)), None

    def backward(params, slots, flipped, g, sums):
        count = _length(params)

        def body(carry, numbered):
            (g, sums), (j, params) = carry, numbered
            _, g, sums, out = gradient(params, slots, j, jnp.where(flipped, count - 1 - j, j), g, sums)
            return (g, sums), out

        (g, sums), out = lax.scan(body, (g, sums), (jnp.arange(count), params), reverse=True)
        return (out if sums is None else sums), g

    def both(old, new, slots, flipped, g, x, sums):
        count = _length(old)

        def body(carry, numbered):
            (g, sums, x, slots), (j, params) = carry, numbered
            i = count - 1 - j
            s = jnp.where(flipped, i, j)
            one, g, sums, out = gradient(params, slots, j, s, g, sums)
            slots = put(slots, known_after(s, (one, g)), x)
            return (g, sums, layer(at(new, i), x), slots), out

        (g, sums, x, slots), out = lax.scan(body, (g, sums, x, slots), (jnp.arange(count), old), reverse=True)
        return (out if sums is None else sums), g, x, slots

    return Layers(forward, backward, both)


def unrolled(
    layers: Sequence[Callable[[PyTree, PyTree], PyTree]], mean: Callable[[PyTree], PyTree] | None = None
) -> Layers:
    """Layers of any kind, one after the other; parameters and slots are tuples, and slots are never flipped.

    Each round waits for the one before, by words that are always zero (`_held_back`): a compiler that took all of one
    pass first would hold the activations of both. Waiting also keeps what the backward pass computes again apart from
    what the forward pass has computed.

    Args:
      layers: the functions.
      mean: as in `stacked`.
    """
    mean = mean or _as_it_is

    def forward(params, x):
        slots = []
        for f, one in zip(layers, params, strict=True):
            slots.append(x)
            x = f(one, x)
        return x, tuple(slots)

    def gradient(j, params, slots, g, sums):
        one, g = pull_back(layers[j], params[j], _held_back(slots[j], g), g)
        return (one if sums is None else add(sums[j], one)), g

    def backward(params, slots, flipped, g, sums):
        del flipped
        gradients = []
        for j in reversed(range(len(layers))):
            one, g = gradient(j, params, slots, g, sums)
            gradients.append(mean(one))
        return tuple(reversed(gradients)), g

    def both(old, new, slots, flipped, g, x, sums):
        del flipped
        gradients, written, one = [], [], ()
        for i, j in enumerate(reversed(range(len(layers)))):
            x = _held_back(x, (g, one))
            one, g = gradient(j, old, slots, g, sums)
            gradients.append(mean(one))
            written.append(x)
            x = layers[i](new[i], x)
        return tuple(reversed(gradients)), g, x, tuple(written)

    return Layers(forward, backward, both)


def _as_it_is(tree: PyTree) -> PyTree:
    return tree


def _is_floating(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def _length(tree: PyTree) -> int:
    return jax.tree.leaves(tree)[0].shape[0]


def at(tree: PyTree, l: Any) -> PyTree:
    """Row `l` of every leaf."""
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, l, keepdims=False), tree)


def put(tree: PyTree, l: Any, one: PyTree) -> PyTree:
    """Every leaf with another row `l`."""
    return jax.tree.map(lambda all, leaf: lax.dynamic_update_index_in_dim(all, leaf, l, 0), tree, one)


def select(condition: Array, yes: PyTree, no: PyTree) -> PyTree:
    """One of two trees."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), yes, no)


def _any_positive(tree: PyTree) -> Array:
    """Of one entry of each array, as a number 0 or 1; NaN is none."""
    signs = [leaf[(0,) * leaf.ndim].real > 0 for leaf in floating(tree) if leaf.size]
    return jnp.stack(signs).any().astype(jnp.int32) if signs else jnp.zeros((), jnp.int32)


def known_after(number: Array, tree: PyTree) -> Array:
    """The same number, for a compiler that cannot know so before the arrays of the tree are there."""
    return jnp.minimum(number, number + _any_positive(tree))


def _held_back(x: PyTree, tree: PyTree) -> PyTree:
    """The same bits, once the arrays of the tree are there. Never by arithmetic, through which NaN would leak."""
    zero = jnp.minimum(_any_positive(tree), 0)

    def one(leaf):
        if jnp.iscomplexobj(leaf):
            return lax.complex(one(leaf.real), one(leaf.imag))
        words = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[leaf.dtype.itemsize]
        return lax.bitcast_convert_type(lax.bitcast_convert_type(leaf, words) ^ zero.astype(words), leaf.dtype)

    return with_floating(x, [one(leaf) for leaf in floating(x)])
