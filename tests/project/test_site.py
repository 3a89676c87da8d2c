"""The built site: what its search finds, and what a reader sees in a browser."""

import html
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from browser import Page, find_chromium, open_browser, serve
from matplotlib import pyplot as plt
from paths import REPOSITORY

pytestmark = pytest.mark.slow
in_browser = pytest.mark.skipif(find_chromium() is None, reason="Chromium is not installed")

GITHUB = "https://github.com/owner/jaxdist"
# What newcomers look for, and the page that they need.
SEARCHES = {
    "nnx": "how-to/use-flax/",
    "dropout": "how-to/randomness/",
    "dataloader": "how-to/load-data/",
    "federated": "how-to/federated-and-edge/",
    "orbax": "reference/checkpoint/",
    "fsdp": "explanation/glossary/",
    "hsdp": "explanation/glossary/",
    "ema": "how-to/evaluate-while-training/",
    "progress bar": "explanation/glossary/",
    "hugging face": "explanation/glossary/",
    "colab": "explanation/glossary/",
    "torchrun": "explanation/glossary/",
    "accelerate": "explanation/glossary/",
}
# Pages with figures, tabs, tables and long code.
LOOKED_AT = (
    *("", "all-of-jaxdist/", "how-to/how-to-choose-a-reducer/", "how-to/use-flax/", "reference/", "what-works/"),
    *("papers/", "explanation/glossary/", "explanation/measurements/", "reference/errors/", "board/"),
    *("notebooks/first-steps/", "how-to/islands-over-a-bucket/", "how-to/train-on-spot-machines/"),
)
SCROLLING_CODE = """[...document.querySelectorAll('article pre > code')]
    .filter(code => code.offsetParent && code.scrollWidth > code.clientWidth).map(code => code.innerText)"""
SCROLLING_TABLES = """[...document.querySelectorAll('article .md-typeset__scrollwrap')]
    .filter(table => table.offsetParent && table.scrollWidth > table.clientWidth).map(table => table.innerText)"""
BROKEN_IMAGES = """[...document.images]
    .filter(image => image.offsetParent && !image.naturalWidth).map(image => image.src)"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built once and strictly, with the links to its repository that it is published with."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    settings = {"NO_MKDOCS_2_WARNING": "1", "JAXDIST_REPOSITORY": GITHUB, "PYTHONPATH": str(REPOSITORY / "docs")}
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=900, env=os.environ | settings)
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with serve(site) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with open_browser() as page:
        yield page


def test_the_index_of_the_search_has_what_newcomers_look_for(site):
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    texts = {entry["location"]: f"{entry['title']} {entry['text']}".lower() for entry in entries}
    for word, page in SEARCHES.items():
        assert any(location.startswith(page) and word in text for location, text in texts.items()), word


def test_what_a_function_returns_is_one_item(site):
    """And not one for each line of the docstring."""
    lists = [
        (page.parent.name, found)
        for page in sorted(site.glob("reference/*/index.html"))
        for found in re.findall(r"Returns:</span></p>\s*<ul>(.*?)</ul>", page.read_text(), re.DOTALL)
    ]
    assert len(lists) > 30
    assert [name for name, found in lists if found.count("doc-section-item") != 1] == []


def count_words(page: Path) -> int:
    """The words of an article as a reader sees them, those of code too."""
    article = re.search(r"<article.*?</article>", page.read_text(), re.DOTALL)[0]
    shown = re.sub(r"<(script|style|svg).*?</\1>", "", article, flags=re.DOTALL)
    return len(re.findall(r"\w[\w'.-]*", html.unescape(re.sub(r"<[^>]+>", " ", shown))))


def test_pages_of_the_reference_can_be_read_in_one_go(site):
    """But for the index, whose tables are folded."""
    found = {page.parent.name: count_words(page) for page in site.glob("reference/*/index.html")}
    assert len(found) > 40
    assert {name: words for name, words in found.items() if words > 4000} == {}, "divide the page by method"


@in_browser
def test_a_page_loads_nothing_from_other_servers(site, address, browser):
    """Nor the stars from GitHub, for which the theme asks where a site has a repository."""
    assert f'<a href="{GITHUB}" title="Go to repository" class="md-source">' in (site / "index.html").read_text()
    browser.show_as(1280)
    browser.requests.clear()
    for name in LOOKED_AT:
        browser.forget(address)
        browser.open(f"{address}/{name}")
    assert len(browser.requests) > len(LOOKED_AT)
    assert [asked for asked in browser.requests if not asked.startswith((address, "about:", "data:"))] == []


@in_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(("width", "phone"), [(1280, False), (390, True)], ids=["desktop", "phone"])
def test_pages_are_drawn_without_complaints(address, browser, width, phone, dark):
    browser.show_as(width, phone=phone, dark=dark)
    for name in LOOKED_AT:
        browser.forget(address)  # a reader who comes for the first time
        browser.open(f"{address}/{name}")
        assert browser.evaluate("document.body.dataset.mdColorScheme") == ("slate" if dark else "default")
        assert not browser.complaints, name
        assert browser.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0, name
        assert browser.evaluate(BROKEN_IMAGES) == [], name
        if not phone:
            assert browser.evaluate(SCROLLING_CODE) == [], name
            assert browser.evaluate(SCROLLING_TABLES) == [], name
        pixels = plt.imread(io.BytesIO(browser.screenshot()))[..., :3]
        assert pixels.shape[:2] == (900, width)
        assert len(np.unique(np.round(pixels.reshape(-1, 3), 1), axis=0)) > 10, f"{name} is blank"
        assert (pixels.mean() < 0.5) == dark, name


# Types a word into the box of the search, and again while the page is still starting; true once there are results.
TYPE_AND_LOOK = """(() => {{
    const box = document.querySelector('[data-md-component=search-query]');
    box.focus();
    box.value = '{word}';
    box.dispatchEvent(new Event('keyup', {{bubbles: true}}));
    return document.querySelector('.md-search-result__item a') !== null;
}})()"""


@in_browser
def test_the_search_box_finds_what_newcomers_look_for(address, browser):
    browser.show_as(1280)
    for word, page in SEARCHES.items():
        browser.open(f"{address}/")
        browser.wait_for(TYPE_AND_LOOK.format(word=word))
        links = "[...document.querySelectorAll('.md-search-result__item a')].map(link => link.pathname)"
        assert f"/{page}" in browser.evaluate(links), word
        assert not browser.complaints
