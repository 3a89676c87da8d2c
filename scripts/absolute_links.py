"""A hook of hatchling: the links of the README, made absolute for a package index, and the URLs of the project.

The README links to files of the repository by relative paths, which work on every host of it and in a clone, but not
on a page of a package index. `JAXDIST_REPOSITORY` names the repository (`https://host/owner/jaxdist`); without it, as
on a laptop, the package gets the README as it is, and no URLs.
"""

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

# `](target)` and `](target "title")`: links and pictures, except those with a scheme and those within the page.
LINK = re.compile(r"(?P<before>!?\[(?:[^\[\]]|!?\[[^\[\]]*\]\([^)]*\))*\]\()(?P<target>[^)\s]+)")
PICTURES = (".png", ".svg")


def make_absolute(text: str, repository: str, revision: str) -> str:
    """The markdown with links that lead into a revision of the repository."""

    def replace(match: re.Match) -> str:
        # A picture inside a link has a link of its own.
        before, target = LINK.sub(replace, match["before"]), match["target"]
        if re.match(r"[a-z]+:|#", target):
            return before + target
        if target.startswith("../../"):  # from a file's page to the pages of the repository
            return before + f"{repository}/{target.removeprefix('../../')}"
        page = "raw" if target.endswith(PICTURES) else "blob"
        return before + f"{repository}/{page}/{revision}/{target}"

    return LINK.sub(replace, text)


class AbsoluteLinks(MetadataHookInterface):
    """Fills in `readme` and `urls`, which pyproject.toml declares as dynamic."""

    def update(self, metadata: dict) -> None:
        """Sets both fields, unless a source distribution has brought them."""
        repository = os.environ.get("JAXDIST_REPOSITORY", "").rstrip("/")
        revision = os.environ.get("JAXDIST_REVISION") or f"v{metadata['version']}"
        if "readme" not in metadata:
            text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
            text = make_absolute(text, repository, revision) if repository else text
            metadata["readme"] = {"content-type": "text/markdown", "text": text}
        if repository and "urls" not in metadata:
            metadata["urls"] = {
                "Repository": repository,
                "Documentation": f"{repository}/tree/{revision}/docs",
                "Changelog": f"{repository}/blob/{revision}/CHANGELOG.md",
                "Issues": f"{repository}/issues",
            }
