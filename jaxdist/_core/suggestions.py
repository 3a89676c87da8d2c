"""Where a public name is: the message for an attribute that a public module does not have."""

import contextlib
import difflib
import sys
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

PACKAGE = __name__.partition(".")[0]
# Public modules inside a room. Its other modules are private, although they are attributes of it once imported.
INNER = (
    *("analysis.cost", "analysis.goodput", "analysis.pods", "analysis.step_time"),
    *("asynchronous.durations", "asynchronous.links", "asynchronous.ray_engine", "asynchronous.replay"),
    *("asynchronous.rules", "processes.launch", "recipes.bagua"),
)
# Names that share fewer letters are of other things.
CUTOFF = 0.8


def suggest_names() -> None:
    """Makes the `AttributeError`s of the public modules that are imported say where a name is, or which are close.

    One line in the file of the package, instead of one in each of theirs. The package itself calls `refuse_name`.
    """
    # Not `_public_paths`, which reads the folder: this runs at import.
    rooms = [value.__name__ for value in vars(sys.modules[PACKAGE]).values() if isinstance(value, ModuleType)]
    for name in (*rooms, *(f"{PACKAGE}.{name}" for name in INNER)):
        if name in sys.modules and name.startswith(f"{PACKAGE}.") and "._" not in name:
            _add_search(sys.modules[name])


def _add_search(module: ModuleType) -> None:
    vars(module).setdefault("__getattr__", partial(refuse_name, module.__name__))


def refuse_name(module: str, name: str) -> NoReturn:
    """Raises the error for a name that a module does not have."""
    raise AttributeError(_Missing(module, name))


class _Missing(NamedTuple):
    """The message for a name that a module does not have.

    It is written when it is read: `hasattr` and imports of submodules ask for names, and drop the error.
    """

    module: str
    name: str

    def __str__(self) -> str:
        line = f"module {self.module!r} has no attribute {self.name!r}"
        if self.name.startswith("_"):
            return line
        places = _places(self.module)
        if self.name in places:
            return f"{line}: it is {' or '.join(places[self.name])}"
        alike: dict[str, list[str]] = {}
        for name, paths in places.items():
            alike.setdefault(_letters(name), []).extend(paths)
        near = difflib.get_close_matches(_letters(self.name), alike, 3, CUTOFF)
        # The same letters are the name in another spelling, and what is only close is something else.
        near = near[:1] if _letters(self.name) in near else near
        found = [path for letters in near for path in alike[letters]]
        return f"{line}; did you mean {' or '.join(found)}?" if found else line


def _letters(name: str) -> str:
    """`PowerSGD` and `power_sgd` in one spelling."""
    return name.replace("_", "").lower()


def _places(asked: str) -> dict[str, list[str]]:
    """The paths of every public name: one for each thing of that name, in the module asked or else the shortest."""
    things: dict[tuple[str, int], list[str]] = {}
    for module in public_modules():
        for name, value in public_names(module).items():
            things.setdefault((name, id(value)), []).append(f"{module.__name__}.{name}")
    places: dict[str, list[str]] = {}
    for (name, _), paths in things.items():
        places.setdefault(name, []).append(min(paths, key=lambda path: (path != f"{asked}.{name}", len(path))))
    return places


def public_modules() -> Iterator[ModuleType]:
    """The package, its rooms and the public modules inside them; those that need what is not installed are left out."""
    for name in _public_paths():
        with contextlib.suppress(ImportError):
            module = import_module(name)
            _add_search(module)
            yield module


def _public_paths() -> list[str]:
    rooms = [room.name for room in iter_modules(sys.modules[PACKAGE].__path__) if not room.name.startswith("_")]
    return [PACKAGE, *(f"{PACKAGE}.{name}" for name in (*rooms, *INNER))]


def public_names(module: ModuleType) -> dict[str, Any]:
    """The names that a public module gives to others, and their values."""
    # Names that the package imports when they are asked for are in its `dir` alone.
    found = {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
    if not hasattr(module, "__path__"):
        return {name: value for name, value in found.items() if getattr(value, "__module__", None) == module.__name__}
    # The file of a package has imports of public names alone, and its private modules as attributes.
    public = _public_paths()
    return {n: value for n, value in found.items() if not isinstance(value, ModuleType) or value.__name__ in public}
