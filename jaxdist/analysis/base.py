"""The record of a collective: its kind, groups and dtype, the bytes that a ring sends for it, and what it crosses."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from .._core.types import AxisNames
from ..state.marks import axis_tuple

BRANCHES = ("max", "min", "all")


class Collective(NamedTuple):
    """One collective operation of a program.

    Attributes:
      kind: `"all-reduce"`, `"all-gather"`, `"reduce-scatter"`, `"all-to-all"`, `"ragged-all-to-all"`,
        `"collective-permute"` or `"collective-broadcast"`.
      dtype: its NumPy name; one name per operand if the operands differ.
      bytes: the size of one worker's operands, for one execution.
      padded_bytes: the size of their buffers, which the tiles of a TPU's layouts fill up: an int8 row `[1, n]` takes
        `4 n` bytes there, of which collectives send all. Elsewhere, and as traced, it is `bytes`.
      group_size: the number of workers in a group (of a permutation: in the longest chain or cycle).
      replica_groups: the groups, as positions in the flattened mesh; `None` if the text does not say.
      pairs: `(source, target)` positions of a permutation.
      count: how often it runs in one call of the program.
      messages: the number of separate transfers: `count` times the operands. XLA merges small reductions into one
        operation with many operands, but on CPU each operand is still a separate, blocking ring.
      wire_bytes: the bytes that one worker sends, over all `count` executions; the mean where workers differ.
      where: the computation (of a compiled program) or the path of primitives (of a traced one) that contains it.
      loops: how often each loop around it runs, the outermost first; `None` where the program does not say. Empty
        outside of loops.
    """

    kind: str
    dtype: str | tuple[str, ...]
    bytes: int
    padded_bytes: int
    group_size: int
    replica_groups: tuple[tuple[int, ...], ...] | None
    pairs: tuple[tuple[int, int], ...]
    count: int
    messages: int
    wire_bytes: float
    where: str
    loops: tuple[int | None, ...] = ()

    @property
    def padded_wire_bytes(self) -> float:
        """`wire_bytes` with the padding of the buffers."""
        return self.wire_bytes * self.padded_bytes / self.bytes if self.bytes else 0.0


class Collectives(NamedTuple):
    """All collectives of a program.

    Attributes:
      ops: in program order.
      wire_bytes: the bytes that one worker sends in one call, summed over `ops`.
      warnings: facts that the program does not contain, such as the trip count of a `while`.
    """

    ops: tuple[Collective, ...]
    wire_bytes: float
    warnings: tuple[str, ...]

    @property
    def padded_wire_bytes(self) -> float:
        """`wire_bytes` with the padding of the buffers, see `Collective.padded_bytes`."""
        return float(sum(op.padded_wire_bytes for op in self.ops))

    def across(self, mesh: Mesh | AbstractMesh, axis: AxisNames) -> "Collectives":
        """Returns those between workers that differ in their place along this axis of the mesh, or one of several.

        Raises:
          ValueError: the mesh has no such axis, or fewer devices than the program.

        Examples:
          >>> import jax
          >>> from jaxdist.analysis import logical_collectives
          >>> mesh = jax.sharding.AbstractMesh((2, 4), ("pod", "data"))
          >>> both = lambda x: jax.lax.pmax(jax.lax.pmean(x, "data"), "pod")
          >>> sent = logical_collectives(both, jax.ShapeDtypeStruct((64,), "float32"), axis_sizes=dict(mesh.shape))
          >>> sent.wire_bytes, sent.across(mesh, "pod").wire_bytes, sent.across(mesh, "data").wire_bytes
          (640.0, 256.0, 384.0)
        """
        crosses = crossing(mesh, axis)
        return summarize([op for op in self.ops if crosses(op)], self.warnings)


def dtype_name(op: Collective) -> str:
    """Joins the dtypes of a collective: `"float32"`, `"float32+int32"`."""
    return op.dtype if isinstance(op.dtype, str) else "+".join(dict.fromkeys(op.dtype))


def spell_loops(op: Collective) -> str:
    """The iterations of the loops around a collective: `"3x8"`, `"?"` for an unknown number, empty outside of loops."""
    return "x".join("?" if times is None else str(times) for times in op.loops)


def wire_factor(kind: str, workers: int) -> float:
    """Returns the bytes that one of `workers` sends per byte of its operand, with ring algorithms.

    All-reduce `2(n-1)/n`, all-gather `n-1`, all others `(n-1)/n`: every worker keeps one n-th.
    """
    if kind == "all-gather":
        return workers - 1.0
    return (2.0 if kind == "all-reduce" else 1.0) * (workers - 1) / workers


def make_collective(
    kind: str,
    operands: Sequence[tuple[str, int]],
    *,
    padded: int | None = None,
    groups: tuple[tuple[int, ...], ...] | None = None,
    pairs: tuple[tuple[int, int], ...] = (),
    devices: int,
    where: str,
) -> Collective:
    """Makes the record of one execution of a collective from its operands' dtypes and bytes, and the buffers' bytes."""
    dtypes = tuple(dtype for dtype, _ in operands)
    size = sum(nbytes for _, nbytes in operands)
    # The operands of a tuple all-to-all are the chunks for the different workers: one exchange.
    messages = 1 if kind == "all-to-all" else len(operands)
    if kind == "collective-permute":
        groups = permutation_groups(pairs)
        # Workers that are their own destination, or no source at all, send nothing.
        sent = sum(source != target for source, target in pairs) / max(devices, 1)
    elif groups:
        sent = sum(len(group) * wire_factor(kind, len(group)) for group in groups) / sum(map(len, groups))
    else:
        sent = wire_factor(kind, max(devices, 1))
    return Collective(
        kind=kind,
        dtype=dtypes[0] if len(set(dtypes)) == 1 else dtypes,
        bytes=size,
        padded_bytes=size if padded is None else padded,
        group_size=max(map(len, groups)) if groups else devices,
        replica_groups=groups,
        pairs=pairs,
        count=1,
        messages=messages,
        wire_bytes=sent * size,
        where=where,
    )


def permutation_groups(pairs: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Returns the sets of workers that a permutation connects with each other, as sorted groups."""
    # Union by sets: members of a group share one set object.
    group_of: dict[int, set[int]] = {}
    for source, target in pairs:
        merged = group_of.get(source, {source}) | group_of.get(target, {target})
        group_of.update(dict.fromkeys(merged, merged))
    return tuple(sorted({tuple(sorted(group)) for group in group_of.values()}))


