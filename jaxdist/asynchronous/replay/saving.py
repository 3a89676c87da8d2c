"""The state of a replay as a file of numbers and names: no code in it."""

import json
import os
import sys
from array import array
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..values import Lazy, Spec, spec_of
from .run import Simulator
from .state import ReplayState


def save(path: Path, clock: Simulator, state: ReplayState) -> None:
    """Writes a state, from which `restore` goes on exactly as it would have.

    One `.npz` file of numbers, and the names of NamedTuples: arrays that many workers share are written once, and
    gradients that nobody has asked for yet as the model and the job that they come from. Written beside, then renamed.

    Args:
      path: the file, `.npz`.
      clock: whose state it is.
      state: to write.

    Raises:
      ValueError: the model or a state has nodes other than dicts, lists, tuples and NamedTuples.

    Example:
      >>> import optax, tempfile, pathlib
      >>> from jaxdist.asynchronous import replay, rules
      >>> clock = replay.simulator(rules.asgd(optax.sgd(0.1)), workers=2)
      >>> file = pathlib.Path(tempfile.mkdtemp()) / "run.npz"
      >>> replay.save(file, clock, clock.advance(clock.init(), seconds=3))
      >>> clock.advance(replay.restore(file, clock), seconds=5).tick
      5000000000
    """
    nodes: list[Any] = []
    arrays: dict[str, np.ndarray] = {}
    seen: dict[int, tuple[Any, int]] = {}  # the object too, so that its number stays its own

    def node(content: Any, source: Any) -> Any:
        nodes.append(content)
        seen[id(source)] = (source, len(nodes) - 1)
        return {"is": len(nodes) - 1}

    def stored(data: np.ndarray) -> str:
        name = f"a{len(arrays)}"
        arrays[name] = np.frombuffer(data.tobytes(), np.uint8)
        return name

    def write(one: Any) -> Any:
        if one is None or isinstance(one, bool | int | float | str):
            return one
        if isinstance(one, np.generic) and not one.dtype.hasobject and one.shape == ():
            return node(["array", stored(np.asarray(one)), [], str(one.dtype), False], one)
        if id(one) in seen:
            return {"is": seen[id(one)][1]}
        if isinstance(one, Spec):
            return node(["spec", write(one.tree)], one)
        if isinstance(one, Lazy):
            return node(["gradient", *map(write, one.recipe)] if one.recipe else ["same", write(one.read())], one)
        if isinstance(one, jax.ShapeDtypeStruct):
            return node(["shape", list(one.shape), str(one.dtype)], one)
        if isinstance(one, jax.Array) and jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            return node(["key", write(jax.random.key_data(one)), str(jax.random.key_impl(one))], one)
        if isinstance(one, jax.Array | np.ndarray):
            shape = [list(one.shape), str(one.dtype), isinstance(one, jax.Array)]
            return node(["array", stored(np.asarray(one)), *shape], one)
        if isinstance(one, array):
            return node(["column", stored(np.frombuffer(one, np.uint8)), one.typecode], one)
        if isinstance(one, dict):
            return node(["dict", [[write(key), write(value)] for key, value in one.items()]], one)
        if isinstance(one, tuple) and hasattr(one, "_fields"):
            return node(["named", type(one).__module__, type(one).__qualname__, [write(part) for part in one]], one)
        if isinstance(one, tuple | list):
            return node([type(one).__name__, [write(part) for part in one]], one)
        raise ValueError(
            f"a {type(one).__name__} cannot be written: models and states must be dicts, lists, tuples and NamedTuples "
            "of arrays"
        )

    content = {one.name: write(getattr(state, one.name)) for one in fields(state)}
    text = json.dumps({"of": _identity(clock), "nodes": nodes, "state": content})
    beside = path.with_name(path.name + ".new")
    with beside.open("wb") as file:
        parts: Any = arrays | {"text": np.frombuffer(text.encode(), np.uint8)}
        np.savez(file, **parts)
    os.replace(beside, path)


def restore(path: Path, clock: Simulator) -> ReplayState:
    """Reads what `save` wrote.

    Args:
      path: the file.
      clock: made as the one that was saved.

    Returns:
      The state.

    Raises:
      ValueError: the file is of another rule, seed or number of workers, or names something that is no NamedTuple.

    Example:
      >>> import optax, tempfile, pathlib
      >>> from jaxdist.asynchronous import replay, rules
      >>> clock = replay.simulator(rules.asgd(optax.sgd(0.1)), workers=2)
      >>> file = pathlib.Path(tempfile.mkdtemp()) / "run.npz"
      >>> replay.save(file, clock, clock.init())
      >>> replay.restore(file, clock).jobs
      [1, 1]
    """
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    content = json.loads(arrays.pop("text").tobytes())
    if content["of"] != _identity(clock):
        raise ValueError(f"{path} is of {content['of']}, not of {_identity(clock)}")
    made: list[Any] = []

    def read(one: Any) -> Any:
        return made[one["is"]] if isinstance(one, dict) else one

    for kind, *parts in content["nodes"]:
        made.append(_READ[kind](read, arrays, clock.setup.gradient, *parts))
    return ReplayState(**{name: read(value) for name, value in content["state"].items()})


def _identity(clock: Simulator) -> dict[str, Any]:
    setup = clock.setup
    timing = isinstance(setup.params, Spec)
    return {"rule": setup.rule.name, "workers": setup.workers, "seed": setup.seed, "timing_only": timing}


def _array(read: Any, arrays: Any, gradient: Any, name: str, shape: list[int], dtype: str, on_device: bool) -> Any:
    data = np.frombuffer(arrays[name].tobytes(), jnp.dtype(dtype)).reshape(shape)
    return jnp.asarray(data) if on_device else data


def _column(read: Any, arrays: Any, gradient: Any, name: str, typecode: str) -> array:
    return array(typecode, arrays[name].tobytes())


def _named(read: Any, arrays: Any, gradient: Any, module: str, name: str, parts: list[Any]) -> Any:
    # Among what is imported already, and a NamedTuple: nothing in the file makes code run.
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")):
        raise ValueError(f"{module}.{name} is no NamedTuple that is imported: make the clock first, with the same rule")
    return found(*map(read, parts))


_READ: dict[str, Callable[..., Any]] = {
    "array": _array,
    "column": _column,
    "named": _named,
    "spec": lambda read, arrays, gradient, tree: spec_of(read(tree)),
    "shape": lambda read, arrays, gradient, shape, dtype: jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype)),
    "gradient": lambda read, arrays, gradient, params, worker, job: gradient(read(params), worker, job),
    "same": lambda read, arrays, gradient, value: read(value),
    "key": lambda read, arrays, gradient, data, name: jax.random.wrap_key_data(read(data), impl=name),
    "dict": lambda read, arrays, gradient, pairs: {read(key): read(value) for key, value in pairs},
    "tuple": lambda read, arrays, gradient, parts: tuple(map(read, parts)),
    "list": lambda read, arrays, gradient, parts: list(map(read, parts)),
}
