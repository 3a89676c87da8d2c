"""The `Workload` and the `Method`: what the command line, the examples and the benchmarks train, and how."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..._core.types import Array, Metrics, PRNGKeyArray, PyTree
from ...reducers.base import Reducer

LOOP_FROM = 12  # layers: fewer are faster unrolled, and compile soon enough


class Layers(NamedTuple):
    """How a loss goes through its layers.

    Attributes:
      one: `one(f)`, for `f(params, *args)` of a single layer.
      alike: `alike(f, layers, x)`, `x = f(params, x)` for the parameters of each of several layers in turn.
    """

    one: Callable[[Callable[..., Any]], Callable[..., Any]]
    alike: Callable[[Callable[..., Any], Sequence[PyTree], Any], Any]


def in_turn(f: Callable[..., Any], layers: Sequence[PyTree], x: Any) -> Any:
    """One layer after the other; of many, in a loop that computes each again in the backward pass."""
    if len(layers) >= LOOP_FROM:
        return looped(f, jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers), x)
    for params in layers:
        x = f(params, x)
    return x


def looped(f: Callable[..., Any], stacked: PyTree, x: Any) -> Any:
    """The same for parameters that are stacked: compiled once, with the activations of one layer at a time."""
    again = jax.checkpoint(f, prevent_cse=False)
    return jax.lax.scan(lambda x, params: (again(params, x), None), x, stacked)[0]


PLAIN = Layers(lambda f: f, in_turn)


class Workload(NamedTuple):
    """A model, its loss and its data, as pure functions.

    Batches are NumPy arrays (or pytrees of them) of the *whole* batch, all workers together: which worker gets
    which rows is the mesh's business. A batch follows from `(seed, step, size)` alone, so every reducer that is
    compared sees the same examples in the same order, and a resumed run goes on where it stopped.

    Attributes:
      name: what the log and the plots call it.
      init: `init(key) -> params`.
      loss: `loss(params, batch, layers=PLAIN) -> scalar`, the mean over the batch. A small model may be one layer.
      metrics: `metrics(params, batch, layers=PLAIN) -> {"loss": ..., ...}`, what an evaluation reports; means over the
        batch.
      batch: `batch(seed, step, size) -> Batch` of the training split.
      held_out: `held_out(size) -> list of batches` of at most `size` examples, never trained on, always the same.
      unit: what throughput counts, `"tokens"` or `"images"`.
      units_per_example: how many of them one example has.
    """

    name: str
    init: Callable[[PRNGKeyArray], PyTree]
    loss: Callable[..., Array]
    metrics: Callable[..., Metrics]
    batch: Callable[[int, int, int], Any]
    held_out: Callable[[int], list[Any]]
    unit: str
    units_per_example: int


class Method(NamedTuple):
    """How workers learn from each other: the arguments of `train.prepare` that say it.

    Attributes:
      reducer: what averages gradients in every step; None if the optimizer communicates by itself.
      optimizer: what is called with this worker's gradients, or, with a reducer, with their mean.
      sync_period: `H`, if workers step by themselves and meet every `H` steps; None if they agree in every step.
      stage: of ZeRO: 1 and 2 cut the optimizer's state over the workers, 3 the parameters too. 0: nothing is cut.
    """

    reducer: Reducer | None
    optimizer: optax.GradientTransformation
    sync_period: int | None = None
    stage: Literal[0, 1, 2, 3] = 0


def parameters_of(workload: Workload) -> int:
    """How many numbers a workload's model has; nothing is computed."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(jax.eval_shape(workload.init, jax.random.key(0))))


def check_batch(size: int, workers: int) -> None:
    """Raises unless a batch divides among the workers."""
    if size < 1 or size % workers:
        raise ValueError(f"the batch must be a positive multiple of the {workers} workers, got {size}")
