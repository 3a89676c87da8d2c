"""Parses HLO text, as far as `analysis` needs it."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from .base import mesh_groups

Program = jax.stages.Compiled | jax.stages.Lowered | str

_COMMENT = re.compile(r"/\*.*?\*/")
_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\b.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s*(ROOT\s+)?%?([\w.\-]+)\s*=\s*(\S.*)$")
_OPCODE = re.compile(r"([\w\-]+)\(")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=?]*)\](\{[^}]*\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_TILES = re.compile(r"T((?:\([\d,*]+\))+)")
_EXPLICIT = re.compile(r"\{((?:\{[\d,\s]*\}[,\s]*)+)\}")
_IOTA = re.compile(r"\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"@?mesh[\[<]([^\]>]*)[\]>](?:,\s*device_ids=\((?:\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,\s]+))\))?\s*\{([^}]*)\}"
)
_MESH_AXIS = re.compile(r"'?([^',=]+)'?=(\d+)")
_SUB_AXIS = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?(?:,\s*|$)")
# Collectives between TPU slices: the program of a slice leaves them to a runtime on the hosts.
_BETWEEN_KINDS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
_SLICE = 100_000  # in that runtime's numbers the first device of slice 1 is 100000; slices count from 1
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


class Shape(NamedTuple):
    """One array of a type; `space` is XLA's number of its memory, `stored` the dimensions of its buffer."""

    dtype: str
    dimensions: tuple[int, ...]
    space: int
    stored: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size of the array."""
        return self._bytes_of(self.dimensions)

    @property
    def named(self) -> tuple[str, int]:
        """Dtype, by its NumPy name, and size."""
        return _numpy_name(self.dtype), self.nbytes

    @property
    def padded_nbytes(self) -> int:
        """The size of its buffer, which the tiles of its layout fill up."""
        return self._bytes_of(self.stored)

    def _bytes_of(self, dimensions: Sequence[int]) -> int:
        return -(-math.prod(dimensions) * bits_of(self.dtype) // 8)


class Between(NamedTuple):
    """A collective between slices, which the program contains as a `send`."""

    kind: str
    groups: tuple[tuple[int, ...], ...] | None  # as positions in a mesh that has one slice after the other
    pairs: tuple[tuple[int, int], ...]
    slices: int  # their number, as far as the instruction shows it
    key: str  # the same for the `send` and the `recv` of one collective


def compile_lowered(program: jax.stages.Compiled | jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles a lowered program, and returns a compiled one unchanged."""
    if not hasattr(program, "as_text"):
        raise TypeError(f"{type(program).__name__} is no program: pass what step.lower(state, batch) returns")
    return program.compile() if isinstance(program, jax.stages.Lowered) else program


def program_text(program: Program) -> str:
    """Returns the optimized HLO of a compiled program; compiles a lowered one, and returns text unchanged."""
    if isinstance(program, str):
        return program
    if (text := compile_lowered(program).as_text()) is None:
        raise ValueError("this backend does not provide the text of its programs; compile for another platform")
    return text


