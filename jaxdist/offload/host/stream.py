"""State that visits the device in portions, two of which are there at a time."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..._core.compat import typed_like, varying_axes
from ..._core.types import Array
from .program import Node, Program
from .values import DEVICE, HOST, Chunk, Values, chunks, entrywise, evaluate

# Smaller groups travel together and as they are.
SMALL = 2**20
ROWS, LANES = 8, 128  # of a register of XLA:TPU


def stream(
    program: Program,
    nodes: Sequence[Node],
    values: Values,
    held: Mapping[int, Any],
    later: set[int],
    tile_bytes: int,
) -> None:
    """Brings the state to the device in portions, computes, and takes the new state back to the host.

    A leaf where entries do not depend on one another is cut into tiles in a loop: while one is computed on, the next
    one travels, and nothing else is on the device. Compilers would send the first tiles of all leaves at once; each
    waits for the loop before the last.
    """
    done: list[Array] = []
    for portion in chunks(program, nodes, held.keys(), min(SMALL, tile_bytes)):
        shape = entrywise(program, portion)
        cuts = None
        if shape is not None and portion.nbytes >= min(SMALL, tile_bytes):
            cuts = _cuts(shape, -(-portion.nbytes // tile_bytes))
        if cuts is None:
            _whole(portion, values, held, later)
            continue
        finished = _tiled(program, portion, values, held, later, cuts, done[-2] if len(done) > 1 else None)
        done += [] if finished is None else [finished]


class Cuts(NamedTuple):
    """How a leaf is cut: its shape, the shape that it is seen in, which dimension is cut, and how long a tile is."""

    shape: tuple[int, ...]
    seen: tuple[int, ...]
    axis: int
    length: int


def _cuts(shape: tuple[int, ...], tiles: int) -> Cuts | None:
    """Into at least so many tiles, or not at all.

    XLA:TPU moves no parts of the last dimension between host and device, and of the one before whole registers only. A
    vector that fills registers is seen as a matrix, which there is the same bytes.
    """
    tiles = max(4, tiles)  # a loop of one round would be unrolled
    seen = (shape[0] // LANES, LANES) if len(shape) == 1 and shape[0] % (ROWS * LANES) == 0 else shape
    outer = seen[:-1]
    if not outer:
        return None
    axis = next((i for i, length in enumerate(outer) if length >= tiles), outer.index(max(outer)))
    length = -(-outer[axis] // min(tiles, outer[axis]))
    if axis == len(seen) - 2:
        length = max(ROWS, length // ROWS * ROWS)
    return Cuts(shape, seen, axis, length) if outer[axis] // length >= 3 else None


def _sides(portion: Chunk, values: Values, held: Mapping[int, Any], later: set[int]):
    """What a portion reads of the state and otherwise, and what it makes of the state and otherwise."""
    made = {value for node in portion.nodes for value in node.outputs}
    read = dict.fromkeys(v for node in portion.nodes for v in node.reads if v not in made)
    state = [v for v in read if v in held]
    new = {old: number for old, number in held.items() if isinstance(number, int) and number in made}
    rest = sorted((made & later) - set(new.values()))
    return state, [v for v in read if v not in held], new, rest


def _whole(portion: Chunk, values: Values, held: Mapping[int, Any], later: set[int]) -> None:
    state, others, new, rest = _sides(portion, values, held, later)
    known = evaluate(portion.nodes, {v: values.get(v, host=False) for v in (*state, *others)}, Node.run)
    for value in (*new.values(), *rest):
        values.put(value, known[value])


def _zero(after: Array | None, like: Array) -> Array | int:
    """A zero that the compiler does not know: what uses it waits for `after`. No number of 32 bits has 64 ones."""
    if after is None or not varying_axes(after) <= varying_axes(like):
        return 0
    ones = lax.population_count(lax.bitcast_convert_type(after.astype(jnp.float32), jnp.int32))
    return lax.shift_right_logical(ones, 6)


def _of_shape(shape: tuple[int, ...], node: Node, operands: Sequence[Any]) -> list[Any]:
    """A node on tiles of this shape."""
    if node.name == "broadcast_in_dim":
        return [jnp.broadcast_to(jnp.reshape(operands[0], ()), shape)]
    return node.run(operands)


def _tiled(
    program: Program,
    portion: Chunk,
    values: Values,
    held: Mapping[int, Any],
    later: set[int],
    cuts: Cuts,
    after: Array | None,
) -> Array | None:
    state, others, new, rest = _sides(portion, values, held, later)
    state_arrays = program.arrays(state)
    _, shape, axis, length = cuts
    full, remainder = divmod(shape[axis], length)
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
        known = evaluate(portion.nodes, known, functools.partial(_of_shape, (*shape[:axis], size, *shape[axis + 1 :])))
        buffers = {
            old: lax.dynamic_update_slice_in_dim(x, jax.device_put(known[new[old]], HOST), at, axis)
            for old, x in buffers.items()
        }
        outs = {v: lax.dynamic_update_slice_in_dim(x, known[v], at, axis) for v, x in outs.items()}
        return buffers, outs

    def body(i, carry):
        tile, buffers, outs = carry
        following = fetch(buffers, (i + 1) * length, length)  # travels while this one is computed
        return following, *compute(tile, buffers, outs, i * length, length)

    outs = {v: typed_like(jnp.zeros(shape, program.types[v].dtype), program.types[v]) for v in rest}
    first = _zero(after, values.get(state_arrays[0], host=True))
    # A remainder that XLA:TPU cannot move reaches back into the tile before and computes entries of that again: so it
    # is read before they change, which may cost a copy on the host.
    size = remainder if axis < len(shape) - 2 or remainder % ROWS == 0 else length
    end = shape[axis] - size
    last = fetch(buffers, end, size) if size > remainder else None
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
    x = next(iter(outs.values()))
    return lax.slice(x, [shape[i] - 1 for i in range(x.ndim)], shape).reshape(())
