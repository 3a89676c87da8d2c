"""What travels in compressed gossip: the codes of all leaves, one message of bytes for each neighbour."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import DTypeLike

from ..._typing import Array, Payload, PyTree
from ...compressors.base import Compressor, working_dtype
from ...reducers._flat import stacked, unstacked
from ...reducers._fused import fused_bytes
from ...topology import Topology
from .method import Turn
from .mixing import check_static, check_symmetric, times, weight_of


def exchange(turn: Turn, compressor: Compressor, tree: PyTree) -> tuple[PyTree, PyTree]:
    """Sends the code `q_i` of this worker's tree to its neighbours.

    Returns:
      `q_i` and `Σ_j W_ij (q_j - q_i)`, both decoded in float32 or better. Everybody decodes the same codes by the same
      program, so that copies of them stay equal.
    """
    leaves, structure = jax.tree.flatten(tree)
    comm, (one,) = turn.comm, turn.topology.rounds
    key = turn.key if compressor.shared_key else jax.random.fold_in(turn.key, comm.index)
    groups, stacks = stacked(leaves)
    keys = [jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.array(members)) for members in groups]
    payloads = [jax.vmap(compressor.compress)(stack, key) for stack, key in zip(stacks, keys, strict=True)]
    arrays, payload_tree = jax.tree.flatten(payloads)
    own = _decode(compressor, payloads, stacks)
    total = [jnp.zeros_like(x) for x in own]
    for message in one.messages:
        sent = fused_bytes(lambda x, pairs=message.pairs: comm.ppermute(x, pairs), arrays)
        weight = weight_of(comm, message.weights)
        arrived = _decode(compressor, payload_tree.unflatten(sent), stacks)
        # Where nothing arrives the code is all zeros, which may decode to anything.
        total = [
            t + jnp.where(weight == 0, 0, times(theirs - mine, weight))
            for t, theirs, mine in zip(total, arrived, own, strict=True)
        ]
    return structure.unflatten(unstacked(groups, own)), structure.unflatten(unstacked(groups, total))


def _decode(compressor: Compressor, payloads: Sequence[Payload], stacks: Sequence[Array]) -> list[Array]:
    return [
        _decoded(compressor, payload, stack, working_dtype(stack.dtype)) for payload, stack in zip(payloads, stacks)
    ]


def _decoded(compressor: Compressor, payload: Payload, stack: Array, dtype: DTypeLike) -> Array:
    like = jax.ShapeDtypeStruct(stack.shape[1:], dtype)
    return jax.vmap(lambda one: compressor.decompress(one, like))(payload)


def check_graph(topology: Topology, what: str) -> Topology:
    """Raises unless neighbours stay, whose models are remembered, and weights are symmetric."""
    check_static(topology, what)
    check_symmetric(topology, what)
    return topology
