"""The trip count of a `while` in a compiled program.

XLA notes it on CPU and GPU (`known_trip_count`), not on TPU, where it is derived from the loop itself: a counter that
starts at a constant, grows by a constant and is compared with a constant.
"""

import re
from typing import NamedTuple

from .reader import Instruction, Module, callees_of

_SAME_VALUE = ("bitcast", "convert", "copy", "reshape")
_CALLS = ("call", "fusion")
_FLIPPED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}


class _Value(NamedTuple):
    """An integer: a constant, or an element of the loop's carry plus a constant."""

    element: int | None
    offset: int


# The parameters of a computation are bound to values, or (in the body and condition of a loop) to its carry.
_CARRY = "carry"
_Bindings = tuple[_Value | None, ...] | str


def trip_count(module: Module, computation: str, loop: Instruction) -> int | None:
    """Returns how often the body of a `while` in the computation of this name runs; `None` if that is unknown."""
    known = re.search(r"known_trip_count\W+n\W+(\d+)", loop.attributes)
    if known:
        return int(known.group(1))
    # Otherwise derive it, from how the condition compares the counter and how the body changes it.
    (condition,), (body,) = callees_of(loop, "condition"), callees_of(loop, "body")
    compared = _comparison(module, condition, module.computations[condition].root, _CARRY)
    if compared is None:
        return None
    direction, left, right = compared

    def constant_of(value: _Value | None) -> int | None:
        """Evaluates a constant, or an element of the carry that the body returns unchanged."""
        if value is None or value.element is None:
            return None if value is None else value.offset
        after = _element(module, body, module.computations[body].root, value.element, _CARRY)
        start = _element(module, computation, loop.operands[0], value.element, ())
        if after != _Value(value.element, 0) or start is None or start.element is not None:
            return None
        return start.offset + value.offset

    # Normalize to `counter <direction> limit`.
    if constant_of(right) is None:
        direction, left, right = _FLIPPED.get(direction, ""), right, left
    limit = constant_of(right)
    if limit is None or left is None or left.element is None:
        return None
    # The counter: its first value, and its step as the offset that the body adds to its own element.
    start = _element(module, computation, loop.operands[0], left.element, ())
    after = _element(module, body, module.computations[body].root, left.element, _CARRY)
    if start is None or start.element is not None or after is None or after.element != left.element:
        return None
    return _iterations(direction, start.offset + left.offset, after.offset, limit)


def _iterations(direction: str, start: int, step: int, limit: int) -> int | None:
    # A falling counter is a rising one with all signs changed.
    if direction in ("GT", "GE"):
        direction, start, step, limit = _FLIPPED[direction], -start, -step, -limit
    if direction == "LE":
        direction, limit = "LT", limit + 1
    distance = limit - start
    if direction == "LT" and step > 0:
        return max(0, -(-distance // step))
    if direction == "NE" and step != 0 and distance % step == 0 and distance // step >= 0:
        return distance // step
    return None


def _comparison(
    module: Module, computation: str, name: str, bindings: _Bindings
) -> tuple[str, _Value | None, _Value | None] | None:
    """Traces the condition of a loop to its comparison: direction, left side, right side."""
    instruction = module.computations[computation].instructions.get(name)
    if instruction is None:
        return None
    if instruction.opcode in _SAME_VALUE:
        return _comparison(module, computation, instruction.operands[0], bindings)
    if instruction.opcode in _CALLS:
        inner, values = _enter(module, computation, instruction, bindings)
        return _comparison(module, inner, module.computations[inner].root, values)
    direction = re.search(r"\bdirection=(\w+)", instruction.attributes)
    if instruction.opcode != "compare" or not direction:
        return None
    left, right = (_value(module, computation, operand, bindings) for operand in instruction.operands)
    return direction.group(1), left, right


def _value(module: Module, computation: str, name: str, bindings: _Bindings) -> _Value | None:
    """Evaluates a scalar as far as it is a constant, or an element of the carry plus a constant."""
    instruction = module.computations[computation].instructions.get(name)
    if instruction is None:
        return None
    opcode, operands, value = instruction.opcode, instruction.operands, None
    if opcode == "constant":
        integer = re.match(r"[su]\d+\[\]", instruction.result) and re.fullmatch(r"-?\d+", operands[0])
        value = _Value(None, int(operands[0])) if integer else None
    elif opcode == "parameter":
        position = int(operands[0])
        value = bindings[position] if not isinstance(bindings, str) and position < len(bindings) else None
    elif opcode == "get-tuple-element":
        index = re.search(r"\bindex=(\d+)", instruction.attributes)
        value = _element(module, computation, operands[0], int(index.group(1)), bindings) if index else None
    elif opcode in _SAME_VALUE:
        value = _value(module, computation, operands[0], bindings)
    elif opcode in _CALLS:
        inner, values = _enter(module, computation, instruction, bindings)
        value = _value(module, inner, module.computations[inner].root, values)
    elif opcode in ("add", "subtract"):
        left, right = (_value(module, computation, operand, bindings) for operand in operands)
        value = _sum(left, right, 1 if opcode == "add" else -1)
    return value


def _sum(left: _Value | None, right: _Value | None, sign: int) -> _Value | None:
    """Adds two values, or subtracts the second with a sign of -1; `None` unless at most one is of the carry."""
    if left is None or right is None:
        return None
    if sign > 0 and left.element is None:
        left, right = right, left
    return _Value(left.element, left.offset + sign * right.offset) if right.element is None else None


def _element(module: Module, computation: str, name: str, index: int, bindings: _Bindings) -> _Value | None:
    """Evaluates one element of a tuple."""
    instruction = module.computations[computation].instructions.get(name)
    if instruction is None:
        return None
    if instruction.opcode == "tuple":
        return _value(module, computation, instruction.operands[index], bindings)
    if instruction.opcode == "parameter":
        return _Value(index, 0) if bindings == _CARRY else None
    if instruction.opcode in ("copy", "opt-barrier"):
        return _element(module, computation, instruction.operands[0], index, bindings)
    if instruction.opcode in _CALLS:
        inner, values = _enter(module, computation, instruction, bindings)
        return _element(module, inner, module.computations[inner].root, index, values)
    return None


def _enter(
    module: Module, computation: str, instruction: Instruction, bindings: _Bindings
) -> tuple[str, tuple[_Value | None, ...]]:
    """Returns the computation that an instruction calls, and the values of its parameters."""
    (inner,) = callees_of(instruction, "calls", "to_apply")
    return inner, tuple(_value(module, computation, operand, bindings) for operand in instruction.operands)
