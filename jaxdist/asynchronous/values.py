"""The values of rules: arrays, gradients not yet computed, or shapes alone. `numeric` functions accept all three."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, no_type_check

import jax
import numpy as np

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


_mean = numeric(lambda *trees: jax.tree.map(lambda *x: sum(x[1:], start=x[0]) / len(x), *trees))
add = numeric(lambda left, right: jax.tree.map(lambda a, b: a + b, left, right))
scale = numeric(lambda tree, factor: jax.tree.map(lambda leaf: leaf * factor, tree))
replace_term = numeric(lambda total, old, new: jax.tree.map(lambda t, a, b: t + (b - a), total, old, new))
# Sums of up to this many terms are one program; compiling larger ones takes longer than they save.
_FEW = 16
_add_few = numeric(lambda *trees: jax.tree.map(lambda *leaves: functools.reduce(lambda a, b: a + b, leaves), *trees))


def sum_of(values: Sequence[Any]) -> Any:
    """Sums values in the order given."""
    total, *rest = values
    # The same additions in the same order, in fewer calls.
    while len(rest) >= _FEW:
        total, rest = _add_few(total, *rest[:_FEW]), rest[_FEW:]
    return functools.reduce(add, rest, total)


def mean_of(values: Sequence[Any]) -> Any:
    """Averages values in the order given: sort them by worker, not by arrival."""
    if len(values) <= _FEW:
        return _mean(*values)
    return scale(sum_of(values), 1 / len(values))
