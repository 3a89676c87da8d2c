"""A `Workload` (model, loss and data) and a `TrainingMethod` (how workers learn from each other)."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..._core.types import Array, Metrics, PRNGKeyArray, PyTree
from ...reducers.reducer import Reducer

LOOP_FROM = 12  # layers: fewer are faster unrolled, and compile quickly enough


class LayerRunner(NamedTuple):
    """The ways in which a loss applies its layers, so that ZeRO can gather their parameters."""

    one: Callable[[Callable[..., Any]], Callable[..., Any]]  # `one(f)`, for `f(params, *args)` of a single layer
    # `alike(f, layers, x)`, which applies `x = f(params, x)` with the parameters of each layer in order
    alike: Callable[[Callable[..., Any], Sequence[PyTree], Any], Any]


def apply_in_order(f: Callable[..., Any], layers: Sequence[PyTree], x: Any) -> Any:
    """Applies one layer after the other; many layers in a loop that recomputes each in the backward pass."""
    # `scan` takes one stacked array for each parameter: a copy of the layers.
    if len(layers) >= LOOP_FROM:
        return apply_in_loop(f, jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers), x)
    for params in layers:
        x = f(params, x)
    return x


def apply_in_loop(f: Callable[..., Any], stacked: PyTree, x: Any) -> Any:
    """Applies stacked layers in a loop: compiled once, with the activations of one layer at a time."""
    # Inside `scan` nothing can merge the recomputation with the forward pass: no barrier is needed.
    recomputed = jax.checkpoint(f, prevent_cse=False)
    return jax.lax.scan(lambda x, params: (recomputed(params, x), None), x, stacked)[0]


PLAIN = LayerRunner(lambda f: f, apply_in_order)


class Workload(NamedTuple):
    """A model, its loss and its data, as pure functions.

    Batches are NumPy arrays (or pytrees of them) with the examples of all workers; the mesh divides the rows. A batch
    is a function of `(seed, step, size)`, so every reducer that is compared sees the same examples in the same order,
    and a resumed run continues with the examples that follow.
    """

    name: str  # its name in logs and plots
    init: Callable[[PRNGKeyArray], PyTree]  # `init(key) -> params`
    # `loss(params, batch, layers=PLAIN) -> scalar`, the mean over the batch. A small model may be one layer
    loss: Callable[..., Array]
    # `metrics(params, batch, layers=PLAIN) -> {"loss": ..., ...}`, means over the batch, for evaluation
    metrics: Callable[..., Metrics]
    batch: Callable[[int, int, int], Any]  # `batch(seed, step, size) -> Batch` of the training split
    # `held_out(size) -> list of batches` of at most `size` examples, fixed and never trained on
    held_out: Callable[[int], list[Any]]
    unit: str  # the unit of throughput, `"tokens"` or `"images"`
    units_per_example: int  # units in an example


class EqualLayers(NamedTuple):
    """A model of equal layers, which a plan needs with one and with two of them."""

    with_layers: Callable[[int], Workload]  # the model with this number of layers
    count: int  # its own number
    input_bytes: float  # bytes of the input of a layer, for one example


class TrainingMethod(NamedTuple):
    """How workers learn from each other: these arguments of `train.prepare`."""

    reducer: Reducer | None  # averages the gradients in every step; None if the optimizer communicates
    # transforms the mean gradients or, without a reducer, this worker's gradients
    optimizer: optax.GradientTransformation
    # `H`, if workers take local steps and synchronize every `H` steps; None if parameters are replicated
    sync_period: int | None = None
    # of ZeRO: 1 and 2 shard the optimizer state over the workers, 3 the parameters too; 0 shards nothing
    stage: Literal[0, 1, 2, 3] = 0


def parameters_of(workload: Workload) -> int:
    """Counts the parameters of a workload's model without computing them."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(jax.eval_shape(workload.init, jax.random.key(0))))


def check_batch(size: int, workers: int) -> None:
    """Raises ValueError if a batch does not divide among the workers."""
    if size < 1 or size % workers:
        raise ValueError(f"the batch must be a positive multiple of the {workers} workers, got {size}")
