"""What rules compute with: arrays, gradients not computed yet, or shapes alone. `numeric` takes all three."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, no_type_check

import jax
import numpy as np

from .._core.types import PyTree


class Spec:
    """The shapes of a value, in a replay without numerics. Equal ones are one object.

    Attributes:
      tree: a pytree of `jax.ShapeDtypeStruct`.
      nbytes: what such a value weighs on the wire.
    """

    __slots__ = ("nbytes", "tree")

    def __init__(self, tree: PyTree, nbytes: int):
        self.tree = tree
        self.nbytes = nbytes

    def __reduce__(self):
        return spec_of, (self.tree,)


class Encoded(NamedTuple):
    """What a compressor made of a value of shapes `like`; only the payload travels."""

    payload: Any
    like: Spec


class Lazy:
    """A value that is computed when somebody reads it, once; what nobody reads costs nothing.

    Attributes:
      spec: its shapes, known before.
      recipe: what can be written to a file instead of the value, or None.
    """

    __slots__ = ("_compute", "_value", "recipe", "spec")

    def __init__(self, compute: Callable[[], PyTree], spec: Spec, recipe: tuple | None = None):
        self._compute: Callable[[], PyTree] | None = compute
        self._value: PyTree = None
        self.spec = spec
        self.recipe = recipe

    def read(self) -> PyTree:
        """The value; the first call computes it and lets go of what it was computed from."""
        if self._compute is not None:
            self._value = self._compute()
            self._compute = self.recipe = None
        return self._value


_known: dict[Any, Spec] = {}


@no_type_check
def spec_of(tree: PyTree) -> Spec:
    """The shapes of a value of any kind."""
    if isinstance(tree, Spec):
        return tree
    if isinstance(tree, Lazy):
        return tree.spec
    leaves, structure = jax.tree.flatten(tree)
    shapes = [(leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else ((), np.result_type(leaf)) for leaf in leaves]
    key = (structure, tuple(shapes))
    if key not in _known:
        structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
        nbytes = sum(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for shape, dtype in shapes)
        _known[key] = Spec(jax.tree.unflatten(structure, structs), nbytes)
    return _known[key]


@no_type_check  # for every message
def nbytes_of(value: PyTree) -> int:
    """What a value of any kind weighs on the wire."""
    if value is None:
        return 0
    if type(value) is Encoded:
        value = value.payload
    return value.nbytes if type(value) is Spec else spec_of(value).nbytes


@no_type_check
def force(value: PyTree) -> PyTree:
    """The arrays of a value: what a `Lazy` computes, also inside tuples and codes."""
    if type(value) is Lazy:
        return value.read()
    if type(value) is Encoded:
        return Encoded(force(value.payload), value.like)
    return tuple(map(force, value)) if type(value) is tuple else value


def numeric(f: Callable[..., Any], *, outputs: int = 1, lazy: bool = False, shared: bool = False) -> Callable[..., Any]:
    """A jitted function of values: it reads lazy ones, and of shapes alone it gives the shapes of its result.

    What a rule does with models and gradients it does through such functions, and what it decides it decides from
    whole numbers: so a replay without numerics takes the same decisions.

    Args:
      f: a pure function of pytrees of arrays (values, the first argument among them), numbers and small arrays.
      outputs: how many values it returns, as a tuple if more than one.
      lazy: where an argument is not computed yet, the result waits too. For one output only.
      shared: remember the last call: where many workers compute the same from the same objects, one does.

    Returns:
      The function of values.

    Example:
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
    def of_shapes(args: tuple) -> Any:
        key = tuple([arg if type(arg) is Spec else None for arg in args])
        found = shapes.get(key)
        if found is None:
            out = jax.eval_shape(f, *[arg.tree if type(arg) is Spec else arg for arg in args])
            found = shapes[key] = spec_of(out) if outputs == 1 else tuple(map(spec_of, out))
        return found

    @no_type_check
    @functools.wraps(f)
    def call(*args: Any) -> Any:
        if type(args[0]) is Spec:
            return of_shapes(args)
        if lazy and any(type(arg) is Lazy for arg in args):
            shape = of_shapes(tuple(spec_of(arg) if isinstance(arg, Lazy) else arg for arg in args))
            return Lazy(lambda: compiled(*map(force, args)), shape)
        if not shared:
            return compiled(*map(force, args))
        if len(args) != len(last[0]) or any(new is not old for new, old in zip(args, last[0])):
            last[:] = args, compiled(*map(force, args))
        return last[1]

    return call


def _average(*trees: PyTree) -> PyTree:
    return jax.tree.map(lambda *leaves: sum(leaves[1:], start=leaves[0]) / len(leaves), *trees)


_mean = numeric(_average)
add = numeric(lambda left, right: jax.tree.map(lambda a, b: a + b, left, right))
scale = numeric(lambda tree, factor: jax.tree.map(lambda leaf: leaf * factor, tree))
replaced = numeric(lambda total, old, new: jax.tree.map(lambda t, a, b: t + (b - a), total, old, new))
_FEW = 16
_add_few = numeric(lambda *trees: jax.tree.map(lambda *leaves: functools.reduce(lambda a, b: a + b, leaves), *trees))


def sum_of(values: Sequence[Any]) -> Any:
    """The sum of values in the order given."""
    total, *rest = values
    while len(rest) >= _FEW:  # the same additions in fewer calls
        total, rest = _add_few(total, *rest[:_FEW]), rest[_FEW:]
    return functools.reduce(add, rest, total)


def mean_of(values: Sequence[Any]) -> Any:
    """The mean of values in the order given: sort them by worker, not by arrival."""
    if len(values) <= _FEW:  # one program; for many its compilation would take longer than it saves
        return _mean(*values)
    return scale(sum_of(values), 1 / len(values))
