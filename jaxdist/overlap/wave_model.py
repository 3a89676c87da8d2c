"""The model that waves pass through: an embedding, its layers and a head, with gradients and checks."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._core.types import Array, PyTree
from ..state.marks import is_mark
from .layer_passes import floating, row, with_floating


class Layered(NamedTuple):
    """The parameters of a model for `wavelet`, and their gradients.

    Attributes:
      embed: of the functions before the layers.
      layers: one tree whose leaves begin with the number of layers; for a sequence of layer functions a tuple of trees.
      head: of the functions after the layers.

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


class WaveModel(NamedTuple):
    """The functions of a model.

    Attributes:
      layer: a `Layer`, `(params, x) -> x`, or a tuple of them.
      head: `(params, x, batch) -> loss`.
      embed: `(params, batch) -> x`.
    """

    layer: Any
    head: Callable[[PyTree, PyTree, PyTree], Array]
    embed: Callable[[PyTree, PyTree], PyTree]


def first_of_batch(params: PyTree, batch: PyTree) -> PyTree:
    """The default of `embed`."""
    del params
    return batch[0]


def embed_gradient(model: WaveModel, params: PyTree, batch: PyTree, g: list[Array]) -> PyTree:
    """The gradient of the parameters of `embed`, from that of the floating leaves of its result."""
    return jax.vjp(lambda params: floating(model.embed(params, batch)), params)[1](g)[0]


def loss_and_gradients(model: WaveModel, params: PyTree, x: PyTree, batch: PyTree) -> tuple[Array, PyTree, list[Array]]:
    """The loss, its gradient by the parameters of the head, and that by the floating leaves of `x`."""

    def loss(params, leaves):
        return model.head(params, with_floating(x, leaves), batch)

    value, (of_head, g) = jax.value_and_grad(loss, argnums=(0, 1))(params, floating(x))
    return value, of_head, g


def check_model(model: WaveModel, params: PyTree, batch: PyTree) -> None:
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
    if callable(model.layer):
        _check_stacked(params.layers)
    elif not isinstance(params.layers, tuple) or len(params.layers) != len(model.layer):
        raise ValueError(f"{len(model.layer)} layer functions need a tuple of {len(model.layer)} trees of parameters")
    loss = jax.eval_shape(lambda params, batch: _apply_once(model, params, batch), params, batch)
    if getattr(loss, "shape", None) != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ValueError(f"head(params, x, batch) must return the mean loss, one floating number, got {loss}")


def _apply_once(model: WaveModel, params: Layered, batch: PyTree) -> Any:
    """The loss, with a single layer if layers are alike."""
    x = model.embed(params.embed, batch)
    if callable(model.layer):
        out = model.layer(row(params.layers, 0), x)
        _check_same_types(x, out)
        return model.head(params.head, out, batch)
    for layer, layer_params in zip(model.layer, params.layers, strict=True):
        x = layer(layer_params, x)
    return model.head(params.head, x, batch)


def check_waves(model: WaveModel, params: PyTree, waves: Sequence[PyTree]) -> None:
    """Checks that the batch is two waves or more, and that each fits the model."""
    if not isinstance(waves, tuple | list) or len(waves) < 2:
        raise ValueError(
            f"the batch must be a tuple of two waves or more, (tick, tock), got {type(waves).__name__}"
            + (f" of {len(waves)}" if isinstance(waves, tuple | list) else "")
        )
    for wave in waves:
        check_model(model, params, wave)


def _check_stacked(params: PyTree) -> None:
    leaves = jax.tree.leaves(params)
    counts = {leaf.shape[0] if leaf.ndim else None for leaf in leaves}
    if len(counts) != 1 or counts & {0, None}:
        raise ValueError(
            "the parameters of stacked layers must all begin with the number of layers, got the shapes "
            f"{[leaf.shape for leaf in leaves]}; for layers that differ pass a sequence of functions"
        )


def _check_same_types(x: PyTree, out: PyTree) -> None:
    found, expected = (jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), tree) for tree in (out, x))
    if found != expected:
        raise ValueError(
            f"a stacked layer must return the shapes and dtypes of its input, {expected}, got {found}; for layers that "
            "differ pass a sequence of functions"
        )
