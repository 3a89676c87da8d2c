"""Writes the notebooks of `examples/notebooks` from the pages of `docs/notebooks`: `python scripts/notebooks.py`.

A page is plain Markdown, which the site shows and a test runs. Each block of Python becomes a cell, with the output
that the page shows after it; what is between blocks becomes text. A notebook says that the library must be installed,
and has no links.

    python scripts/notebooks.py docs/notebooks

writes notebooks that Colab can open, for the site: they install the library from the repository that
`JAXDIST_REPOSITORY` names (`https://host/owner/jaxdist`), in the revision `JAXDIST_REVISION`, where their links lead.
"""

import json
import os
import posixpath
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "notebooks"
NOTEBOOKS = ROOT / "examples" / "notebooks"
# A block of Python, and the block of its output right after it.
CELL = re.compile(r"^```python\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
IMAGE = re.compile(r"^!\[[^\]]*\]\([^)]*\)\n*", re.MULTILINE)
REFERENCE = re.compile(r"\[([^\[\]]+)\]\[jaxdist[\w.]*\]")
LINK = re.compile(r"\[([^\[\]]+)\]\(([\w./#-]+)\)")
# The link of a page to its notebook.
BUTTON = re.compile(r"^\[.*\]\(.*\)\{.*\}\n*", re.MULTILINE)


def make_notebook(page: Path, repository: str = "", revision: str = "main") -> dict:
    """The notebook of a page, as the JSON of Jupyter's format 4."""
    title, rest = page.read_text().split("\n\n", 1)
    cells = [_text(title), _installation(repository, revision)]
    end = 0
    for match in CELL.finditer(rest):
        between = _for_notebooks(rest[end : match.start()], repository, revision)
        cells += [_text(between), _code(match[1], match[2] or "")]
        end = match.end()
    cells.append(_text(_for_notebooks(rest[end:], repository, revision)))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": [cell for cell in cells if cell["source"]],
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 4,
    }


def _for_notebooks(markdown: str, repository: str, revision: str) -> str:
    """Leaves out pictures, which cells draw, and links of the site, or makes them links to the repository."""

    def replace(match: re.Match) -> str:
        path = posixpath.normpath(posixpath.join("docs/notebooks", match[2]))
        return f"[{match[1]}]({repository}/blob/{revision}/{path})" if repository else match[1]

    return LINK.sub(replace, REFERENCE.sub(r"\1", BUTTON.sub("", IMAGE.sub("", markdown))))


def _installation(repository: str, revision: str) -> dict:
    if repository:
        return _code(f'%pip install -q "jaxdist @ git+{repository}@{revision}" scikit-learn matplotlib\n', "")
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


def write(folder: Path = NOTEBOOKS, repository: str = "", revision: str = "main") -> None:
    """Writes the notebooks of all pages."""
    for page in sorted(PAGES.glob("*.md")):
        text = json.dumps(make_notebook(page, repository, revision), indent=1, ensure_ascii=False)
        (folder / f"{page.stem}.ipynb").write_text(text + "\n")


def main() -> None:
    """Writes the notebooks of the repository, or into a folder those that Colab can open."""
    if len(sys.argv) == 1:
        write()
        return
    repository = os.environ.get("JAXDIST_REPOSITORY", "").rstrip("/")
    if not repository:
        raise SystemExit("JAXDIST_REPOSITORY must name the repository that notebooks install the library from")
    write(Path(sys.argv[1]), repository, os.environ.get("JAXDIST_REVISION") or "main")


if __name__ == "__main__":
    main()
