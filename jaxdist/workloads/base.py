"""The `Workload`: what the command line, the examples and the benchmarks train."""

from collections.abc import Callable
from typing import Any, NamedTuple

from .._typing import Array, Metrics, PRNGKeyArray, PyTree

Layer = Callable[[Callable[..., Any]], Callable[..., Any]]


def plain(f: Callable[..., Any]) -> Callable[..., Any]:
    """The layer as it is."""
    return f


class Workload(NamedTuple):
    """A model, its loss and its data, as pure functions.

    Batches are NumPy arrays (or pytrees of them) of the *whole* batch, all workers together: which worker gets
    which rows is the mesh's business. A batch follows from `(seed, step, size)` alone, so every reducer that is
    compared sees the same examples in the same order, and a resumed run goes on where it stopped.

    Attributes:
      name: what the log and the plots call it.
      init: `init(key) -> params`.
      loss: `loss(params, batch, layer=plain) -> scalar`, the mean over the batch. `layer` wraps the functions
        `f(params, *args)` of the layers, or of the whole model if it is small: `parallel.gathered` where parameters
        are cut over the workers.
      metrics: `metrics(params, batch, layer=plain) -> {"loss": ..., ...}`, what an evaluation reports; means over the
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
