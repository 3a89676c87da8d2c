"""Codes of the pieces that workers own: what is gathered of parameters and of their updates."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ..._typing import Array, Like, Payload, PRNGKeyArray, Shape
from ...comm import Comm
from ...compressors.base import Compressor
from ...reducers._flat import alike, stacked
from ...reducers._fused import fused_bytes
from .flat import cleared


def encode(
    compressor: Compressor, pieces: Sequence[Array], shapes: Sequence[Shape], key: PRNGKeyArray, comm: Comm
) -> list[Payload]:
    """The payloads `[k, ...]` of the `k` pieces of each length: a program has one code for each length, not leaf.

    `shapes` are those of the leaves that they are pieces of; padding is coded as zeros.
    """
    sizes = map(math.prod, shapes)
    pieces = [cleared(x, size, comm.size, comm.index) for x, size in zip(pieces, sizes, strict=True)]
    groups, stacks = stacked(pieces)
    keys = [jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.array(members)) for members in groups]
    return [jax.vmap(compressor.compress)(*pair) for pair in zip(stacks, keys, strict=True)]


def decode(compressor: Compressor, payloads: Sequence[Payload], pieces: Sequence[Like]) -> list[Array]:
    """The inverse of `encode`; payloads `[*batch, k, ...]` give pieces `[*batch, n]`."""
    out: list = list(pieces)
    groups = alike(pieces, lambda x: (x.shape, jnp.dtype(x.dtype)))
    for members, payload in zip(groups, payloads, strict=True):
        like = jax.ShapeDtypeStruct(pieces[members[0]].shape, pieces[members[0]].dtype)
        found = _mapped(compressor, like, payload, len(members))
        for k, i in enumerate(members):
            out[i] = found[..., k, :]
    return out


def _mapped(compressor: Compressor, like: Like, payload: Payload, members: int) -> Array:
    one = jax.eval_shape(compressor.compress, like, jax.random.key(0))
    dimensions = jax.tree.leaves(payload)[0].ndim - jax.tree.leaves(one)[0].ndim
    batch = jax.tree.leaves(payload)[0].shape[:dimensions]
    assert batch[-1] == members
    flat = jax.tree.map(lambda x: x.reshape(math.prod(batch), *x.shape[dimensions:]), payload)
    return jax.vmap(lambda x: compressor.decompress(x, like))(flat).reshape(*batch, *like.shape)


def gather_payloads(payloads: Sequence[Payload], comm: Comm, *, agreed: bool = True) -> list[Payload]:
    """Everybody's, `[W, k, ...]`, by one collective of bytes."""
    arrays, structure = jax.tree.flatten(list(payloads))
    return structure.unflatten(fused_bytes(lambda x: comm.all_gather(x, agreed=agreed), arrays))
