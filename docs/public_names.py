"""Lists the public names of jaxdist: the tables of the reference. As a script it writes `docs/llms.txt`.

python docs/public_names.py
"""

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
MARKER = "<!-- tables of public names -->"
LONG = 110
# A page of the reference with at least so many entries starts with a table of them.
MANY = 4


def exported(source: Path) -> set[str]:
    """The names that a file gives to others: its own definitions, and `from .x import y as y`."""
    names = set()
    nodes = ast.parse(source.read_text()).body
    # What is imported later is written for type checkers only.
    nodes += [inner for node in nodes if isinstance(node, ast.If) for inner in node.body]
    for node in nodes:
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
        name: page.name for page in sorted(ROOT.glob("docs/reference/*.md")) for name in entries_of(page.read_text())
    }


def entries_of(markdown: str) -> list[str]:
    """The `::: name` entries of a page, in its order."""
    return re.findall(r"^::: (\S+)$", markdown, re.MULTILINE)


def resolve(name: str):
    """`jaxdist.compressors.cast` -> the function, not the module of that name."""
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


def stability_of(module: str) -> str:
    """How stable a public module is, as the last paragraph of its docstring says."""
    level = re.search(r"\n\n(Provisional|Experimental): .*\Z", inspect.getdoc(import_module(module)) or "")
    return level[1].lower() if level else "stable"


def tables() -> str:
    """A table of the public modules, and a section with a table of names for each."""
    entries, modules = documented(), public_names()
    sections, rows = [], []
    for module, names in modules.items():
        if not names:
            continue
        summary = summarize(import_module(module))
        level = stability_of(module) if module != "jaxdist" else ""
        rows.append(f"| [`{module}`](#{module.replace('.', '')}) | {len(names)} | {level} | {summary} |")
        table = _table_of(module, names, entries)
        if module != "jaxdist":
            table = f"<details markdown><summary>{len(names)} names</summary>\n\n{table}\n\n</details>"
        sections.append(f"## `{module}`\n\n{summary}\n\n{table}\n")
    contents = "\n".join(["| module | names | [stability](../stability.md) | |", "|---|--:|---|---|", *rows])
    return "\n".join([contents, "", *sections])


def _table_of(module: str, names: set[str], entries: dict[str, str]) -> str:
    rows = []
    for name in sorted(names, key=lambda name: (name.lower(), name)):
        full = f"{module}.{name}"
        value = resolve(full)
        entry = entry_of(full, entries)
        # A module without a page of its own has a section here.
        link = f"[`{name}`][{entry}]" if entry else f"[`{name}`](#{full.replace('.', '')})"
        rows.append(f"| {link} | {kind_of(value)} | {summarize(value)} |")
    return "\n".join(["| name | kind | |", "|---|---|---|", *rows])


def with_contents(markdown: str) -> str:
    """Puts a table of the entries of a page in front of its first section or entry."""
    names = entries_of(markdown)
    if len(names) < MANY:
        return markdown
    rows = [f"| [`{name.removeprefix('jaxdist.')}`][{name}] | {summarize(resolve(name))} |" for name in names]
    table = "\n".join(["| on this page | |", "|---|---|", *rows])
    return re.sub(r"^(?=## |::: )", lambda _: f"{table}\n\n", markdown, count=1, flags=re.MULTILINE)


def with_stability(markdown: str) -> str:
    """Says on a page of the reference, below its title, which of its modules may still change."""
    modules = sorted({".".join(name.split(".")[:2]) for name in entries_of(markdown) if name.count(".") > 1})
    levels = [(module, stability_of(module)) for module in modules]
    text = ", ".join(f"`{module}` is [{level}](../stability.md)" for module, level in levels if level != "stable")
    return re.sub(r"\A(# .*\n)", rf"\1\n*{text}.*\n", markdown) if text else markdown


def with_sentences(markdown: str) -> str:
    """Gives each name in the tables of `| kind | names |` a row of its own, with the first sentence about it."""
    return re.sub(r"^\| kind \| names \|\n.*\n((?:\|.*\n)+)", _one_row_each, markdown, flags=re.MULTILINE)


def _one_row_each(table: re.Match) -> str:
    rows = ["| kind | name | |", "|---|---|---|"]
    for line in table[1].splitlines():
        kind, names = (cell.strip() for cell in line[1:-1].split(" | "))
        for name in names.split(", "):
            link = re.fullmatch(r"\[`\S+`\]\[(jaxdist\S+)\]", name)
            rows.append(f"| {kind} | {name} | {summarize(resolve(link[1])) if link else ''} |")
            kind = ""  # in its first row
    return "\n".join(rows) + "\n"


def with_tables(markdown: str) -> str:
    """Fills in the tables of a page."""
    if MARKER in markdown:
        return with_sentences(markdown.replace(MARKER, tables()))
    return with_sentences(with_stability(with_contents(markdown)))


def read_site() -> dict[str, Any]:
    """The configuration of the site; what is not plain YAML in it, such as variables of the environment, is `None`."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("", lambda loader, suffix, node: None)
    return yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)


def list_pages() -> str:
    """The text of `llms.txt`: all pages, for language models (https://llmstxt.org)."""
    site = read_site()
    return contents_for_models(site["site_description"], site["nav"])


def contents_for_models(summary: str, nav: list[dict[str, Any]]) -> str:
    """The pages of the site in the order of its navigation, each with its first sentence."""
    lines = ["# jaxdist", "", f"> {summary}."]
    for part in nav:
        for title, pages in part.items():
            lines += ["", f"## {title}", "", *_lines_of_pages(title, pages)]
    return "\n".join(lines) + "\n"


def _lines_of_pages(title: str, pages: Any) -> list[str]:
    if isinstance(pages, str):
        path = re.sub(r"(^|/)index$", r"\1", pages.removesuffix(".md"))
        return [f"- [{title}]({path.rstrip('/') or '.'}/): {_first_sentence(pages)}".removesuffix(": ")]
    entries = pages.items() if isinstance(pages, dict) else ((title, page) for page in pages)
    return [line for inner, page in entries for line in _lines_of_pages(inner, page)]


def _first_sentence(page: str) -> str:
    """Of a page, as text without links."""
    paragraphs = (ROOT / "docs" / page).read_text().split("\n\n")
    sentences = (part for part in paragraphs if re.match(r"[A-Z*`\[]", part) and ".md-button" not in part)
    text = " ".join(next(sentences, "").split())
    text = re.sub(r"\[([^\]]+)\](\([^)]*\)|\[[^\]]*\])", r"\1", text)
    return re.split(r"(?<=[.:])\s", text)[0].replace("**", "").removesuffix(":")


if __name__ == "__main__":
    (ROOT / "docs" / "llms.txt").write_text(list_pages())
