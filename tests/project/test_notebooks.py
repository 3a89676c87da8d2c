"""The notebooks are those of their pages, which `test_docs.py` runs."""

import json
import re
import runpy

import pytest
from paths import REPOSITORY
from repository_links import NOTEBOOKS, with_colab

PAGES = sorted((REPOSITORY / "docs" / "notebooks").glob("*.md"))
HOST = "https://github.com/team/jaxdist"
pytestmark = pytest.mark.skipif(
    not (REPOSITORY / "scripts/notebooks.py").exists(), reason="a source distribution does not write notebooks"
)


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(REPOSITORY / "scripts" / "notebooks.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_notebook_is_that_of_its_page(page, script):
    text = (NOTEBOOKS / f"{page.stem}.ipynb").read_text()
    installed = re.search(r"git\+([^\"\\]+)", text)
    expected = script["make_notebook"](page, installed[1] if installed else "")
    assert json.loads(text) == expected, "run `python scripts/notebooks.py`"


def test_every_notebook_has_a_page():
    assert [notebook.stem for notebook in sorted(NOTEBOOKS.glob("*.ipynb"))] == [page.stem for page in PAGES]


def test_cells_have_what_the_page_prints(script, tmp_path):
    page = tmp_path / "sums.md"
    page.write_text(
        "# Sums\n\nBy [`exact`][jaxdist.exact], [as ever](../faq.md#sums).\n\n"
        "```python\nprint(1 + 1)\n```\n\n```text\n2\n```\n\n"
        "```python\ndraw()\n```\n\n![A sum](../images/sum.svg)\n\nThe end.\n"
    )
    title, install, text, cell, figure, end = script["make_notebook"](page, HOST)["cells"]
    assert title["source"] == ["# Sums"]
    assert install["source"] == [f'%pip install -q "jaxdist @ git+{HOST}" scikit-learn matplotlib']
    assert text["source"] == [f"By `exact`, [as ever]({HOST}/blob/main/docs/faq.md#sums)."]
    assert (cell["source"], cell["outputs"][0]["text"]) == (["print(1 + 1)"], ["2\n"])
    assert (figure["source"], figure["outputs"], end["source"]) == (["draw()"], [], ["The end."])
    without = script["make_notebook"](page)["cells"]
    assert without[1]["source"] == ["This notebook needs jaxdist, scikit-learn and matplotlib."]
    assert without[2]["source"] == ["By `exact`, as ever."]


def test_a_page_links_to_colab_where_its_notebook_can_be_opened(script, tmp_path, monkeypatch):
    page = PAGES[0]
    monkeypatch.setattr("repository_links.NOTEBOOKS", tmp_path)
    (tmp_path / f"{page.stem}.ipynb").write_text(json.dumps(script["make_notebook"](page, HOST)))
    name = f"notebooks/{page.name}"
    link = f"https://colab.research.google.com/github/team/jaxdist/blob/main/examples/notebooks/{page.stem}.ipynb"
    assert link in with_colab("# Title\n\nText.", name, HOST)
    for other in ("", "https://example.org/team/jaxdist", "https://github.com/other/jaxdist"):
        assert with_colab("# Title\n\nText.", name, other) == "# Title\n\nText."
    assert with_colab("# Title\n\nText.", "faq.md", HOST) == "# Title\n\nText."
