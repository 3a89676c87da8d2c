"""Lists the public names of jaxdist; as a hook of mkdocs it fills in the tables of reference/index.md."""

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parent.parent
MARKER = "<!-- tables of public names -->"
LONG = 110


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
    package = Path(import_module("jaxdist").__file__).parent
    modules = {"jaxdist": exported(package / "__init__.py")}
    for path in sorted(package.iterdir()):
        source = path / "__init__.py" if path.is_dir() else path
        if source.exists() and source.suffix == ".py" and not path.stem.startswith("_"):
            modules[f"jaxdist.{path.stem}"] = exported(source)
    return modules


def documented() -> dict[str, str]:
    """Each `::: name` of the reference and the file name of its page."""
    return {
        name: page.name
        for page in sorted(ROOT.glob("docs/reference/*.md"))
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    }


def resolve(name: str):
    """`jaxdist.reducers.exact` -> the function, not the module of that name."""
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def summarize(value) -> str:
    """The first sentence of a docstring, for a cell of a table."""
    is_documented = inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)
    paragraph = (inspect.getdoc(value) or "").split("\n\n")[0] if is_documented else ""
    # A period inside `jd.exact` does not end a sentence. Long sentences are cut at their colon.
    sentence = re.split(r"(?<=\.)\s", " ".join(paragraph.split()) + " ")[0].strip()
    if len(sentence) > LONG:
        sentence = re.split(r":\s", sentence)[0]
    # In code a bar does not end a cell, and a backslash would be shown.
    parts = sentence.rstrip(":").split("`")
    return "`".join(part if number % 2 else part.replace("|", "\\|") for number, part in enumerate(parts))


def kind_of(value) -> str:
    """What a name is, in one word."""
    if inspect.ismodule(value):
        return "module"
    if inspect.isclass(value):
        return "error" if issubclass(value, BaseException) else "class"
    return "function" if inspect.isroutine(value) else "value"


def entry_of(name: str, entries: dict[str, str]) -> str | None:
    """The `:::` entry that documents a name, which may be exported in several places."""
    if name in entries:
        return name
    value = resolve(name)
    return next((entry for entry in entries if resolve(entry) is value), None)


def tables() -> str:
    """A section with a table for each public module."""
    entries, modules, sections = documented(), public_names(), []
    for module, names in modules.items():
        rows = []
        for name in sorted(names, key=str.lower):
            full = f"{module}.{name}"
            value = resolve(full)
            entry = entry_of(full, entries)
            # A module without a page of its own has a section here.
            link = f"[`{name}`][{entry}]" if entry else f"[`{name}`](#{full.replace('.', '')})"
            rows.append(f"| {link} | {kind_of(value)} | {summarize(value)} |")
        summary = summarize(import_module(module))
        table = "\n".join(["| name | kind | |", "|---|---|---|", *rows])
        sections.append(f"## `{module}`\n\n{summary}\n\n{table}\n")
    return "\n".join(sections)


def on_page_markdown(markdown: str, **options) -> str:
    """Replaces the marker of a page by the tables; mkdocs calls this for every page."""
    del options
    return markdown.replace(MARKER, tables()) if MARKER in markdown else markdown
