"""What one instruction of a compiled program costs a chip: products of matrices and traffic with its memory."""

import functools
import math
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .reader import Computation, Instruction, Module, bits_of, called

_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=?]*)\](\{[^}]*\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "bitcast-convert", "reshape", "after-all")
_FREE += ("add-dependency", "domain", "get-dimension-size", "opt-barrier", "partition-id", "replica-id")
_SAME_VALUE = ("bitcast", "bitcast-convert", "reshape", "convert", "copy")
_SLICES = ("dynamic-slice", "slice", "gather")
HOST_SPACE = 5  # XLA's number for the memory of the host; 0 is that of the device, others lie on the chip


class Work(NamedTuple):
    """What an instruction asks of a chip.

    Attributes:
      flops: operations in products of matrices and convolutions, by the dtype of what is multiplied.
      bytes: read from and written to the memory of the device.
    """

    flops: dict[str, float]
    bytes: int


class Shape(NamedTuple):
    """One array of a type: where it lies is XLA's number of a memory."""

    dtype: str
    dimensions: tuple[int, ...]
    space: int

    @property
    def nbytes(self) -> int:
        """Its size."""
        return -(-math.prod(self.dimensions) * bits_of(self.dtype) // 8)


def shapes(result: str) -> list[Shape]:
    """Return the arrays in the text of a type."""
    found = []
    for dtype, dimensions, layout in _ARRAY.findall(result):
        if dtype not in ("token", "opaque"):
            sizes = tuple(int(size.strip("<=?") or 1) for size in dimensions.split(",") if size)
            space = _SPACE.search(layout)
            found.append(Shape(dtype, sizes, int(space.group(1)) if space else 0))
    return found


def traffic(result: str) -> int:
    """Return the bytes of the arrays of a type that lie in the memory of the device."""
    return sum(shape.nbytes for shape in shapes(result) if shape.space == 0)


def weigher(module: Module) -> Callable[[str, Instruction], Work]:
    """Return `work(computation, instruction)` for the instructions of a program; loops and branches weigh nothing.

    A product of `[m, k]` and `[k, n]` counts `2mkn` operations. Other operations count none: where they take time it is
    their memory traffic that does. A fusion reads its operands and writes its results once, of those that it only
    slices just the slices, and of those that it updates in place just the update.
    """

    @functools.cache
    def inside(name: str) -> dict[str, float]:
        total: dict[str, float] = {}
        for instruction in module.computations[name].instructions.values():
            for dtype, flops in products(name, instruction).items():
                total[dtype] = total.get(dtype, 0.0) + flops
        return total

    def products(name: str, instruction: Instruction) -> dict[str, float]:
        symbols = module.computations[name].instructions
        counted = _COUNTED.get(instruction.opcode)
        if counted:
            flops = counted(instruction, *(shapes(symbols[operand].result) for operand in instruction.operands[:2]))
            return {shapes(symbols[instruction.operands[0]].result)[0].dtype: flops} if flops else {}
        if instruction.opcode in ("while", "conditional"):
            return {}
        callees = [inner for inner in called(instruction, "calls", "to_apply") if inner in module.computations]
        return inside(callees[0]) if callees else {}

    def moved(name: str, instruction: Instruction) -> int:
        symbols, opcode = module.computations[name].instructions, instruction.opcode
        operands = [symbols[operand].result for operand in instruction.operands if operand in symbols]
        if opcode in _SLICES:
            return 2 * traffic(instruction.result)
        if opcode == "dynamic-update-slice":
            return 2 * traffic(operands[1])
        callees = called(instruction, "calls")
        if opcode.startswith("fusion") and callees and callees[0] in module.computations:
            body = module.computations[callees[0]]
            return sum(min(traffic(r), read) for r, read in zip(operands, _reads(body))) + _written(body, instruction)
        return sum(map(traffic, operands)) + traffic(instruction.result)

    def work(name: str, instruction: Instruction) -> Work:
        if instruction.opcode in _FREE or instruction.opcode in ("while", "conditional", "call"):
            return Work({}, 0)
        return Work(products(name, instruction), moved(name, instruction))

    return work


def _reads(body: Computation) -> list[int]:
    """How much of each parameter of a fused computation is read at most."""
    users: dict[str, list[Instruction]] = {}
    for instruction in body.instructions.values():
        for operand in instruction.operands:
            users.setdefault(operand, []).append(instruction)

    def read(name: str) -> float:
        total = 0.0
        for user in users.get(name, ()):
            if user.opcode in _SLICES and user.operands[0] == name:
                total += sum(shape.nbytes for shape in shapes(user.result))
            elif user.opcode in _SAME_VALUE:
                total += read(user.name)
            elif user.opcode != "dynamic-update-slice" or user.operands[0] != name:
                return math.inf
        return total

    parameters = [i for i in body.instructions.values() if i.opcode == "parameter"]
    found = {int(parameter.operands[0]): read(parameter.name) for parameter in parameters}
    return [int(min(found.get(n, math.inf), 2**62)) for n in range(max(found, default=-1) + 1)]


def _written(body: Computation, fusion: Instruction) -> int:
    """What a fusion writes: its results, or the part of one that it changes in place."""

    def updated(name: str) -> Instruction | None:
        instruction = body.instructions.get(name)
        if instruction is not None and instruction.opcode in _SAME_VALUE:
            return updated(instruction.operands[0])
        return instruction if instruction is not None and instruction.opcode == "dynamic-update-slice" else None

    root = body.instructions.get(body.root)
    names = root.operands if root is not None and root.opcode == "tuple" else (body.root,)
    total = 0
    for name, result in zip(names, shapes(fusion.result)):
        update = updated(name)
        part = body.instructions.get(update.operands[1]) if update is not None else None
        size = result.nbytes if part is None else min(result.nbytes, sum(s.nbytes for s in shapes(part.result)))
        total += size if result.space == 0 else 0
    return total


def _dot(instruction: Instruction, left: list[Shape], right: list[Shape]) -> float:
    del right
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
    over = [int(n) for n in contracted.group(1).split(",") if n] if contracted else []
    return 2.0 * math.prod(shapes(instruction.result)[0].dimensions) * math.prod(left[0].dimensions[n] for n in over)


def _convolution(instruction: Instruction, left: list[Shape], right: list[Shape]) -> float:
    """TPU programs write products of matrices as convolutions; in batches, with the batch as a dilated dimension."""
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

        def of(key: str, default: str, n: int = n) -> str:
            values = window.get(key, "").split("x")
            return values[n] if n < len(values) and values[n] else default

        into, size = left[0].dimensions[data.index(str(n))], right[0].dimensions[kernel.index(str(n))]
        padding = int(of("pad", "0_0").split("_")[0])
        steps = [int(of(key, "1")) for key in ("stride", "lhs_dilate", "rhs_dilate")]
        count *= _positions(into, size, shape[result.index(str(n))], padding, *steps)
    groups = re.search(r"batch_group_count=(\d+)", instruction.attributes)
    batch = left[0].dimensions[data.index("b")] // (int(groups.group(1)) if groups else 1)
    return 2.0 * count * batch * right[0].dimensions[kernel.index("i")] * shape[result.index("f")]


@functools.lru_cache(maxsize=4096)
def _positions(into: int, size: int, out: int, padding: int, stride: int, dilation: int, spread: int) -> int:
    """How many pairs of a place in the kernel and one in the result meet an entry that is there."""
    place = np.arange(out)[:, None] * stride + np.arange(size)[None, :] * spread - padding
    return int(((place >= 0) & (place <= (into - 1) * dilation) & (place % dilation == 0)).sum())


def _library_call(instruction: Instruction, left: list[Shape], right: list[Shape]) -> float:
    """A product that cuBLAS computes; the other calls of the backends are no products."""
    del right
    contracted = re.search(r"lhs_contracting_dimensions\W+([\d\",\s]+)", instruction.attributes)
    if "__cublas$" not in instruction.attributes or contracted is None:
        return 0.0
    over = [int(n) for n in re.findall(r"\d+", contracted.group(1))]
    return 2.0 * math.prod(shapes(instruction.result)[0].dimensions) * math.prod(left[0].dimensions[n] for n in over)


_COUNTED = {
    "dot": _dot,
    "convolution": _convolution,
    "custom-call": lambda call, left=None, right=None: _library_call(call, left, right or []) if left else 0.0,
}
