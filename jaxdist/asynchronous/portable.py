"""States and values as text and flat arrays: for files and for messages between processes. No code in either."""

import json
import sys
from array import array
from collections.abc import Callable
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np

from .values import Lazy, Spec, spec_of

# NamedTuples that this process has written: those of a script have a module that another process calls otherwise.
_met: dict[tuple[str, str], type] = {}


@no_type_check  # for every message
def write(value: Any, store: Callable[[Any], int | str]) -> str:
    """The text of a value; what is an array in it goes to `store`, once for each object.

    Args:
      value: dicts, lists, tuples and NamedTuples of arrays, numbers and text; lazy gradients as their recipe.
      store: takes an array (of NumPy, of JAX or of the module `array`) and gives the number or name of its place.

    Returns:
      JSON.

    Raises:
      ValueError: there is something else in it.
    """
    nodes: list[Any] = []
    seen: dict[int, tuple[Any, int]] = {}  # the object too, so that its number stays its own

    def node(content: Any, source: Any) -> Any:
        nodes.append(content)
        seen[id(source)] = (source, len(nodes) - 1)
        return {"is": len(nodes) - 1}

    def visit(one: Any) -> Any:
        if one is None or isinstance(one, bool | int | float | str):
            return one
        if id(one) in seen:
            return {"is": seen[id(one)][1]}
        if isinstance(one, Spec):
            return node(["spec", visit(one.tree)], one)
        if isinstance(one, Lazy):
            return node(["gradient", *map(visit, one.recipe)] if one.recipe else ["same", visit(one.read())], one)
        if isinstance(one, jax.ShapeDtypeStruct):
            return node(["shape", list(one.shape), str(one.dtype)], one)
        if isinstance(one, jax.Array) and jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            return node(["key", visit(jax.random.key_data(one)), str(jax.random.key_impl(one))], one)
        if isinstance(one, jax.Array | np.ndarray | np.generic) and one.dtype != object:
            return node(["array", store(one), list(one.shape), str(one.dtype), isinstance(one, jax.Array)], one)
        if isinstance(one, array):
            return node(["column", store(one), one.typecode], one)
        if isinstance(one, dict):
            return node(["dict", [[visit(key), visit(value)] for key, value in one.items()]], one)
        if isinstance(one, tuple) and hasattr(one, "_fields"):
            kind = type(one)
            _met[kind.__module__, kind.__qualname__] = kind
            return node(["named", kind.__module__, kind.__qualname__, [visit(part) for part in one]], one)
        if isinstance(one, tuple | list):
            return node([type(one).__name__, [visit(part) for part in one]], one)
        raise ValueError(
            f"a {type(one).__name__} cannot be written: models and states must be dicts, lists, tuples and NamedTuples "
            "of arrays"
        )

    root = visit(value)
    return json.dumps({"nodes": nodes, "root": root})


@no_type_check
def read(text: str, load: Callable[[int | str], Any], gradient: Callable[[Any, int, int], Any] | None = None) -> Any:
    """The value that `write` wrote.

    Args:
      text: from `write`.
      load: gives the bytes that `flat` made of the array that `store` was given, by its number or name.
      gradient: makes lazy gradients of recipes.

    Returns:
      A value of the same structure, shapes and dtypes.

    Raises:
      ValueError: it names something that is no NamedTuple of this process.
    """
    content = json.loads(text)
    made: list[Any] = []

    def found(one: Any) -> Any:
        return made[one["is"]] if isinstance(one, dict) else one

    for kind, *parts in content["nodes"]:
        made.append(_READ[kind](found, load, gradient, *parts))
    return found(content["root"])


def flat(one: Any) -> np.ndarray:
    """The bytes of an array; without a copy where it lies in the memory of the host."""
    return np.ascontiguousarray(np.asarray(one)).reshape(-1).view(np.uint8)


def _array(found: Any, load: Any, gradient: Any, name: Any, shape: list[int], dtype: str, on_device: bool) -> Any:
    data = np.frombuffer(load(name), jnp.dtype(dtype)).reshape(shape)
    return jnp.asarray(data) if on_device else data


def _column(found: Any, load: Any, gradient: Any, name: Any, typecode: str) -> array:
    return array(typecode, bytes(load(name)))


def _named(found: Any, load: Any, gradient: Any, module: str, name: str, parts: list[Any]) -> Any:
    # Among what is imported already, and a NamedTuple: nothing that was written makes code run.
    kind: Any = sys.modules.get(module)
    for part in name.split("."):
        kind = getattr(kind, part, None)
    kind = kind or _met.get((module, name))
    if not (isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")):
        raise ValueError(f"{module}.{name} is no NamedTuple that is imported: make the clock first, with the same rule")
    return kind(*map(found, parts))


_READ: dict[str, Callable[..., Any]] = {
    "array": _array,
    "column": _column,
    "named": _named,
    "spec": lambda found, load, gradient, tree: spec_of(found(tree)),
    "shape": lambda found, load, gradient, shape, dtype: jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype)),
    "gradient": lambda found, load, gradient, params, worker, job: gradient(found(params), worker, job),
    "same": lambda found, load, gradient, value: found(value),
    "key": lambda found, load, gradient, data, name: jax.random.wrap_key_data(found(data), impl=name),
    "dict": lambda found, load, gradient, pairs: {found(key): found(value) for key, value in pairs},
    "tuple": lambda found, load, gradient, parts: tuple(map(found, parts)),
    "list": lambda found, load, gradient, parts: list(map(found, parts)),
}
