"""A table of collectives, and a comparison of the compiled with the written ones."""

from collections import defaultdict
from typing import NamedTuple

from .base import Collective, Collectives, dtype_name


class Widened(NamedTuple):
    """One kind of collective of which the compiled program sends more than the traced one.

    Attributes:
      kind: as in `Collective`.
      logical_bytes: the bytes that one worker sends as written; 0 if only the compiler inserted such operations.
      compiled_bytes: the bytes that one worker sends in the compiled program.
      logical_dtypes: as written, sorted.
      compiled_dtypes: as sent, sorted.
    """

    kind: str
    logical_bytes: float
    compiled_bytes: float
    logical_dtypes: tuple[str, ...]
    compiled_dtypes: tuple[str, ...]


def upcast_collectives(logical: Collectives, compiled: Collectives, *, tolerance: float = 0.01) -> tuple[Widened, ...]:
    """Returns the collectives of which the compiled program sends more bytes than the function asks for.

    The usual causes: bfloat16, float8 and 4-bit integers are sent as wider types on CPU (send u8 or u16 words instead),
    and automatic sharding gathers arrays that were meant to stay sharded.

    Args:
      logical: from `logical_collectives`.
      compiled: from `collectives`, with the same `branch`.
      tolerance: the relative increase to ignore. 0 reports padding too; 0.01 reports only what matters.

    Returns:
      One entry per kind that grew; empty if everything is sent as written.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxdist.analysis.collectives import collectives
      >>> from jaxdist.analysis.logical import logical_collectives
      >>> add = jax.jit(lambda x: x + 1)
      >>> upcast_collectives(logical_collectives(add, jnp.ones(4)), collectives(add.lower(jnp.ones(4))))
      ()
    """
    asked, sent = _by_kind(logical), _by_kind(compiled)
    return tuple(
        Widened(kind, _wire(asked[kind]), _wire(ops), _dtypes(asked[kind]), _dtypes(ops))
        for kind, ops in sorted(sent.items())
        if _wire(ops) > _wire(asked[kind]) * (1 + tolerance)
    )


def table(found: Collectives) -> str:
    """Formats collectives as a table for a terminal; equal operations share a row.

    Args:
      found: from `collectives` or `logical_collectives`.

    Returns:
      The lines: a heading, a row for each different operation, the total, the warnings.

    Example:
      >>> import jax
      >>> from jaxdist.analysis.logical import logical_collectives
      >>> add = lambda x, y: (jax.lax.psum(x, "data"), jax.lax.ppermute(y, "data", [(0, 1), (1, 0)]))
      >>> x = jax.ShapeDtypeStruct((1024,), "float32")
      >>> print(table(logical_collectives(add, x, x, axis_sizes={"data": 2})))
      kind                dtype    workers  times  messages  bytes  wire bytes
      all-reduce          float32        2      1         1  4,096       4,096
      collective-permute  float32        2      1         1  4,096       4,096
      one worker sends                                                   8,192
    """
    # Unrolled layers repeat the same collective many times: one row for all of them.
    merged: dict[tuple[str, str, int, int], list[Collective]] = defaultdict(list)
    for op in found.ops:
        merged[op.kind, dtype_name(op), op.group_size, op.bytes].append(op)
    rows = [("kind", "dtype", "workers", "times", "messages", "bytes", "wire bytes")]
    for (kind, dtype, workers, size), ops in merged.items():
        times, messages = sum(op.count for op in ops), sum(op.messages for op in ops)
        rows.append((kind, dtype, str(workers), str(times), str(messages), f"{size:,}", f"{_wire(ops):,.0f}"))
    rows.append(("one worker sends", "", "", "", "", "", f"{found.wire_bytes:,.0f}"))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        )
        for row in rows
    ]
    return "\n".join([*lines, *(f"note: {warning}" for warning in found.warnings)])


def _by_kind(found: Collectives) -> defaultdict[str, list[Collective]]:
    kinds: defaultdict[str, list[Collective]] = defaultdict(list)
    for op in found.ops:
        kinds[op.kind].append(op)
    return kinds


def _wire(ops: list[Collective]) -> float:
    return sum((op.wire_bytes for op in ops), 0.0)


def _dtypes(ops: list[Collective]) -> tuple[str, ...]:
    names: set[str] = set()
    for op in ops:
        names.update([op.dtype] if isinstance(op.dtype, str) else op.dtype)
    return tuple(sorted(names))
