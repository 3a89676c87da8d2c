"""Parses HLO text, as far as the rest of this folder needs it."""

import math
import re
from collections import Counter
from typing import NamedTuple

import jax
import numpy as np

from ..base import mesh_groups

Program = jax.stages.Compiled | jax.stages.Lowered | str

_COMMENT = re.compile(r"/\*.*?\*/")
_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\b.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s*(ROOT\s+)?%?([\w.\-]+)\s*=\s*(\S.*)$")
_OPCODE = re.compile(r"([\w\-]+)\(")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=?]*)\]")
_EXPLICIT = re.compile(r"\{((?:\{[\d,\s]*\}[,\s]*)+)\}")
_IOTA = re.compile(r"\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"@?mesh[\[<]([^\]>]*)[\]>](?:,\s*device_ids=\((?:\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,\s]+))\))?\s*\{([^}]*)\}"
)
_MESH_AXIS = re.compile(r"'?([^',=]+)'?=(\d+)")
_SUB_AXIS = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?(?:,\s*|$)")
_NUMPY_PREFIX = (("bf", "bfloat"), ("f", "float"), ("s", "int"), ("u", "uint"), ("c", "complex"))


class Instruction(NamedTuple):
    """One line: `name = result opcode(operands), attributes`. `result` and `attributes` stay text."""

    name: str
    result: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str


class Computation(NamedTuple):
    """The instructions of one computation by name, in order, and the name of the one that it returns."""

    instructions: dict[str, Instruction]
    root: str


class Module(NamedTuple):
    """A parsed program: its computations, the one that runs, and how many devices take part."""

    computations: dict[str, Computation]
    entry: str
    devices: int


def program_text(program: Program) -> str:
    """Returns the optimized HLO of a compiled program; compiles a lowered one, and returns text unchanged."""
    if isinstance(program, str):
        return program
    compiled = program.compile() if isinstance(program, jax.stages.Lowered) else program
    text = compiled.as_text()
    if text is None:
        raise ValueError(
            "this backend does not provide the text of its compiled programs; compile for another platform"
        )
    return text


def parse(text: str) -> Module:
    """Parses HLO text into computations and instructions.

    Args:
      text: what `compiled.as_text()` returns, of any backend.

    Returns:
      The module. Lines that are not instructions (source tables, comments) are skipped.

    Example:
      >>> module = parse('''HloModule add, num_partitions=2
      ... ENTRY %main (x: f32[4]) -> f32[4] {
      ...   %x = f32[4]{0} parameter(0)
      ...   ROOT %y = f32[4]{0} add(%x, %x)
      ... }''')
      >>> module.devices, module.computations["main"].instructions["y"].operands
      (2, ('x', 'x'))
    """
    computations: dict[str, Computation] = {}
    entry = current = root = ""
    instructions: dict[str, Instruction] = {}
    devices = 1
    for raw in text.splitlines():
        line = _COMMENT.sub("", raw).rstrip()
        if line.startswith("HloModule"):
            sizes = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", line)
            devices = math.prod(map(int, sizes))
        elif not current:
            header = _HEADER.match(line)
            if header:
                current, instructions, root = header.group(2), {}, ""
                entry = current if header.group(1) or not entry else entry
        elif line.startswith("}"):
            computations[current] = Computation(instructions, root or next(reversed(instructions), ""))
            current = ""
        else:
            found = _INSTRUCTION.match(line)
            parsed = _instruction(found.group(2), found.group(3)) if found else None
            if found and parsed:
                instructions[parsed.name] = parsed
                root = parsed.name if found.group(1) else root
    if not computations:
        raise ValueError("the text contains no HLO computation; pass a compiled program or its as_text()")
    return Module(computations, entry, devices)


def opcodes(program: Program) -> dict[str, int]:
    """Counts the opcodes of a program, over all its computations.

    Nothing is left out, not even parameters and tuples, and a loop's body counts once: two programs that do the same
    work have equal histograms.

    Args:
      program: a compiled or lowered program (`step.lower(...)`, `.compile()`), or its text.

    Returns:
      Opcode to count, sorted by opcode.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> opcodes(jax.jit(lambda x: x @ x).lower(jnp.ones((2, 2))))["parameter"]
      1
    """
    module = parse(program_text(program))
    counts = Counter(
        instruction.opcode
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
    )
    return dict(sorted(counts.items()))


