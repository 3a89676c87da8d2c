"""The house rules that a parser can check; `import-linter` checks the order of the rooms."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import jaxdist

PACKAGE = Path(jaxdist.__file__).parent
SOURCES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
PUBLIC_NAMES = 48
# Workers and programs are things: "a worker that waits", not "whoever waits"; a file "is" in a folder.
PEOPLE = re.compile(r"\b(who|whoever|whom|nobody|everybody|somebody|anybody|lies|lie|stands|stand)\b", re.IGNORECASE)


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


def test_docstrings_do_not_speak_of_things_as_of_people():
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts = {
        f"{path.relative_to(PACKAGE)}: {getattr(node, 'name', 'module')}": ast.get_docstring(node) or ""
        for path, tree in SOURCES.items()
        for node in ast.walk(tree)
        if isinstance(node, kinds)
    }
    assert {place: PEOPLE.findall(text) for place, text in texts.items() if PEOPLE.search(text)} == {}


def test_error_messages_do_not_either():
    found = [
        f"{path.relative_to(PACKAGE)}:{text.lineno}"
        for path, tree in SOURCES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise)
        for text in ast.walk(node)
        if isinstance(text, ast.Constant) and isinstance(text.value, str) and PEOPLE.search(text.value)
    ]
    assert not found
