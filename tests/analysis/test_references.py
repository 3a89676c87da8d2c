"""Papers of docstrings as BibTeX: every one can be read, and each has one entry and one key."""

import re
from collections import defaultdict
from functools import cache

import pytest
from readers_modules import modules_in
from sources import docstrings

import jaxdist as jd
from jaxdist._cli import main as cli
from jaxdist._cli.spellings import parse
from jaxdist.analysis.references import _REFERENCE, read_references

ENTRY = re.compile(r"@misc\{([a-z]+\d{4}[a-z0-9]+),\n((?:  \w+ = \{.+\},\n)+)\}")
FORM = 'write `Authors, "Title", venue, arXiv:ID, year`, where the venue and the ID may be missing'


@cache
def citing():
    return {place: text for place, text in docstrings().items() if "\nReferences:\n" in text}


def read_bibtex(text):
    """The fields of each entry, by key; fails for text that is of no entry."""
    assert not ENTRY.sub("", text).strip(), text
    return {key: dict(re.findall(r"^  (\w+) = \{(.+)\},$", body, re.MULTILINE)) for key, body in ENTRY.findall(text)}


def test_every_reference_can_be_read():
    assert len(citing()) > 150
    for place, docstring in citing().items():
        section = " ".join(docstring.partition("\nReferences:\n")[2].split())
        left = _REFERENCE.sub("", section)
        assert read_references(docstring), f"{place}: {FORM}"
        assert not re.search(r'"|arXiv|\b(19|20)\d\d\b|et al', left), f"{place}: {FORM}: {left}"


def test_a_paper_is_cited_alike_wherever_it_is():
    papers = defaultdict(set)
    for docstring in citing().values():
        for paper in read_references(docstring):
            for mark in (paper.key, paper.title.lower(), paper.eprint):
                papers[mark].add(paper)
    del papers[""]
    assert not {mark: found for mark, found in papers.items() if len(found) > 1}


def test_years_are_near_those_of_the_preprints():
    for place, docstring in citing().items():
        for paper in read_references(docstring):
            # A preprint may be posted after the publication, and a publication take its time.
            if paper.eprint:
                assert -1 <= int(paper.year) - 2000 - int(paper.eprint[:2]) <= 3, (place, paper)


def test_every_docstring_with_references_gives_valid_entries():
    for place, docstring in citing().items():
        method = type(place, (), {"__doc__": docstring})
        entries = read_bibtex(jd.analysis.bibtex(method))
        assert len(entries) == len(set(read_references(docstring)))
        for fields in entries.values():
            assert {"author", "title", "year"} <= set(fields)
            assert ("eprint" in fields) == ("archivePrefix" in fields)
            assert all(value.count("{") == value.count("}") for value in fields.values())


def test_entries_of_several_methods_are_there_once():
    text = jd.analysis.bibtex(jd.error_feedback, jd.compressors.scaled_sign, jd.power_sgd)
    entries = read_bibtex(text)
    assert len(entries) == text.count("@misc")
    assert entries["vogels2019powersgd"] == {
        "author": "Vogels and Karimireddy and Jaggi",
        "title": "{PowerSGD}: Practical Low-Rank Gradient Compression for Distributed Optimization",
        "year": "2019",
        "eprint": "1905.13727",
        "archivePrefix": "arXiv",
    }
    assert entries["karimireddy2019errorfeedback"]["author"] == "Karimireddy and others"


def test_names_of_two_words_and_venues_are_fields():
    entries = read_bibtex(jd.analysis.bibtex(jd.reducers.alq, jd.reducers.partitioned))
    assert entries["benbasat2024optimalapproximate"]["author"].startswith("{Ben Basat} and Ben-Itzhak and ")
    assert entries["peng2019genericcommunication"]["howpublished"] == "SOSP"


def test_a_method_without_a_paper_is_refused():
    with pytest.raises(ValueError, match="the docstring of exact cites no paper: leave it out"):
        jd.analysis.bibtex(jd.power_sgd, jd.exact)


def test_the_command_prints_the_papers_of_a_spelling(capsys):
    assert cli.main(["reducers", "diloco:H=50/ef:power_sgd:4", "--bibtex"]) == 0
    keys = set(read_bibtex(capsys.readouterr().out))
    assert {"douillard2023diloco", "vogels2019powersgd", "karimireddy2019errorfeedback"} <= keys
    # `ring` is the graph here, and no all-reduce.
    assert [method.__name__ for method in parse.find_methods("d_psgd:ring")] == ["d_psgd"]


def test_a_function_of_the_user_is_cited_by_its_docstring(tmp_path, monkeypatch, capsys):
    cited = '"""Mine.\n\n    References:\n      Ada, "A code", arXiv:2001.00001, 2020\n    """'
    source = f"def with_paper():\n    {cited}\n\n\ndef without():\n    pass\n"
    with modules_in(tmp_path, monkeypatch, own_papers=source):
        assert cli.main(["reducers", "ef:own_papers:with_paper:0.5", "--bibtex"]) == 0
        keys = set(read_bibtex(capsys.readouterr().out))
        assert any(key.startswith("ada2020") for key in keys)
        assert "karimireddy2019errorfeedback" in keys
        assert cli.main(["reducers", "ef:own_papers:without", "--bibtex"]) == 0
        assert "karimireddy2019errorfeedback" in read_bibtex(capsys.readouterr().out)
        assert cli.main(["reducers", "own_papers:without", "--bibtex"]) == 2
        assert "no paper is cited for own_papers:without" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["exact", "--bibtex"], "no paper is cited for exact"),
        (["--bibtex"], "--bibtex needs a name, as in jaxdist reducers power_sgd --bibtex"),
        (["powersgd", "--bibtex"], "unknown name 'powersgd'; did you mean power_sgd? known: "),
    ],
)
def test_names_without_papers_are_refused(arguments, message, capsys):
    assert cli.main(["reducers", *arguments]) == 2
    assert message in capsys.readouterr().err
