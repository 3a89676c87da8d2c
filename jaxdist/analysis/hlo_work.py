"""The work of a compiled program: how often each loop runs, and the cost of each instruction.

XLA notes the trip count of a `while` on CPU and GPU (`known_trip_count`), not on TPU, where it is derived from the loop
itself: a counter that starts at a constant, grows by a constant and is compared with a constant. The cost of an
instruction is its operations in matrix products, and its memory traffic.
"""

import functools
import math
import re
from typing import Any, NamedTuple

import numpy as np

from .hlo_reader import Computation, Instruction, Module, Shape, callees_of, shapes

# Of loops.
_SAME_INTEGER = ("bitcast", "convert", "copy", "reshape")
_CALLS = ("call", "fusion")
_FLIPPED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}
# Of instructions.
_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "bitcast-convert", "reshape", "after-all")
_FREE += ("add-dependency", "domain", "get-dimension-size", "opt-barrier", "partition-id", "replica-id")
_SAME_VALUE = ("bitcast", "bitcast-convert", "reshape", "convert", "copy")
_SLICES = ("dynamic-slice", "slice", "gather")
_CONTROL = ("while", "conditional", "call")  # their computations are counted where they run
HOST_SPACE = 5  # XLA's number for the memory of the host; 0 is the memory of the device, others are on the chip


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
    if instruction.opcode in _SAME_INTEGER:
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
    elif opcode in _SAME_INTEGER:
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


class Work(NamedTuple):
    """The work of an instruction."""

    flops: dict[str, float]  # operations in matrix products and convolutions, by the dtype of the first factor
    bytes: int  # read from and written to the memory of the device


def traffic(result: str) -> int:
    """Returns the bytes of those arrays of a type that are in the memory of the device."""
    return sum(shape.nbytes for shape in shapes(result) if shape.space == 0)


class CostModel:
    """The cost of each instruction of a program; loops, branches and calls themselves cost nothing.

    A product of `[m, k]` and `[k, n]` counts `2mkn` operations. Other operations count none: where they take time it is
    their memory traffic that does. A fusion reads its operands and writes its results once; of operands that it only
    slices it reads the slices, and of results that it updates in place it writes the update.
    """

    def __init__(self, module: Module):
        self._module = module
        self._flops_inside: dict[str, dict[str, float]] = {}

    def cost(self, name: str, instruction: Instruction) -> Work:
        """Returns the work of one instruction of the computation `name`."""
        if instruction.opcode in _FREE or instruction.opcode in _CONTROL:
            return Work({}, 0)
        return Work(self._flops(name, instruction), self._bytes(name, instruction))

    def _flops(self, name: str, instruction: Instruction) -> dict[str, float]:
        """Operations in matrix products, by the dtype of the first factor."""
        symbols = self._module.computations[name].instructions
        count = _PRODUCTS.get(instruction.opcode)
        if count:
            operands = [shapes(symbols[operand].result) for operand in instruction.operands[:2]]
            flops = count(instruction, *operands)
            return {operands[0][0].dtype: flops} if flops else {}
        if instruction.opcode in ("while", "conditional"):
            return {}
        # Fusions and calls do the work of the computation that they name.
        callees = [c for c in callees_of(instruction, "calls", "to_apply") if c in self._module.computations]
        return self._flops_of_computation(callees[0]) if callees else {}

    def _flops_of_computation(self, name: str) -> dict[str, float]:
        if name not in self._flops_inside:
            total: dict[str, float] = {}
            for instruction in self._module.computations[name].instructions.values():
                for dtype, flops in self._flops(name, instruction).items():
                    total[dtype] = total.get(dtype, 0.0) + flops
            self._flops_inside[name] = total
        return self._flops_inside[name]

    def _bytes(self, name: str, instruction: Instruction) -> int:
        """Traffic with the memory of the device."""
        symbols, opcode = self._module.computations[name].instructions, instruction.opcode
        operands = [symbols[operand].result for operand in instruction.operands if operand in symbols]
        # A slice touches only the part that it takes, an update only the part that it replaces.
        if opcode in _SLICES:
            return 2 * traffic(instruction.result)
        if opcode == "dynamic-update-slice":
            return 2 * traffic(operands[1])
        callees = callees_of(instruction, "calls")
        if opcode.startswith("fusion") and callees and callees[0] in self._module.computations:
            body = self._module.computations[callees[0]]
            return sum(min(traffic(r), read) for r, read in zip(operands, _reads(body))) + _writes(body, instruction)
        return sum(map(traffic, operands)) + traffic(instruction.result)


