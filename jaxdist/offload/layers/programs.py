"""The compiled programs of a stack: one for the layer forward, one backward, and those of its two ends."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..._core.compat import shard_map
from ..._core.types import Array, AxisNames, PyTree
from ...comm.over import over
from ...reducers.base import NO_EXTRAS, Reducer
from ...state.marks import axis_tuple
from ..nvme.arrays import on_host
from .stack import LayerStack


class Config(NamedTuple):
    """`axis` is `None` without a mesh."""

    stack: LayerStack
    reducer: Reducer
    mesh: Mesh | None
    axis: AxisNames


class Programs(NamedTuple):
    """Compiled functions. Gradients of parameters are means over workers; `x` and its gradient are each worker's own.

    Attributes:
      embed: `(params, batch) -> x`.
      layer: `(params, x) -> x`.
      head: `(params, x, batch) -> loss`.
      head_grads: `(params, x, batch) -> (loss, gradient of params, gradient of x)`.
      layer_grads: `(params, x, gradient of the result) -> (gradient of params, gradient of x)`; computes the layer
        again.
      embed_grads: `(params, batch, gradient of the result) -> gradient of params`.
    """

    embed: Callable[[PyTree, Any], PyTree]
    layer: Callable[[PyTree, PyTree], PyTree]
    head: Callable[[PyTree, PyTree, Any], Array]
    head_grads: Callable[..., tuple[Array, PyTree, PyTree]]
    layer_grads: Callable[..., tuple[PyTree, PyTree]]
    embed_grads: Callable[..., PyTree]


def build_programs(cfg: Config) -> Programs:
    """Compiles each function when it is first called."""
    # Of parameters every worker has all, of batches and activations its own examples.
    whole, own = PartitionSpec(), PartitionSpec(axis_tuple(cfg.axis))
    return Programs(
        _compile(cfg, _embed, (whole, own), own),
        _compile(cfg, _layer, (whole, own), own),
        _compile(cfg, _head, (whole, own, own), whole),
        _compile(cfg, _head_grads, (whole, own, own), (whole, whole, own)),
        _compile(cfg, _layer_grads, (whole, own, own), (whole, own)),
        _compile(cfg, _embed_grads, (whole, own, own), whole),
    )


def _compile(cfg: Config, f: Callable, in_specs: Any, out_specs: Any) -> Callable:
    f = partial(f, cfg)
    if cfg.mesh is None:
        return jax.jit(f)
    names = set(cfg.mesh.axis_names)
    return jax.jit(
        shard_map(f, mesh=cfg.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=names, check_vma=True)
    )


def _own(cfg: Config, params: PyTree) -> PyTree:
    # Else the gradient of replicated parameters would be summed over workers by `jax.vjp` itself.
    return over(cfg.axis).varying(params)


def _mean(cfg: Config, grads: PyTree) -> PyTree:
    """The mean of a part's gradients over workers: one call of the reducer for each part, in the backward pass."""
    if not jax.tree.leaves(grads):
        return grads
    return cfg.reducer.reduce(grads, cfg.reducer.init(grads), over(cfg.axis), NO_EXTRAS)[0].mean


def _embed(cfg: Config, params: PyTree, batch: Any) -> PyTree:
    x = cfg.stack.embed(_own(cfg, params), batch)
    for leaf in jax.tree.leaves(x):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(f"embed must return floating arrays, got one of {leaf.dtype}: convert it, or leave it out")
    return x


def _layer(cfg: Config, params: PyTree, x: PyTree) -> PyTree:
    y = cfg.stack.layer(_own(cfg, params), x)
    kinds = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), tree) for tree in (x, y)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"a layer must return what it takes, {kinds[0]}, got {kinds[1]}")
    return y


def _head(cfg: Config, params: PyTree, x: PyTree, batch: Any) -> Array:
    return over(cfg.axis).mean(cfg.stack.head(_own(cfg, params), x, batch))


