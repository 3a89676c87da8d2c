"""Checks the annotations of a package at every call of its functions.

jaxtyping has such a hook, too. It builds two functions for each function that is defined, and calls both at each call:
tests take a sixth less processor time with this one.
"""

import ast
import functools
import inspect
import re
import sys
import types
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder, SourceFileLoader

from beartype import BeartypeConf, beartype
from jaxtyping import TypeCheckError, jaxtyped

_HAS_SHAPE = re.compile(r"\w+\[[^][]*, '[^']*'\]")
_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)
# An int is a float to a type checker.
_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True, violation_type=TypeCheckError))


def install_import_hook(package: str) -> None:
    """Makes the functions of the package, which must not have been imported yet, raise `TypeCheckError`."""
    sys.meta_path.insert(0, _Finder(package))


def check_types(function: Callable) -> Callable:
    """Checks arguments and results, and that sizes with a name are equal within a call; of a class, its fields."""
    if isinstance(function, type):
        return jaxtyped(function, typechecker=_beartype)
    if not function.__annotations__:
        return function
    checked = None

    @functools.wraps(function)
    def call(*args, **kwargs):
        # At the first call: most functions are never called in a process that runs a part of the tests.
        nonlocal checked
        if checked is None:
            checked = _check(function)
        return checked(*args, **kwargs)

    return call


# By its code, the annotations of an inner function, their check, and whether they have shapes.
_checks: dict[types.CodeType, tuple[dict, types.FunctionType, bool]] = {}


def _check(function: Callable) -> Callable:
    """An inner function is defined anew by each call of the outer one; its check is the same, and is made once."""
    known = _checks.get(function.__code__)
    if known is not None and known[0] == function.__annotations__:
        _, first, has_shape = known
        checked = types.FunctionType(first.__code__, first.__globals__, first.__name__)
        checked.__dict__.update(first.__dict__, __wrapped__=function)
        # beartype's functions have no argument but what they close over, in keywords of their own.
        checked.__kwdefaults__ = {**(first.__kwdefaults__ or {}), "__beartype_func": function}
    else:
        checked = _beartype(function)
        has_shape = any(_HAS_SHAPE.search(repr(hint)) for hint in function.__annotations__.values())
        defaults = getattr(checked, "__kwdefaults__", None) or {}
        if "<locals>" in function.__qualname__ and defaults.get("__beartype_func") is function:
            _checks[function.__code__] = function.__annotations__, checked, has_shape
    if not has_shape:
        return checked
    if inspect.isgeneratorfunction(function):
        return jaxtyped(checked, typechecker=None)  # which takes the shapes out of what it yields

    @functools.wraps(checked)
    def call_in_context(*args, **kwargs):
        with jaxtyped("context"):
            return checked(*args, **kwargs)

    return call_in_context


class _Finder(MetaPathFinder):
    def __init__(self, package: str):
        self.package = package

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] != self.package:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def get_code(self, fullname):
        # Not `source_to_code`, whose result would be written to the files of compiled code that users load.
        tree = ast.parse(self.get_data(self.path), self.path)
        _decorate(tree)
        first = next(i for i, each in enumerate([*tree.body, None]) if not _is_docstring_or_future(each))
        tree.body[first:first] = ast.parse("from type_checks import check_types as CHECK_TYPES").body
        return compile(tree, self.path, "exec", dont_inherit=True)


def _decorate(node):
    """Of statements alone: `ast.NodeTransformer` visits every expression too, which takes several times as long."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _STATEMENTS):
            _decorate(child)
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        check = ast.copy_location(ast.Name("CHECK_TYPES", ast.Load()), node)
        # Of a function innermost, below `jax.jit` and `custom_vjp`. Of a class outermost: `dataclass` makes the
        # function that takes the fields. A class would mangle a name that begins with two underscores.
        node.decorator_list.insert(0 if isinstance(node, ast.ClassDef) else len(node.decorator_list), check)


def _is_docstring_or_future(node):
    return isinstance(node, ast.Expr) or (isinstance(node, ast.ImportFrom) and node.module == "__future__")
