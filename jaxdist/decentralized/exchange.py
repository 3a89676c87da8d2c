"""The exchange of payloads with neighbors that methods of compressed gossip share."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._core.types import Array, Payload, PyTree
from ..compressors.compressor import Compressor
from ..transforms.common import zeros_like
from ..wire.buffers import fuse_bytes, stack_by_shape, unstack
from ..wire.codec import TreeCodec
from ..wire.mixing import multiply_in_dtype, weight_of
from ..wire.shards import map_groups
from .method import StepContext


def init_copy(name: str, params: PyTree) -> dict[str, PyTree]:
    """Returns the first copy of the model, called `name`, and the pull of the neighbors' copies on it."""
    # All workers start from one model, so that the copies of it are equal and pull nowhere.
    return {name: params, "pull": zeros_like(params)}


class _Exchanged(NamedTuple):
    """The positions of the leaves in each stack of one shape, the stacks, and their payloads.

    For each message of the topology `received` has the weight of its source on this worker, and the payloads.
    """

    groups: list[list[int]]
    stacks: list[Array]
    payloads: list[Payload]
    received: list[tuple[Array | float, list[Payload]]]


def exchange(context: StepContext, compressor: Compressor, tree: PyTree) -> tuple[PyTree, PyTree]:
    """Sends this worker's compressed tree `q_i` to its neighbors; returns `q_i` and `Σ_j W_ij (q_j - q_i)`, decoded.

    All workers decode the same payloads with the same program, so that their copies stay equal.
    """
    return map_groups(partial(_exchange_group, context, compressor), tree, results=2)


def _exchange_group(context: StepContext, compressor: Compressor, tree: PyTree) -> tuple[PyTree, PyTree]:
    leaves, structure = jax.tree.flatten(tree)
    groups, stacks, payloads, received = _send_payloads(context, compressor, leaves)
    own = decode_leaves(compressor, payloads, stacks)
    total = [jnp.zeros_like(x) for x in own]
    for weight, arrived in received:
        theirs = decode_leaves(compressor, arrived, stacks)
        # Where nothing arrives the payload is all zeros, which may decode to anything.
        total = [
            t + jnp.where(weight == 0, 0, multiply_in_dtype(their - mine, weight))
            for t, their, mine in zip(total, theirs, own, strict=True)
        ]
    return structure.unflatten(unstack(groups, own)), structure.unflatten(unstack(groups, total))


def exchange_rows(context: StepContext, compressor: Compressor, tree: PyTree) -> PyTree:
    """Sends this worker's compressed tree and returns all payloads decoded: `[1 + neighbors, *s]`, its own first."""
    leaves, structure = jax.tree.flatten(tree)
    groups, stacks, payloads, received = _send_payloads(context, compressor, leaves)
    # One operation decodes all rows, so that the copies of a payload are equal in every bit, fused or not.
    rows = jax.tree.map(lambda *parts: jnp.stack(parts), payloads, *(arrived for _, arrived in received))
    decode_stack = partial(_codec(compressor).decode_stack, wide=True)
    decoded = [
        jax.vmap(decode_stack, in_axes=(0, None))(payload, stack) for payload, stack in zip(rows, stacks, strict=True)
    ]
    # Where nothing arrived the payload is all zeros, which may decode to anything.
    is_received = jnp.stack([jnp.asarray(weight != 0) for weight in (1.0, *(weight for weight, _ in received))])
    # Its own row instead, so that a replica that nobody updates follows the model, and not zeros.
    decoded = [jnp.where(is_received.reshape(-1, *[1] * (x.ndim - 1)), x, x[:1]) for x in decoded]
    # `unstack` takes the leaves from the first axis, and these have the rows there.
    return structure.unflatten(unstack(groups, [jnp.moveaxis(x, 1, 0) for x in decoded]))


def _send_payloads(context: StepContext, compressor: Compressor, leaves: Sequence[Array]) -> _Exchanged:
    """Compresses the leaves in stacks of one shape and sends them along the edges of the graph."""
    comm, (static_round,) = context.comm, context.topology.rounds
    groups, stacks, payloads = compress_leaves(context, compressor, leaves)
    arrays, payload_tree = jax.tree.flatten(payloads)
    received = []
    for message in static_round.messages:
        arrived = fuse_bytes(comm, lambda x, pairs=message.pairs: comm.ppermute(x, pairs), arrays)
        received.append((weight_of(comm, message.weights), payload_tree.unflatten(arrived)))
    return _Exchanged(groups, stacks, payloads, received)


def compress_leaves(
    context: StepContext, compressor: Compressor, leaves: Sequence[Array]
) -> tuple[list[list[int]], list[Array], list[Payload]]:
    """Compresses leaves of one shape together; returns the positions of each group, its stack, and its payload."""
    key = context.key if compressor.shared_key else jax.random.fold_in(context.key, context.comm.index)
    groups, stacks = stack_by_shape(leaves)
    return groups, stacks, _codec(compressor).encode(groups, stacks, key)


def decode_leaves(compressor: Compressor, payloads: Sequence[Payload], stacks: Sequence[Array]) -> list[Array]:
    """Decodes one worker's payloads, in float32 or better."""
    return _codec(compressor).decode(payloads, stacks, wide=True)


def _codec(compressor: Compressor) -> TreeCodec:
    return TreeCodec(compressor, maps_single=True)
