"""The papers of methods as BibTeX, read from the references of their docstrings."""

import inspect
import re
import unicodedata
from collections.abc import Callable
from typing import Any, NamedTuple

# Authors, "Title", venue, arXiv:ID, year: venue and ID may be missing. A name is one to three capitalized words.
_NAME = r"[^\W\d_][\w'’-]*(?: [^\W\d_][\w'’-]*){0,2}"
_REFERENCE = re.compile(
    rf'(?:^|(?<=[.;:] ))(?P<authors>(?:{_NAME}, )*{_NAME}(?: et al\.)?), "(?P<title>[^"]+)", '
    r"(?:(?P<venue>(?!arXiv)[A-Z][^,;\"]*), )?(?:arXiv:(?P<eprint>\d{4}\.\d{4,5}), )?(?P<year>\d{4})\b"
)
_SMALL_WORDS = frozenset({"", "a", "an", "and", "can", "for", "in", "is", "of", "on", "the", "to", "towards", "with"})
_ESCAPED = str.maketrans({mark: f"\\{mark}" for mark in "&%#_$"})


class Reference(NamedTuple):
    """A paper as a docstring cites it.

    Attributes:
      authors: family names; `others` is the last one if the list goes on.
      title: without quotes.
      year: of the publication, or of the preprint.
      venue: the conference or the journal; empty for a preprint.
      eprint: the number on arXiv; empty if there is none.
    """

    authors: tuple[str, ...]
    title: str
    year: str
    venue: str
    eprint: str

    @property
    def key(self) -> str:
        """The key of the entry: the first author, the year, and a name before a colon or else the first two words."""
        name, _, _ = self.title.partition(":")
        words = [_to_ascii(word) for word in re.split(r"[\s-]", name)]
        words = [word for word in words if word not in _SMALL_WORDS and not word.isdigit()]
        return f"{_to_ascii(self.authors[0])}{self.year}{''.join(words[:2])}"


def read_references(docstring: str) -> list[Reference]:
    """Returns the papers in the last section of a docstring, that of the references.

    Each is `Authors, "Title", venue, arXiv:ID, year`, of which the venue and the ID may be missing.

    Examples:
      >>> import jaxdist as jd
      >>> from jaxdist.analysis.references import read_references
      >>> [(paper.authors[0], paper.year, paper.eprint) for paper in read_references(jd.top_k.__doc__)]
      [('Stich', '2018', '1809.07599'), ('Lin', '2017', '1712.01887')]
    """
    _, _, section = docstring.partition("References:\n")
    found = []
    for match in _REFERENCE.finditer(" ".join(section.split())):
        authors = match["authors"].replace(" et al.", ", others").split(", ")
        found.append(
            Reference(tuple(authors), match["title"], match["year"], match["venue"] or "", match["eprint"] or "")
        )
    return found


def bibtex(*methods: Callable[..., Any]) -> str:
    """Writes the papers that the docstrings of methods cite as BibTeX, each once.

    Entries are `@misc`, with the number on arXiv as `eprint`, and a venue as `howpublished`. Names are family names,
    as in the docstrings. Capitals inside words, as in PowerSGD, are protected from styles that lower titles.

    Args:
      methods: public functions or classes of jaxdist, such as `jaxdist.power_sgd`, or your own with such references.

    Returns:
      The text of a `.bib` file.

    Raises:
      ValueError: the docstring of a method cites no paper.

    Examples:
      >>> import jaxdist as jd
      >>> print(jd.analysis.bibtex(jd.qsgd))
      @misc{alistarh2016qsgd,
        author = {Alistarh and Grubic and Li and Tomioka and Vojnovic},
        title = {{QSGD}: communication-efficient {SGD} via gradient quantization and encoding},
        year = {2016},
        eprint = {1610.02132},
        archivePrefix = {arXiv},
      }
    """
    entries: dict[str, str] = {}
    for method in methods:
        found = read_references(inspect.getdoc(method) or "")
        if not found:
            name = getattr(method, "__name__", repr(method))
            raise ValueError(f"the docstring of {name} cites no paper: leave it out")
        entries |= {reference.key: _write_entry(reference) for reference in found}
    return "\n\n".join(entries.values())


def _write_entry(reference: Reference) -> str:
    # A family name of two words would be read as a given name and a family name.
    authors = [f"{{{name}}}" if " " in name else name for name in reference.authors]
    fields = {"author": " and ".join(authors), "title": _protect_capitals(reference.title), "year": reference.year}
    if reference.venue:
        fields["howpublished"] = reference.venue.translate(_ESCAPED)
    if reference.eprint:
        fields |= {"eprint": reference.eprint, "archivePrefix": "arXiv"}
    lines = [f"  {name} = {{{value}}}," for name, value in fields.items()]
    return "\n".join([f"@misc{{{reference.key},", *lines, "}"])


def _protect_capitals(title: str) -> str:
    words = title.translate(_ESCAPED).split(" ")
    # As in `signSGD` and `D²`.
    return " ".join(re.sub(r"\w*[^\W_][A-Z]\w*|[A-Z]²", r"{\g<0>}", word) for word in words)


def _to_ascii(word: str) -> str:
    """The letters and digits of a word without accents, in lower case."""
    plain = unicodedata.normalize("NFKD", word).encode("ascii", "ignore").decode()
    return re.sub(r"\W", "", plain).lower()
