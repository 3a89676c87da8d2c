"""The house rules that a parser can check; `import-linter` checks the order of the rooms."""

import ast
import re
from collections import defaultdict

from sources import PACKAGE, docstrings, modules

PUBLIC_NAMES = 50
# Workers and programs are things: "a worker that waits", not "whoever waits"; a file "is" in a folder.
# JAX's maxima and minima of many entries, which lose NaN on CPU, and those over workers, which depend on the wiring.
EXTREMES = {"max", "min", "amax", "amin", "nanmax", "nanmin", "reduce_max", "reduce_min", "segment_max", "segment_min"}
OVER_WORKERS = {"pmax", "pmin"}
PEOPLE = re.compile(r"\b(who|whoever|whom|nobody|everybody|somebody|anybody|lies|lie|stands|stand)\b", re.IGNORECASE)
ADVICE = 'workers, files and arrays are things: write "a worker that waits", "a file is in"'


def functions(tree: ast.AST, outer: tuple[str, ...] = ()):
    """Yields every function with the names of the functions around it; expressions have none."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, outer
            yield from functions(node, (*outer, node.name))
        elif isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            yield from functions(node, outer)


def test_functions_nest_at_most_once():
    deep = [
        f"{path.name}:{node.lineno}"
        for path, tree in modules().items()
        for node, outer in functions(tree)
        if len(outer) > 1
    ]
    assert not deep, f"move the inner function to the module, with its values as arguments: {', '.join(deep)}"


def test_no_inner_function_is_called_one():
    found = [
        f"{path.name}:{node.lineno}"
        for path, tree in modules().items()
        for node, outer in functions(tree)
        if outer and node.name == "one"
    ]
    assert not found, f"name the function after what it does, such as `cast_leaf`: {', '.join(found)}"


def test_a_public_class_name_means_one_thing():
    places = defaultdict(list)
    for path, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    shared = {name: paths for name, paths in places.items() if len(paths) > 1}
    assert not shared, f"give all but one of them another name, or a leading underscore: {shared}"


def test_the_top_level_stays_small():
    names = {
        alias.asname
        for node in ast.walk(modules()[PACKAGE / "__init__.py"])
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname and not alias.asname.startswith("_")
    }
    assert len(names) <= PUBLIC_NAMES, (
        f"jaxdist has {len(names)} names at the top level: export the new one from its package alone, as "
        "`jaxdist.reducers` does with most"
    )


def test_rooms_import_no_private_modules_of_other_rooms():
    found = []
    for path, tree in modules().items():
        here = ("jaxdist", *path.relative_to(PACKAGE).parent.parts)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                target = (*here[: len(here) - node.level + 1], *(node.module or "").split("."))
                room = target[1] if len(target) > 1 else ""
                if room != (*here, "")[1] and any(part.startswith("_") for part in target[2:]):
                    found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert not found, f"import from a module without a leading underscore: {', '.join(found)}"


def test_docstrings_do_not_speak_of_things_as_of_people():
    found = {place: PEOPLE.findall(text) for place, text in docstrings().items() if PEOPLE.search(text)}
    assert not found, f"{ADVICE}: {found}"


def test_error_messages_do_not_either():
    found = [
        f"{path.relative_to(PACKAGE)}:{text.lineno}"
        for path, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise)
        for text in ast.walk(node)
        if isinstance(text, ast.Constant) and isinstance(text.value, str) and PEOPLE.search(text.value)
    ]
    assert not found, f"{ADVICE}: {', '.join(found)}"


def extremes(tree: ast.AST):
    """Yields JAX's extremes in a module, and in one that computes with JAX the methods of which arrays have no type."""
    computes = any("jax.numpy" in ast.unparse(node) for node in tree.body if isinstance(node, ast.Import))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in EXTREMES | OVER_WORKERS:
            base = ast.unparse(node.value)
            if base.split(".")[-1] in ("jnp", "lax", "ops"):
                yield node
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jax"):
            yield from (alias for alias in node.names if alias.name in EXTREMES | OVER_WORKERS)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("max", "min"):
            names = {name.id for name in ast.walk(node.func.value) if isinstance(name, ast.Name)}
            if computes and not names & {"np", "jnp", "lax", "comm", "inner", "outer"}:
                yield node


def test_maxima_keep_nan():
    """`_core.xla_quirks` has those of entries, of all dtypes, and `Comm` that over workers; `np.max(x)` is NumPy's."""
    places = {PACKAGE / "_core/xla_quirks.py": EXTREMES, PACKAGE / "comm/over.py": OVER_WORKERS}
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"
        for path, tree in modules().items()
        for node in extremes(tree)
        if not (isinstance(node, ast.Attribute) and node.attr in places.get(path, ()))
    ]
    advice = "use largest_entry or smallest_entry of jaxdist/_core/xla_quirks.py, or Comm.max, which keep NaN"
    assert not found, f"{advice}: {', '.join(found)}"


def test_the_search_for_maxima_finds_them():
    for text in (
        "jnp.max(x)",
        "jax.lax.pmax(x, 'data')",
        "reduce(jnp.min, x)",
        "x.max(0)",
        "f(x).min()",
        "ops.segment_max(x)",
    ):
        assert list(extremes(ast.parse(f"import jax.numpy as jnp\n{text}"))), text
    for text in (
        "np.max(x)",
        "comm.max(x)",
        "jnp.maximum(x, y)",
        "jnp.finfo(x.dtype).max",
        "np.abs(x).max()",
        "max(x)",
    ):
        assert not list(extremes(ast.parse(f"import jax.numpy as jnp\n{text}"))), text
