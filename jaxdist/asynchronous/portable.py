"""Serializes states and values as text and flat arrays, for files and for messages between processes; never as code."""

import json
import sys
from array import array
from collections.abc import Callable
from typing import Any, ClassVar, no_type_check

import jax
import jax.numpy as jnp
import numpy as np

from .values import Lazy, Spec, spec_of

# NamedTuple classes that this process has written. A class of a script is found here, since its module (`__main__`) has
# another name in other processes.
_WRITTEN_CLASSES: dict[tuple[str, str], type] = {}


@no_type_check  # called for every message
def write(value: Any, store: Callable[[Any], int | str]) -> str:
    """Writes a value as text; each array in it is passed to `store`, once per object.

    Args:
      value: dicts, lists, tuples and NamedTuples of arrays, numbers and text; lazy gradients are written as recipes.
      store: takes an array (of NumPy, of JAX or of the module `array`) and returns the number or name of its entry.

    Returns:
      JSON.

    Raises:
      ValueError: the value contains an object of another type.
    """
    writer = _Writer(store)
    root = writer.visit(value)
    return json.dumps({"nodes": writer.nodes, "root": root})


@no_type_check
class _Writer:
    """A graph of nodes in the order in which they are completed; shared objects are written once."""

    def __init__(self, store: Callable[[Any], int | str]):
        self.store = store
        self.nodes: list[Any] = []
        # The object is kept beside its index, so that its id is not reused.
        self.seen: dict[int, tuple[Any, int]] = {}

    def visit(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if id(value) not in self.seen:
            content = self.content(value)
            self.nodes.append(content)
            self.seen[id(value)] = (value, len(self.nodes) - 1)
        return {"is": self.seen[id(value)][1]}

    def content(self, value: Any) -> list[Any]:
        visit = self.visit
        if isinstance(value, Spec):
            return ["spec", visit(value.tree)]
        if isinstance(value, Lazy):
            return ["gradient", *map(visit, value.recipe)] if value.recipe else ["same", visit(value.read())]
        if isinstance(value, jax.ShapeDtypeStruct):
            return ["shape", list(value.shape), str(value.dtype)]
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return ["key", visit(jax.random.key_data(value)), str(jax.random.key_impl(value))]
        if isinstance(value, jax.Array | np.ndarray | np.generic) and value.dtype != object:
            return ["array", self.store(value), list(value.shape), str(value.dtype), isinstance(value, jax.Array)]
        if isinstance(value, array):
            return ["column", self.store(value), value.typecode]
        if isinstance(value, dict):
            return ["dict", [[visit(key), visit(entry)] for key, entry in value.items()]]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            kind = type(value)
            _WRITTEN_CLASSES[kind.__module__, kind.__qualname__] = kind
            return ["named", kind.__module__, kind.__qualname__, [visit(part) for part in value]]
        if isinstance(value, tuple | list):
            return [type(value).__name__, [visit(part) for part in value]]
        raise ValueError(
            f"a {type(value).__name__} cannot be written: models and states must be dicts, lists, tuples and "
            "NamedTuples of arrays"
        )


@no_type_check
def read(text: str, load: Callable[[int | str], Any], gradient: Callable[[Any, int, int], Any] | None = None) -> Any:
    """Reads a value that `write` wrote.

    Args:
      text: from `write`.
      load: returns, for a number or name that `store` returned, the bytes that `flat` made of that array.
      gradient: makes lazy gradients from recipes.

    Returns:
      A value of the same structure, shapes and dtypes.

    Raises:
      ValueError: the text names a class that is not a NamedTuple of this process.
    """
    content = json.loads(text)
    reader = _Reader(load, gradient)
    for kind, *parts in content["nodes"]:
        # A table of its own methods, and not `getattr`: the text selects among these and nothing else.
        reader.values.append(reader.KINDS[kind](reader, *parts))
    return reader.value(content["root"])


@no_type_check
class _Reader:
    """The values of the nodes read so far; a node refers only to earlier ones."""

    def __init__(self, load: Callable[[int | str], Any], gradient: Callable[[Any, int, int], Any] | None):
        self.load, self.gradient = load, gradient
        self.values: list[Any] = []

    def value(self, part: Any) -> Any:
        return self.values[part["is"]] if isinstance(part, dict) else part

    def read_array(self, name: Any, shape: list[int], dtype: str, on_device: bool) -> Any:
        data = np.frombuffer(self.load(name), jnp.dtype(dtype)).reshape(shape)
        return jnp.asarray(data) if on_device else data

    def read_column(self, name: Any, typecode: str) -> array:
        return array(typecode, bytes(self.load(name)))

    def read_named(self, module: str, name: str, parts: list[Any]) -> Any:
        # Only a NamedTuple of a module that is already imported: reading never runs code that was not loaded before.
        kind: Any = sys.modules.get(module)
        for part in name.split("."):
            kind = getattr(kind, part, None)
        kind = kind or _WRITTEN_CLASSES.get((module, name))
        if not (isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")):
            raise ValueError(
                f"{module}.{name} is not an imported NamedTuple: create the simulator with the same rule before reading"
            )
        return kind(*map(self.value, parts))

    def read_spec(self, tree: Any) -> Spec:
        return spec_of(self.value(tree))

    def read_shape(self, shape: list[int], dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))

    def read_gradient(self, params: Any, worker: int, job: int) -> Any:
        if self.gradient is None:
            raise ValueError("the text contains lazy gradients: pass gradient= to read them")
        return self.gradient(self.value(params), worker, job)

    def read_key(self, data: Any, name: str) -> Any:
        return jax.random.wrap_key_data(self.value(data), impl=name)

    def read_dict(self, pairs: list[Any]) -> dict:
        return {self.value(key): self.value(entry) for key, entry in pairs}

    def read_tuple(self, parts: list[Any]) -> tuple:
        return tuple(map(self.value, parts))

    def read_list(self, parts: list[Any]) -> list:
        return list(map(self.value, parts))

    KINDS: ClassVar = {
        "array": read_array,
        "column": read_column,
        "named": read_named,
        "spec": read_spec,
        "shape": read_shape,
        "gradient": read_gradient,
        "same": value,
        "key": read_key,
        "dict": read_dict,
        "tuple": read_tuple,
        "list": read_list,
    }


def flat(value: Any) -> np.ndarray:
    """Returns the bytes of an array, without a copy if it is in host memory."""
    return np.ascontiguousarray(np.asarray(value)).reshape(-1).view(np.uint8)
