"""Compares what a program was written to send with what its compiled form sends."""

from collections import defaultdict
from typing import NamedTuple

from .base import Collective, Collectives


class WideSum(NamedTuple):
    """One kind of collective of which the compiled program sends more bytes than the traced one, for one worker.

    `logical_bytes` and `logical_dtypes` are as written; they are 0 and empty if only the compiler inserted such
    operations. `compiled_bytes` and `compiled_dtypes` are as sent.
    """

    kind: str
    logical_bytes: float
    compiled_bytes: float
    logical_dtypes: tuple[str, ...]
    compiled_dtypes: tuple[str, ...]


# The relative increase that is not reported: padding.
_PADDING = 0.01


def upcast_collectives(logical: Collectives, compiled: Collectives) -> tuple[WideSum, ...]:
    """Returns the collectives of which the compiled program sends more bytes than the function asks for.

    The usual causes: bfloat16, float8 and 4-bit integers are sent as wider types on CPU (send u8 or u16 words instead),
    and automatic sharding gathers arrays that were meant to stay sharded.

    Args:
      logical: from `logical_collectives`.
      compiled: from `collectives`, with the same `branch`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jaxdist.analysis.collectives import collectives
      >>> from jaxdist.analysis.collectives import logical_collectives
      >>> add = jax.jit(lambda x: x + 1)
      >>> upcast_collectives(logical_collectives(add, jnp.ones(4)), collectives(add.lower(jnp.ones(4))))
      ()
    """
    asked, sent = _by_kind(logical), _by_kind(compiled)
    return tuple(
        WideSum(kind, _wire(asked[kind]), _wire(ops), _dtypes(asked[kind]), _dtypes(ops))
        for kind, ops in sorted(sent.items())
        if _wire(ops) > _wire(asked[kind]) * (1 + _PADDING)
    )


def _by_kind(found: Collectives) -> defaultdict[str, list[Collective]]:
    kinds: defaultdict[str, list[Collective]] = defaultdict(list)
    for op in found.ops:
        kinds[op.kind].append(op)
    return kinds


def _wire(ops: list[Collective]) -> float:
    return sum((op.wire_bytes for op in ops), 0.0)


def _dtypes(ops: list[Collective]) -> tuple[str, ...]:
    return tuple(sorted({name for op in ops for name in ((op.dtype,) if isinstance(op.dtype, str) else op.dtype)}))
