"""Third: the update runs where its state is, in host memory, or is streamed through the device in portions."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..._core.compat import cast_varying, host_compute, is_on_host, varying_axes
from ..._core.jaxprs import CASTS, ELEMENTWISE
from ..._core.types import Array
from .flatten import Operation, Program, flatten, run_operations
from .place import place_operations

DEVICE, HOST = jax.memory.Space.Device, jax.memory.Space.Host
# Smaller portions are merged, and not cut into tiles.
SMALL = 2**20
# The shape of a register of XLA:TPU.
ROWS, LANES = 8, 128


class Values:
    """The values of a program, on the device, on the host or on both; each is sent to the other side at most once."""

    def __init__(self, program: Program, given: Sequence[Array]):
        self.known: tuple[dict[int, Array], dict[int, Array]] = ({}, {})
        self.place_all([*program.inputs, *program.constants], [*given, *program.constants.values()])

    def place_all(self, numbers: Iterable[int], arrays: Iterable[Array]) -> None:
        """Stores values that have been computed, each on the side where it is."""
        for number, x in zip(numbers, arrays, strict=True):
            self.known[is_on_host(x)][number] = x

    def get(self, number: int, *, host: bool) -> Array:
        """A value on one of the two sides."""
        if number not in self.known[host]:
            self.known[host][number] = jax.device_put(self.known[not host][number], HOST if host else DEVICE)
        return self.known[host][number]


class Portion(NamedTuple):
    """Operations in order, and the bytes of the state that they read."""

    operations: list[Operation]
    nbytes: int

    @property
    def makes(self) -> set[int]:
        """The values that it computes."""
        return {value for operation in self.operations for value in operation.outputs}

    @property
    def reads(self) -> list[int]:
        """The values that it reads and does not compute."""
        made = self.makes
        return list(dict.fromkeys(v for operation in self.operations for v in operation.reads if v not in made))


def _portions(
    program: Program, operations: Sequence[Operation], state: Collection[int], smallest: int
) -> list[Portion]:
    """Groups operations that share arrays (those of one leaf), so that portions do not depend on one another.

    Portions are merged up to `smallest` bytes of state.
    """
    out: list[Portion] = []
    for members in _components(program, operations):
        read = {value for operation in members for value in operation.reads if value in state}
        size = sum(program.nbytes(value) for value in read)
        if out and out[-1].nbytes + size <= smallest:
            out[-1] = Portion(out[-1].operations + members, out[-1].nbytes + size)
        else:
            out.append(Portion(members, size))
    return out


def _components(program: Program, operations: Sequence[Operation]) -> list[list[Operation]]:
    """The connected components of operations that share an array, or a number that one of them computes."""
    # Union-find over the operations' positions.
    parent = list(range(len(operations)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    first: dict[int, int] = {}
    for i, operation in enumerate(operations):
        made_here = [value for value in operation.reads if value in first]
        for value in {*program.arrays((*operation.reads, *operation.outputs)), *made_here}:
            j = first.setdefault(value, i)
            parent[root(i)] = root(j)
        for value in operation.outputs:
            first.setdefault(value, i)
    groups: dict[int, list[Operation]] = {}
    for i, operation in enumerate(operations):
        groups.setdefault(root(i), []).append(operation)
    return list(groups.values())


def _common_shape(program: Program, portion: Portion) -> tuple[int, ...] | None:
    """The shape of all arrays of a portion whose operations are entrywise, or `None`."""
    shapes = set()
    for operation in portion.operations:
        arrays = program.arrays((*operation.reads, *operation.outputs))
        shapes |= {program.types[value].shape for value in arrays}
        is_constant = operation.name == "broadcast_in_dim" and not program.arrays(operation.reads)
        if operation.name not in ELEMENTWISE | CASTS and not is_constant:
            return None
    return shapes.pop() if len(shapes) == 1 else None


def run(
    program: Program,
    given: Sequence[Array],
    state: Mapping[int, int],
    *,
    compute: Literal["host", "device"],
    tile_bytes: int,
) -> list[Array]:
    """Computes the outputs of a program: the new leaves of the state on the host, all others on the device.

    `state`: for each leaf of the state, the position of its input and that of its output. `compute`: where the
    operations beside the state run. `tile_bytes`: the bytes of state in one portion.
    """
    # The value of each leaf of the state -> that of its new one.
    held = {program.inputs[i]: program.outputs[o] for i, o in state.items()}
    levels = place_operations(program, held.keys(), [x for x in held.values() if isinstance(x, int)])
    values = Values(program, given)
    for level, operations in enumerate(levels):
        # Even levels run on the device, odd ones beside the state.
        if level % 2 == 0:
            for operation in operations:
                operands = [values.get(x, host=False) if isinstance(x, int) else x.val for x in operation.inputs]
                values.place_all(operation.outputs, operation.run(operands))
            continue
        # Only values that other levels or the caller read are kept.
        others = [operation for other in (*levels[:level], *levels[level + 1 :]) for operation in other]
        read = [value for operation in others for value in operation.reads]
        later = {x for x in (*read, *program.outputs) if isinstance(x, int)}
        if compute == "device":
            _stream(program, operations, values, held, later, tile_bytes)
        else:
            for portion in _portions(program, operations, held.keys(), tile_bytes):
                _run_on_host(portion, values, later)
    sides = [i in state.values() for i in range(len(program.outputs))]
    return [
        values.get(x, host=host) if isinstance(x, int) else _literal(x, HOST if host else DEVICE)
        for x, host in zip(program.outputs, sides, strict=True)
    ]


def _run_on_host(portion: Portion, values: Values, later: set[int]) -> None:
    read, out = portion.reads, sorted(portion.makes & later)

    def region(*operands: Array) -> list[Array]:
        known = dict(zip(read, operands, strict=True))
        known = run_operations(portion.operations, known, _run_operation_on_host)
        return [known[value] for value in out]

    # Only values that are read outside leave the region.
    values.place_all(out, host_compute(region, len(out))(*(values.get(v, host=True) for v in read)))


def _run_operation_on_host(operation: Operation, operands: Sequence[Any]) -> list[Any]:
    """Runs one operation with operands and results in host memory."""
    # Branches have been traced for the device, so they are interpreted too.
    if operation.name == "cond":
        branches = [partial(_run_branch, flatten(closed)) for closed in operation.equation.params["branches"]]
        return lax.switch(operands[0], branches, *operands[1:])
    # Constants alone would put the result on the device, and `vmap` joins the indices of a slice in one array.
    is_slice = operation.name in ("dynamic_slice", "dynamic_update_slice")
    if is_slice or not any(isinstance(x, jax.Array) and is_on_host(x) for x in operands):
        operands = [jax.device_put(x, HOST) for x in operands]
    return [x if is_on_host(x) else jax.device_put(x, HOST) for x in operation.run(operands)]


def _run_branch(program: Program, *operands: Array) -> list[Array]:
    known = dict(zip(program.inputs, operands, strict=True))
    known |= {v: jax.device_put(x, HOST) for v, x in program.constants.items()}
    known = run_operations(program.operations, known, _run_operation_on_host)
    return [known[x] if isinstance(x, int) else _literal(x, HOST) for x in program.outputs]


def _literal(x: Any, side: Any) -> Array:
    return jax.device_put(jnp.asarray(x.val, x.aval.dtype), side)


# ---- compute on the device


def _stream(
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
    for portion in _portions(program, operations, held.keys(), min(SMALL, tile_bytes)):
        shape = _common_shape(program, portion)
        cuts = None
        if shape is not None and portion.nbytes >= min(SMALL, tile_bytes):
            cuts = _cuts(shape, -(-portion.nbytes // tile_bytes))
        if cuts is None:
            state, others, new, rest = _uses(portion, held, later)
            known = {v: values.get(v, host=False) for v in (*state, *others)}
            known = run_operations(portion.operations, known, Operation.run)
            made = [*new.values(), *rest]
            values.place_all(made, [known[value] for value in made])
            continue
        finished = _run_tiled(program, portion, values, held, later, cuts, done[-2] if len(done) > 1 else None)
        done += [] if finished is None else [finished]


class _Cuts(NamedTuple):
    """How a leaf is cut: its shape, the shape it is viewed in, the dimension that is cut, and the length of a tile."""

    shape: tuple[int, ...]
    view: tuple[int, ...]
    axis: int
    length: int


def _cuts(shape: tuple[int, ...], tiles: int) -> _Cuts | None:
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
    return _Cuts(shape, view, axis, length) if outer[axis] // length >= 3 else None


class _Uses(NamedTuple):
    """The values that a portion reads, of the state and others, and makes: new state by the old one, and the rest."""

    state: list[int]
    others: list[int]
    new: dict[int, int]
    rest: list[int]


def _uses(portion: Portion, held: Mapping[int, Any], later: set[int]) -> _Uses:
    read, made = portion.reads, portion.makes
    new = {old: number for old, number in held.items() if isinstance(number, int) and number in made}
    rest = sorted((made & later) - set(new.values()))
    return _Uses([v for v in read if v in held], [v for v in read if v not in held], new, rest)


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
    cuts: _Cuts,
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
        known = run_operations(portion.operations, known, partial(_run_on_tile, tile_shape))
        buffers = {
            old: lax.dynamic_update_slice_in_dim(x, jax.device_put(known[new[old]], HOST), at, axis)
            for old, x in buffers.items()
        }
        outs = {v: lax.dynamic_update_slice_in_dim(x, known[v], at, axis) for v, x in outs.items()}
        return buffers, outs

    def body(i, carry):
        tile, buffers, outs = carry
        # The next tile is transferred while this one is computed. Before this one is written: XLA:GPU would copy whole
        # buffers otherwise, to keep what is read apart from what is written.
        following, buffers = lax.optimization_barrier((fetch(buffers, (i + 1) * length, length), buffers))
        return following, *compute(tile, buffers, outs, i * length, length)

    # Updates are written tile by tile too, into arrays on the device.
    types = {v: program.types[v] for v in rest}
    outs = {v: cast_varying(jnp.zeros(shape, kind.dtype), kind.manual_axis_type.varying) for v, kind in types.items()}
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
    results = {new[old]: x for old, x in buffers.items()} | outs
    values.place_all(results, [x.reshape(cuts.shape) for x in results.values()])
    if not outs:
        return None
    # Its last entry is written last.
    x = next(iter(outs.values()))
    return lax.slice(x, [shape[i] - 1 for i in range(x.ndim)], shape).reshape(())
