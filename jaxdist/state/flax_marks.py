"""Registers marks and typed keys with `flax.serialization` when a program imports it; the library itself does not."""

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
    """Registers functions that convert marks and typed keys to dictionaries of arrays and back.

    `to_bytes` supports registered classes only, and cannot convert typed keys, which reducers have in their state, to
    NumPy arrays. Classes that are registered already are not changed.
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
    """Registers the marks now if flax is imported already, else at its import: it is slow, and may not be installed."""
    if MODULE in sys.modules:
        register_marks(sys.modules[MODULE])
    else:
        sys.meta_path.insert(0, _WhenImported())
