"""Runs an update whose state is in host memory."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from ..._core.compat import host_compute, is_on_host
from ..._core.types import Array
from .cut import place_operations
from .program import Operation, Program, flatten
from .stream import stream
from .values import DEVICE, HOST, Portion, Values, portions_of, run_operations


def run(
    program: Program,
    given: Sequence[Array],
    state: Mapping[int, int],
    *,
    compute: Literal["host", "device"],
    tile_bytes: int,
) -> list[Array]:
    """Computes the outputs of a program.

    Args:
      program: the update.
      given: its inputs.
      state: for each leaf of the state, the position of its input and that of its output.
      compute: where the operations beside the state run.
      tile_bytes: the bytes of state in one portion.

    Returns:
      The new leaves of the state on the host, all other outputs on the device.
    """
    # The value of each leaf of the state -> that of its new one.
    held = {program.inputs[i]: program.outputs[o] for i, o in state.items()}
    levels = place_operations(program, held.keys(), [x for x in held.values() if isinstance(x, int)])
    values = Values(program, given)
    for level, operations in enumerate(levels):
        # Even levels run on the device, odd ones beside the state.
        if level % 2 == 0:
            _run_on_device(operations, values)
            continue
        later = _read_outside(program, levels, level)
        if compute == "device":
            stream(program, operations, values, held, later, tile_bytes)
        else:
            for portion in portions_of(program, operations, held.keys(), tile_bytes):
                _run_on_host(portion, values, later)
    in_state = set(state.values())
    return [_output(values, x, host=i in in_state) for i, x in enumerate(program.outputs)]


def _output(values: Values, x: Any, *, host: bool) -> Array:
    if isinstance(x, int):
        return values.get(x, host=host)
    return jax.device_put(jnp.asarray(x.val, x.aval.dtype), HOST if host else DEVICE)


def _read_outside(program: Program, levels: Sequence[Sequence[Operation]], level: int) -> set[int]:
    """The values that other levels or the caller read."""
    others = [operations for other, operations in enumerate(levels) if other != level]
    read = {value for operations in others for operation in operations for value in operation.reads}
    return read | {x for x in program.outputs if isinstance(x, int)}


def _run_on_device(operations: Sequence[Operation], values: Values) -> None:
    for operation in operations:
        operands = [values.get(x, host=False) if isinstance(x, int) else x.val for x in operation.inputs]
        for number, x in zip(operation.outputs, operation.run(operands), strict=True):
            values.put(number, x)


def _run_on_host(portion: Portion, values: Values, later: set[int]) -> None:
    made = {value for operation in portion.operations for value in operation.outputs}
    read = list(dict.fromkeys(v for operation in portion.operations for v in operation.reads if v not in made))
    out = sorted(made & later)

    def region(*operands: Array) -> list[Array]:
        found = run_operations(portion.operations, dict(zip(read, operands, strict=True)), run_operation_on_host)
        return [found[value] for value in out]

    # Only values that are read outside leave the region.
    results = host_compute(region, len(out))(*(values.get(v, host=True) for v in read))
    for number, x in zip(out, results, strict=True):
        values.put(number, x)


def run_operation_on_host(operation: Operation, operands: Sequence[Any]) -> list[Any]:
    """Runs one operation with operands and results in host memory."""
    # Branches have been traced for the device, so they are interpreted too.
    if operation.name == "cond":
        branches = [partial(_run_branch, flatten(closed)) for closed in operation.equation.params["branches"]]
        return lax.switch(operands[0], branches, *operands[1:])
    # Constants alone would put the result on the device.
    if not any(isinstance(x, jax.Array) and is_on_host(x) for x in operands):
        operands = [jax.device_put(x, HOST) for x in operands]
    return [x if is_on_host(x) else jax.device_put(x, HOST) for x in operation.run(operands)]


def _run_branch(program: Program, *operands: Array) -> list[Array]:
    known = dict(zip(program.inputs, operands, strict=True))
    known |= {v: jax.device_put(x, HOST) for v, x in program.constants.items()}
    known = run_operations(program.operations, known, run_operation_on_host)
    return [
        known[x] if isinstance(x, int) else jax.device_put(jnp.asarray(x.val, x.aval.dtype), HOST)
        for x in program.outputs
    ]
