"""Shardings of parameters and optimizer state for plain `jax.jit`."""

import math
from typing import NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._core.types import PyTree, Shape, State
from ..state.placement import workers


class ZeroShardings(NamedTuple):
    """The `NamedSharding` of every leaf; `gradients` is for `jax.lax.with_sharding_constraint` inside the step."""

    params: PyTree
    gradients: PyTree
    opt_state: PyTree


def zero_shardings(
    params: PyTree, opt_state: State, mesh: Mesh, *, stage: int, axis: str = "data", smallest: int = 100_000
) -> ZeroShardings:
    """Returns ZeRO's shardings for steps under plain `jit`, where the compiler inserts the collectives.

    Each array is sharded along its largest dimension that the axis divides; one without such a dimension stays
    replicated. The state may be of any optimizer: only the shapes of its leaves matter.

    The collectives depend on the compiler: on GPUs and TPUs the mean of sharded gradients becomes a reduce-scatter.
    XLA:CPU sends an all-reduce and a gather, 3Ψ, and keeps no gradient sharded: use `zero_redundancy` where bytes
    count. For stage 3 constrain activations to the batch after each layer (`with_sharding_constraint(x, P(axis))`);
    otherwise the compiler may shard the contraction and exchange activations.

    Args:
      stage: 0: nothing is sharded; 1: the state; 2: and gradients; 3: and parameters.

    Examples:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> mesh, params = jd.make_mesh({"data": 1}), {"w": jnp.zeros((4, 8)), "b": jnp.zeros(3)}
      >>> state = optax.adam(0.1).init(params)
      >>> found = jd.zero.zero_shardings(params, state, mesh, stage=1, smallest=0)
      >>> tuple(found.opt_state[0].mu["w"].spec), tuple(found.params["w"].spec)
      ((None, 'data'), ())
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage must be 0, 1, 2 or 3, got {stage}")
    count = workers(mesh, axis)

    def shardings_from(first: int, tree: PyTree) -> PyTree:
        if stage < first:
            return jax.tree.map(lambda leaf: NamedSharding(mesh, PartitionSpec()), tree)
        return jax.tree.map(lambda leaf: NamedSharding(mesh, _spec(leaf.shape, count, axis, smallest)), tree)

    return ZeroShardings(shardings_from(3, params), shardings_from(2, params), shardings_from(1, opt_state))


def _spec(shape: Shape, count: int, axis: str, smallest: int) -> PartitionSpec:
    """Shards the largest dimension that `count` workers divide, if there is one."""
    divisible = [d for d, length in enumerate(shape) if length and length % count == 0]
    if not divisible or math.prod(shape) < smallest:
        return PartitionSpec()
    largest = max(divisible, key=lambda d: shape[d])
    return PartitionSpec(*(None,) * largest, axis)
