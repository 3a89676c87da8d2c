"""The documentation runs, and every public name has its place in the reference."""

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from inspect import isclass, isfunction
from pathlib import Path
from pkgutil import walk_packages

import jax
import pytest
from paths import REPOSITORY

import jaxdist

ROOT = REPOSITORY
PAGES = sorted([*ROOT.glob("README.md"), *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[tuple[int, str]]:
    """The line number and the text of each Python block; `pycon` and `shell` blocks are not run."""
    text = page.read_text()
    found = BLOCK.finditer(text)
    return [(text.count("\n", 0, match.start(2)), match[2]) for match in found]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=page_id)
def test_page_runs(page):
    namespace = {"__name__": "__main__"}
    # With the settings of a reader, not with the stricter ones of our tests.
    with jax.numpy_rank_promotion("allow"):
        for line, code in blocks(page):
            # Line numbers of the page, so that a traceback points into it.
            exec(compile("\n" * line + code, str(page), "exec"), namespace)


def exported(source: Path) -> set[str]:
    """The names that a file gives to others: its own definitions, and `from .x import y as y`."""
    names = set()
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            names |= {alias.name for alias in node.names if alias.asname == alias.name}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
    return {name for name in names if not name.startswith("_")}


def public_names() -> dict[str, set[str]]:
    """Each public module and what it exports."""
    package = Path(jaxdist.__file__).parent
    modules = {"jaxdist": exported(package / "__init__.py")}
    for path in sorted(package.iterdir()):
        source = path / "__init__.py" if path.is_dir() else path
        if source.exists() and source.suffix == ".py" and not path.stem.startswith("_"):
            modules[f"jaxdist.{path.stem}"] = exported(source)
    return modules


def documented() -> dict[str, str]:
    """Each `::: name` of the reference and the page that it stands on."""
    return {
        name: page.name
        for page in sorted(ROOT.glob("docs/reference/*.md"))
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    }


def resolve(name: str):
    """`jaxdist.reducers.exact` -> the function, not the module of that name."""
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def test_every_public_name_is_on_a_reference_page():
    shown = [resolve(name) for name in documented()]
    modules = public_names()
    missing = [
        f"{module}.{name}"
        for module, names in modules.items()
        for name in sorted(names)
        if f"{module}.{name}" not in modules and not any(resolve(f"{module}.{name}") is value for value in shown)
    ]
    assert not missing, f"add `::: name` to a page of docs/reference for {', '.join(missing)}"


def test_every_reference_entry_has_a_docstring():
    objects = {name: resolve(name) for name in documented()}
    bare = [name for name, value in objects.items() if not value.__doc__ and (isfunction(value) or isclass(value))]
    assert not bare


def exceptions(base: type = BaseException) -> Iterator[type]:
    """The exception classes of the package, of those modules that are imported."""
    for kind in base.__subclasses__():
        if kind.__module__.startswith("jaxdist."):
            yield kind
        yield from exceptions(kind)


def test_every_exception_is_on_the_page_of_errors():
    for module in walk_packages(jaxdist.__path__, "jaxdist."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
    page = (ROOT / "docs/reference/errors.md").read_text()
    linked = {resolve(name) for name in re.findall(r"\]\[(jaxdist\.\S+?)\]", page)}
    missing = sorted(f"{kind.__module__}.{kind.__name__}" for kind in set(exceptions()) - linked)
    assert not missing, f"say on docs/reference/errors.md what to do about {', '.join(missing)}"


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")]
    assert [page for page in pages if page not in navigation] == []
