"""Parameters that are cut over the workers (ZeRO stage 3), whole only while a layer needs them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._marks import Sharded, is_mark
from .._typing import AxisNames, PyTree
from ..comm import over
from ..reducers._flat import MULTIPLE
from ..transforms.zero.flat import joined


def shard(params: PyTree, *, smallest: int = 100_000) -> PyTree:
    """Marks the parameters that are worth cutting as `Sharded`.

    Args:
      params: the parameters as written, whole arrays (or their shapes, under `eval_shape`).
      smallest: leaves with fewer entries stay whole on every worker: gathering them costs latency and saves nothing.

    Returns:
      The parameters with their marks, for the train state.

    Raises:
      ValueError: `smallest` is negative.

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> jd.parallel.shard({"w": jnp.zeros((4, 4)), "b": jnp.zeros(4)}, smallest=10)["b"].shape
      (4,)
      >>> type(jd.parallel.shard({"w": jnp.zeros((4, 4))}, smallest=10)["w"]).__name__
      'Sharded'

    References:
      Rajbhandari, Rasley, Ruwase, He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv
      1910.02054, 2020 (the persistence threshold of DeepSpeed's stage 3).
    """
    if smallest < 0:
        raise ValueError(f"smallest must not be negative, got {smallest}")
    return jax.tree.map(lambda x: Sharded(x, multiple=MULTIPLE) if x.size >= smallest else x, params)


def gathered(f: Callable[..., Any], *, axis: AxisNames = "data", remat: bool = True) -> Callable[..., Any]:
    """`f(params, *args)`, a layer or a model, for parameters that are cut: whole while `f` runs, and then dropped.

    The forward pass gathers the `Sharded` parameters. The backward pass gathers them again instead of keeping them, and
    its gradient for this worker's part is the mean over workers, by a reduce-scatter: `local_value_and_grad` of a loss
    of gathered layers needs no `all_reduce`, but for the leaves that are not cut.

    *On the wire* for `n` entries in float32: two all-gathers and a reduce-scatter, `3(W-1)/W · 4n` bytes sent (without
    `remat` one all-gather less, and then all whole parameters live from the forward to the backward pass).

    Args:
      f: `f(params, *args)`; it sees whole arrays. `params` is a tree that contains marks, not a mark itself, which a
        step does not see.
      axis: the mesh axis of the workers.
      remat: compute `f` again in the backward pass.

    Returns:
      The function of cut parameters.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> layer = jd.parallel.gathered(lambda p, x: x * p["w"].sum())
      >>> def step(state, x):
      ...     value, gradient = jd.local_value_and_grad(lambda p: layer(p, x[0]))(state["params"])
      ...     return {"params": gradient}, jax.lax.pmean(value, "data")
      >>> state = jd.place({"params": {"w": jd.Sharded(jnp.arange(3.0))}}, 2)
      >>> state, value = jd.simulate(step, workers=2)(state, jnp.array([1.0, 3.0]))
      >>> float(value), state["params"]["w"].value.tolist()
      (6.0, [2.0, 2.0, 2.0, 0.0])

    References:
      Rajbhandari, Rasley, Ruwase, He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv
      1910.02054, 2020. Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", arXiv
      2304.11277, 2023.
    """

    def run(params, *args):
        return f(_whole(params, axis), *args)

    # Between layers nothing may be merged: a gather shared by forward and backward pass would live through both.
    return jax.checkpoint(run, prevent_cse=True) if remat else run


def gathered_scan(f: Callable[..., Any], layers: Sequence[PyTree], x: Any, *args: Any, axis: AxisNames = "data") -> Any:
    """`x = f(layer, x, *args)` for each layer in turn, one layer whole at a time, compiled once for all.

    *On the wire*: as `gathered`, once for each layer.

    Args:
      f: `f(params, x, *args) -> x`.
      layers: the parameters of each layer, with the same tree, shapes and dtypes; kept apart in the train state. This
        worker's parts are stacked for the loop, which copies them.
      x: what goes through the layers.
      args: passed to each.
      axis: the mesh axis of the workers.

    Returns:
      The last `x`.

    Raises:
      ValueError: the layers are not alike, or there are none.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> layers = jd.place([{"w": jd.Sharded(jnp.full(3, 2.0))} for _ in range(4)], 2)
      >>> def step(state, x):
      ...     last = jd.parallel.gathered_scan(lambda p, x: x * p["w"][0], state, x[0])
      ...     return state, jax.lax.pmean(last, "data")
      >>> float(jd.simulate(step, workers=2)(layers, jnp.array([1.0, 3.0]))[1])
      32.0

    References:
      Rajbhandari, Rasley, Ruwase, He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv
      1910.02054, 2020.
    """
    kinds = {str(jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), layer)) for layer in layers}
    if len(kinds) != 1:
        raise ValueError(f"gathered_scan needs at least one layer, and all alike, got {len(kinds)} kinds")
    stacked = jax.tree.map(lambda *pieces: jnp.stack(pieces), *layers)
    layer = gathered(f, axis=axis)
    return lax.scan(lambda x, params: (layer(params, x, *args), None), x, stacked)[0]


def _whole(params: PyTree, axis: AxisNames) -> PyTree:
    comm = over(axis)

    def one(leaf):
        if not is_mark(leaf):
            return leaf
        return joined(comm.all_gather(leaf.value, agreed=False), leaf.shape)

    return jax.tree.map(one, params, is_leaf=is_mark)
