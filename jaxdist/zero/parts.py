"""Computes any function of whole arrays on the shards that workers own, by evaluating its trace in another way.

Elementwise operations run on the shard. A sum, maximum or minimum over a whole leaf is taken over the shard, and then
over the workers. Any other operation needs the whole leaf. The matrix products of several leaves are divided among the
workers (`owners`), and otherwise the leaf is gathered: right for any function, at the price of its bytes.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._core.compat import cast_varying, varying_axes
from .._core.jaxprs import (
    CASTS,
    ELEMENTWISE,
    LOOPS,
    RESHAPES,
    TAKES_NUMBERS,
    WHOLE,
    apply_primitive,
    evaluate,
    inner_jaxprs,
)
from .._core.types import Array, PyTree
from .._core.xla_quirks import largest_entry, smallest_entry
from ..comm.base import Comm
from ..comm.over import over
from ..state.marks import is_mark
from ..wire.buffers import MULTIPLE
from ..wire.shards import shard_of
from .owners import Deferred, Later, is_later, settled
from .values import Part, Uniform, is_part


def as_parts(tree: PyTree, comm: Comm | None = None) -> PyTree:
    """A `Part` for each marked leaf; with `comm`, one for each replicated leaf too, whose full array is known."""

    def as_part(x: Any) -> Any:
        if is_mark(x):
            return Part(x.value, x.shape)
        return x if comm is None else Part(shard_of(x, comm), x.shape, x)

    return jax.tree.map(as_part, tree, is_leaf=is_mark)


def on_parts(
    f: Callable[..., PyTree],
    comm: Comm,
    likes: Sequence[PyTree],
    arguments: Sequence[PyTree],
    *,
    whole: PyTree | None = None,
) -> PyTree:
    """`f(*arguments)`, where a `Part` represents a whole array.

    Args:
      whole: a boolean for each result: if a single worker computes it, do all others get the whole of it, or shards?
        `None` is shards of all.

    Returns:
      The results of `f`, with a `Part` for those that could be computed on shards alone. Their padding is zero:
      functions compute other values from the padding, even NaN, which state and payloads would keep.
    """
    # The trace is of whole arrays, so that any function works; only its evaluation is on parts.
    values = jax.tree.leaves(arguments, is_leaf=is_part)
    around = over(_axes_around(values, comm))
    closed, out = jax.make_jaxpr(lambda *trees: f(*around.varying(trees)), return_shape=True)(*likes)
    flags = None if whole is None else jax.tree.leaves(whole)
    results = _evaluate(closed, comm, values, whole=flags)
    results = [x.clear_padding(comm) if is_part(x) else _as_array(x) for x in results]
    return jax.tree.structure(out).unflatten(results)


def _axes_around(values: Sequence[Any], comm: Comm) -> tuple[str, ...]:
    """The mesh axes, besides those of these workers, that any value varies over: groups that are updated separately.

    The whole trace varies over them, because equations are bound as they were traced, and do not cast operands.
    """
    own = varying_axes(comm.varying(jnp.zeros(())))
    return tuple(sorted(frozenset().union(*map(varying_axes, jax.tree.leaves(values))) - own))


def _evaluate(closed: Any, comm: Comm, values: Sequence[Any], *, whole: Sequence[bool] | None = None) -> Sequence[Any]:
    deferred = Deferred(comm)
    # Computations without sharded operands run as traced, on every worker.
    options: Any = {"kinds": (Part, Uniform, Later), "primitives": {"broadcast_in_dim", *CASTS}}
    results = evaluate(closed, partial(_apply, deferred), values, opaque=(*LOOPS, WHOLE), **options)
    flags = [not getattr(x, "shape", ()) for x in results] if whole is None else whole
    later = [(x, flag) for x, flag in zip(results, flags, strict=True) if is_later(x)]
    deferred.settle([x for x, _ in later], [flag for _, flag in later])
    return [settled(x) for x in results]


def _apply(deferred: Deferred, equation: Any, operands: list[Any]) -> Sequence[Any]:
    """The results of one equation, on parts where that is possible."""
    name, comm = equation.primitive.name, deferred.comm
    operands = [settled(x) for x in operands]
    shape = equation.outvars[0].aval.shape if equation.outvars else ()
    is_number = not is_part(operands[0]) and not is_later(operands[0]) and jnp.size(_number(operands[0])) == 1
    if name == "broadcast_in_dim" and is_number:
        return [Uniform(jnp.reshape(_number(operands[0]), ()), shape)]
    # A shard may vary over the axes already, and the primitive would refuse to cast it again.
    if name in CASTS:
        names = equation.outvars[0].aval.manual_axis_type.varying
        return [x if is_later(x) else _cast_type(x, names) for x in operands]
    if any(map(is_later, operands)):
        return _apply_to_deferred(deferred, equation, operands)
    # Only one branch runs, so all must return the same kinds of values.
    if name == "cond":
        branches = [partial(_apply_branch, comm, branch) for branch in inner_jaxprs(equation)]
        carried = [x if is_part(x) else _as_array(x) for x in operands[1:]]
        return lax.switch(jnp.asarray(operands[0], jnp.int32), branches, *carried)
    if any(map(is_part, operands)):
        return _apply_to_parts(deferred, equation, operands)
    return _apply_to_known(equation, operands)


def _apply_to_known(equation: Any, operands: list[Any]) -> Sequence[Any]:
    """The results of an equation whose operands every worker has in full."""
    if equation.primitive.name in ELEMENTWISE and all(isinstance(x, Uniform) or jnp.ndim(x) == 0 for x in operands):
        shape = equation.outvars[0].aval.shape
        return [Uniform(apply_primitive(equation, [_number(x) for x in operands])[0], shape)]
    return apply_primitive(equation, [_as_array(x) for x in operands])


def _apply_to_deferred(deferred: Deferred, equation: Any, operands: list[Any]) -> Sequence[Any]:
    """The results of an equation with a deferred operand: deferred too, unless shards must be sent for it."""
    name = equation.primitive.name
    shape = equation.outvars[0].aval.shape if equation.outvars else ()
    known = frozenset[int]().union(*(x.node.inputs for x in operands if is_later(x)))
    sends_more = name in ELEMENTWISE and any(
        is_part(x) and x.full is None and id(x.value) not in known for x in operands
    )
    if name != "cond" and not sends_more and deferred.can_defer(equation, operands):
        return deferred.defer(equation, operands)
    for x in operands:
        if is_later(settled(x)):
            is_entrywise = name == "cond" or (name in ELEMENTWISE and x.shape == shape)
            deferred.settle_alike(x, whole=not (x.shape and is_entrywise))
    return _apply(deferred, equation, operands)


def _apply_to_parts(deferred: Deferred, equation: Any, operands: list[Any]) -> Sequence[Any]:
    """The results of an equation with a part among its operands: without a gather where that is possible."""
    name, comm = equation.primitive.name, deferred.comm
    shape = equation.outvars[0].aval.shape if equation.outvars else ()
    if name in ELEMENTWISE:
        return [_apply_elementwise(equation, operands, comm)]
    if len(operands) == 1:
        (part,) = operands
        # Shards are flat and in row-major order, so a reshape changes nothing but the shape.
        if name in RESHAPES and math.prod(shape) == math.prod(part.shape):
            full = None if part.full is None else apply_primitive(equation, [part.full])[0]
            return [Part(part.value, shape, full)]
        # A reduction to one number is one over all dimensions that have several entries.
        if part.full is None and math.prod(shape) == 1 and _reduces(name, part.value.dtype):
            return [REDUCTIONS[name](part, comm).reshape(shape)]
    # Any other operation needs whole arrays.
    if any(is_part(x) and x.full is None for x in operands) and deferred.can_defer(equation, operands):
        return deferred.defer(equation, operands)
    return apply_primitive(equation, [x.whole(comm) if is_part(x) else _as_array(x) for x in operands])


def _apply_elementwise(equation: Any, operands: Sequence[Any], comm: Comm) -> Part:
    shape = equation.outvars[0].aval.shape
    length = (-(-math.prod(shape) // (comm.size * MULTIPLE)) * MULTIPLE,)
    # A primitive of arrays of one shape broadcasts a number when it is lowered; writing that out takes time to trace.
    is_mixed = equation.primitive.name in TAKES_NUMBERS
    bind = partial(equation.primitive.bind, **equation.params)

    def operand_of(x: Any) -> Array:
        if is_part(x) and x.shape == shape:
            return x.value
        if isinstance(x, Uniform):
            return lax.broadcast(x.value, length) if is_mixed or not shape else jnp.asarray(x.value)
        x = x.whole(comm) if is_part(x) else jnp.asarray(x)
        if x.ndim == 0:
            return x if shape else lax.broadcast(x, length)
        # Dimensions of one entry are broadcast to longer ones.
        return shard_of(jnp.broadcast_to(x, shape), comm)

    # If all operands are known in full, so is the result: an operation that needs it later gathers nothing.
    known = not any(is_part(x) and x.full is None for x in operands)
    full = bind(*(x.full if is_part(x) else _as_array(x) for x in operands)) if known else None
    return Part(bind(*comm.varying([operand_of(x) for x in operands])), shape, full)


def _apply_branch(comm: Comm, branch: Any, *operands: Any) -> list[Any]:
    """A branch's results in a form that all branches share: numbers, and this worker's shard of every array."""

    def share_form(x: Any) -> Any:
        if is_part(x):
            return Part(x.value, x.shape) if x.shape else x.whole(comm)
        x = _as_array(x)
        return Part(shard_of(x, comm), x.shape) if jnp.shape(x) else x

    return [share_form(x) for x in _evaluate(branch, comm, operands)]


def _reduction(
    over_shard: Callable[[Array], Array], over_workers: Callable[[Comm], Callable], neutral: float | bool
) -> Callable[[Part, Comm], Array]:
    """A reduction of a whole array; the padding is replaced by the neutral element first."""
    return lambda part, comm: over_workers(comm)(over_shard(part.clear_padding(comm, neutral).value))


# `Comm` has sums and maxima: a minimum is a negated maximum, and logical reductions are those of 0 and 1.
REDUCTIONS: dict[str, Callable[[Part, Comm], Array]] = {
    "reduce_sum": _reduction(lambda x: jnp.sum(x, dtype=x.dtype), lambda comm: comm.sum, 0),
    "reduce_max": _reduction(largest_entry, lambda comm: comm.max, -jnp.inf),
    "reduce_min": _reduction(smallest_entry, lambda comm: lambda x: -comm.max(-x), jnp.inf),
    "reduce_or": _reduction(jnp.any, lambda comm: lambda x: comm.max(x.astype(jnp.int32)) > 0, False),
    "reduce_and": _reduction(jnp.all, lambda comm: lambda x: comm.max((~x).astype(jnp.int32)) == 0, True),
}


def _reduces(name: str, dtype: Any) -> bool:
    """Returns True if `REDUCTIONS` are right for this dtype.

    Integers do not have infinities or all negatives, 8-bit floats not always infinities, and of integers `reduce_or`
    takes the bits.
    """
    if name in ("reduce_or", "reduce_and"):
        return jnp.issubdtype(dtype, jnp.bool_)
    is_exact = name == "reduce_sum" or jnp.issubdtype(dtype, jnp.floating)
    return name in REDUCTIONS and is_exact and jnp.dtype(dtype).itemsize > 1


def _cast_type(x: Any, names: Iterable[str]) -> Any:
    if isinstance(x, Uniform):
        return Uniform(cast_varying(jnp.asarray(x.value), names), x.shape)
    return jax.tree.map(lambda leaf: cast_varying(jnp.asarray(leaf), names), x)


def _as_array(x: Any) -> Any:
    return jnp.broadcast_to(x.value, x.shape) if isinstance(x, Uniform) else x


def _number(x: Any) -> Any:
    return x.value if isinstance(x, Uniform) else x
