"""Serializes states and values as text and flat arrays, for files and for messages between processes; never as code."""

import json
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np

from .values import Lazy, Spec, spec_of

# NamedTuple classes that this process has written, or that `know_classes` has seen. A class of a script is found here,
# since its module (`__main__`) has another name in other processes.
_WRITTEN_CLASSES: dict[tuple[str, str], type] = {}


@no_type_check  # called for every message
def write(value: Any, store: Callable[[Any], int | str]) -> str:
    """Writes a value as text; each array in it is passed to `store`, once per object.

    Args:
      value: dicts, lists, tuples and NamedTuples of arrays, numbers and text; lazy gradients are written as recipes.
      store: takes an array (of NumPy, of JAX or of the module `array`) and returns the number or name of its entry.

    Returns:
      JSON.
    """
    writer = _Writer(store)
    root = writer.visit(value)
    return json.dumps({"nodes": writer.nodes, "root": root})


def know_classes(value: Any) -> None:
    """Lets `read` make the NamedTuples of this value, which this process need not have written before."""
    write(value, lambda array: 0)


@no_type_check
class _Writer:
    """A graph of nodes in the order in which they are completed; shared objects are written once."""

    def __init__(self, store: Callable[[Any], int | str]):
        self.store = store
        self.nodes: list[Any] = []
        # The object is kept beside its index, so that its id is not reused.
        self.seen: dict[int, tuple[Any, int]] = {}

    def visit(self, value: Any) -> Any:
        """Returns a number or text as it is, and a reference to the node of any other object."""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if id(value) not in self.seen:
            content = self.content(value)
            self.nodes.append(content)
            self.seen[id(value)] = (value, len(self.nodes) - 1)
        return {"is": self.seen[id(value)][1]}

    def content(self, value: Any) -> list[Any]:
        """Returns the node of an object: its kind, then what `_READERS` needs to make it again."""
        visit = self.visit
        if isinstance(value, Spec):
            return ["spec", visit(value.tree)]
        if isinstance(value, Lazy):
            return ["gradient", *map(visit, value.recipe)] if value.recipe else ["same", visit(value.read())]
        if isinstance(value, jax.ShapeDtypeStruct):
            return ["shape", list(value.shape), str(value.dtype)]
        if isinstance(value, array):
            return ["column", self.store(value), value.typecode]
        if isinstance(value, jax.Array | np.ndarray | np.generic) and value.dtype != object:
            return self.array_content(value)
        # Other subclasses of tuples and lists would come back as something else.
        if isinstance(value, dict) or type(value) in (tuple, list) or hasattr(value, "_fields"):
            return self.container_content(value)
        raise ValueError(
            f"{type(value).__name__} cannot be written: models and states must be dicts, lists, tuples and "
            "NamedTuples of arrays"
        )

    def array_content(self, value: Any) -> list[Any]:
        """Returns the node of an array of NumPy or JAX."""
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return ["key", self.visit(jax.random.key_data(value)), str(jax.random.key_impl(value))]
        return ["array", self.store(value), list(value.shape), str(value.dtype), isinstance(value, jax.Array)]

    def container_content(self, value: Any) -> list[Any]:
        """Returns the node of a dict, list, tuple or NamedTuple."""
        kind = type(value)
        if isinstance(value, dict):
            kind = "ordered" if isinstance(value, OrderedDict) else "dict"
            return [kind, [[self.visit(key), self.visit(entry)] for key, entry in value.items()]]
        parts = [self.visit(part) for part in value]
        if not hasattr(value, "_fields"):
            return [kind.__name__, parts]
        _WRITTEN_CLASSES[kind.__module__, kind.__qualname__] = kind
        return ["named", kind.__module__, kind.__qualname__, parts]


@no_type_check
def read(text: str, load: Callable[[int | str], Any], gradient: Callable[[Any, int, int], Any] | None = None) -> Any:
    """Reads a value that `write` wrote.

    Args:
      text: from `write`.
      load: returns, for a number or name that `store` returned, the bytes that `flat` made of that array.
      gradient: makes lazy gradients from recipes.

    Raises:
      ValueError: the text names a class that is not a NamedTuple of this process.
    """
    content = json.loads(text)
    reader = _Reader(load, gradient)
    for kind, *parts in content["nodes"]:
        # A table, and not `getattr`: the text selects among these functions and nothing else.
        reader.values.append(_READERS[kind](reader, *parts))
    return reader.value(content["root"])


@no_type_check
class _Reader:
    """The values of the nodes read so far; a node refers only to earlier ones."""

    def __init__(self, load: Callable[[int | str], Any], gradient: Callable[[Any, int, int], Any] | None):
        self.load, self.gradient = load, gradient
        self.values: list[Any] = []

    def value(self, part: Any) -> Any:
        """Returns a number or text as it is, and the value of a node that is referred to."""
        return self.values[part["is"]] if isinstance(part, dict) else part


@no_type_check
def _read_array(reader: _Reader, name: Any, shape: list[int], dtype: str, on_device: bool) -> Any:
    data = np.frombuffer(reader.load(name), jnp.dtype(dtype)).reshape(shape)
    return jnp.asarray(data) if on_device else data


@no_type_check
def _read_named(reader: _Reader, module: str, name: str, parts: list[Any]) -> Any:
    # Only a NamedTuple of a module that is already imported: reading never runs code that was not loaded before.
    kind: Any = sys.modules.get(module)
    for part in name.split("."):
        kind = getattr(kind, part, None)
    kind = kind or _WRITTEN_CLASSES.get((module, name)) or _moved_class(module, name)
    if not (isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")):
        raise ValueError(
            f"{module}.{name} is not an imported NamedTuple: create the simulator with the same rule before reading"
        )
    return kind(*map(reader.value, parts))


def _moved_class(module: str, name: str) -> type | None:
    """The class of this name in another module of the same room, where the module of an older file has none."""
    room = ".".join(module.split(".")[:2]) + "."
    if not room.startswith(__name__.partition(".")[0] + "."):
        return None
    modules = [(path, found) for path, found in list(sys.modules.items()) if path.startswith(room)]
    classes = [vars(found)[name] for path, found in modules if getattr(vars(found).get(name), "__module__", "") == path]
    return classes[0] if len(classes) == 1 else None


@no_type_check
def _read_gradient(reader: _Reader, params: Any, worker: int, job: int) -> Any:
    if reader.gradient is None:
        raise ValueError("the text contains lazy gradients: pass gradient= to read them")
    return reader.gradient(reader.value(params), worker, job)


_READERS: dict[str, Callable[..., Any]] = {
    "array": _read_array,
    "column": lambda reader, name, typecode: array(typecode, bytes(reader.load(name))),
    "named": _read_named,
    "spec": lambda reader, tree: spec_of(reader.value(tree)),
    "shape": lambda reader, shape, dtype: jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype)),
    "gradient": _read_gradient,
    "same": lambda reader, value: reader.value(value),
    "key": lambda reader, data, name: jax.random.wrap_key_data(reader.value(data), impl=name),
    "dict": lambda reader, pairs: {reader.value(key): reader.value(entry) for key, entry in pairs},
    "ordered": lambda reader, pairs: OrderedDict((reader.value(key), reader.value(entry)) for key, entry in pairs),
    "tuple": lambda reader, parts: tuple(map(reader.value, parts)),
    "list": lambda reader, parts: list(map(reader.value, parts)),
}


def flat(value: Any) -> np.ndarray:
    """Returns the bytes of an array, without a copy if it is in host memory."""
    return np.ascontiguousarray(np.asarray(value)).reshape(-1).view(np.uint8)