def parse(text: str) -> Module:
    """Parses the HLO text of any backend; lines that are not instructions (source tables, comments) are skipped.

    Examples:
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
        # Comments inside types, as in `/*index=5*/`, would confuse the splitting at commas.
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

    Examples:
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


def shapes(result: str) -> list[Shape]:
    """Returns the arrays in the text of a type."""
    found = []
    for dtype, dimensions, layout in _ARRAY.findall(result):
        if dtype not in ("token", "opaque"):
            sizes = tuple(int(size.strip("<=?") or 1) for size in dimensions.split(",") if size)
            space = _SPACE.search(layout)
            stored = _tiled(sizes, layout)
            found.append(Shape(dtype, sizes, int(space.group(1)) if space else 0, stored))
    return found


def _tiled(sizes: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """Returns the dimensions of the buffer of an array: tiles of tiles, as in `{1,0:T(8,128)(2,1)}`.

    A tile of `r` dimensions cuts the `r` minor ones of what it is applied to, each rounded up, and adds its own.
    """
    tiles = _TILES.search(layout)
    if tiles is None:
        return sizes
    order = _integers(layout.partition(":")[0])
    # Major first; the layout names the minor ones first.
    stored = [sizes[dimension] for dimension in reversed(order)]
    for tile in re.findall(r"\(([\d,*]+)\)", tiles[1]):
        # A star merges a dimension with the next one.
        lengths = tile.split(",")
        stored = [1] * (len(lengths) - len(stored)) + stored
        kept, cut = stored[: len(stored) - len(lengths)], stored[len(stored) - len(lengths) :]
        merged, inner = 1, []
        for size, length in zip(cut, lengths, strict=True):
            merged *= size
            if length != "*":
                kept.append(-(-merged // int(length)))
                inner.append(int(length))
                merged = 1
        stored = kept + inner
    return tuple(stored)


def arrays(result: str) -> list[tuple[str, int]]:
    """Returns dtype (by NumPy name) and bytes of every array in the text of a type."""
    return [shape.named for shape in shapes(result)]


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


def between_slices(instruction: Instruction, devices: int) -> Between | None:
    """Returns the collective that a `send` or `recv` of XLA:TPU's multi-slice runtime is part of, else `None`.

    `devices` is the number of devices of a slice.

    Examples:
      >>> text = '_xla_host_transfer_rendezvous="a",_xla_megascale_target="{1,2}x{0:1}",'
      >>> send = Instruction("s", "f32[4]", "send", ("x",), text + '_xla_megascale_transfer_type="ALL_REDUCE"')
      >>> between_slices(send, 2).groups
      ((0, 2), (1, 3))
    """
    kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.attributes)
    if instruction.opcode not in ("send", "recv") or kind is None or kind[1] not in _BETWEEN_KINDS:
        return None
    key = re.search(r'_xla_host_transfer_rendezvous="([^"]*)"', instruction.attributes)
    name, found = _BETWEEN_KINDS[kind[1]], key[1] if key else instruction.name
    # The target is spelled in one of three ways: `0->1` pairs, `{{0,1},{2,3}}` groups, or a product of two ranges.
    moves = re.findall(r"(\d+)->(\d+)", instruction.attributes)
    if moves:
        pairs = tuple((_position(source, devices), _position(target, devices)) for source, target in moves)
        return Between(name, None, pairs, 1 + max(max(pair) for pair in pairs) // devices, found)
    listed = re.search(r"_xla_megascale_target=\{((?:\{[\d,]+\},?)+)\}", instruction.attributes)
    if listed:
        members = [re.findall(r"\d+", group) for group in re.findall(r"\{([\d,]+)\}", listed[1])]
        groups = tuple(tuple(sorted(_position(number, devices) for number in group)) for group in members)
        return Between(name, groups, (), 1 + max(map(max, groups)) // devices, found)
    target = re.search(r'_xla_megascale_target="\{([^}]*)\}x\{([^}]*)\}"', instruction.attributes)
    if target is None:
        return None
    slices, members = _parse_ranges(target[1]), _parse_ranges(target[2])
    groups = tuple(tuple((number - 1) * devices + member for number in slices) for member in members)
    return Between(name, groups, (), max(slices), found)


def _position(number: str, devices: int) -> int:
    """Converts the runtime's number of a device to its position in the mesh."""
    return (int(number) // _SLICE - 1) * devices + int(number) % _SLICE


def _parse_ranges(text: str) -> list[int]:
    """Parses `0:3` (both ends included) and `1,2`."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition(":")
        found += range(int(first), int(last or first) + 1)
    return found


def replica_groups(attributes: str, devices: int) -> tuple[tuple[int, ...], ...] | None:
    """Returns the groups of a collective, or `None` if there are none or their spelling is unknown.

    XLA prints `{{0,1},{2,3}}`, `{}` (all devices), `[2,4]<=[8]` with or without a transposition `T(1,0)`, and
    `mesh['pod'=2,'data'=4] {'data'}` with or without `device_ids=(...)` and parts of axes `'data':(2)2`.
    Positions are taken as positions in the flattened mesh, which is how JAX numbers its partitions.

    Examples:
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
    if reshaped:
        return mesh_groups(shape, chosen, _device_order(reshaped, permutation))
    return mesh_groups(shape, chosen, np.array(_integers(listed)) if listed else None)


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
