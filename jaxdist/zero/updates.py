"""From the parts that workers have updated to the updates of all parameters, whole or coded."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._core.dtypes import working_dtype
from .._core.trees import next_count
from .._core.types import Array, Int, Key, PyTree, Shape
from ..comm.base import Comm
from ..compressors.base import Compressor
from ..state.marks import Sharded, is_mark, with_value
from ..wire.encoded import step_key
from ..wire.flat import MULTIPLE
from ..wire.shards import joined, piece
from .parts import Part
from .shards import decode, encode, gather, gather_payloads


class CodedState(NamedTuple):
    """Of the coded gather. Agreed: the key of all draws and a count. Cut: what the code of the updates left behind.

    `residual` has `None` for parameters that are cut themselves, and everywhere where there are master parameters:
    what lies between those and the parameters is the residual.
    """

    key: Key[Array, ""]
    count: Int[Array, ""]
    residual: PyTree


def is_part(x: Any) -> bool:
    """Whether this stands for a whole array."""
    return isinstance(x, Part)


def local(x: Any, comm: Comm) -> Array:
    """The piece that this worker owns of a part or of a whole array."""
    return x.value if is_part(x) else piece(x, comm)


def taken(steps: PyTree, params: PyTree, comm: Comm) -> PyTree:
    """The updates: cut where the parameters are, else of all workers; what each has computed whole is not sent."""
    leaves, tree = jax.tree.flatten(params, is_leaf=is_mark)
    found = jax.tree.leaves(steps, is_leaf=is_part)
    missing = _missing(found, leaves)
    likes = [_like(found[i]) for i in missing]
    arrived = gather([found[i].value for i in missing], likes, comm)
    return tree.unflatten(_with_arrived(found, leaves, dict(zip(missing, arrived, strict=True)), comm))


def coded(
    steps: PyTree, params: PyTree, state: CodedState, compressor: Compressor, some: Array | bool, comm: Comm
) -> tuple[PyTree, CodedState]:
    """As `taken`, with a code for what is sent: `D(C(u + e))`, of which `e` keeps what it lacks."""
    leaves, tree = jax.tree.flatten(params, is_leaf=is_mark)
    found = jax.tree.leaves(steps, is_leaf=is_part)
    missing = _missing(found, leaves)
    old = tree.flatten_up_to(state.residual)
    owed = [found[i].value.astype(old[i].value.dtype) + old[i].value for i in missing]
    own, arrived = _exchange(owed, [found[i].shape for i in missing], state, compressor, comm)
    new = list(old)
    delivered = {}
    for i, x, mine, rows in zip(missing, owed, own, arrived, strict=True):
        dtype = found[i].value.dtype
        kept = Part(x - mine.astype(dtype).astype(x.dtype), found[i].shape).cleared(comm).value
        new[i] = with_value(old[i], jnp.where(some, kept, old[i].value))
        delivered[i] = jnp.where(some, rows.astype(dtype), jnp.zeros_like(rows, dtype))
    updates = tree.unflatten(_with_arrived(found, leaves, delivered, comm))
    return updates, CodedState(state.key, next_count(state.count), tree.unflatten(new))


def differences(master: PyTree, params: PyTree, comm: Comm) -> PyTree:
    """The updates that make the parameters the master in their own dtype; sent in that dtype."""
    leaves, tree = jax.tree.flatten(params, is_leaf=is_mark)
    pairs = list(zip(jax.tree.leaves(master), leaves, strict=True))
    sent = [(x.astype(p.dtype), p) for x, p in pairs if not is_mark(p)]
    likes = [p for _, p in sent]
    arrived = iter(gather([x for x, _ in sent], likes, comm))

    def one(x, p):
        if is_mark(p):
            return with_value(p, _difference(x.astype(p.value.dtype), p.value))
        return _difference(next(arrived), p)

    return tree.unflatten([one(*pair) for pair in pairs])


def coded_differences(
    master: PyTree, params: PyTree, state: CodedState, compressor: Compressor, some: Array | bool, comm: Comm
) -> tuple[PyTree, CodedState]:
    """Updates that bring the parameters nearer to the master, `D(C(master - params))`: nothing is lost for good."""
    leaves, tree = jax.tree.flatten(params, is_leaf=is_mark)
    pairs = list(zip(jax.tree.leaves(master), leaves, strict=True))
    owed = [_difference(x, piece(p, comm)) for x, p in pairs if not is_mark(p)]
    _, arrived = _exchange(owed, [p.shape for p in leaves if not is_mark(p)], state, compressor, comm)
    arriving = iter(arrived)

    def one(x, p):
        if is_mark(p):
            return with_value(p, _difference(x.astype(p.value.dtype), p.value))
        rows = next(arriving)
        return jnp.where(some, rows, jnp.zeros_like(rows))

    return tree.unflatten([one(*pair) for pair in pairs]), state._replace(count=next_count(state.count))


def residual_of(params: PyTree) -> PyTree:
    """Nothing is owed yet: zeros for what is not cut, to be placed."""

    def one(p):
        return None if is_mark(p) else Sharded(jnp.zeros(p.shape, working_dtype(p.dtype)), multiple=MULTIPLE)

    return jax.tree.map(one, params, is_leaf=is_mark)


def _exchange(
    owed: list[Array], shapes: list[Shape], state: CodedState, compressor: Compressor, comm: Comm
) -> tuple[list[Array], list[Array]]:
    """What the code of this worker's pieces decodes to, and that of all workers, whole."""
    key = step_key(state.key, state.count, comm, shared=compressor.shared_key)
    payloads = encode(compressor, owed, shapes, key, comm)
    everybody = decode(compressor, gather_payloads(payloads, comm), owed)
    wholes = [
        joined(rows, jax.ShapeDtypeStruct(shape, rows.dtype)) for rows, shape in zip(everybody, shapes, strict=True)
    ]
    return decode(compressor, payloads, owed), wholes


def _missing(found: list, params: list) -> list[int]:
    """Which updates must be sent."""
    return [
        i
        for i, (x, p) in enumerate(zip(found, params, strict=True))
        if not is_mark(p) and is_part(x) and x.full is None
    ]


def _with_arrived(found: list, params: list, arrived: dict[int, Array], comm: Comm) -> list:
    def one(i, x, p):
        if i in arrived:
            return arrived[i]
        return with_value(p, local(x, comm)) if is_mark(p) else x.full if is_part(x) else x

    return [one(i, x, p) for i, (x, p) in enumerate(zip(found, params, strict=True))]


def _like(x: Part) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.value.dtype)


def _difference(new: Array, old: Array) -> Array:
    # In float32, unlike other updates: added to a bfloat16 parameter it gives the new one exactly.
    wide = working_dtype(old.dtype)
    return new.astype(wide) - old.astype(wide)
