"""A hook of mkdocs: what pages link to in the repository outside of `docs`, such as reports, leads to its host.

Notebooks get a link that opens them in Colab, where the repository is on GitHub and they install the library from it.

In a clone and on the host such relative links work as they are. On the site they become links to the repository that
`JAXDIST_REPOSITORY` names (`https://host/owner/jaxdist`), in the revision `JAXDIST_REVISION`; without it, their text.
"""

import os
import posixpath
import re
from pathlib import Path

NOTEBOOKS = Path(__file__).parent.parent / "examples" / "notebooks"
# The attributes of a button go with its link.
LINK = re.compile(r"\[(?P<text>[^\[\]]+)\]\((?P<target>(?:\.\./)+[\w./-]+)\)(?P<attributes>\{[^}]*\})?")


def with_links(markdown: str, page: str, repository: str, revision: str = "main") -> str:
    """The text of a page, by its path under `docs`, with links that lead out of `docs` to a repository, or without."""

    def replace(match: re.Match) -> str:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), match["target"]))
        if path.startswith("docs/"):
            return match[0]
        text, attributes = match["text"], match["attributes"] or ""
        if not repository:
            return "" if attributes else text
        kind = "blob" if posixpath.splitext(path)[1] else "tree"
        return f"[{text}]({repository}/{kind}/{revision}/{path}){attributes}"

    return LINK.sub(replace, markdown)


def with_colab(markdown: str, page: str, repository: str, revision: str = "main") -> str:
    """The text of a page, below its title with a link to Colab if it is that of a notebook."""
    folder, name = posixpath.split(posixpath.splitext(page)[0])
    notebook = NOTEBOOKS / f"{name}.ipynb"
    is_open = repository.startswith("https://github.com/") and folder == "notebooks" and notebook.exists()
    # `scripts/notebooks.py` writes the name of the repository into the cell that installs the library.
    if not is_open or f"git+{repository}" not in notebook.read_text():
        return markdown
    path = f"{repository.removeprefix('https://github.com/')}/blob/{revision}/examples/notebooks/{name}.ipynb"
    link = f"[Open in Colab](https://colab.research.google.com/github/{path}){{ .md-button }}"
    title, rest = markdown.split("\n\n", 1)
    return f"{title}\n\n{link}\n\n{rest}"


def on_page_markdown(markdown: str, page, **options) -> str:
    """Changes the links of a page; mkdocs calls this for every page."""
    del options
    repository = os.environ.get("JAXDIST_REPOSITORY", "").rstrip("/")
    revision = os.environ.get("JAXDIST_REVISION") or "main"
    linked = with_links(markdown, page.file.src_uri, repository, revision)
    return with_colab(linked, page.file.src_uri, repository, revision)
