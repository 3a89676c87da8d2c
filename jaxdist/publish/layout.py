"""Which process of a job publishes which part of the parameters, and how a follower puts the parts together."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._core.types import PyTree
from .._stores.base import hash_of
from .base import PublishDamagedError
from .words import PublishedLeaf, view_values, view_words


class Box(NamedTuple):
    """A rectangular piece of a leaf: the number of the leaf, where it begins in each dimension, and its shape."""

    leaf: int
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def index(self) -> tuple[slice, ...]:
        """Where it is in the leaf."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))


class ShardLayout(NamedTuple):
    """How the leaves are cut into parts.

    Attributes:
      name: of its bytes in the store; empty where one part has all leaves as they are.
      parts: the boxes of each part, in the order of the leaves; a process has the part of its number.
    """

    name: str
    parts: tuple[tuple[Box, ...], ...]

    def leaves_of(self, part: int, leaves: Sequence[PublishedLeaf]) -> list[PublishedLeaf]:
        """The boxes of a part, as leaves of their own."""
        return [leaves[box.leaf]._replace(shape=box.shape) for box in self.parts[part]]


def process_of(device: Any) -> int:
    """The process that a device belongs to."""
    return device.process_index


def lay_out(tree: PyTree, leaves: Sequence[PublishedLeaf], processes: int) -> ShardLayout:
    """The layout of a job: the shards that differ, each in the part of a process that has it.

    It follows from the shardings, which all processes know. Of several processes that have a shard the one with the
    fewest bytes so far publishes it. What is on the devices of one process, or on none, is published by process 0.

    Examples:
      >>> lay_out({"w": np.zeros((2, 3))}, [PublishedLeaf("w", (2, 3), "float64")], 1).parts
      ((Box(leaf=0, start=(0, 0), shape=(2, 3)),),)
    """
    if processes == 1:
        return lay_out_whole(leaves)
    found = []
    for number, (x, leaf) in enumerate(zip(jax.tree.leaves(tree), leaves, strict=True)):
        for box, holders in _find_boxes(number, x, leaf):
            found.append((len(holders) > 1, -leaf._replace(shape=box.shape).size * leaf.bits.itemsize, box, holders))
    parts: list[list[Box]] = [[] for _ in range(processes)]
    sizes = [0] * processes
    # First what one process alone can publish, then the largest of what several can.
    for _, size, box, holders in sorted(found):
        owner = min(holders, key=lambda process: (sizes[process], process))
        parts[owner].append(box)
        sizes[owner] -= size
    layout = ShardLayout("", tuple(tuple(sorted(boxes)) for boxes in parts))
    return layout._replace(name=_name_of(write_layout(layout)))


def lay_out_whole(leaves: Sequence[PublishedLeaf]) -> ShardLayout:
    """The layout of one part."""
    return ShardLayout("", (tuple(_whole(number, leaf) for number, leaf in enumerate(leaves)),))


def cut(tree: PyTree, leaves: Sequence[PublishedLeaf], layout: ShardLayout, process: int) -> list[Any]:
    """The part of a process: arrays on its devices, or copies of words in host memory.

    Raises:
      ValueError: process 0 has nothing of a leaf that is on the devices of one process.
    """
    arrays = jax.tree.leaves(tree)
    return [_take_box(arrays[box.leaf], leaves[box.leaf], box, layout, process) for box in layout.parts[process]]


def join(
    parts: Sequence[Sequence[np.ndarray]], leaves: Sequence[PublishedLeaf], layout: ShardLayout
) -> Iterator[np.ndarray]:
    """The values of each leaf, from the words of its boxes; they share no memory with these."""
    found: list[list[tuple[Box, np.ndarray]]] = [[] for _ in leaves]
    for boxes, some in zip(layout.parts, parts, strict=True):
        for box, words in zip(boxes, some, strict=True):
            found[box.leaf].append((box, words))
    for leaf, some in zip(leaves, found, strict=True):
        # As words, which NumPy copies bit for bit and fast, two of them for an entry of 16 bytes.
        each = leaf.values.itemsize // leaf.bits.itemsize
        whole = np.empty((*leaf.shape, each), leaf.bits)
        for box, words in some:
            whole[box.index] = words.reshape(*box.shape, each)
        yield view_values(whole.reshape(-1), leaf)


def write_layout(layout: ShardLayout) -> bytes:
    """A layout as JSON."""
    return json.dumps({"parts": layout.parts}, separators=(",", ":")).encode()


def read_layout(name: str, body: bytes, leaves: Sequence[PublishedLeaf]) -> ShardLayout:
    """A layout from its JSON. Raises `PublishDamagedError` for other bytes, and where it does not fit the leaves."""
    if name != _name_of(body):
        raise PublishDamagedError(f"{name} has other bytes than its hash says")
    sizes = [0] * len(leaves)
    try:
        parts = tuple(tuple(_read_box(*fields) for fields in boxes) for boxes in json.loads(body)["parts"])
        for box in (box for boxes in parts for box in boxes):
            sizes[box.leaf] += leaves[box.leaf]._replace(shape=box.shape).size
        if sizes != [leaf.size for leaf in leaves]:
            raise ValueError("its boxes are not as large as the leaves")
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise PublishDamagedError(f"{name} is no layout of these leaves: {type(error).__name__}: {error}") from error
    return ShardLayout(name, parts)


def _name_of(body: bytes) -> str:
    return f"layouts/{hash_of(body)}"


def _read_box(leaf: int, start: Sequence[int], shape: Sequence[int]) -> Box:
    return Box(int(leaf), tuple(map(int, start)), tuple(map(int, shape)))


def _whole(number: int, leaf: PublishedLeaf) -> Box:
    return Box(number, (0,) * len(leaf.shape), leaf.shape)


def _find_boxes(number: int, x: Any, leaf: PublishedLeaf) -> list[tuple[Box, set[int]]]:
    """The shards of a leaf that differ, and the processes that have them."""
    if not isinstance(x, jax.Array):
        return [(_whole(number, leaf), {0})]
    holders: dict[Box, set[int]] = {}
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        holders.setdefault(_box_at(number, index, leaf.shape), set()).add(process_of(device))
    # An array of one process's devices is one of several copies, as far as that process knows.
    if len(set().union(*holders.values())) == 1:
        return [(_whole(number, leaf), {0})]
    return sorted(holders.items())


def _box_at(number: int, index: Sequence[slice], shape: Sequence[int]) -> Box:
    ends = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    return Box(number, tuple(start for start, _ in ends), tuple(stop - start for start, stop in ends))


def _take_box(x: Any, leaf: PublishedLeaf, box: Box, layout: ShardLayout, process: int) -> Any:
    if not isinstance(x, jax.Array):
        # A number of Python that is too large for its dtype is an error, not another number.
        return view_words(np.array(x, None if hasattr(x, "dtype") else leaf.values), leaf)
    if not layout.name:
        return x
    # A program of arrays that other processes have, too, would have to run on all of them: so the data of a shard.
    for shard in x.addressable_shards:
        if process_of(shard.device) == process and _box_at(box.leaf, shard.index, leaf.shape) == box:
            return shard.data
    if {process_of(device) for device in x.sharding.device_set} != {process}:
        raise ValueError(
            f"`{leaf.name}` is on no device of process {process}, as {x.sharding}: put it on devices of several "
            "processes, or in each process a copy of its own"
        )
    return x
