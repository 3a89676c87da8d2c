"""Streams the state through the device in portions, two of which are there at a time."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..._core.compat import typed_like, varying_axes
from ..._core.types import Array
from .program import Operation, Program
from .values import DEVICE, HOST, Portion, Values, common_shape, portions_of, run_operations

# Smaller portions are merged, and not cut into tiles.
SMALL = 2**20
# The shape of a register of XLA:TPU.
ROWS, LANES = 8, 128


def stream(
    program: Program,
    operations: Sequence[Operation],
    values: Values,
    held: Mapping[int, Any],
    later: set[int],
    tile_bytes: int,
) -> None:
    """Sends the state to the device in portions, computes, and sends the new state back to the host.

    A leaf with entrywise operations is cut into tiles in a loop: while one tile is computed, the next one is
    transferred, and nothing else is on the device. Compilers would send the first tiles of all leaves at once, so each
    loop waits for the one before the previous loop.
    """
    done: list[Array] = []
    for portion in portions_of(program, operations, held.keys(), min(SMALL, tile_bytes)):
        shape = common_shape(program, portion)
        cuts = None
        if shape is not None and portion.nbytes >= min(SMALL, tile_bytes):
            cuts = _cuts(shape, -(-portion.nbytes // tile_bytes))
        if cuts is None:
            _run_whole(portion, values, held, later)
            continue
        finished = _run_tiled(program, portion, values, held, later, cuts, done[-2] if len(done) > 1 else None)
        done += [] if finished is None else [finished]


class Cuts(NamedTuple):
    """How a leaf is cut: its shape, the shape it is viewed in, the dimension that is cut, and the length of a tile."""

    shape: tuple[int, ...]
    view: tuple[int, ...]
    axis: int
    length: int


def _cuts(shape: tuple[int, ...], tiles: int) -> Cuts | None:
    """Cuts an array into at least this number of tiles, or returns `None`.

    XLA:TPU cannot transfer parts of the last dimension between host and device, and parts of the one before only in
    whole registers. A vector that fills registers is viewed as a matrix, which has the same memory layout there.
    """
    # A loop of a single round would be unrolled.
    tiles = max(4, tiles)
    view = (shape[0] // LANES, LANES) if len(shape) == 1 and shape[0] % (ROWS * LANES) == 0 else shape
    outer = view[:-1]
    if not outer:
        return None
    axis = next((i for i, length in enumerate(outer) if length >= tiles), outer.index(max(outer)))
    length = -(-outer[axis] // min(tiles, outer[axis]))
    if axis == len(view) - 2:
        length = max(ROWS, length // ROWS * ROWS)
    return Cuts(shape, view, axis, length) if outer[axis] // length >= 3 else None


class _Uses(NamedTuple):
    """The values that a portion reads, of the state and others, and makes: new state by the old one, and the rest."""

    state: list[int]
    others: list[int]
    new: dict[int, int]
    rest: list[int]


def _uses(portion: Portion, held: Mapping[int, Any], later: set[int]) -> _Uses:
    made = {value for operation in portion.operations for value in operation.outputs}
    read = dict.fromkeys(v for operation in portion.operations for v in operation.reads if v not in made)
    state = [v for v in read if v in held]
    new = {old: number for old, number in held.items() if isinstance(number, int) and number in made}
    rest = sorted((made & later) - set(new.values()))
    return _Uses(state, [v for v in read if v not in held], new, rest)


def _run_whole(portion: Portion, values: Values, held: Mapping[int, Any], later: set[int]) -> None:
    state, others, new, rest = _uses(portion, held, later)
    known = run_operations(portion.operations, {v: values.get(v, host=False) for v in (*state, *others)}, Operation.run)
    for value in (*new.values(), *rest):
        values.put(value, known[value])


def _zero_after(after: Array | None, like: Array) -> Array | int:
    """A zero that the compiler cannot fold, so that everything that uses it waits for `after`."""
    if after is None or not varying_axes(after) <= varying_axes(like):
        return 0
    # At most 32 of 32 bits are ones, and 32 >> 6 is zero.
    ones = lax.population_count(lax.bitcast_convert_type(after.astype(jnp.float32), jnp.int32))
    return lax.shift_right_logical(ones, 6)


def _run_on_tile(shape: tuple[int, ...], operation: Operation, operands: Sequence[Any]) -> list[Any]:
    """Runs one operation on tiles of this shape."""
    if operation.name == "broadcast_in_dim":
        return [jnp.broadcast_to(jnp.reshape(operands[0], ()), shape)]
    return operation.run(operands)


def _run_tiled(
    program: Program,
    portion: Portion,
    values: Values,
    held: Mapping[int, Any],
    later: set[int],
    cuts: Cuts,
    after: Array | None,
) -> Array | None:
    """Computes a portion tile by tile; returns a number that is available when its last tile is, if there is one."""
    state, others, new, rest = _uses(portion, held, later)
    state_arrays = program.arrays(state)
    _, shape, axis, length = cuts
    full, remainder = divmod(shape[axis], length)
    # Numbers, and arrays that are not state, are whole on the device; the state stays on the host, and is replaced.
    fixed = {v: values.get(v, host=False) for v in (*state, *others) if not program.is_array(v)}
    arrays = {v: values.get(v, host=False).reshape(shape) for v in others if program.is_array(v)}
    untouched = {v: values.get(v, host=True).reshape(shape) for v in state_arrays if v not in new}
    buffers = {v: values.get(v, host=True).reshape(shape) for v in new}

    def fetch(buffers, at, size):
        source = untouched | buffers
        tile = {v: lax.dynamic_slice_in_dim(source[v], at, size, axis) for v in state_arrays}
        return {v: jax.device_put(x, DEVICE) for v, x in tile.items()}

    def compute(tile, buffers, outs, at, size):
        known = fixed | tile | {v: lax.dynamic_slice_in_dim(x, at, size, axis) for v, x in arrays.items()}
        tile_shape = (*shape[:axis], size, *shape[axis + 1 :])
        known = run_operations(portion.operations, known, functools.partial(_run_on_tile, tile_shape))
        buffers = {
            old: lax.dynamic_update_slice_in_dim(x, jax.device_put(known[new[old]], HOST), at, axis)
            for old, x in buffers.items()
        }
        outs = {v: lax.dynamic_update_slice_in_dim(x, known[v], at, axis) for v, x in outs.items()}
        return buffers, outs

    def body(i, carry):
        tile, buffers, outs = carry
        # The next tile is transferred while this one is computed.
        following = fetch(buffers, (i + 1) * length, length)
        return following, *compute(tile, buffers, outs, i * length, length)

    # Updates are written tile by tile too, into arrays on the device.
    outs = {v: typed_like(jnp.zeros(shape, program.types[v].dtype), program.types[v]) for v in rest}
    first = _zero_after(after, values.get(state_arrays[0], host=True))
    # A remainder that XLA:TPU cannot transfer is extended back into the previous tile, whose entries are computed
    # again: so it is read before they change, which may cost a copy on the host.
    size = remainder if axis < len(shape) - 2 or remainder % ROWS == 0 else length
    end = shape[axis] - size
    last = fetch(buffers, end, size) if size > remainder else None
    # The last full tile is computed after the loop, which always fetches one ahead.
    tile, buffers, outs = lax.fori_loop(0, full - 1, body, (fetch(buffers, first, length), buffers, outs))
    if remainder and last is None:
        last = fetch(buffers, end, size)
    buffers, outs = compute(tile, buffers, outs, (full - 1) * length, length)
    if last is not None:
        buffers, outs = compute(last, buffers, outs, end, size)
    for old, x in buffers.items():
        values.put(new[old], x.reshape(cuts.shape))
    for value, x in outs.items():
        values.put(value, x.reshape(cuts.shape))
    if not outs:
        return None
    # Its last entry is written last.
    x = next(iter(outs.values()))
    return lax.slice(x, [shape[i] - 1 for i in range(x.ndim)], shape).reshape(())