def _head_grads(cfg: Config, params: PyTree, x: PyTree, batch: Any) -> tuple[Array, PyTree, PyTree]:
    value_and_grad = jax.value_and_grad(cfg.stack.head, argnums=(0, 1))
    loss, (grads, cotangent) = value_and_grad(_own(cfg, params), x, batch)
    return over(cfg.axis).mean(loss), _mean(cfg, grads), cotangent


def _layer_grads(cfg: Config, params: PyTree, x: PyTree, cotangent: PyTree) -> tuple[PyTree, PyTree]:
    _, pull_back = jax.vjp(cfg.stack.layer, _own(cfg, params), x)
    grads, cotangent = pull_back(cotangent)
    return _mean(cfg, grads), cotangent


def _embed_grads(cfg: Config, params: PyTree, batch: Any, cotangent: PyTree) -> PyTree:
    _, pull_back = jax.vjp(lambda params: cfg.stack.embed(params, batch), _own(cfg, params))
    (grads,) = pull_back(cotangent)
    return _mean(cfg, grads)


def check_reducer(reducer: Reducer) -> None:
    """Refuses reducers that keep something from one step to the next."""
    state = jax.eval_shape(reducer.init, {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)})
    if jax.tree.leaves(state):
        raise ValueError(
            f"the gradient of a layer is averaged when it has been computed, and nothing is kept of it, but {reducer} "
            "keeps residuals or random keys from step to step: use exact()"
        )


def place_params(cfg: Config, tree: Any, leaves: list[np.ndarray]) -> PyTree:
    """Copies parameters to the device, or to all devices of the mesh."""
    where = None if cfg.mesh is None else NamedSharding(cfg.mesh, PartitionSpec())
    # The context `jax.enable_x64` holds for one thread, and this is the one that reads ahead.
    check_dtypes(leaves)
    return tree.unflatten(jax.device_put(leaves, where))


def check_dtypes(leaves: Sequence[np.ndarray]) -> None:
    """Refuses parameters that JAX would truncate."""
    for leaf in leaves:
        if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
            raise ValueError(f"parameters of {leaf.dtype} need jax.config.update('jax_enable_x64', True)")


def place_batch(cfg: Config, batch: PyTree) -> PyTree:
    """Copies a batch to the device, or splits it over the workers along its first dimension."""
    if cfg.mesh is None:
        return jax.device_put(batch)
    names = axis_tuple(cfg.axis)
    workers = math.prod(cfg.mesh.shape[name] for name in names)
    for leaf in jax.tree.leaves(batch):
        if not np.ndim(leaf) or np.shape(leaf)[0] % workers:
            raise ValueError(f"a batch of shape {np.shape(leaf)} cannot be split over {workers} workers")
    return jax.device_put(batch, NamedSharding(cfg.mesh, PartitionSpec(names)))


def to_host(x: PyTree) -> PyTree:
    """Copies activations to host memory, each device its own; they stay where they are if that is host memory."""
    return jax.tree.map(lambda leaf: _move(leaf, "pinned_host"), x)


def to_device(x: PyTree) -> PyTree:
    """The inverse of `to_host`."""
    return jax.tree.map(lambda leaf: _move(leaf, "device"), x)


def _move(leaf: Array, kind: str) -> Array:
    if all(map(on_host, leaf.devices())):
        return leaf
    return jax.device_put(leaf, leaf.sharding.with_memory_kind(kind))


def first_copy(leaf: Array) -> np.ndarray:
    """A replicated array, from its first device, as a vector."""
    return np.asarray(leaf.addressable_data(0)).reshape(-1)


def copy_forwarded(results: PyTree, params: PyTree) -> PyTree:
    """Copies results that are parameters themselves: `jit` returns the argument, whose memory is a buffer of disk."""
    given = {id(leaf) for leaf in jax.tree.leaves(params)}
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if id(leaf) in given else leaf, results)
