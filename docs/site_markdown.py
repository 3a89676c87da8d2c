"""The Markdown of the site: an extension of Python-Markdown that fills in tables and leads links into the repository.

An extension, and not a hook of mkdocs, since Zensical, the successor of the theme, reads `markdown_extensions` and no
hooks. Both find it with `PYTHONPATH=docs`.
"""

from markdown import Extension
from markdown.preprocessors import Preprocessor
from public_names import with_tables
from repository_links import with_repository


class SitePreprocessor(Preprocessor):
    """Changes the text of a page before anything else reads it."""

    def run(self, lines: list[str]) -> list[str]:
        """The lines of the page, with tables and links."""
        return with_repository(with_tables("\n".join(lines))).split("\n")


class SiteExtension(Extension):
    """Registers the preprocessor."""

    def extendMarkdown(self, md):  # noqa: N802
        """Python-Markdown calls this for every page, and for every docstring."""
        md.preprocessors.register(SitePreprocessor(md), "site", priority=100)


def makeExtension(**options):  # noqa: N802
    """Python-Markdown finds the extension by this name."""
    return SiteExtension(**options)
