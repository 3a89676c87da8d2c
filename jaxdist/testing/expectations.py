"""What a test expects of the collectives of a program."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

from .._core.checks import check_count, check_range
from .._core.types import AxisNames, Number
from ..analysis.base import Collective, Collectives, dtype_name, spell_loops, summarize, table
from ..analysis.collectives import collectives
from ..analysis.hlo_reader import Program, bits_of

KINDS = {
    "all_reduce_bytes": ("all-reduce",),
    "all_gather_bytes": ("all-gather",),
    "reduce_scatter_bytes": ("reduce-scatter",),
    "all_to_all_bytes": ("all-to-all", "ragged-all-to-all"),
    "permute_bytes": ("collective-permute",),
}
# Floats wider than expected are the fault to find; packed words, positions and counts are integers of any width.
NARROW_ON_CPU = (
    "on CPU, XLA sends bfloat16 and float8 as float32: pass logical_collectives(step, state, batch) to check what is "
    "written, or a program that was compiled for the target"
)


def expect(
    program: Program | Collectives,
    *,
    all_reduce_bytes: Number | None = None,
    all_gather_bytes: Number | None = None,
    reduce_scatter_bytes: Number | None = None,
    all_to_all_bytes: Number | None = None,
    permute_bytes: Number | None = None,
    wire_bytes: Number | None = None,
    dtype: DTypeLike | None = None,
    times: int | None = None,
    outside_loops: bool = False,
    mesh: Mesh | AbstractMesh | None = None,
    axis: AxisNames = None,
    allow_others: bool = False,
    spare_bytes: int = 256,
) -> Collectives:
    """Fails a test whose program sends more, wider, more often or elsewhere than expected; shows the table then.

    It finds what no loss shows: gradients that are summed once per micro-batch, or in float32 instead of bfloat16, and
    gathers that the compiler added. Nothing runs, so devices that are not attached will do (`analysis.pods`).

    If a number of bytes is given, collectives of kinds without one are a failure, and so is a kind with one that does
    not occur. Bytes are at most.

    Args:
      program: `step.lower(state, batch)`, compiled or not, its HLO text, or what `collectives` or `logical_collectives`
        returned.
      all_reduce_bytes: the operands of one worker, in one call of the program: the columns bytes and times of
        `analysis.table`, multiplied.
      all_gather_bytes: likewise; the operand is the worker's own part.
      reduce_scatter_bytes: likewise.
      all_to_all_bytes: likewise.
      permute_bytes: likewise.
      wire_bytes: what one worker sends in all, with ring algorithms.
      dtype: the widest of the operands. Integers, such as packed codes, may be wider than a floating `dtype`.
      times: the most executions of each kind. XLA may merge the collectives of several leaves into one.
      outside_loops: whether collectives inside a loop of more than one iteration are a failure.
      mesh: goes with `axis`.
      axis: counts the collectives that cross this axis of the mesh alone, or one of several.
      allow_others: whether kinds without a number of bytes are not looked at.
      spare_bytes: collectives of no more bytes are not looked at, such as those of the loss, and each number of bytes
        may be exceeded by so many, since XLA merges the loss into the gradients.

    Returns:
      The collectives that were looked at.

    Raises:
      AssertionError: the program sends something else; names each deviation.
      ValueError: nothing is expected, a number is out of its range, or the mesh has no such axis.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jaxdist.analysis import logical_collectives
      >>> mean = lambda x: jax.lax.pmean(x, "data")
      >>> gradient = jax.ShapeDtypeStruct((1024,), jnp.bfloat16)
      >>> program = logical_collectives(mean, gradient, axis_sizes={"data": 4})
      >>> expect(program, all_reduce_bytes=2048, dtype=jnp.bfloat16, times=1, outside_loops=True).wire_bytes
      3072.0
      >>> expect(program, all_reduce_bytes=1024)
      Traceback (most recent call last):
      AssertionError: all-reduce has 2,048 bytes, expected at most 1,024
      kind              dtype     workers  times  messages  bytes  wire bytes
      all-reduce        bfloat16        4      1         1  2,048       3,072
      one worker sends                                                  3,072
    """
    limits = {
        "all_reduce_bytes": all_reduce_bytes,
        "all_gather_bytes": all_gather_bytes,
        "reduce_scatter_bytes": reduce_scatter_bytes,
        "all_to_all_bytes": all_to_all_bytes,
        "permute_bytes": permute_bytes,
    }
    given = {name: limit for name, limit in limits.items() if limit is not None}
    _check(given, wire_bytes, dtype, times, outside_loops, spare_bytes)
    if (mesh is None) != (axis is None):
        raise ValueError("mesh and axis go together, as in mesh=mesh, axis='data'")
    found = program if isinstance(program, Collectives) else collectives(program)
    if mesh is not None:
        found = found.across(mesh, axis)
    large = [op for op in found.ops if op.bytes * op.count > spare_bytes]
    named = [kind for name in given for kind in KINDS[name]]
    others = [op for op in large if given and op.kind not in named]
    seen = [op for op in large if op not in others]
    problems = [] if allow_others else [f"{_spell(op)} was not expected" for op in others]
    for name, limit in given.items():
        problems += _check_kind(KINDS[name], float(limit), seen, spare_bytes)
    sent = sum(op.wire_bytes for op in seen)
    if wire_bytes is not None and sent > wire_bytes + spare_bytes:
        problems.append(
            f"one worker sends {sent:,.0f} bytes, expected at most {wire_bytes:,.0f} (without messages of up to "
            f"{spare_bytes})"
        )
    if dtype is not None:
        problems += _check_dtype(jnp.dtype(dtype), seen)
    if times is not None:
        problems += _check_times(times, seen)
    if outside_loops:
        looped = [op for op in seen if any(length != 1 for length in op.loops)]
        problems += [f"{_spell(op)} is inside a loop of {spell_loops(op)} iterations" for op in looped]
    if problems:
        raise AssertionError("\n".join([*dict.fromkeys(problems), table(found)]))
    return summarize(seen, found.warnings)


def _check(
    given: dict[str, Number],
    wire_bytes: Number | None,
    dtype: DTypeLike | None,
    times: int | None,
    outside_loops: bool,
    spare_bytes: int,
) -> None:
    """Raises ValueError for expectations that no program could fail, or none could meet."""
    if not given and wire_bytes is None and dtype is None and times is None and not outside_loops:
        raise ValueError("nothing is expected: give bytes, as in all_reduce_bytes=4096, dtype, times or outside_loops")
    numbers = given | ({} if wire_bytes is None else {"wire_bytes": wire_bytes})
    for name, number in numbers.items():
        check_range(name, number, 0, ends="[)")
    if times is not None:
        check_count("times", times, 0)
    check_count("spare_bytes", spare_bytes, 0)


def _check_kind(kinds: Sequence[str], limit: float, seen: Sequence[Collective], spare: int) -> list[str]:
    own = [op for op in seen if op.kind in kinds]
    size = sum(op.bytes * op.count for op in own)
    if limit > spare and not own:
        return [f"there is no {kinds[0]} of more than {spare} bytes, expected {limit:,.0f}"]
    if size > limit + spare:
        return [f"{kinds[0]} has {size:,} bytes, expected at most {limit:,.0f}"]
    return []


def _check_dtype(dtype: np.dtype, seen: Sequence[Collective]) -> list[str]:
    problems = []
    for op in seen:
        names = (op.dtype,) if isinstance(op.dtype, str) else op.dtype
        if any(_is_wider(name, dtype) for name in names):
            narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 and "float32" in names
            problems.append(f"{_spell(op)} is wider than {dtype.name}{f' ({NARROW_ON_CPU})' if narrow else ''}")
    return problems


def _is_wider(name: str, dtype: np.dtype) -> bool:
    """Whether an operand of this dtype is wider than expected; integers are compared with integers alone."""
    is_inexact = name.startswith(("float", "bfloat", "complex"))
    if jnp.issubdtype(dtype, jnp.inexact):
        return is_inexact and bits_of(name) > bits_of(dtype.name)
    return is_inexact or bits_of(name) > bits_of(dtype.name)


def _check_times(times: int, seen: Sequence[Collective]) -> list[str]:
    counts = {op.kind: 0 for op in seen}
    for op in seen:
        counts[op.kind] += op.count
    return [f"{kind} runs {n} times, expected at most {times}" for kind, n in counts.items() if n > times]


def _spell(op: Collective) -> str:
    return f"{op.kind} of {op.bytes:,} bytes in {dtype_name(op)}"