def mesh_groups(
    shape: Sequence[int], over: Sequence[int], order: np.ndarray | None = None
) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of a mesh of `shape` that communicate over the dimensions `over`, in that order.

    `order` has the device positions in mesh order, when the mesh is not in the order of its devices.
    """
    # Move the reduced axes last: each row of the result is then a group.
    ids = np.arange(int(np.prod(shape))) if order is None else order
    rest = [dimension for dimension in range(len(shape)) if dimension not in over]
    members = int(np.prod([shape[dimension] for dimension in over]))
    groups = ids.reshape(shape).transpose([*rest, *over]).reshape(-1, members)
    return tuple(tuple(group) for group in groups.tolist())


def repeat(ops: Sequence[Collective], times: int) -> list[Collective]:
    """Multiplies the counts of `ops` by the iterations of the loop around them."""
    return [
        op._replace(count=op.count * times, messages=op.messages * times, wire_bytes=op.wire_bytes * times)
        for op in ops
    ]


def in_loop(ops: Sequence[Collective], times: int | None) -> list[Collective]:
    """Puts `ops` into a loop of so many iterations; one of an unknown number (`None`) counts once."""
    inside = ops if times is None else repeat(ops, times)
    return [op._replace(loops=(times, *op.loops)) for op in inside]


def cost_of(ops: Sequence[Collective]) -> tuple[float, int]:
    """Returns what branches are compared by: bytes, and of those that send equally many, messages."""
    return sum((op.wire_bytes for op in ops), 0.0), sum(op.messages for op in ops)


def take_branch(
    branches: Sequence[list[Collective]], taken: int, branch: str, where: str, warnings: list[str]
) -> list[Collective]:
    """Returns the collectives of one branch, or of `"all"`, and adds a warning if the branches differ."""
    if branch == "all":
        return [op for ops in branches for op in ops]
    costs = [cost_of(ops) for ops in branches]
    if len(set(costs)) > 1:
        sizes = ", ".join(f"{size:.0f}" for size, _ in costs)
        is_extreme = costs[taken] == (max if branch == "max" else min)(costs)
        counted = f"the {branch}imum" if is_extreme else f"{costs[taken][0]:.0f}, for the {branch}imum of the step"
        warnings.append(f"the branches of {where} send {sizes} bytes each time; counted {counted}")
    return branches[taken]


def check_branch(branch: str) -> None:
    """Checks that `branch` is one of the known choices."""
    if branch not in BRANCHES:
        raise ValueError(f"branch must be one of {', '.join(BRANCHES)}, got {branch!r}")


def summarize(ops: Sequence[Collective], warnings: Sequence[str]) -> Collectives:
    """Sums over `ops`; equal warnings are kept once."""
    return Collectives(tuple(ops), float(sum(op.wire_bytes for op in ops)), tuple(dict.fromkeys(warnings)))


def crossing(mesh: Mesh | AbstractMesh, axis: AxisNames) -> Callable[[Collective], bool]:
    """Returns a function: whether a collective has a group of workers that differ in their place along the axis.

    Raises:
      ValueError: the mesh has no such axis; the function, if the program runs on more devices than the mesh has.
    """
    names = axis_tuple(axis)
    if absent := [name for name in names if name not in mesh.axis_names]:
        raise ValueError(f"the mesh has no axis {absent[0]!r}, its axes are {', '.join(map(str, mesh.axis_names))}")
    sizes = tuple(mesh.shape.values())
    places = np.indices(sizes).reshape(len(sizes), -1)[[mesh.axis_names.index(name) for name in names]]

    def crosses(op: Collective) -> bool:
        # Groups that the text does not state are of all devices.
        groups = op.replica_groups if op.replica_groups is not None else (tuple(range(places.shape[1])),)
        if max((member for group in groups for member in group), default=0) >= places.shape[1]:
            raise ValueError(f"the program runs on more than the {places.shape[1]} devices of the mesh: pass its own")
        return any(len(np.unique(places[:, list(group)], axis=1).T) > 1 for group in groups)

    return crosses


def table(found: Collectives) -> str:
    """Formats collectives as a table for a terminal; equal operations share a row.

    A program with collectives inside loops has a column with the iterations, `3x8` for a loop of 8 inside one of 3 and
    `?` for a number that the program does not state; one whose buffers are padded, as they are on TPU, has two more.

    Examples:
      >>> import jax
      >>> from jaxdist.analysis.collectives import logical_collectives
      >>> add = lambda x, y: (jax.lax.psum(x, "data"), jax.lax.ppermute(y, "data", [(0, 1), (1, 0)]))
      >>> x = jax.ShapeDtypeStruct((1024,), "float32")
      >>> print(table(logical_collectives(add, x, x, axis_sizes={"data": 2})))
      kind                dtype    workers  times  messages  bytes  wire bytes
      all-reduce          float32        2      1         1  4,096       4,096
      collective-permute  float32        2      1         1  4,096       4,096
      one worker sends                                                   8,192
    """
    # Unrolled layers repeat the same collective many times: one row for all of them.
    merged: dict[tuple[str, str, int, int, int, str], list[Collective]] = defaultdict(list)
    for op in found.ops:
        key = op.kind, dtype_name(op), op.group_size, op.bytes, op.padded_bytes, spell_loops(op)
        merged[key].append(op)
    is_padded = any(op.padded_bytes != op.bytes for op in found.ops)
    is_looped = any(op.loops for op in found.ops)
    rows = [["kind", "dtype", "workers", "times", "messages", "bytes", "wire bytes"]]
    rows[0] += ["padded", "wire padded"] if is_padded else []
    rows[0] += ["loops"] if is_looped else []
    for (kind, dtype, workers, size, padded, loops), ops in merged.items():
        times, messages = sum(op.count for op in ops), sum(op.messages for op in ops)
        wire = sum(op.wire_bytes for op in ops)
        rows.append([kind, dtype, str(workers), str(times), str(messages), f"{size:,}", f"{wire:,.0f}"])
        rows[-1] += [f"{padded:,}", f"{sum(op.padded_wire_bytes for op in ops):,.0f}"] if is_padded else []
        rows[-1] += [loops] if is_looped else []
    rows.append(["one worker sends", *[""] * 5, f"{found.wire_bytes:,.0f}"])
    rows[-1] += ["", f"{found.padded_wire_bytes:,.0f}"] if is_padded else []
    rows[-1] += [""] if is_looped else []
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, *(f"note: {warning}" for warning in found.warnings)])
