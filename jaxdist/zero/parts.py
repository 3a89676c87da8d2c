"""Computes any function of whole arrays on the shards that workers own, by evaluating its trace in another way.

Elementwise operations run on the shard. A sum, maximum or minimum over a whole leaf is taken over the shard, and then
over the workers. Before any other operation the leaf is gathered: right for any function, at the price of its bytes.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

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
from .._core.types import Array, PyTree, Shape
from .._core.xla_quirks import largest_entry, smallest_entry
from ..comm.base import Comm
from ..comm.over import over
from ..state.marks import is_mark
from ..wire.buffers import MULTIPLE
from ..wire.shards import clear_padding, shard_of, unshard


@partial(jax.tree_util.register_dataclass, data_fields=("value", "full"), meta_fields=("shape",))
class Part:
    """One worker's shard of an array of this shape: `[n]` of its entries, in row-major order, padded.

    `full` is the whole array, where every worker knows it: it is used instead of a gather. If no result needs it, the
    compiler removes it as dead code.
    """

    def __init__(self, value: Any, shape: Shape, full: Any = None):
        self.value, self.shape, self.full = value, shape, full

    def clear_padding(self, comm: Comm, fill: Any = 0) -> "Part":
        """The same array, with `fill` in place of the results that were computed for the padding."""
        value = clear_padding(self.value, math.prod(self.shape), comm.size, comm.index, fill=fill)
        return Part(value, self.shape, self.full)

    def whole(self, comm: Comm) -> Array:
        """The whole array, gathered unless it is known."""
        return all_gather_shards(self.value, self.shape, comm) if self.full is None else self.full


class Uniform(NamedTuple):
    """An array of this shape whose entries are all one number."""

    value: Array
    shape: Shape


# A bound method of C: JAX calls it at every node of every tree.
is_part: Callable[[Any], bool] = Part.__instancecheck__


def local_shard(x: Any, comm: Comm) -> Array:
    """The shard that this worker owns of a part or of a whole array."""
    return x.value if is_part(x) else shard_of(x, comm)


def all_gather_shards(x: Array, shape: Shape, comm: Comm) -> Array:
    """`[n] -> [*s]`: the whole array, from all workers' shards."""
    return unshard(comm.all_gather(x), jax.ShapeDtypeStruct(shape, x.dtype))


def as_parts(tree: PyTree, comm: Comm | None = None) -> PyTree:
    """A `Part` for each marked leaf; with `comm`, one for each replicated leaf too, whose full array is known."""

    def as_part(x: Any) -> Any:
        if is_mark(x):
            return Part(x.value, x.shape)
        return x if comm is None else Part(shard_of(x, comm), x.shape, x)

    return jax.tree.map(as_part, tree, is_leaf=is_mark)


def on_parts(f: Callable[..., PyTree], comm: Comm, likes: Sequence[PyTree], arguments: Sequence[PyTree]) -> PyTree:
    """`f(*arguments)`, where a `Part` represents a whole array.

    Returns:
      The results of `f`, with a `Part` for those that could be computed on shards alone. Their padding is zero:
      functions compute other values from the padding, even NaN, which state and payloads would keep.
    """
    # The trace is of whole arrays, so that any function works; only its evaluation is on parts.
    values = jax.tree.leaves(arguments, is_leaf=is_part)
    around = over(_axes_around(values, comm))
    closed, out = jax.make_jaxpr(lambda *trees: f(*around.varying(trees)), return_shape=True)(*likes)
    results = _evaluate(closed, comm, values)
    results = [x.clear_padding(comm) if is_part(x) else _as_array(x) for x in results]
    return jax.tree.structure(out).unflatten(results)


def _axes_around(values: Sequence[Any], comm: Comm) -> tuple[str, ...]:
    """The mesh axes, besides those of these workers, that any value varies over: groups that are updated separately.

    The whole trace varies over them, because equations are bound as they were traced, and do not cast operands.
    """
    own = varying_axes(comm.varying(jnp.zeros(())))
    return tuple(sorted(frozenset().union(*map(varying_axes, jax.tree.leaves(values))) - own))


def _evaluate(closed: Any, comm: Comm, values: Sequence[Any]) -> list[Any]:
    # Computations without sharded operands run as traced, on every worker.
    kinds, primitives = (Part, Uniform), {"broadcast_in_dim", *CASTS}
    return evaluate(closed, partial(_apply, comm), values, opaque=(*LOOPS, WHOLE), kinds=kinds, primitives=primitives)


def _apply(comm: Comm, equation: Any, operands: list[Any]) -> Sequence[Any]:
    """The results of one equation, on parts where that is possible."""
    name = equation.primitive.name
    shape = equation.outvars[0].aval.shape if equation.outvars else ()
    if name == "broadcast_in_dim" and not is_part(operands[0]) and jnp.size(_number(operands[0])) == 1:
        return [Uniform(jnp.reshape(_number(operands[0]), ()), shape)]
    # A shard may vary over the axes already, and the primitive would refuse to cast it again.
    if name in CASTS:
        names = equation.outvars[0].aval.manual_axis_type.varying
        return [_cast_type(x, names) for x in operands]
    # Only one branch runs, so all must return the same kinds of values.
    if name == "cond":
        branches = [partial(_apply_branch, comm, branch) for branch in inner_jaxprs(equation)]
        carried = [x if is_part(x) else _as_array(x) for x in operands[1:]]
        return lax.switch(jnp.asarray(operands[0], jnp.int32), branches, *carried)
    if not any(map(is_part, operands)):
        if name in ELEMENTWISE and all(isinstance(x, Uniform) or jnp.ndim(x) == 0 for x in operands):
            return [Uniform(apply_primitive(equation, [_number(x) for x in operands])[0], shape)]
        return apply_primitive(equation, [_as_array(x) for x in operands])
    return _apply_to_parts(comm, equation, operands)


def _apply_to_parts(comm: Comm, equation: Any, operands: list[Any]) -> Sequence[Any]:
    """The results of an equation with a part among its operands: without a gather where that is possible."""
    name = equation.primitive.name
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
    return apply_primitive(equation, [x.whole(comm) if is_part(x) else _as_array(x) for x in operands])


def _apply_elementwise(equation: Any, operands: Sequence[Any], comm: Comm) -> Part:
    shape = equation.outvars[0].aval.shape
    length = (-(-math.prod(shape) // (comm.size * MULTIPLE)) * MULTIPLE,)
    mixed = equation.primitive.name in TAKES_NUMBERS and bool(shape)
    bind = partial(equation.primitive.bind, **equation.params)

    def operand_of(x: Any) -> Array:
        if is_part(x) and x.shape == shape:
            return x.value
        if isinstance(x, Uniform):
            return jnp.broadcast_to(x.value, length)
        x = x.whole(comm) if is_part(x) else jnp.asarray(x)
        if x.ndim == 0:
            return x if mixed else jnp.broadcast_to(x, length)
        # Dimensions of one entry are broadcast to longer ones.
        return shard_of(jnp.broadcast_to(x, shape), comm)

    # If all operands are known in full, so is the result: an operation that needs it later gathers nothing.
    fulls = [x.full if is_part(x) else _as_array(x) for x in operands]
    full = None if any(x is None for x in fulls) else bind(*fulls)
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
