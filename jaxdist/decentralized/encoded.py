"""The exchange of compressed gossip: payloads of all leaves, in one message of bytes for each neighbor."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from .._core.dtypes import working_dtype
from .._core.types import Array, Payload, PyTree
from ..compressors.base import Compressor
from ..topology.base import Topology
from ..wire.flat import fuse_bytes, stack_by_shape, unstack
from ..wire.mixing import times, weight_of
from .method import StepContext
from .mixing import check_static, check_symmetric


def exchange(context: StepContext, compressor: Compressor, tree: PyTree) -> tuple[PyTree, PyTree]:
    """Sends this worker's compressed tree `q_i` to its neighbors.

    Returns:
      `q_i` and `Σ_j W_ij (q_j - q_i)`, both decoded in float32 or better. All workers decode the same payloads with the
      same program, so that their copies stay equal.
    """
    leaves, structure = jax.tree.flatten(tree)
    groups, stacks, payloads, received = _send_payloads(context, compressor, leaves)
    own = _decode(compressor, payloads, stacks)
    total = [jnp.zeros_like(x) for x in own]
    for weight, arrived in received:
        theirs = _decode(compressor, arrived, stacks)
        # Where nothing arrives the payload is all zeros, which may decode to anything.
        total = [
            t + jnp.where(weight == 0, 0, times(their - mine, weight))
            for t, their, mine in zip(total, theirs, own, strict=True)
        ]
    return structure.unflatten(unstack(groups, own)), structure.unflatten(unstack(groups, total))


def exchange_rows(context: StepContext, compressor: Compressor, tree: PyTree) -> PyTree:
    """Sends this worker's compressed tree and returns all payloads decoded: `[1 + neighbors, *s]`, its own first.

    All rows are decoded by one operation, so that the copies of a payload are equal in every bit, fused or not.
    """
    leaves, structure = jax.tree.flatten(tree)
    groups, stacks, payloads, received = _send_payloads(context, compressor, leaves)
    rows = jax.tree.map(lambda *parts: jnp.stack(parts), payloads, *(arrived for _, arrived in received))
    decoded = [
        jax.vmap(partial(_decode_stack, compressor, stack))(payload)
        for payload, stack in zip(rows, stacks, strict=True)
    ]
    # Where nothing arrived the payload is all zeros, which may decode to anything.
    is_received = jnp.stack([jnp.asarray(weight != 0) for weight in (1.0, *(weight for weight, _ in received))])
    decoded = [jnp.where(is_received.reshape(-1, *[1] * (x.ndim - 1)), x, 0) for x in decoded]
    out = {i: x[:, k] for members, x in zip(groups, decoded, strict=True) for k, i in enumerate(members)}
    return structure.unflatten([out[i] for i in range(len(leaves))])


def _send_payloads(
    context: StepContext, compressor: Compressor, leaves: Sequence[Array]
) -> tuple[list[list[int]], list[Array], list[Payload], list[tuple[Array | float, list[Payload]]]]:
    """Compresses the leaves in stacks of one shape and sends them along the edges of the graph.

    Returns:
      The indices of the leaves in each stack, the stacks, their payloads, and for each message the weight of its
      source on this worker with the payloads that arrived.
    """
    comm, (static_round,) = context.comm, context.topology.rounds
    key = context.key if compressor.shared_key else jax.random.fold_in(context.key, comm.index)
    groups, stacks = stack_by_shape(leaves)
    keys = [jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.array(members)) for members in groups]
    payloads = [jax.vmap(compressor.compress)(stack, key) for stack, key in zip(stacks, keys, strict=True)]
    arrays, payload_tree = jax.tree.flatten(payloads)
    received = []
    for message in static_round.messages:
        arrived = fuse_bytes(lambda x, pairs=message.pairs: comm.ppermute(x, pairs), arrays)
        received.append((weight_of(comm, message.weights), payload_tree.unflatten(arrived)))
    return groups, stacks, payloads, received


def _decode(compressor: Compressor, payloads: Sequence[Payload], stacks: Sequence[Array]) -> list[Array]:
    return [_decode_stack(compressor, stack, payload) for payload, stack in zip(payloads, stacks, strict=True)]


def _decode_stack(compressor: Compressor, stack: Array, payloads: Payload) -> Array:
    """Decodes the payloads of the rows of a stack in float32 or better."""
    like = jax.ShapeDtypeStruct(stack.shape[1:], working_dtype(stack.dtype))
    return jax.vmap(lambda payload: compressor.decompress(payload, like))(payloads)


def check_graph(topology: Topology, method: str) -> Topology:
    """Checks that neighbors stay the same, since copies of them are kept, and that weights are symmetric."""
    check_static(topology, method)
    check_symmetric(topology, method)
    return topology