def _reads(body: Computation) -> list[int]:
    """Returns an upper bound of the bytes that a fused computation reads of each parameter."""
    users: dict[str, list[Instruction]] = {}
    for instruction in body.instructions.values():
        for operand in instruction.operands:
            users.setdefault(operand, []).append(instruction)

    def bytes_read(name: str) -> float:
        total = 0.0
        for user in users.get(name, ()):
            if user.opcode in _SLICES and user.operands[0] == name:
                total += sum(shape.nbytes for shape in shapes(user.result))
            elif user.opcode in _SAME_VALUE:
                total += bytes_read(user.name)
            # An update does not read the array that it changes in place; every other use reads all of it.
            elif user.opcode != "dynamic-update-slice" or user.operands[0] != name:
                return math.inf
        return total

    parameters = [i for i in body.instructions.values() if i.opcode == "parameter"]
    found = {int(parameter.operands[0]): bytes_read(parameter.name) for parameter in parameters}
    return [int(min(found.get(n, math.inf), 2**62)) for n in range(max(found, default=-1) + 1)]


def _writes(body: Computation, fusion: Instruction) -> int:
    """Returns the bytes that a fusion writes: its results, or the part of one that it changes in place."""

    def find_update(name: str) -> Instruction | None:
        instruction = body.instructions.get(name)
        if instruction is not None and instruction.opcode in _SAME_VALUE:
            return find_update(instruction.operands[0])
        return instruction if instruction is not None and instruction.opcode == "dynamic-update-slice" else None

    root = body.instructions.get(body.root)
    names = root.operands if root is not None and root.opcode == "tuple" else (body.root,)
    # The start of an asynchronous fusion returns its operands, too.
    written = root.result if root is not None and fusion.opcode.endswith("-start") else fusion.result
    total = 0
    for name, result in zip(names, shapes(written)):
        update = find_update(name)
        part = body.instructions.get(update.operands[1]) if update is not None else None
        size = result.nbytes if part is None else min(result.nbytes, sum(s.nbytes for s in shapes(part.result)))
        total += size if result.space == 0 else 0
    return total


def _dot(instruction: Instruction, left: list[Shape], right: list[Shape]) -> float:
    del right
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
    return _product_flops(instruction, left, contracted.group(1) if contracted else "")


def _product_flops(instruction: Instruction, left: list[Shape], contracted: str) -> float:
    """Counts 2 · (entries of the result) · (length of the contracted dimensions)."""
    lengths = [left[0].dimensions[int(n)] for n in re.findall(r"\d+", contracted)]
    return 2.0 * math.prod(shapes(instruction.result)[0].dimensions) * math.prod(lengths)


def _convolution(instruction: Instruction, left: list[Shape], right: list[Shape]) -> float:
    """Counts a convolution. XLA:TPU writes matrix products as convolutions, a batch as a dilated dimension."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        return 0.0
    data, kernel, result = labels.groups()
    shape = shapes(instruction.result)[0].dimensions
    window = dict(
        re.findall(r"(\w+)=([\dx_\-]+)", (re.search(r"window=\{([^}]*)\}", instruction.attributes) or [""])[0])
    )
    count = 1.0
    for n in range(sum(label.isdigit() for label in result)):
        into, size = left[0].dimensions[data.index(str(n))], right[0].dimensions[kernel.index(str(n))]
        padding = int(_window_entry(window, "pad", n, "0_0").split("_")[0])
        steps = [int(_window_entry(window, key, n, "1")) for key in ("stride", "lhs_dilate", "rhs_dilate")]
        count *= _positions(into, size, shape[result.index(str(n))], padding, *steps)
    # Each result entry sums over the kernel window and its input features, two operations per pair.
    groups = re.search(r"batch_group_count=(\d+)", instruction.attributes)
    batch = left[0].dimensions[data.index("b")] // (int(groups.group(1)) if groups else 1)
    return 2.0 * count * batch * right[0].dimensions[kernel.index("i")] * shape[result.index("f")]


def _window_entry(window: dict[str, str], key: str, dimension: int, default: str) -> str:
    """One dimension of a window attribute such as `stride=2x1`; XLA leaves out what has its default."""
    values = window.get(key, "").split("x")
    return values[dimension] if dimension < len(values) and values[dimension] else default


@functools.lru_cache(maxsize=4096)
def _positions(into: int, size: int, out: int, padding: int, stride: int, dilation: int, spacing: int) -> int:
    """Counts the pairs of a kernel entry and a result entry that read the input and not its padding."""
    # Where in the (dilated) input each result entry reads with each kernel entry.
    position = np.arange(out)[:, None] * stride + np.arange(size)[None, :] * spacing - padding
    return int(((position >= 0) & (position <= (into - 1) * dilation) & (position % dilation == 0)).sum())


def _library_call(instruction: Instruction, left: list[Shape] | None = None, right: Any = None) -> float:
    """Counts a product that cuBLAS computes; all other library calls count nothing."""
    del right
    contracted = re.search(r"lhs_contracting_dimensions\W+([\d\",\s]+)", instruction.attributes)
    if not left or "__cublas$" not in instruction.attributes or contracted is None:
        return 0.0
    return _product_flops(instruction, left, contracted.group(1))


_PRODUCTS = {"dot": _dot, "convolution": _convolution, "custom-call": _library_call}
