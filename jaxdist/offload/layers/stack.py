"""A model as a stack of equal layers, and the functions of a run whose parameters are on disk."""

from collections.abc import Callable
from typing import Any, NamedTuple

from ..._core.types import Array, PyTree, State
from ..nvme.store import StreamedStats


class LayerStack(NamedTuple):
    """A model that is computed part by part: an embedding, equal layers one after the other, and a head.

    Attributes:
      embed: `embed(params, batch) -> x`, the input of the first layer: a tree of floating arrays.
      layer: `layer(params, x) -> x`, of the same shapes and dtypes. All layers have parameters of the same tree,
        shapes and dtypes, so that it is compiled once.
      head: `head(params, x, batch) -> loss`, a number: the mean over the examples of the batch.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxdist import offload
      >>> stack = offload.LayerStack(
      ...     embed=lambda p, batch: batch,
      ...     layer=lambda p, x: x + jnp.tanh(x @ p["w"]),
      ...     head=lambda p, x, batch: jnp.mean((x @ p["w"]) ** 2),
      ... )
      >>> stack.layer({"w": jnp.zeros((4, 4))}, jnp.ones((2, 4))).shape
      (2, 4)
    """

    embed: Callable[[PyTree, Any], PyTree]
    layer: Callable[[PyTree, PyTree], PyTree]
    head: Callable[[PyTree, PyTree, Any], Array]


class StreamedLayers(NamedTuple):
    """A run whose parameters and optimizer state are on disk.

    A part is `"embed"`, `"head"` or the number of a layer, from 0.

    Attributes:
      init: `init(layer, count, *, embed, head) -> step`. `layer(i)` returns the initial parameters of layer `i`; only
        one layer is in memory at a time. `embed` and `head` are their parameters, `{}` for none. If the folder holds
        a run, it continues from there, the given values only tell the shapes, and the step is that of the last commit.
      step: `step(batch) -> loss`, one step of training. If it raises, the run on disk is that of the last commit, and
        it can be called again.
      loss: `loss(batch) -> loss`, the forward pass alone; nothing is written.
      params: `params(part) -> tree`, in numpy.
      state: `state(part) -> state`, the optimizer's state for the part, in numpy.
      flush: `flush() -> step`: waits until the last step is committed, and returns its number.
      stats: `stats() -> StreamedStats`, counters.
      close: releases the folder.
    """

    init: Callable[..., int]
    step: Callable[[PyTree], Array]
    loss: Callable[[PyTree], Array]
    params: Callable[[str | int], PyTree]
    state: Callable[[str | int], State]
    flush: Callable[[], int]
    stats: Callable[[], StreamedStats]
    close: Callable[[], None]
