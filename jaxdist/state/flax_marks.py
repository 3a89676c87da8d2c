"""The marks and typed keys for `flax.serialization`, as soon as a program imports it; the library itself does not."""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import jax

from .._core.compat import key_class
from .marks import MARKS, with_value

MODULE = "flax.serialization"


def register_marks(serialization: Any) -> None:
    """Says how marks and typed keys become a dictionary of arrays, and back by the example that flax asks for.

    `to_bytes` knows no class but those that are registered, and cannot make numpy arrays of typed keys, which reducers
    have in their state. A class that is registered already is left alone.
    """

    def mark_to_dict(mark):
        return {"value": serialization.to_state_dict(mark.value)}

    def mark_from_dict(mark, found):
        return with_value(mark, serialization.from_state_dict(mark.value, found["value"], name="value"))

    def key_from_words(key, words):
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(key))

    entries: dict[type, tuple[Any, Any]] = {mark: (mark_to_dict, mark_from_dict) for mark in MARKS}
    entries[key_class()] = (jax.random.key_data, key_from_words)
    for kind, functions in entries.items():
        if not serialization.is_serializable(kind):
            serialization.register_serialization_state(kind, *functions)


class _WhenImported(importlib.abc.MetaPathFinder):
    """Lets the other finders find the module, and calls `register_marks` with it once it has been executed."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """None for every other module."""
        if fullname != MODULE:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                register_marks(module)

            spec.loader.exec_module = execute_and_register
        return spec


def register_with_flax() -> None:
    """Now if flax is there already, else when it is imported: flax is slow to import, and need not be installed."""
    if MODULE in sys.modules:
        register_marks(sys.modules[MODULE])
    else:
        sys.meta_path.insert(0, _WhenImported())
