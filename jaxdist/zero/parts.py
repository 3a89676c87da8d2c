"""Any function of whole arrays, computed on the parts that workers own: its trace, evaluated another way.

What is elementwise in the trace runs on the part. A sum, a largest or a smallest over a whole leaf is that of the part,
and then over the workers. For everything else the leaf is gathered first: right for any function, at the price of the
bytes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._core.compat import Literal, typed_like, varying_axes
from .._core.jaxprs import CASTS, ELEMENTWISE, RESHAPES, TAKES_NUMBERS, apply_primitive, inner_jaxprs
from .._core.types import Array, PyTree, Shape
from ..comm.base import Comm
from ..comm.over import over
from ..wire.flat import MULTIPLE
from ..wire.shards import cleared, piece
from .shards import whole


@jax.tree_util.register_pytree_node_class
class Part:
    """Stands for an array of this shape: the `[n]` entries of it that this worker has, in row-major order, padded.

    `full`, where it is known, is the array itself: what needs it need not gather it. The one that nobody uses in the
    end is never computed.
    """

    def __init__(self, value: Any, shape: Shape, full: Any = None):
        self.value, self.shape, self.full = value, shape, full

    def tree_flatten(self):
        """The two arrays are the children."""
        return (self.value, self.full), self.shape

    @classmethod
    def tree_unflatten(cls, aux, children):
        """The inverse."""
        return cls(children[0], aux, children[1])

    def cleared(self, comm: Comm, fill: Any = 0) -> "Part":
        """The same array, with `fill` for whatever has been computed of the padding."""
        value = cleared(self.value, math.prod(self.shape), comm.size, comm.index, fill=fill)
        return Part(value, self.shape, self.full)

    def whole(self, comm: Comm) -> Array:
        """The array itself, gathered if it must be."""
        return whole(self.value, self.shape, comm) if self.full is None else self.full


class Uniform(NamedTuple):
    """One number, meant as an array of this shape."""

    value: Array
    shape: Shape


def on_parts(f: Callable[..., PyTree], comm: Comm, likes: Sequence[PyTree], arguments: Sequence[PyTree]) -> PyTree:
    """`f(*arguments)`, where a `Part` stands for the whole array.

    Args:
      f: any function of arrays.
      comm: the workers.
      likes: the shapes and dtypes of the whole arguments.
      arguments: like `likes`, with a `Part` for some arrays.

    Returns:
      What `f` returns, with a `Part` for what could be computed on parts alone, padded with zeros: functions make
      something of the padding, even NaN, which state and codes would keep.
    """
    values = jax.tree.leaves(arguments, is_leaf=lambda x: isinstance(x, Part))
    around = over(_axes_around(values, comm))
    closed, out = jax.make_jaxpr(lambda *trees: f(*around.varying(trees)), return_shape=True)(*likes)
    found = _run(closed.jaxpr, closed.consts, values, comm)
    found = [x.cleared(comm) if isinstance(x, Part) else _plain(x) for x in found]
    return jax.tree.structure(out).unflatten(found)


def _axes_around(values: Sequence[Any], comm: Comm) -> tuple[str, ...]:
    """The mesh axes, besides those of these workers, that any value varies over: groups of them that step apart.

    All is traced as varying over them, since equations are bound as they were traced, and do not cast operands.
    """
    own = varying_axes(comm.varying(jnp.zeros(())))
    return tuple(sorted(frozenset().union(*map(varying_axes, jax.tree.leaves(values))) - own))


def _run(jaxpr: Any, consts: Sequence[Any], values: Sequence[Any], comm: Comm) -> list[Any]:
    known: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *values], strict=True))

    def of(atom):
        return atom.val if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        results = _apply(equation, [of(atom) for atom in equation.invars], comm)
        known.update(zip(equation.outvars, results, strict=True))
    return [of(atom) for atom in jaxpr.outvars]


def _apply(equation: Any, operands: list[Any], comm: Comm) -> Sequence[Any]:
    name = equation.primitive.name
    shape = equation.outvars[0].aval.shape if equation.outvars else ()
    if name == "broadcast_in_dim" and not isinstance(operands[0], Part) and jnp.size(_plain_value(operands[0])) == 1:
        return [Uniform(jnp.reshape(_plain_value(operands[0]), ()), shape)]
    if name in CASTS:
        return [_retyped(x, equation.outvars[0].aval) for x in operands]
    if not any(isinstance(x, Part | Uniform) for x in operands):
        return apply_primitive(equation, operands)
    inside = list(inner_jaxprs(equation.params.values()))
    if len(inside) == 1 and name not in ("scan", "while"):  # a call
        return _run(inside[0].jaxpr, inside[0].consts, operands, comm)
    if name == "cond":
        branches = [lambda *xs, at=at: _branch(at, xs, comm) for at in inside]
        return lax.switch(jnp.asarray(operands[0], jnp.int32), branches, *map(_carried, operands[1:]))
    if not any(isinstance(x, Part) for x in operands):
        if name in ELEMENTWISE and all(isinstance(x, Uniform) or jnp.ndim(x) == 0 for x in operands):
            return [Uniform(apply_primitive(equation, [_plain_value(x) for x in operands])[0], shape)]
        return apply_primitive(equation, [_plain(x) for x in operands])
    if name in ELEMENTWISE:
        return [_elementwise(equation, operands, comm)]
    part = operands[0]
    if name in RESHAPES and len(operands) == 1 and math.prod(shape) == math.prod(part.shape):
        full = None if part.full is None else apply_primitive(equation, [part.full])[0]
        return [Part(part.value, shape, full)]
    if name in REDUCTIONS and part.full is None and math.prod(shape) == 1:  # other dimensions have one entry
        return [REDUCTIONS[name](part, comm).reshape(shape)]
    return apply_primitive(equation, [x.whole(comm) if isinstance(x, Part) else _plain(x) for x in operands])


def _elementwise(equation: Any, operands: Sequence[Any], comm: Comm) -> Part:
    shape = equation.outvars[0].aval.shape
    length = (-(-math.prod(shape) // (comm.size * MULTIPLE)) * MULTIPLE,)
    mixed = equation.primitive.name in TAKES_NUMBERS and bool(shape)

    def local(x):
        if isinstance(x, Part) and x.shape == shape:
            return x.value
        if isinstance(x, Uniform):
            return jnp.broadcast_to(x.value, length)
        x = x.whole(comm) if isinstance(x, Part) else jnp.asarray(x)
        if x.ndim == 0:
            return x if mixed else jnp.broadcast_to(x, length)
        return piece(jnp.broadcast_to(x, shape), comm)  # dimensions of one entry may meet longer ones

    fulls = [x.full if isinstance(x, Part) else _plain(x) for x in operands]
    full = None if any(x is None for x in fulls) else apply_primitive(equation, fulls)[0]
    return Part(apply_primitive(equation, [comm.varying(local(x)) for x in operands])[0], shape, full)


def _reduce(of_part: Callable[[Array], Array], of_workers: Callable[[Comm], Callable], neutral: Callable) -> Callable:
    def reduction(part: Part, comm: Comm) -> Array:
        return of_workers(comm)(of_part(part.cleared(comm, neutral(part.value.dtype)).value))

    return reduction


def _lowest(dtype: Any) -> Array:
    return jnp.array(-jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min, dtype)


def _highest(dtype: Any) -> Array:
    return jnp.array(jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max, dtype)


REDUCTIONS: dict[str, Callable[[Part, Comm], Array]] = {
    "reduce_sum": _reduce(jnp.sum, lambda comm: comm.sum, lambda dtype: jnp.zeros((), dtype)),
    "reduce_max": _reduce(jnp.max, lambda comm: comm.max, _lowest),
    "reduce_min": _reduce(jnp.min, lambda comm: lambda x: -comm.max(-x), _highest),
    "reduce_or": _reduce(jnp.any, lambda comm: lambda x: comm.max(x.astype(jnp.int32)) > 0, lambda dtype: False),
    "reduce_and": _reduce(jnp.all, lambda comm: lambda x: comm.max((~x).astype(jnp.int32)) == 0, lambda dtype: True),
}


def _branch(closed: Any, operands: Sequence[Any], comm: Comm) -> list[Any]:
    """A branch's results in a form that every branch has: numbers, and this worker's part of arrays."""

    def one(x):
        if isinstance(x, Part):
            return Part(x.value, x.shape) if x.shape else x.whole(comm)
        x = _plain(x)
        return Part(piece(x, comm), x.shape) if jnp.shape(x) else x

    return [one(x) for x in _run(closed.jaxpr, closed.consts, operands, comm)]


def _carried(x: Any) -> Any:
    return x if isinstance(x, Part) else _plain(x)


def _retyped(x: Any, aval: Any) -> Any:
    if isinstance(x, Uniform):
        return Uniform(typed_like(jnp.asarray(x.value), aval), x.shape)
    return jax.tree.map(lambda leaf: typed_like(jnp.asarray(leaf), aval), x)


def _plain(x: Any) -> Any:
    return jnp.broadcast_to(x.value, x.shape) if isinstance(x, Uniform) else x


def _plain_value(x: Any) -> Any:
    return x.value if isinstance(x, Uniform) else x
