"""Links of pages to what is in the repository outside of `docs`, such as reports, lead to its host.

In a clone and on the host such relative links work as they are. On the site they become links to the repository that
`JAXDIST_REPOSITORY` names (`https://host/owner/jaxdist`), in the revision `JAXDIST_REVISION`; without it, their text.

A link of a page to its notebook opens that in Colab. `JAXDIST_COLAB` says where the notebooks are that install the
library, as in `owner/jaxdist/blob/gh-pages/dev`: beside their pages. Without it there is no such link.
"""

import os
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
# The attributes of a button go with its link.
LINK = re.compile(r"\[(?P<text>[^\[\]]+)\]\((?P<target>(?:\.\./)+(?P<path>[\w./-]+))\)(?P<attributes>\{[^}]*\})?")
COLAB = "https://colab.research.google.com/github"


def with_links(markdown: str, repository: str, revision: str = "main", colab: str = "") -> str:
    """The text of a page with links to a repository and its notebooks, or without."""

    def replace(match: re.Match) -> str:
        text, path, attributes = match["text"], match["path"], match["attributes"] or ""
        # What is no file of the repository is a page beside this one; mkdocs says if there is none.
        if not (ROOT / path).exists():
            return match[0]
        if path.endswith(".ipynb"):
            name = Path(path).name
            return f"[{text}]({COLAB}/{colab}/notebooks/{name}){attributes}" if colab else ""
        if not repository:
            return "" if attributes else text
        kind = "blob" if (ROOT / path).is_file() else "tree"
        return f"[{text}]({repository}/{kind}/{revision}/{path}){attributes}"

    return LINK.sub(replace, markdown)


def with_repository(markdown: str) -> str:
    """The text of a page with the links that the environment asks for."""
    repository = os.environ.get("JAXDIST_REPOSITORY", "").rstrip("/")
    revision = os.environ.get("JAXDIST_REVISION") or "main"
    return with_links(markdown, repository, revision, os.environ.get("JAXDIST_COLAB", ""))
