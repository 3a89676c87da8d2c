"""Collectives between TPU slices, which the compiled program of a slice leaves to a runtime on the hosts."""

import re
from typing import NamedTuple

from .reader import Instruction

_KINDS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
_SLICE = 100_000  # in a permutation, the first device of slice 1 has number 100000; slices count from 1


class Between(NamedTuple):
    """A collective between slices, which the program contains as a `send`.

    Attributes:
      kind: as in `Collective`.
      groups: the devices of each group, as positions in a mesh that has one slice after the other.
      pairs: of a permutation.
      slices: their number, as far as the instruction shows it.
      key: the same for the `send` and the `recv` of one collective.
    """

    kind: str
    groups: tuple[tuple[int, ...], ...] | None
    pairs: tuple[tuple[int, int], ...]
    slices: int
    key: str


def between_slices(instruction: Instruction, devices: int) -> Between | None:
    """Returns the collective that a `send` or `recv` of XLA:TPU's multi-slice runtime is part of, else `None`.

    Args:
      instruction: of a compiled program.
      devices: the number of devices of a slice.

    Example:
      >>> from jaxdist.analysis.hlo.reader import Instruction
      >>> text = '_xla_host_transfer_rendezvous="a",_xla_megascale_target="{1,2}x{0:1}",'
      >>> send = Instruction("s", "f32[4]", "send", ("x",), text + '_xla_megascale_transfer_type="ALL_REDUCE"')
      >>> between_slices(send, 2).groups
      ((0, 2), (1, 3))
    """
    kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.attributes)
    if instruction.opcode not in ("send", "recv") or kind is None or kind[1] not in _KINDS:
        return None
    key = re.search(r'_xla_host_transfer_rendezvous="([^"]*)"', instruction.attributes)
    name, found = _KINDS[kind[1]], key[1] if key else instruction.name
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
    slices, members = _numbers(target[1]), _numbers(target[2])
    groups = tuple(tuple((number - 1) * devices + member for number in slices) for member in members)
    return Between(name, groups, (), max(slices), found)


def _position(number: str, devices: int) -> int:
    """Converts the runtime's number of a device to its position in the mesh."""
    return (int(number) // _SLICE - 1) * devices + int(number) % _SLICE


def _numbers(text: str) -> list[int]:
    """Parses `0:3` (both ends included) and `1,2`."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition(":")
        found += range(int(first), int(last or first) + 1)
    return found
