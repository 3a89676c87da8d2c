"""A model of the user's own: a loss, parameters and batches."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from ..._core.types import Array, Metrics, PRNGKeyArray, PyTree
from ...offload.layers.stack import LayerStack
from .base import PLAIN, EqualLayers, LayerRunner, Workload

STACK = (
    "return (stack, params, batch): stack, a jaxdist.offload.LayerStack; params, arrays or a function params(key) "
    'with keys "embed", "layers" (a list, one tree for each layer, all alike) and "head"; batch, as with a loss'
)
RETURNS = (
    "return (loss, params, batch): loss(params, batch) -> the mean over the examples; params, arrays or a function "
    "params(key); batch, arrays whose first dimension counts examples, or a function batch(seed, step, size)"
)
HELD_OUT_SEED, HELD_OUT_BATCHES = 2**31 - 1, 4


def own_workload(name: str, made: Any) -> Workload:
    """Makes a workload of what a user's function has returned, `(loss, params, batch)`.

    Of given arrays, the last tenth of the examples is held out, and batches are drawn from the others with replacement;
    a function `batch` is also called with a seed that no run has, for held-out examples. A loss is one layer: ZeRO
    gathers all of its parameters at once. A `LayerStack` in its place is gathered layer by layer.

    Examples:
      >>> rows = np.ones((20, 3), np.float32)
      >>> made = (lambda params, batch: jnp.mean(batch @ params), jnp.zeros(3), rows)
      >>> workload = own_workload("my_model:make", made)
      >>> workload.batch(0, 0, 4).shape, len(workload.held_out(8))
      ((4, 3), 1)
    """
    if not _is_model(made):
        size = f" of {len(made)}" if type(made) is tuple else ""
        raise ValueError(f"{name} returned a {type(made).__name__}{size}; {RETURNS}")
    loss_fn, params, batch = made
    init = params if callable(params) else _hold_params(name, params)
    draw, held_out = _from_function(batch) if callable(batch) else _from_arrays(name, batch)
    loss = _loss_of_stack(loss_fn) if isinstance(loss_fn, LayerStack) else _loss_of_layer(loss_fn)
    _check_loss(name, loss, init, draw, returns=STACK if isinstance(loss_fn, LayerStack) else RETURNS)

    def metrics(params: PyTree, batch: Any, *, layers: LayerRunner = PLAIN) -> Metrics:
        return {"loss": loss(params, batch, layers=layers)}

    return Workload("own", init, loss, metrics, draw, held_out, unit="examples", units_per_example=1)


def own_layers(name: str, made: Any) -> EqualLayers:
    """Makes the layers of what a user's function has returned, `(stack, params, batch)`.

    Raises:
      ValueError: it has returned a loss in place of a stack.
    """
    whole = own_workload(name, made)
    stack, _, batch = made
    if not isinstance(stack, LayerStack):
        raise ValueError(
            f"{name} returned one function for all of its layers, and this plan needs them one by one: {STACK}"
        )
    shapes = jax.eval_shape(whole.init, jax.random.key(0))
    x = jax.eval_shape(stack.embed, shapes["embed"], whole.batch(0, 0, 2))
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(x))

    def with_layers(count: int) -> Workload:
        return own_workload(name, (stack, partial(_init_layers, whole.init, count), batch))

    return EqualLayers(with_layers, len(shapes["layers"]), size / 2)


def _init_layers(init: Callable[[PRNGKeyArray], PyTree], count: int, key: PRNGKeyArray) -> PyTree:
    """The parameters of a stack with this number of layers, all like the first."""
    params = init(key)
    return {**params, "layers": params["layers"][:1] * count}


def _loss_of_layer(loss: Callable[[PyTree, Any], Array]) -> Callable[..., Array]:
    """The `loss` of a workload for a model that is one layer."""
    return lambda params, batch, *, layers=PLAIN: layers.one(loss)(params, batch)


def _loss_of_stack(stack: LayerStack) -> Callable[..., Array]:
    """The `loss` of a workload with parameters `{"embed": ..., "layers": [...], "head": ...}`."""

    def loss(params: PyTree, batch: Any, *, layers: LayerRunner = PLAIN) -> Float[Array, ""]:
        x = layers.one(stack.embed)(params["embed"], batch)
        x = layers.alike(stack.layer, params["layers"], x)
        return layers.one(stack.head)(params["head"], x, batch)

    return loss


def _is_model(made: Any) -> bool:
    """Whether a function has returned a loss or a stack, and two further things."""
    # A stack alone is a tuple of three too.
    is_triple = isinstance(made, tuple) and len(made) == 3 and not isinstance(made, LayerStack)
    return is_triple and (callable(made[0]) or isinstance(made[0], LayerStack))


def _hold_params(name: str, params: PyTree) -> Callable[[PRNGKeyArray], PyTree]:
    """A function that returns given parameters for every key."""
    leaves = jax.tree.leaves(params)
    if not leaves or not all(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves):
        raise ValueError(f"{name} returned params without arrays, or with other things among them; {RETURNS}")
    return lambda key: jax.tree.map(jnp.asarray, params)


def _from_arrays(name: str, rows: PyTree) -> tuple[Callable[[int, int, int], Any], Callable[[int], list[Any]]]:
    """`batch` and `held_out` of a workload, for given examples."""
    leaves = jax.tree.leaves(rows)
    if not all(isinstance(leaf, jax.Array | np.ndarray) and leaf.ndim for leaf in leaves):
        raise ValueError(f"{name} returned a batch with things that are no arrays of examples; {RETURNS}")
    counts = sorted({len(leaf) for leaf in leaves})
    if len(counts) != 1 or counts[0] < 2:
        raise ValueError(
            f"{name} returned a batch whose arrays have {', '.join(map(str, counts)) or 'no'} examples: all must have "
            "the same number of them, at least 2"
        )
    rows, count = jax.tree.map(np.asarray, rows), counts[0]
    # The last tenth is held out.
    cut = count - max(1, count // 10)

    def draw(seed: int, step: int, size: int) -> Any:
        chosen = np.random.default_rng((seed, step)).integers(0, cut, size)
        return jax.tree.map(lambda x: x[chosen], rows)

    def held_out(size: int) -> list[Any]:
        size = min(size, count - cut)
        starts = range(cut, count - size + 1, size)
        return [jax.tree.map(lambda x, start=start: x[start : start + size], rows) for start in starts]

    return draw, held_out


def _from_function(
    batch: Callable[[int, int, int], Any],
) -> tuple[Callable[[int, int, int], Any], Callable[[int], list[Any]]]:
    """`batch` and `held_out` of a workload, for a function that makes examples."""

    def held_out(size: int) -> list[Any]:
        return [batch(HELD_OUT_SEED, step, size) for step in range(HELD_OUT_BATCHES)]

    return batch, held_out


def _check_loss(
    name: str,
    loss: Callable[..., Any],
    init: Callable[[PRNGKeyArray], PyTree],
    draw: Callable[[int, int, int], Any],
    *,
    returns: str,
) -> None:
    """Traces the loss once, so that its mistakes show before anything is compiled."""
    try:
        found = jax.eval_shape(loss, jax.eval_shape(init, jax.random.key(0)), draw(0, 0, 2))
    except Exception as problem:
        first = next(iter(str(problem).splitlines()), "")
        raise ValueError(f"{name}: its loss fails: {type(problem).__name__}: {first}; {returns}") from problem
    if getattr(found, "shape", None) != () or not jnp.issubdtype(found.dtype, jnp.floating):
        raise ValueError(f"{name}: its loss returns {found} and not one floating number; {returns}")
