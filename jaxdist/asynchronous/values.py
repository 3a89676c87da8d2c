"""The values of rules: arrays, gradients not yet computed, or shapes alone. `numeric` functions accept all three."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import numpy as np

from .._core.dtypes import widen
from .._core.types import PyTree


class Spec:
    """The shapes of a value, a pytree of `jax.ShapeDtypeStruct`, and its size on the wire.

    It replaces the value in a replay without numerics. Equal specs are the same object.
    """

    __slots__ = ("nbytes", "tree")

    def __init__(self, tree: PyTree, nbytes: int):
        self.tree, self.nbytes = tree, nbytes

    def __reduce__(self):
        return spec_of, (self.tree,)


class Encoded(NamedTuple):
    """The payload of a compressed value whose shapes were `like`; only the payload is sent.

    A NumPy vector of bytes is the variable-length code of the payload.
    """

    payload: Any
    like: Spec


class Lazy:
    """A lazily computed, cached value whose shapes are known in advance. A value that is never read costs nothing.

    `recipe` is a description that can be written to a file instead of the value, or None.
    """

    __slots__ = ("_compute", "_value", "recipe", "spec")

    def __init__(self, compute: Callable[[], PyTree], spec: Spec, recipe: tuple | None = None):
        self._compute: Callable[[], PyTree] | None = compute
        self._value: PyTree = None
        self.spec, self.recipe = spec, recipe

    def read(self) -> PyTree:
        """Returns the value; the first call computes it and releases the inputs."""
        if self._compute is not None:
            self._value = self._compute()
            self._compute = self.recipe = None
        return self._value


_SPECS: dict[Any, Spec] = {}


@no_type_check
def spec_of(tree: PyTree) -> Spec:
    """Returns the shapes of a value of any kind."""
    if isinstance(tree, Spec):
        return tree
    if isinstance(tree, Lazy):
        return tree.spec
    leaves, structure = jax.tree.flatten(tree)
    shapes = [(leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else ((), np.result_type(leaf)) for leaf in leaves]
    key = (structure, tuple(shapes))
    if key not in _SPECS:
        structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
        nbytes = sum(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for shape, dtype in shapes)
        _SPECS[key] = Spec(jax.tree.unflatten(structure, structs), nbytes)
    return _SPECS[key]


@no_type_check  # called for every message
def nbytes_of(value: PyTree) -> int:
    """Returns the size on the wire of a value of any kind."""
    if value is None:
        return 0
    if type(value) is Encoded:
        value = value.payload
        # The lengths of codes differ from message to message: not worth a `Spec` each.
        if type(value) is np.ndarray:
            return value.nbytes
    return value.nbytes if type(value) is Spec else spec_of(value).nbytes


@no_type_check
def force(value: PyTree) -> PyTree:
    """Returns the arrays of a value: computes each `Lazy`, also inside tuples and payloads."""
    if type(value) is Lazy:
        return value.read()
    if type(value) is Encoded:
        return Encoded(force(value.payload), value.like)
    return tuple(map(force, value)) if type(value) is tuple else value


def numeric(f: Callable[..., Any], *, outputs: int = 1, lazy: bool = False, shared: bool = False) -> Callable[..., Any]:
    """Jits a function and extends it to values: lazy arguments are read, and shapes alone are mapped to shapes.

    Rules apply such functions to models and gradients, and decide by integers only, so that a replay without numerics
    takes the same decisions.

    Args:
      f: a pure function of pytrees of arrays (values, the first argument among them), numbers and small arrays.
      outputs: the number of values that it returns, as a tuple if more than one.
      lazy: return a lazy result if an argument is lazy. For one output only.
      shared: cache the last call: where all workers compute the same result from the same objects, it runs once.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxdist.asynchronous import numeric
      >>> double = numeric(lambda x: 2 * x)
      >>> double(jnp.ones(2)).tolist()
      [2.0, 2.0]
    """
    compiled = jax.jit(f)
    shapes: dict[Any, Any] = {}
    last: list[Any] = [(), None]

    @no_type_check
    def result_shapes(args: tuple) -> Any:
        key = tuple([arg if type(arg) is Spec else None for arg in args])
        result = shapes.get(key)
        if result is None:
            out = jax.eval_shape(f, *[arg.tree if type(arg) is Spec else arg for arg in args])
            result = shapes[key] = spec_of(out) if outputs == 1 else tuple(map(spec_of, out))
        return result

    @no_type_check
    @functools.wraps(f)
    def call(*args: Any) -> Any:
        # In a replay without numerics every value is a `Spec`, so the first argument tells.
        if type(args[0]) is Spec:
            return result_shapes(args)
        if lazy and any(type(arg) is Lazy for arg in args):
            shape = result_shapes(tuple(spec_of(arg) if isinstance(arg, Lazy) else arg for arg in args))
            return Lazy(lambda: compiled(*map(force, args)), shape)
        if not shared:
            return compiled(*map(force, args))
        # By identity: comparing arrays would read them.
        if len(args) != len(last[0]) or any(new is not old for new, old in zip(args, last[0])):
            last[:] = args, compiled(*map(force, args))
        return last[1]

    return call


def widen_floats(x: Any) -> Any:
    """Casts floats to float32 or wider, in which sums of many neither stall nor overflow; integers stay."""
    return widen(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x


def _narrow(x: Any, like: Any) -> Any:
    """Casts floats back to the dtype of `like`; the mean of integers is a float."""
    return x.astype(like.dtype) if jnp.issubdtype(like.dtype, jnp.inexact) else x


def zeros_of_sum(tree: PyTree) -> PyTree:
    """The zeros from which a sum of such trees begins."""
    return jax.tree.map(lambda x: jnp.zeros_like(widen_floats(x)), tree)


def _add_leaves(*leaves: Any) -> Any:
    return functools.reduce(lambda total, leaf: total + widen_floats(leaf), leaves[1:], widen_floats(leaves[0]))


# Sums are in float32 or wider.
_mean = numeric(
    lambda *trees: jax.tree.map(lambda *leaves: _narrow(_add_leaves(*leaves) / len(leaves), leaves[0]), *trees)
)
zeros_for_sum = numeric(zeros_of_sum)
add = numeric(lambda left, right: jax.tree.map(_add_leaves, left, right))
scale_like = numeric(
    lambda total, factor, like: jax.tree.map(lambda leaf, other: _narrow(leaf * factor, other), total, like)
)
replace_term = numeric(
    lambda total, old, new: jax.tree.map(lambda t, a, b: t + (widen_floats(b) - widen_floats(a)), total, old, new)
)
# Sums of up to this many terms are one program; compiling larger ones takes longer than they save.
_FEW = 16
_add_few = numeric(lambda *trees: jax.tree.map(_add_leaves, *trees))


def sum_of(values: Sequence[Any]) -> Any:
    """Sums values in the order given, in float32 or wider."""
    total, *rest = values
    # The same additions in the same order, in fewer calls.
    while len(rest) >= _FEW:
        total, rest = _add_few(total, *rest[:_FEW]), rest[_FEW:]
    return functools.reduce(add, rest, total) if rest else _add_few(total)


def mean_of(values: Sequence[Any]) -> Any:
    """Averages values in the order given, in their dtype: sort them by worker, not by arrival."""
    if len(values) <= _FEW:
        return _mean(*values)
    return scale_like(sum_of(values), 1 / len(values), values[0])
