"""Writes the notebooks of `examples/notebooks` from the pages of `docs/notebooks`: `python scripts/notebooks.py`.

A page is plain Markdown, which the site shows and a test runs. Each block of Python becomes a cell, with the output
that the page shows after it; what is between blocks becomes text. `JAXDIST_REPOSITORY` names the repository
(`https://host/owner/jaxdist`) that a notebook installs the library from, and that its links lead to. Without it a
notebook says that the library must be installed, and has no links.
"""

import json
import os
import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "notebooks"
NOTEBOOKS = ROOT / "examples" / "notebooks"
# A block of Python, and the block of its output right after it.
CELL = re.compile(r"^```python\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
IMAGE = re.compile(r"^!\[[^\]]*\]\([^)]*\)\n*", re.MULTILINE)
REFERENCE = re.compile(r"\[([^\[\]]+)\]\[jaxdist[\w.]*\]")
LINK = re.compile(r"\[([^\[\]]+)\]\(([\w./#-]+)\)")


def make_notebook(page: Path, repository: str = "") -> dict:
    """The notebook of a page, as the JSON of Jupyter's format 4."""
    title, rest = page.read_text().split("\n\n", 1)
    cells = [_text(title), _installation(repository)]
    end = 0
    for match in CELL.finditer(rest):
        cells += [_text(_for_notebooks(rest[end : match.start()], repository)), _code(match[1], match[2] or "")]
        end = match.end()
    cells.append(_text(_for_notebooks(rest[end:], repository)))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": [cell for cell in cells if cell["source"]],
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 4,
    }


def _for_notebooks(markdown: str, repository: str) -> str:
    """Leaves out pictures, which cells draw, and links of the site, or makes them links to the repository."""

    def replace(match: re.Match) -> str:
        path = posixpath.normpath(posixpath.join("docs/notebooks", match[2]))
        return f"[{match[1]}]({repository}/blob/main/{path})" if repository else match[1]

    return LINK.sub(replace, REFERENCE.sub(r"\1", IMAGE.sub("", markdown)))


def _installation(repository: str) -> dict:
    if repository:
        return _code(f'%pip install -q "jaxdist @ git+{repository}" scikit-learn matplotlib\n', "")
    return _text("This notebook needs jaxdist, scikit-learn and matplotlib.")


def _text(markdown: str) -> dict:
    return {"cell_type": "markdown", "metadata": {}, "source": markdown.strip().splitlines(keepends=True)}


def _code(source: str, printed: str) -> dict:
    stream = {"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)}
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {},
        "outputs": [stream] if printed else [],
        "source": source.strip().splitlines(keepends=True),
    }


def write(repository: str = "") -> None:
    """Writes the notebooks of all pages."""
    NOTEBOOKS.mkdir(exist_ok=True)
    for page in sorted(PAGES.glob("*.md")):
        text = json.dumps(make_notebook(page, repository), indent=1, ensure_ascii=False)
        (NOTEBOOKS / f"{page.stem}.ipynb").write_text(text + "\n")


if __name__ == "__main__":
    write(os.environ.get("JAXDIST_REPOSITORY", "").rstrip("/"))
