"""What travels in compressed gossip: the codes of all leaves, one message of bytes for each neighbor."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import DTypeLike

from .._core.dtypes import working_dtype
from .._core.types import Array, Payload, PyTree
from ..compressors.base import Compressor
from ..topology.base import Topology
from ..wire.flat import fused_bytes, stacked, unstacked
from ..wire.mixing import times, weight_of
from .method import Turn
from .mixing import check_static, check_symmetric


def exchange(turn: Turn, compressor: Compressor, tree: PyTree) -> tuple[PyTree, PyTree]:
    """Sends the code `q_i` of this worker's tree to its neighbors.

    Returns:
      `q_i` and `Σ_j W_ij (q_j - q_i)`, both decoded in float32 or better. Everybody decodes the same codes by the same
      program, so that copies of them stay equal.
    """
    leaves, structure = jax.tree.flatten(tree)
    groups, stacks, payloads, heard = _talk(turn, compressor, leaves)
    own = _decode(compressor, payloads, stacks)
    total = [jnp.zeros_like(x) for x in own]
    for weight, arrived in heard:
        theirs = _decode(compressor, arrived, stacks)
        # Where nothing arrives the code is all zeros, which may decode to anything.
        total = [
            t + jnp.where(weight == 0, 0, times(their - mine, weight))
            for t, their, mine in zip(total, theirs, own, strict=True)
        ]
    return structure.unflatten(unstacked(groups, own)), structure.unflatten(unstacked(groups, total))


def exchange_rows(turn: Turn, compressor: Compressor, tree: PyTree) -> PyTree:
    """As `exchange`, and returns all codes apart, decoded: `[1 + neighbors, *s]`, this worker's first.

    All rows are decoded by one operation, so that the copies of a code are equal in every bit, fused or not.
    """
    leaves, structure = jax.tree.flatten(tree)
    groups, stacks, payloads, heard = _talk(turn, compressor, leaves)
    rows = jax.tree.map(lambda *parts: jnp.stack(parts), payloads, *(arrived for _, arrived in heard))
    decoded = [
        jax.vmap(lambda one, stack=stack: _decoded(compressor, one, stack, working_dtype(stack.dtype)))(payload)
        for payload, stack in zip(rows, stacks, strict=True)
    ]
    is_heard = jnp.stack([jnp.asarray(weight != 0) for weight in (1.0, *(weight for weight, _ in heard))])
    decoded = [jnp.where(is_heard.reshape(-1, *[1] * (x.ndim - 1)), x, 0) for x in decoded]
    out = {i: x[:, k] for members, x in zip(groups, decoded, strict=True) for k, i in enumerate(members)}
    return structure.unflatten([out[i] for i in range(len(leaves))])


def _talk(turn: Turn, compressor: Compressor, leaves: Sequence[Array]):
    """Leaves of one shape as stacks and which they are, their payloads, and the weight and payloads of each message."""
    comm, (one,) = turn.comm, turn.topology.rounds
    key = turn.key if compressor.shared_key else jax.random.fold_in(turn.key, comm.index)
    groups, stacks = stacked(leaves)
    keys = [jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.array(members)) for members in groups]
    payloads = [jax.vmap(compressor.compress)(stack, key) for stack, key in zip(stacks, keys, strict=True)]
    arrays, payload_tree = jax.tree.flatten(payloads)
    heard = []
    for message in one.messages:
        sent = fused_bytes(lambda x, pairs=message.pairs: comm.ppermute(x, pairs), arrays)
        heard.append((weight_of(comm, message.weights), payload_tree.unflatten(sent)))
    return groups, stacks, payloads, heard


def _decode(compressor: Compressor, payloads: Sequence[Payload], stacks: Sequence[Array]) -> list[Array]:
    return [
        _decoded(compressor, payload, stack, working_dtype(stack.dtype)) for payload, stack in zip(payloads, stacks)
    ]


def _decoded(compressor: Compressor, payload: Payload, stack: Array, dtype: DTypeLike) -> Array:
    like = jax.ShapeDtypeStruct(stack.shape[1:], dtype)
    return jax.vmap(lambda one: compressor.decompress(one, like))(payload)


def check_graph(topology: Topology, what: str) -> Topology:
    """Raises unless neighbors stay, whose models are remembered, and weights are symmetric."""
    check_static(topology, what)
    check_symmetric(topology, what)
    return topology
