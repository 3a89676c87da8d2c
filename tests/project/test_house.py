"""The house rules that a parser can check; `import-linter` checks the order of the rooms."""

import ast
from collections import defaultdict
from pathlib import Path

import jaxdist

PACKAGE = Path(jaxdist.__file__).parent
SOURCES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
PUBLIC_NAMES = 48


def functions(tree: ast.AST, outer: tuple[str, ...] = ()):
    """Yields every function with the names of the functions around it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, outer
            yield from functions(node, (*outer, node.name))
        else:
            yield from functions(node, outer)


def test_functions_nest_at_most_once():
    deep = [
        f"{path.name}:{node.lineno}"
        for path, tree in SOURCES.items()
        for node, outer in functions(tree)
        if len(outer) > 1
    ]
    assert not deep


def test_no_inner_function_is_called_one():
    found = [
        f"{path.name}:{node.lineno}"
        for path, tree in SOURCES.items()
        for node, outer in functions(tree)
        if outer and node.name == "one"
    ]
    assert not found


def test_a_public_class_name_means_one_thing():
    places = defaultdict(list)
    for path, tree in SOURCES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_the_top_level_stays_small():
    names = {
        alias.asname
        for node in SOURCES[PACKAGE / "__init__.py"].body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert len(names) <= PUBLIC_NAMES


def test_rooms_import_no_private_modules_of_other_rooms():
    found = []
    for path, tree in SOURCES.items():
        here = ("jaxdist", *path.relative_to(PACKAGE).parent.parts)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                target = (*here[: len(here) - node.level + 1], *(node.module or "").split("."))
                room = target[1] if len(target) > 1 else ""
                if room != (*here, "")[1] and any(part.startswith("_") for part in target[2:]):
                    found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert not found
