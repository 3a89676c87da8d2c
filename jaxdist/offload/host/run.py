"""Carries out an update whose state lies in host memory."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from ..._core.compat import host_compute, lies_on_host
from ..._core.types import Array
from .cut import cut
from .program import Node, Program, flatten
from .stream import stream
from .values import DEVICE, HOST, Chunk, Values, chunks, evaluate


def run(
    program: Program,
    given: Sequence[Array],
    state: Mapping[int, int],
    *,
    compute: Literal["host", "device"],
    tile_bytes: int,
) -> list[Array]:
    """The outputs of a program.

    Args:
      program: the update.
      given: its inputs.
      state: the input and the output, by their positions, of each leaf of the state.
      compute: where the work is done that stands beside the state.
      tile_bytes: how much state is one portion of it.

    Returns:
      The new leaves of the state on the host, all else on the device.
    """
    held = {program.inputs[i]: program.outputs[o] for i, o in state.items()}
    plan = cut(program, held.keys(), [x for x in held.values() if isinstance(x, int)])
    values = Values(program, given)
    for level, nodes in enumerate(plan.levels):
        if level % 2 == 0:
            for node in nodes:
                operands = [values.get(x, host=False) if isinstance(x, int) else x.val for x in node.inputs]
                for number, x in zip(node.outputs, node.run(operands), strict=True):
                    values.put(number, x)
            continue
        later = _read_outside(program, plan.levels, level)
        if compute == "device":
            stream(program, nodes, values, held, later, tile_bytes)
        else:
            for portion in chunks(program, nodes, held.keys(), tile_bytes):
                _on_host(portion, values, later)

    def output(i, x):
        host = i in state.values()
        if isinstance(x, int):
            return values.get(x, host=host)
        return jax.device_put(jnp.asarray(x.val, x.aval.dtype), HOST if host else DEVICE)

    return [output(i, x) for i, x in enumerate(program.outputs)]


def _read_outside(program: Program, levels: Sequence[Sequence[Node]], level: int) -> set[int]:
    """What other levels or the caller read."""
    others = {v for other, nodes in enumerate(levels) if other != level for node in nodes for v in node.reads}
    return others | {x for x in program.outputs if isinstance(x, int)}


def _on_host(portion: Chunk, values: Values, later: set[int]) -> None:
    made = {value for node in portion.nodes for value in node.outputs}
    read = list(dict.fromkeys(v for node in portion.nodes for v in node.reads if v not in made))
    out = sorted(made & later)

    def region(*operands):
        found = evaluate(portion.nodes, dict(zip(read, operands, strict=True)), node_on_host)
        return [found[value] for value in out]

    results = host_compute(region, len(out))(*(values.get(v, host=True) for v in read))
    for number, x in zip(out, results, strict=True):
        values.put(number, x)


def node_on_host(node: Node, operands: Sequence[Any]) -> list[Any]:
    """Constants would be made on the device; branches have been traced for the device."""
    if node.name == "cond":
        branches = [functools.partial(_branch, flatten(closed)) for closed in node.equation.params["branches"]]
        return lax.switch(operands[0], branches, *operands[1:])
    if not any(isinstance(x, jax.Array) and lies_on_host(x) for x in operands):
        operands = [jax.device_put(x, HOST) for x in operands]
    return [x if lies_on_host(x) else jax.device_put(x, HOST) for x in node.run(operands)]


def _branch(program: Program, *operands: Array) -> list[Array]:
    known = dict(zip(program.inputs, operands, strict=True))
    known |= {v: jax.device_put(x, HOST) for v, x in program.constants.items()}
    known = evaluate(program.nodes, known, node_on_host)
    return [
        known[x] if isinstance(x, int) else jax.device_put(jnp.asarray(x.val, x.aval.dtype), HOST)
        for x in program.outputs
    ]
