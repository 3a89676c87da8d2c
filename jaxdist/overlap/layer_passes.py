"""A model of layers, and two passes through it, one backward and one forward, in the memory of one.

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
from ..state.marks import is_mark

Layer = Callable[[PyTree, PyTree], PyTree]
Mean = Callable[[PyTree], PyTree]
# The gradient by the floating leaves of an activation.
Gradient = list[Array]


def identity(tree: PyTree) -> PyTree:
    """Returns the tree: the mean over a single worker."""
    return tree


class LoopPasses(NamedTuple):
    """Passes through layers that are alike, in a loop; leaves of parameters and slots begin with the number of layers.

    One iteration of the loop takes layer `j` backward and layer `L-1-j` forward. They are independent except for the
    index of the slot, which is known only when the slot has been read: without that XLA has no order of reading and
    writing, and copies all slots twice in each iteration.

    `mean` averages the gradient of a layer over workers, in its iteration; not together with `sums`.
    """

    layer: Layer
    mean: Mean = identity

    def forward(self, params: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        """Returns the output of the last layer, and the slots."""
        return lax.scan(lambda x, layer_params: (self.layer(layer_params, x), x), x, params)

    def backward(
        self, params: PyTree, slots: PyTree, flipped: Any, g: Gradient, sums: PyTree | None
    ) -> tuple[PyTree, Gradient]:
        """Returns gradients, added to `sums` in its memory or as they are if it is `None`, and that of the input."""
        num_layers = _length(params)

        def body(carry, numbered):
            (g, sums), (j, layer_params) = carry, numbered
            slot = row(slots, jnp.where(flipped, num_layers - 1 - j, j))
            gradient, g = pull_back(self.layer, layer_params, slot, g)
            sums, out = self._collect(gradient, sums, j)
            return (g, sums), out

        (g, sums), out = lax.scan(body, (g, sums), (jnp.arange(num_layers), params), reverse=True)
        return (out if sums is None else sums), g

    def both(
        self, old: PyTree, new: PyTree, slots: PyTree, flipped: Any, g: Gradient, x: PyTree, sums: PyTree | None
    ) -> tuple[PyTree, Gradient, PyTree, PyTree]:
        """Goes backward with `old` beside forward with `new`; the slots it returns are in the opposite order."""
        num_layers = _length(old)

        def body(carry, numbered):
            (g, sums, x, slots), (j, layer_params) = carry, numbered
            # Layer j goes backward and frees its slot, which layer i fills on its way forward.
            i = num_layers - 1 - j
            s = jnp.where(flipped, i, j)
            gradient, g = pull_back(self.layer, layer_params, row(slots, s), g)
            sums, out = self._collect(gradient, sums, j)
            slots = set_row(slots, hide_until(s, (gradient, g)), x)
            return (g, sums, self.layer(row(new, i), x), slots), out

        (g, sums, x, slots), out = lax.scan(body, (g, sums, x, slots), (jnp.arange(num_layers), old), reverse=True)
        return (out if sums is None else sums), g, x, slots

    def _collect(self, gradient: PyTree, sums: PyTree | None, j: Array) -> tuple[PyTree | None, PyTree | None]:
        """Adds the gradient of layer `j` to the sums, or averages it as an output of the loop."""
        if sums is None:
            return None, self.mean(gradient)
        return set_row(sums, j, add(row(sums, j), gradient)), None


class SequencePasses(NamedTuple):
    """Passes through layers of any kind, unrolled; parameters and slots are tuples, and slots are never flipped.

    Each layer waits for the one before, by words that are always zero (`_delay`): a compiler that ran all of one pass
    first would keep the activations of both. Waiting also keeps the compiler from merging the recomputation in the
    backward pass with the forward pass.
    """

    layers: Sequence[Layer]
    mean: Mean = identity

    def forward(self, params: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        """As `LoopPasses.forward`."""
        slots = []
        for layer, layer_params in zip(self.layers, params, strict=True):
            slots.append(x)
            x = layer(layer_params, x)
        return x, tuple(slots)

    def backward(
        self, params: PyTree, slots: PyTree, flipped: Any, g: Gradient, sums: PyTree | None
    ) -> tuple[PyTree, Gradient]:
        """As `LoopPasses.backward`."""
        del flipped
        gradients = []
        for j in reversed(range(len(self.layers))):
            gradient, g = self._pull_back(j, params, slots, g, sums)
            gradients.append(self.mean(gradient))
        return tuple(reversed(gradients)), g

    def both(
        self, old: PyTree, new: PyTree, slots: PyTree, flipped: Any, g: Gradient, x: PyTree, sums: PyTree | None
    ) -> tuple[PyTree, Gradient, PyTree, PyTree]:
        """As `LoopPasses.both`."""
        del flipped
        gradients, inputs, gradient = [], [], ()
        for i, j in enumerate(reversed(range(len(self.layers)))):
            # Layer i waits until layer j + 1 has gone backward.
            x = _delay(x, (g, gradient))
            gradient, g = self._pull_back(j, old, slots, g, sums)
            gradients.append(self.mean(gradient))
            inputs.append(x)
            x = self.layers[i](new[i], x)
        return tuple(reversed(gradients)), g, x, tuple(inputs)

    def _pull_back(
        self, j: int, params: PyTree, slots: PyTree, g: Gradient, sums: PyTree | None
    ) -> tuple[PyTree, Gradient]:
        gradient, g = pull_back(self.layers[j], params[j], _delay(slots[j], g), g)
        return (gradient if sums is None else add(sums[j], gradient)), g


def pull_back(f: Layer, params: PyTree, x: PyTree, g: Gradient) -> tuple[PyTree, Gradient]:
    """Returns the gradients of `f(params, x)` by its parameters and by the floating leaves of `x`."""

    def between_floating(params, leaves):
        return floating(f(params, with_floating(x, leaves)))

    return jax.vjp(between_floating, params, floating(x))[1](g)


def add(sums: PyTree | None, gradients: PyTree) -> PyTree:
    """Adds gradients to sums in float32 or better."""
    wide = jax.tree.map(lambda x: x.astype(working_dtype(x.dtype)), gradients)
    return wide if sums is None else jax.tree.map(jnp.add, sums, wide)


def floating(tree: PyTree) -> list[Like]:
    """Returns the leaves that have gradients."""
    return [leaf for leaf in jax.tree.leaves(tree) if _is_floating(leaf)]


def with_floating(tree: PyTree, leaves: Sequence[Array]) -> PyTree:
    """Replaces the leaves that have gradients."""
    remaining = iter(leaves)
    return jax.tree.map(lambda leaf: next(remaining) if _is_floating(leaf) else leaf, tree)


def row(tree: PyTree, i: Any) -> PyTree:
    """Returns row `i` of every leaf."""
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, i, keepdims=False), tree)


def set_row(tree: PyTree, i: Any, values: PyTree) -> PyTree:
    """Replaces row `i` of every leaf."""
    return jax.tree.map(lambda leaf, value: lax.dynamic_update_index_in_dim(leaf, value, i, 0), tree, values)


def hide_until(number: Array, tree: PyTree) -> Array:
    """Returns the same number, in a form that a compiler cannot know before the arrays of the tree are computed."""
    return jnp.minimum(number, number + _any_positive(tree))


def _delay(x: PyTree, tree: PyTree) -> PyTree:
    """Returns the same bits, once the arrays of the tree are computed."""
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
    """Returns 1 if the first entry of some floating leaf is positive, else 0; NaN is not positive."""
    signs = [leaf[(0,) * leaf.ndim].real > 0 for leaf in floating(tree) if leaf.size]
    return jnp.stack(signs).any().astype(jnp.int32) if signs else jnp.zeros((), jnp.int32)


def _is_floating(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def _length(tree: PyTree) -> int:
    return jax.tree.leaves(tree)[0].shape[0]


class Layered(NamedTuple):
    """The parameters of a model for `wavelet`, and their gradients.

    `embed` are those before the layers and `head` those after. `layers` is one tree whose leaves begin with the number
    of layers; for a sequence of layer functions a tuple of trees.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> layers = [{"w": jnp.ones((2, 2))} for _ in range(3)]
      >>> stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
      >>> jd.overlap.Layered((), stacked, jnp.ones(2)).layers["w"].shape
      (3, 2, 2)
    """

    embed: PyTree
    layers: PyTree
    head: PyTree


class WaveModel(NamedTuple):
    """The functions of a model: a layer or a tuple of them, `head(params, x, batch)` and `embed(params, batch)`."""

    layer: Any
    head: Callable[[PyTree, PyTree, PyTree], Array]
    embed: Callable[[PyTree, PyTree], PyTree]

    def embed_gradient(self, params: PyTree, batch: PyTree, g: Gradient) -> PyTree:
        """Returns the gradient of the parameters of `embed`, from that of the floating leaves of its result."""
        return jax.vjp(lambda params: floating(self.embed(params, batch)), params)[1](g)[0]

    def loss_and_gradients(self, params: PyTree, x: PyTree, batch: PyTree) -> tuple[Array, PyTree, Gradient]:
        """Returns the loss, its gradient by the parameters of the head, and that by the floating leaves of `x`."""

        def loss(params, leaves):
            return self.head(params, with_floating(x, leaves), batch)

        # `x` may have keys and integers, so its floating leaves are an argument of their own.
        value, (of_head, g) = jax.value_and_grad(loss, argnums=(0, 1))(params, floating(x))
        return value, of_head, g

    def check(self, params: PyTree, batch: PyTree) -> None:
        """Checks that parameters and a wave fit the functions of the model."""
        if not isinstance(params, Layered):
            raise ValueError(
                f"the parameters must be a Layered(embed, layers, head), got {type(params).__name__}: stack the "
                "parameters of layers that are alike with jax.tree.map(lambda *x: jnp.stack(x), *layers)"
            )
        for path, leaf in jax.tree_util.tree_flatten_with_path(params, is_leaf=is_mark)[0]:
            name = jax.tree_util.keystr(path)
            if is_mark(leaf):
                raise ValueError(f"{name} is {type(leaf).__name__}, but wavelet needs whole, replicated parameters")
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise ValueError(f"{name} has dtype {leaf.dtype}, which has no gradient: pass it in the batch")
        if callable(self.layer):
            leaves = jax.tree.leaves(params.layers)
            counts = {leaf.shape[0] if leaf.ndim else None for leaf in leaves}
            if len(counts) != 1 or counts & {0, None}:
                raise ValueError(
                    "the parameters of stacked layers must all begin with the number of layers, got the shapes "
                    f"{[leaf.shape for leaf in leaves]}; for layers that differ pass a sequence of functions"
                )
        elif not isinstance(params.layers, tuple) or len(params.layers) != len(self.layer):
            raise ValueError(f"{len(self.layer)} layer functions need a tuple of {len(self.layer)} trees of parameters")
        loss = jax.eval_shape(self._apply_once, params, batch)
        if getattr(loss, "shape", None) != () or not jnp.issubdtype(loss.dtype, jnp.floating):
            raise ValueError(f"head(params, x, batch) must return the mean loss, one floating number, got {loss}")

    def _apply_once(self, params: Layered, batch: PyTree) -> Any:
        """Returns the loss, with a single layer if layers are alike."""
        x = self.embed(params.embed, batch)
        if callable(self.layer):
            out = self.layer(row(params.layers, 0), x)
            _check_same_types(x, out)
            return self.head(params.head, out, batch)
        for layer, layer_params in zip(self.layer, params.layers, strict=True):
            x = layer(layer_params, x)
        return self.head(params.head, x, batch)


def _check_same_types(x: PyTree, out: PyTree) -> None:
    found, expected = (jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), tree) for tree in (out, x))
    if found != expected:
        raise ValueError(
            f"a stacked layer must return the shapes and dtypes of its input, {expected}, got {found}; for layers that "
            "differ pass a sequence of functions"
        )