def arrays(result: str) -> list[tuple[str, int]]:
    """Returns dtype (by NumPy name) and bytes of every array in the text of a type."""
    found = []
    for dtype, dimensions in _ARRAY.findall(result):
        if dtype in ("token", "opaque"):
            continue
        elements = math.prod(int(size.strip("<=?") or 1) for size in dimensions.split(",") if size)
        found.append((_numpy_name(dtype), -(-elements * bits_of(dtype) // 8)))
    return found


def bits_of(dtype: str) -> int:
    """Returns the bits of one element: the first number in the name, as in `f8e4m3fn`, `bfloat16`, `uint4`."""
    number = re.search(r"\d+", dtype)
    return int(number.group()) if number else 8  # pred and bool take a byte


def callees_of(instruction: Instruction, *keys: str) -> list[str]:
    """Returns the names of the computations that the attributes `keys` of an instruction name."""
    names: list[str] = []
    for key in keys:
        found = re.search(rf"\b{key}=(\{{[^}}]*\}}|%?[\w.\-]+)", instruction.attributes)
        if found:
            names += re.findall(r"[\w.\-]+", found.group(1))
    return names


def pairs(instruction: Instruction) -> tuple[tuple[int, int], ...]:
    """Returns the `(source, target)` pairs of a permutation, or of a send that XLA made of one."""
    found = re.search(r"source_target_pairs=\"?\{((?:\{\d+,\d+\},?\s*)*)\}", instruction.attributes)
    matches = re.findall(r"\{(\d+),(\d+)\}", found.group(1)) if found else []
    return tuple((int(source), int(target)) for source, target in matches)


def replica_groups(attributes: str, devices: int) -> tuple[tuple[int, ...], ...] | None:
    """Returns the groups of a collective, from any of the spellings that XLA prints.

    These are `{{0,1},{2,3}}`, `{}` (all devices), `[2,4]<=[8]` with or without a transposition `T(1,0)`, and
    `mesh['pod'=2,'data'=4] {'data'}` with or without `device_ids=(...)` and parts of axes `'data':(2)2`.
    Positions are taken as positions in the flattened mesh, which is how JAX numbers its partitions.

    Args:
      attributes: the text behind the operands of an instruction.
      devices: how many devices take part in the program.

    Returns:
      The groups, or `None` if there are none or their spelling is unknown.

    Example:
      >>> replica_groups("replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}", 4)
      ((0, 2), (1, 3))
      >>> replica_groups("replica_groups=mesh['pod'=2,'data'=2] {'data'}", 4)
      ((0, 1), (2, 3))
    """
    _, found, spelling = attributes.partition("replica_groups=")
    if not found:
        return None
    if spelling.startswith("{}"):
        return (tuple(range(devices)),)
    if explicit := _EXPLICIT.match(spelling):
        return tuple(tuple(_integers(group)) for group in re.findall(r"\{([\d,\s]*)\}", explicit.group(1)))
    if iota := _IOTA.match(spelling):
        ids = _device_order(iota.group(3), iota.group(4)).reshape(int(iota.group(1)), int(iota.group(2)))
        return tuple(tuple(group) for group in ids.tolist())
    mesh = _MESH.match(spelling)
    return _groups_of_mesh(*mesh.groups()) if mesh else None


def _groups_of_mesh(
    axes: str, reshaped: str | None, permutation: str | None, listed: str | None, over: str
) -> tuple[tuple[int, ...], ...]:
    """Returns the groups over some axes of a mesh, or over parts of axes, which become separate mesh dimensions."""
    sizes = {name: int(size) for name, size in _MESH_AXIS.findall(axes)}
    # (axis, stride of the part, size of the part); a whole axis is the part that starts at 1.
    parts = [
        (name, int(before or 1), int(size or sizes[name])) for name, before, size in _SUB_AXIS.findall(over) if name
    ]
    # Cut each axis at the edges of its parts; a dimension is labeled (axis, stride within the axis).
    shape: list[int] = []
    labels: list[tuple[str, int]] = []
    for name, size in sizes.items():
        cuts = {1, size} | {cut for axis, before, part in parts if axis == name for cut in (before, before * part)}
        edges = sorted(cuts)
        for low, high in zip(edges[:-1] or [1], edges[1:] or [1]):
            shape.append(high // low)
            labels.append((name, low))
    chosen = [
        labels.index(label)
        for axis, before, part in parts
        for label in labels
        if label[0] == axis and (before <= label[1] < before * part or part == sizes[axis] == 1)
    ]
    order = None
    if reshaped:
        order = _device_order(reshaped, permutation)
    elif listed:
        order = np.array(_integers(listed))
    return mesh_groups(shape, chosen, order)


def _device_order(dimensions: str, permutation: str | None) -> np.ndarray:
    """Evaluates XLA's iota form `[dimensions]T(permutation)` to a list of device numbers."""
    shape = _integers(dimensions)
    ids = np.arange(math.prod(shape)).reshape(shape)
    return (ids.transpose(_integers(permutation)) if permutation else ids).reshape(-1)


def _integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _numpy_name(dtype: str) -> str:
    if dtype == "pred":
        return "bool"
    for prefix, name in _NUMPY_PREFIX:
        rest = dtype.removeprefix(prefix)
        if rest != dtype and rest[:1].isdigit():
            # f8e4m3fn is float8_e4m3fn; plain floats have nothing behind their width.
            return name + re.sub(r"^(\d)(e)", r"\1_\2", rest)
    return dtype


def _instruction(name: str, text: str) -> Instruction | None:
    """Parses `result opcode(operands), attributes`; the type of a tuple is in parentheses itself."""
    end = _closing(text, 0) if text.startswith("(") else text.find(" ")
    result, rest = text[: end + 1].strip(), text[end + 1 :].strip()
    opcode = _OPCODE.match(rest)
    if end < 0 or not opcode:
        return None
    close = _closing(rest, opcode.end() - 1)
    operands = tuple(operand.split()[-1].lstrip("%") for operand in _split(rest[opcode.end() : close]))
    return Instruction(name, result, opcode.group(1), operands, rest[close + 1 :])


def _closing(text: str, start: int) -> int:
    """Returns the position of the parenthesis that closes the one at `start`."""
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] == "(") - (text[position] == ")")
        if depth == 0:
            return position
    return len(text)


def _split(operands: str) -> list[str]:
    """Splits at commas outside of brackets."""
    pieces, depth = [""], 0
    for character in operands:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += character
    return [piece for piece in pieces if piece.strip()]
