"""The parsed modules of the package: once, and not while tests are collected."""

import ast
from functools import cache
from pathlib import Path

import jaxdist

PACKAGE = Path(jaxdist.__file__).parent


@cache
def modules() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def docstrings() -> dict[str, str]:
    """Of modules, classes and functions: the cleaned text, by file, line and name."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [(path, node) for path, tree in modules().items() for node in ast.walk(tree) if isinstance(node, kinds)]
    return {
        f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 1)}: {getattr(node, 'name', 'module')}": text
        for path, node in nodes
        if (text := ast.get_docstring(node))
    }
