"""Delivers the updates that each worker computed for its shards to all workers, as they are or compressed."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._core.dtypes import working_dtype
from .._core.trees import next_count
from .._core.types import Array, Flag, Int, Key, PyTree, Shape, State, Updates
from ..comm.base import Comm
from ..compressors.compressor import Compressor
from ..state.marks import Sharded, is_mark, with_value
from ..transforms.master import follow_parameter
from ..wire.buffers import MULTIPLE
from ..wire.codec import step_key
from ..wire.shards import shard_of, unshard
from .shards import decode, encode, gather, gather_payloads
from .values import Part, is_part, local_shard


class Delivery(NamedTuple):
    """How updates of shards become updates of all parameters.

    `init(params)` makes the state. `send(steps, params, master, state, some, comm)` returns the updates (sharded where
    the parameters are), the new master parameters, and the new state; `some` is False if no worker had an example.
    `takes_whole`: it sends updates as they are, so that a worker that has a whole one had better send all of it.
    """

    init: Callable[[PyTree], State]
    send: Callable[..., tuple[Updates, PyTree, State]]
    takes_whole: bool = False


class DeliveryState(NamedTuple):
    """State of a compressed gather: the key of all draws, a count (both replicated), and the residual (sharded).

    `residual` is what compression left out of the updates so far. It is `None` for parameters that are sharded
    themselves, and `()` with master parameters: their difference from the parameters is the residual.
    """

    key: Key[Array, ""]
    count: Int[Array, ""]
    residual: PyTree


def follow_params(master: PyTree, params: PyTree, comm: Comm) -> PyTree:
    """Moves the shards of the masters as far as something else has moved their parameters since the last update."""

    def follow_leaf(m: Any, p: Any) -> Any:
        return with_value(m, follow_parameter(m.value, p.value if is_mark(p) else shard_of(p, comm)))

    return jax.tree.map(follow_leaf, master, params, is_leaf=is_mark)


def deliver_updates() -> Delivery:
    """Gathers updates. An update that `inner` computed in full on every worker is not sent."""
    return Delivery(lambda params: (), _gather_updates, takes_whole=True)


def deliver_encoded_updates(compressor: Compressor) -> Delivery:
    """Gathers the payload of `u + e` and applies `D(C(u + e))`; `e`, the residual, keeps the difference."""
    return Delivery(lambda params: _init_state(_zero_residual(params)), partial(_gather_encoded_updates, compressor))


def deliver_params() -> Delivery:
    """Updates the master parameters and gathers them in the dtype of the parameters."""
    return Delivery(lambda params: (), _gather_params)


def deliver_encoded_params(compressor: Compressor) -> Delivery:
    """Updates the master parameters and gathers `D(C(master - params))`: the next difference contains the error."""
    return Delivery(lambda params: _init_state(()), partial(_gather_encoded_params, compressor))


def _gather_updates(
    steps: Updates, params: PyTree, master: PyTree, state: State, some: Flag, comm: Comm
) -> tuple[Updates, PyTree, State]:
    del some
    leaves, tree = jax.tree.flatten(params, is_leaf=is_mark)
    found = jax.tree.leaves(steps, is_leaf=is_part)
    sent = _positions_to_send(found, leaves)
    likes = [jax.ShapeDtypeStruct(found[i].shape, found[i].value.dtype) for i in sent]
    gathered = gather([found[i].value for i in sent], likes, comm)
    return tree.unflatten(_complete(found, leaves, dict(zip(sent, gathered, strict=True)), comm)), master, state


def _gather_encoded_updates(
    compressor: Compressor, steps: Updates, params: PyTree, master: PyTree, state: State, some: Flag, comm: Comm
) -> tuple[Updates, PyTree, State]:
    leaves, tree = jax.tree.flatten(params, is_leaf=is_mark)
    found = jax.tree.leaves(steps, is_leaf=is_part)
    sent = _positions_to_send(found, leaves)
    residual = tree.flatten_up_to(state.residual)
    # u + e, in the residual's dtype.
    corrected = [found[i].value.astype(residual[i].value.dtype) + residual[i].value for i in sent]
    own, full = _exchange(corrected, [found[i].shape for i in sent], state, compressor, comm)
    new_residual, gathered = list(residual), {}
    for i, x, own_decoded, decoded in zip(sent, corrected, own, full, strict=True):
        # Parameters move by what the update's dtype holds of the decoded array, so the residual is computed from that.
        dtype = found[i].value.dtype
        error = Part(x - own_decoded.astype(dtype).astype(x.dtype), found[i].shape).clear_padding(comm).value
        new_residual[i] = with_value(residual[i], jnp.where(some, error, residual[i].value))
        # The residual is kept, not sent, in a step without examples.
        gathered[i] = jnp.where(some, decoded.astype(dtype), jnp.zeros_like(decoded, dtype))
    updates = tree.unflatten(_complete(found, leaves, gathered, comm))
    return updates, master, DeliveryState(state.key, next_count(state.count), tree.unflatten(new_residual))


def _gather_params(
    steps: Updates, params: PyTree, master: PyTree, state: State, some: Flag, comm: Comm
) -> tuple[Updates, PyTree, State]:
    del some
    moved, master = _apply_to_master(steps, master, comm)
    leaves, tree = jax.tree.flatten(params, is_leaf=is_mark)
    # Only the rounded parameters are sent: half the bytes of the master for bfloat16.
    rounded = [(x.astype(p.dtype), p) for x, p in zip(moved, leaves, strict=True) if not is_mark(p)]
    gathered = iter(gather([x for x, _ in rounded], [p for _, p in rounded], comm))
    updates = [
        _difference_of_shards(x, p) if is_mark(p) else difference(next(gathered), p)
        for x, p in zip(moved, leaves, strict=True)
    ]
    return tree.unflatten(updates), master, state


def _gather_encoded_params(
    compressor: Compressor, steps: Updates, params: PyTree, master: PyTree, state: State, some: Flag, comm: Comm
) -> tuple[Updates, PyTree, State]:
    moved, master = _apply_to_master(steps, master, comm)
    leaves, tree = jax.tree.flatten(params, is_leaf=is_mark)
    pairs = list(zip(moved, leaves, strict=True))
    # master - params contains all earlier compression errors, so no residual is kept.
    owed = [difference(x, shard_of(p, comm)) for x, p in pairs if not is_mark(p)]
    _, full = _exchange(owed, [p.shape for p in leaves if not is_mark(p)], state, compressor, comm)
    decoded = iter(full)

    def complete_leaf(x: Array, p: Any) -> Any:
        if is_mark(p):
            return _difference_of_shards(x, p)
        update = next(decoded)
        return jnp.where(some, update, jnp.zeros_like(update))

    updates = tree.unflatten([complete_leaf(x, p) for x, p in pairs])
    return updates, master, state._replace(count=next_count(state.count))


def _init_state(residual: PyTree) -> DeliveryState:
    return DeliveryState(jax.random.key(0), jnp.zeros((), jnp.int32), residual)


def _zero_residual(params: PyTree) -> PyTree:
    """Zeros for every replicated parameter, `None` for sharded ones."""

    def zeros(p: Any) -> Sharded | None:
        return None if is_mark(p) else Sharded(jnp.zeros(p.shape, working_dtype(p.dtype)), multiple=MULTIPLE)

    return jax.tree.map(zeros, params, is_leaf=is_mark)


def _apply_to_master(steps: Updates, master: PyTree, comm: Comm) -> tuple[list[Array], PyTree]:
    """The new shards of the master parameters, as a list and with their marks."""
    moved = jax.tree.map(lambda x, u: x.value + local_shard(u, comm), master, steps, is_leaf=is_mark)
    return jax.tree.leaves(moved), jax.tree.map(with_value, master, moved, is_leaf=is_mark)


def _exchange(
    owed: Sequence[Array], shapes: Sequence[Shape], state: DeliveryState, compressor: Compressor, comm: Comm
) -> tuple[list[Array], list[Array]]:
    """Encodes the local shards, gathers the payloads, and returns the decoded local shards and full arrays."""
    # All workers, including the owner, apply the decoded update: parameters stay equal.
    key = step_key(state.key, state.count, comm, shared=compressor.shared_key)
    payloads = encode(compressor, owed, shapes, key, comm)
    decoded = decode(compressor, gather_payloads(payloads, comm), owed, of_all=True)
    full = [unshard(rows, jax.ShapeDtypeStruct(shape, rows.dtype)) for rows, shape in zip(decoded, shapes, strict=True)]
    return decode(compressor, payloads, owed), full


def _positions_to_send(found: list, params: list) -> list[int]:
    """The positions of updates of replicated parameters that no worker has in full."""
    return [
        i
        for i, (x, p) in enumerate(zip(found, params, strict=True))
        if not is_mark(p) and is_part(x) and x.full is None
    ]


def _complete(found: list, params: list, gathered: dict[int, Array], comm: Comm) -> list:
    """All updates: gathered, sharded as the parameter is, or computed in full by every worker."""

    def complete_leaf(i: int, x: Any, p: Any) -> Any:
        if i in gathered:
            return gathered[i]
        return with_value(p, local_shard(x, comm)) if is_mark(p) else x.full if is_part(x) else x

    return [complete_leaf(i, x, p) for i, (x, p) in enumerate(zip(found, params, strict=True))]


def _difference_of_shards(new: Array, old: Any) -> Any:
    return with_value(old, difference(new.astype(old.value.dtype), old.value))


def difference(new: Array, old: Array) -> Array:
    """The update that makes of the old parameter the new one: in float32, where a bfloat16 sum is then exact."""
    wide = working_dtype(old.dtype)
    return new.astype(wide) - old.astype(wide)
