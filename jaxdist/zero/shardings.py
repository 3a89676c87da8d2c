"""ZeRO under plain `jit`: shardings, from which the compiler derives what is sent."""

import math
from typing import NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._core.types import PyTree, State
from ..state.placement import workers


class ZeroShardings(NamedTuple):
    """The `NamedSharding` of every leaf; `gradients` is for `jax.lax.with_sharding_constraint` inside the step."""

    params: PyTree
    gradients: PyTree
    opt_state: PyTree


def zero_shardings(
    params: PyTree, opt_state: State, mesh: Mesh, *, stage: int, axis: str = "data", smallest: int = 100_000
) -> ZeroShardings:
    """ZeRO for steps under plain `jit`: where each leaf lies, and the compiler inserts what must be sent.

    Each array is cut along its largest dimension that the axis divides; one without such a dimension stays whole. The
    state may be of any optimizer: what counts is the shape of each of its leaves.

    What compilers make of it: GPUs and TPUs turn the mean of cut gradients into a reduce-scatter. XLA:CPU sends an
    all-reduce and a gather, 3Ψ, and keeps no gradient cut: use `zero_redundancy` where bytes count. For stage 3
    constrain activations to the batch after each layer (`with_sharding_constraint(x, P(axis))`), or the compiler may
    rather cut the contraction and exchange activations.

    Args:
      params: the parameters, or their shapes.
      opt_state: the optimizer's state, or its shapes.
      mesh: the mesh.
      stage: 0: nothing is cut; 1: the state; 2: and gradients; 3: and parameters.
      axis: the mesh axis of the workers.
      smallest: arrays with fewer entries stay whole.

    Returns:
      The shardings, for `in_shardings`, `out_shardings` and `device_put`.

    Raises:
      ValueError: there is no such stage, or no such axis.

    Example:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> mesh, params = jd.make_mesh({"data": 1}), {"w": jnp.zeros((4, 8)), "b": jnp.zeros(3)}
      >>> state = optax.adam(0.1).init(params)
      >>> found = jd.zero.zero_shardings(params, state, mesh, stage=1, smallest=0)
      >>> tuple(found.opt_state[0].mu["w"].spec), tuple(found.params["w"].spec)
      ((None, 'data'), ())

    References:
      Rajbhandari, Rasley, Ruwase, He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv
      1910.02054, 2020. Xu et al., "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training", arXiv
      2004.13336, 2020.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage must be 0, 1, 2 or 3, got {stage}")
    count = workers(mesh, axis)

    def one(leaf, is_cut):
        whole = NamedSharding(mesh, PartitionSpec())
        fitting = [d for d, length in enumerate(leaf.shape) if length and length % count == 0]
        if not is_cut or not fitting or math.prod(leaf.shape) < smallest:
            return whole
        largest = max(fitting, key=lambda d: leaf.shape[d])
        return NamedSharding(mesh, PartitionSpec(*(None,) * largest, axis))

    def of(tree, first):
        return jax.tree.map(lambda leaf: one(leaf, stage >= first), tree)

    return ZeroShardings(of(params, 3), of(params, 2), of(opt_state, 1))
