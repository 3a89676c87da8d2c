"""The notebooks are those of their pages, which `test_docs.py` runs."""

import json
import runpy
import sys

import pytest
import yaml
from paths import REPOSITORY
from repository_links import with_links

PAGES = sorted((REPOSITORY / "docs" / "notebooks").glob("*.md"))
NOTEBOOKS = REPOSITORY / "examples" / "notebooks"
HOST = "https://github.com/team/jaxdist"
pytestmark = pytest.mark.skipif(
    not (REPOSITORY / "scripts/notebooks.py").exists(), reason="a source distribution does not write notebooks"
)


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(REPOSITORY / "scripts" / "notebooks.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_notebook_is_that_of_its_page(page, script):
    found = json.loads((NOTEBOOKS / f"{page.stem}.ipynb").read_text())
    assert found == script["make_notebook"](page), "run `python scripts/notebooks.py`"


def test_every_notebook_has_a_page():
    assert [notebook.stem for notebook in sorted(NOTEBOOKS.glob("*.ipynb"))] == [page.stem for page in PAGES]


def test_cells_have_what_the_page_prints(script, tmp_path):
    page = tmp_path / "sums.md"
    page.write_text(
        "# Sums\n\n[Open](../../examples/notebooks/sums.ipynb){ .md-button }\n\n"
        "By [`exact`][jaxdist.exact], [as ever](../faq.md#sums).\n\n"
        "```python\nprint(1 + 1)\n```\n\n```text\n2\n```\n\n"
        "```python\ndraw()\n```\n\n![A sum](../images/sum.svg)\n\nThe end.\n"
    )
    title, install, text, cell, figure, end = script["make_notebook"](page, HOST)["cells"]
    assert title["source"] == ["# Sums"]
    assert install["source"] == [f'%pip install -q "jaxdist @ git+{HOST}@main" scikit-learn matplotlib']
    assert text["source"] == [f"By `exact`, [as ever]({HOST}/blob/main/docs/faq.md#sums)."]
    assert (cell["source"], cell["outputs"][0]["text"]) == (["print(1 + 1)"], ["2\n"])
    assert (figure["source"], figure["outputs"], end["source"]) == (["draw()"], [], ["The end."])
    without = script["make_notebook"](page)["cells"]
    assert without[1]["source"] == ["This notebook needs jaxdist, scikit-learn and matplotlib."]
    assert without[2]["source"] == ["By `exact`, as ever."]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_links_to_its_notebook_in_colab_where_that_can_be_opened(page):
    text = page.read_text()
    link = f"https://colab.research.google.com/github/team/jaxdist/blob/gh-pages/dev/notebooks/{page.stem}.ipynb"
    assert f"\n\n[Open in Colab]({link}){{ .md-button }}\n\n" in with_links(
        text, HOST, colab="team/jaxdist/blob/gh-pages/dev"
    )
    assert "Colab" not in with_links(text, HOST)


def test_notebooks_for_colab_install_the_library_of_their_revision(script, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["notebooks.py", str(tmp_path)])
    monkeypatch.delenv("JAXDIST_REPOSITORY", raising=False)
    with pytest.raises(SystemExit, match="JAXDIST_REPOSITORY"):
        script["main"]()
    monkeypatch.setenv("JAXDIST_REPOSITORY", f"{HOST}/")
    monkeypatch.setenv("JAXDIST_REVISION", "v0.1.0")
    script["main"]()
    assert sorted(path.stem for path in tmp_path.glob("*.ipynb")) == [page.stem for page in PAGES]
    for path in tmp_path.glob("*.ipynb"):
        cell = json.loads(path.read_text())["cells"][1]["source"][0]
        assert cell == f'%pip install -q "jaxdist @ git+{HOST}@v0.1.0" scikit-learn matplotlib'


@pytest.mark.skipif(not (REPOSITORY / ".github").exists(), reason="a source distribution has no workflows")
def test_the_site_is_published_with_the_notebooks_that_its_pages_open():
    steps = yaml.safe_load((REPOSITORY / ".github/workflows/docs.yml").read_text())["jobs"]["publish"]["steps"]
    commands = [step.get("run", "") for step in steps]
    (written,) = [i for i, command in enumerate(commands) if "scripts/notebooks.py docs/notebooks" in command]
    published = [i for i, command in enumerate(commands) if "mike deploy" in command]
    assert len(published) == 2
    for i in published:
        assert written < i
        # Where mike puts this version of the site.
        version = "$version" if '"$version"' in commands[i] else "dev"
        assert f"JAXDIST_COLAB=$GITHUB_REPOSITORY/blob/gh-pages/{version}" in commands[i]
