"""Counts the bytes that a group sends while it is traced, independently of the count read from compiled programs."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._core.types import Array
from .base import Comm, Sent


def counted(comm: Comm, ledger: list[Sent]) -> Comm:
    """Makes a group that appends every collective to `ledger` while the program is traced.

    Args:
      comm: the group.
      ledger: a list; each collective appends a `Sent` with the bytes that one worker sends (ring formulas).

    Returns:
      The counting group.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxdist import comm
      >>> ledger = []
      >>> _ = jax.vmap(lambda x: comm.counted(comm.over("data"), ledger).mean(x), axis_name="data")(jnp.ones((4, 100)))
      >>> ledger
      [Sent(collective='mean', bytes=600.0)]
    """
    if comm.remake is not None:  # a composed group sends what its parts send
        return comm.remake(lambda part: counted(part, ledger))._replace(ledger=ledger, uncounted=comm)
    w = comm.size
    factors = {
        "mean": 2 * (w - 1) / w,
        "sum": 2 * (w - 1) / w,
        "max": 2 * (w - 1) / w,
        "all_gather": w - 1,
        "all_to_all": (w - 1) / w,
        "reduce_scatter_mean": (w - 1) / w,
    }

    def collective(name, tree, **options):
        if w > 1:
            ledger.append(Sent(name, factors[name] * _bytes(tree)))
        return getattr(comm, name)(tree, **options)

    def ppermute(tree, pairs):
        moved = sum(source != destination for source, destination in pairs) / w
        if moved:
            ledger.append(Sent("ppermute", moved * _bytes(tree)))
        return comm.ppermute(tree, pairs)

    return comm._replace(
        **{name: partial(collective, name) for name in factors},
        ppermute=ppermute,
        inner=None if comm.inner is None else counted(comm.inner, ledger),
        outer=None if comm.outer is None else counted(comm.outer, ledger),
        ledger=ledger,
        uncounted=comm,
    )


def _bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def total_bytes(ledger: list[Sent]) -> Array | float:
    """The bytes in a ledger; an array when some were sent under a condition."""
    return sum((sent.bytes for sent in ledger), 0.0)


def cond(agreed: Array, on_true: Callable, on_false: Callable, comm: Comm, *operands: Any) -> Any:
    """`lax.cond` whose branches may communicate: `on_true(comm, *operands)` or `on_false(comm, *operands)`.

    The predicate must be equal on all workers: a collective that only some workers enter compiles, and then hangs.

    Raises:
      ValueError: the predicate differs between workers.
    """
    return _conditional("cond", lax.cond, agreed, (on_true, on_false), comm, operands)


def switch(agreed: Array, branches: Sequence[Callable], comm: Comm, *operands: Any) -> Any:
    """`lax.switch` whose branches may communicate: `branches[agreed](comm, *operands)`.

    Raises:
      ValueError: the branch number differs between workers.
    """

    def choose(agreed, *rest):
        return lax.switch(agreed, rest[: len(branches)], *rest[len(branches) :])

    return _conditional("switch", choose, agreed, branches, comm, operands)


def _conditional(
    name: str, choose: Callable, agreed: Array, branches: Sequence[Callable], comm: Comm, operands: Sequence[Any]
) -> Any:
    if jax.typeof(agreed).manual_axis_type.varying:
        raise ValueError(
            "a condition around a collective must be agreed, but this predicate differs between workers: "
            "derive it from reduced values, a step count or a schedule"
        )
    uncounted, outer_ledger = comm.uncounted, comm.ledger
    if uncounted is None or outer_ledger is None:
        return choose(agreed, *(partial(branch, comm) for branch in branches), *operands)

    def run_counted(branch, *xs):
        ledger: list[Sent] = []
        out = branch(counted(uncounted, ledger), *xs)
        return out, jnp.asarray(total_bytes(ledger), jnp.float32)

    out, sent = choose(agreed, *(partial(run_counted, branch) for branch in branches), *operands)
    outer_ledger.append(Sent(name, sent))
    return out
