"""The documentation runs, and every public name has its place in the reference."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from inspect import get_annotations, isclass, isfunction
from pathlib import Path
from pkgutil import walk_packages
from textwrap import dedent

import jax
import optax
import pytest
from paths import REPOSITORY
from public_names import (
    contents_for_models,
    documented,
    list_pages,
    public_names,
    read_site,
    resolve,
    stability_of,
    summarize,
    tables,
    with_contents,
    with_sentences,
    with_stability,
)
from repository_links import LINK, with_links
from transcripts import assert_alike

import jaxdist
from jaxdist.asynchronous.protocol import Rule
from jaxdist.compressors import Compressor
from jaxdist.reducers import Reducer

ROOT = REPOSITORY
PAGES = sorted([*ROOT.glob("README.md"), *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^( *)```(\w+)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
# What fits beside the navigation on a laptop. Blocks of output, `text`, wrap instead.
COLUMNS = 84
# Pages that a newcomer follows line by line: what they show is what the blocks print, on this machine too.
TRANSCRIPTS = (
    *("docs/index.md", "docs/all-of-jaxdist.md", "docs/how-to/use-flax.md", "docs/how-to/run-on-many-processes.md"),
    *("docs/how-to/train-a-language-model.md", "docs/how-to/tensor-parallelism.md"),
    *("docs/how-to/keep-your-shardings.md", "docs/how-to/train-on-spot-machines.md"),
    "docs/how-to/islands-over-a-bucket.md",
    *(f"docs/notebooks/{name}.md" for name in ("first-steps", "choose-a-reducer", "new-compressor")),
    "docs/notebooks/diloco-and-islands.md",
)
SHOWN = re.compile(r"^( *)```\n\n\1```text\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[tuple[int, str]]:
    """The line number and the text of each Python block; `py`, `pycon` and `shell` blocks are not run."""
    text = page.read_text()
    found = BLOCK.finditer(text)
    # A block inside a tab is indented.
    return [(text.count("\n", 0, match.start(2)), dedent(match[2])) for match in found]


# The block of the README has a test of its own. These pages compile many programs.
NAMES = ("all-of-jaxdist", "first-steps", "new-compressor", "diloco-and-islands", "how-to-choose-a-reducer")
LONG = {f"{name}.md": pytest.mark.slow for name in NAMES}
RUN = [pytest.param(page, marks=LONG.get(page.name, ())) for page in PAGES if blocks(page) and page.name != "README.md"]


@contextlib.contextmanager
def keeping_mesh():
    before = jax.sharding.get_mesh()
    try:
        yield
    finally:
        jax.set_mesh(before)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("page", RUN, ids=page_id)
def test_page_runs(page, capsys):
    namespace = {"__name__": "__main__"}
    # With the settings of a reader, not with the stricter ones of our tests; a page may set a mesh for good.
    with jax.numpy_rank_promotion("allow"), keeping_mesh():
        for line, code in blocks(page):
            # Line numbers of the page, so that a traceback points into it.
            exec(compile("\n" * line + code, str(page), "exec"), namespace)
            printed = capsys.readouterr().out
            if printed and page_id(page) in TRANSCRIPTS:
                assert_alike(printed, shown_after(page, line + code.count("\n")))


def shown_after(page: Path, line: int) -> str:
    """The block of output that follows the block of code that ends before this line."""
    rest = "\n".join(page.read_text().split("\n")[line:])
    found = SHOWN.match(rest)
    assert found, f"show what the block prints, at {page}:{line + 1}"
    return dedent(found[2])


def test_a_transcript_that_is_out_of_date_fails():
    assert_alike("step 0: loss 0.500, 18,277 bytes\n", "step 0: loss 0.508, 18,277 bytes\n")
    for stale in ("step 0: loss 0.600, 18,277 bytes\n", "step 0: loss 0.500, 18,278 bytes\n", "loss 0.500\n"):
        with pytest.raises(AssertionError):
            assert_alike("step 0: loss 0.500, 18,277 bytes\n", stale)


def test_powersgd_on_a_flax_model_takes_forty_lines():
    """From the installation to the bytes that a worker sends: the first block of the page, and what it shows."""
    page = ROOT / "docs/how-to/use-flax.md"
    line, code = blocks(page)[0]
    assert sum(bool(text.strip()) for text in code.splitlines()) <= 40
    assert "power_sgd" in code
    assert "nnx.Module" in code
    assert re.search(r"^one worker sends +[\d,]+$", shown_after(page, line + code.count("\n")), re.MULTILINE)


def test_the_tab_of_equinox_prints_what_it_shows(capsys):
    """Fenced as `py`, which is not run with the page: equinox is not among the dependencies."""
    pytest.importorskip("equinox", reason="equinox is not installed")
    page = ROOT / "docs/how-to/use-flax.md"
    text = page.read_text()
    tab = re.search(r"^    ```py\n(.*?)^    ```$", text, re.MULTILINE | re.DOTALL)
    imports = blocks(page)[0][1].split("\n\n\nclass")[0]
    with jax.numpy_rank_promotion("allow"):
        exec(f"{imports}\n{dedent(tab[1])}", {"__name__": "__main__"})
    assert_alike(capsys.readouterr().out, shown_after(page, text.count("\n", 0, tab.end())))


@pytest.mark.slow
def test_two_processes_print_what_the_page_shows(tmp_path):
    page = ROOT / "docs/how-to/run-on-many-processes.md"
    (tmp_path / "train.py").write_text(blocks(page)[0][1])
    shown = re.search(r"^jaxdist launch -n 2 train.py\n```\n\n```text\n(.*?)^```$", page.read_text(), re.M | re.S)[1]
    # One device in each process, as on a machine without the settings of our tests.
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "NPROC")}
    command = [sys.executable, "-m", "jaxdist.processes.launch", "-n", "2", "train.py"]
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    # gloo announces its peers.
    printed = [line for line in run.stdout.splitlines(keepends=True) if "[Gloo]" not in line]
    assert_alike("".join(printed), shown)


def run_readme(program: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines that the program prints, with the settings of a reader."""
    with jax.numpy_rank_promotion("allow"):
        exec(compile(program, "README.md", "exec"), {"__name__": "__main__"})
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("steps", [1, pytest.param(101, marks=pytest.mark.slow)])
def test_diff_of_the_readme_runs_before_and_after_and_prints_what_it_says(steps, capsys):
    page = (ROOT / "README.md").read_text()
    lines = re.search(r"^```diff\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1].splitlines()
    before, after = ("\n".join(line[1:] for line in lines if not line.startswith(sign)) for sign in "+-")
    assert [code.rstrip() for _, code in blocks(ROOT / "README.md")] == [after]
    signs = [line[0] for line in lines if line[:1] in ("+", "-") and line[1:]]
    assert (signs.count("+"), signs.count("-")) == (8, 2)  # "Eight lines in, two out"

    shown = re.search(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1].splitlines()
    printed, seen = run_readme(after.replace("range(101)", f"range({steps})"), capsys), 1 + steps // 50
    assert printed[seen:] == shown[3:]
    losses = [[float(line.split()[-1]) for line in output[:seen]] for output in (printed, shown)]
    assert losses[0] == pytest.approx(losses[1], abs=0.02)

    # One step: bytes do not depend on their number.
    one_step = [program.replace("range(101)", "range(1)") for program in (before, after)]
    plain = run_readme(one_step[0], capsys)
    exact = run_readme(one_step[1].replace("jd.error_feedback(jd.power_sgd(rank=4))", "jd.exact()"), capsys)
    assert exact[0] == plain[0]
    assert f"sends {exact[-1].split()[-1]} bytes" in page.replace("\n", " ")


def long_lines(page: Path) -> Iterator[str]:
    """The lines of code blocks that a reader would have to scroll to the side."""
    text = page.read_text()
    for match in FENCED.finditer(text):
        indent, language, code = match.groups()
        first = text.count("\n", 0, match.start(3)) + 1
        for number, line in enumerate(code.splitlines(), first):
            if language != "text" and len(line) - len(indent) > COLUMNS:
                yield f"{page.relative_to(ROOT)}:{number}"


def test_code_needs_no_scrolling():
    found = [line for page in sorted(ROOT.glob("docs/**/*.md")) for line in long_lines(page)]
    assert not found, f"at most {COLUMNS} columns: ruff format --line-length {COLUMNS} -"


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/how-to/*.md")), ids=page_id)
def test_a_guide_shows_what_it_prints(page):
    text = page.read_text()
    assert any("print(" in code for _, code in blocks(page)), "print a result"
    # The output follows its block, at most one sentence later.
    shown = re.search(r"print\((?:(?!```).)*?^```\n\n(?:[^\n`]+\n+){0,2}```text\n", text, re.MULTILINE | re.DOTALL)
    assert shown, "show what a block prints in a ```text block right after it"


def test_every_public_name_is_on_a_reference_page():
    shown = [resolve(name) for name in documented()]
    modules = public_names()
    missing = [
        f"{module}.{name}"
        for module, names in modules.items()
        for name in sorted(names)
        if f"{module}.{name}" not in modules and not any(resolve(f"{module}.{name}") is value for value in shown)
    ]
    assert not missing, f"add `::: name` to a page of docs/reference for {', '.join(missing)}"


def test_the_page_about_versions_says_how_stable_each_room_is():
    page = (ROOT / "docs/stability.md").read_text()
    levels = dict(re.findall(r"^\| `(jaxdist[.\w]*)` \| (\w+) \|$", page, re.MULTILINE))
    rooms = {module for module, names in public_names().items() if names} - {"jaxdist"}
    assert levels == {module: stability_of(module) for module in rooms}
    assert set(levels.values()) == {"stable", "provisional", "experimental"}


def test_a_page_of_the_reference_says_which_of_its_rooms_may_change():
    page = "# Islands\n\nText.\n\n::: jaxdist.islands.join\n\n::: jaxdist.zero.shard\n"
    line = "*`jaxdist.islands` is [provisional](../stability.md).*"
    assert with_stability(page) == page.replace("# Islands\n", f"# Islands\n\n{line}\n")
    stable = page.replace("jaxdist.islands.join", "jaxdist.reducers.exact")
    assert with_stability(stable) == stable


def test_the_list_for_language_models_has_links_and_first_sentences():
    nav = [{"Guides": [{"Log metrics": "how-to/log-metrics.md"}, {"Tools": ["faq.md", {"All": "reference/index.md"}]}]}]
    text = contents_for_models("A library", nav)
    assert text.startswith(
        "# jaxdist\n\n> A library.\n\n## Guides\n\n- [Log metrics](how-to/log-metrics/): The library "
    )
    assert "- [All](reference/): Every public name of jaxdist" in text


def test_the_list_for_language_models_is_that_of_the_pages():
    found = (ROOT / "docs/llms.txt").read_text()
    assert found == list_pages(), "run `python docs/public_names.py`"
    assert "- [First steps](notebooks/first-steps/): This notebook trains on handwritten digits" in found


def test_the_site_keeps_to_what_the_successor_of_its_theme_reads():
    """Zensical ignores hooks and unknown plugins, and says nothing."""
    site = read_site()
    assert "hooks" not in site
    names = [name for entry in site["plugins"] for name in (entry if isinstance(entry, dict) else [entry])]
    assert names == ["search", "mkdocstrings"]
    # What the pages need of ours is an extension of Markdown.
    assert "site_markdown" in site["markdown_extensions"]
    markdown = pytest.importorskip("markdown", reason="the site is not built here")
    text = markdown.Markdown(extensions=["site_markdown"]).convert("[report](../../benchmarks/README.md)")
    assert text == "<p>report</p>"


def test_the_table_of_the_reference_has_every_public_name():
    table = tables()
    missing = [
        f"{module}.{name}"
        for module, names in public_names().items()
        for name in names
        if not re.search(rf"^\| \[`{name}`\](\[jaxdist\.\S+\]|\(#jaxdist\w+\)) \|", table, re.MULTILINE)
    ]
    assert not missing, f"export them from their `__init__.py` as `from .x import y as y`: {', '.join(missing)}"
    # Python-Markdown shows the backslash of a bar inside code.
    assert not re.findall(r"^\|[^`\n]*(?:`[^`\n]*`[^`\n]*)*`[^`\n]*\\\|", table, re.MULTILINE)
    page = (ROOT / "docs/reference/index.md").read_text()
    assert "<!-- tables of public names -->" in page


def test_what_works_has_every_method_and_calls_no_helper_a_rule():
    page = (ROOT / "docs/what-works.md").read_text()
    linked = [resolve(name) for name in re.findall(r"\]\[(jaxdist[\w.]*)\]", page)]
    made = (Compressor, Reducer, Rule, optax.GradientTransformation, optax.GradientTransformationExtraArgs)
    found = {
        f"{module}.{name}": resolve(f"{module}.{name}") for module, names in public_names().items() for name in names
    }
    methods = {name: value for name, value in found.items() if isfunction(value) and returned(value) in made}
    assert len(methods) > 50
    missing = [f"[`{name.rpartition('.')[2]}`][{name}]" for name, value in methods.items() if value not in linked]
    assert not missing, f"add to a table in docs/what-works.md: {', '.join(missing)}"
    for row in ("servers", "local models", "without a server"):
        (names,) = re.findall(rf"^\| {row} \| (.*) \|$", page, re.M)
        for name in re.findall(r"\]\[(jaxdist[\w.]*)\]", names):
            assert returned(resolve(name)) is Rule, f"{name} returns no rule: move it to another row of what-works.md"


def returned(function):
    return get_annotations(function).get("return")


def test_a_long_page_of_the_reference_starts_with_a_table_of_its_entries():
    page = "# Sums\n\nAll of them.\n\n## Exact\n\n" + "\n\n".join(
        f"::: jaxdist.{name}" for name in ("exact", "power_sgd", "compressed", "two_shot")
    )
    table, rest = with_contents(page).removeprefix("# Sums\n\nAll of them.\n\n").split("\n\n", 1)
    assert [row.split("|")[1].strip() for row in table.splitlines()[2:]] == [
        f"[`{name}`][jaxdist.{name}]" for name in ("exact", "power_sgd", "compressed", "two_shot")
    ]
    assert rest == page.removeprefix("# Sums\n\nAll of them.\n\n")
    short = page.split("\n\n::: jaxdist.two_shot")[0]
    assert with_contents(short) == short


def test_each_method_that_works_has_a_sentence():
    page = (
        "| kind | names |\n|---|---|\n| means | [`exact`][jaxdist.exact], [`two_shot`][jaxdist.two_shot], `jaxdist` |\n"
    )
    rows = with_sentences(f"Text.\n\n{page}\nText.\n").splitlines()[4:-2]
    assert [row.split(" | ")[:2] for row in rows] == [
        ["| means", "[`exact`][jaxdist.exact]"],
        ["| ", "[`two_shot`][jaxdist.two_shot]"],
        ["| ", "`jaxdist`"],
    ]
    assert rows[0].endswith(f"| {summarize(jaxdist.exact)} |")
    works = (ROOT / "docs/what-works.md").read_text()
    silent = re.findall(r"^\|.*\| (\S+\]\[jaxdist\S+) \|  \|$", with_sentences(works), re.MULTILINE)
    assert not silent, f"begin the docstring with a sentence: {', '.join(silent)}"


@pytest.mark.skipif(not (ROOT / "benchmarks").exists(), reason="a source distribution has no reports")
def test_links_of_pages_into_the_repository_lead_to_files():
    found = [
        (page, match[0])
        for page in ROOT.glob("docs/**/*.md")
        for match in LINK.finditer(page.read_text())
        if not (page.parent / match["target"]).exists()
    ]
    assert not found


def test_links_into_the_repository_lead_to_its_host_on_the_site():
    text = "[why](../faq.md), [report](../../docs/faq.md), [`all`](../../examples), [gone](../../benchmarks/gone.md)"
    host = "https://example.org/team/jaxdist"
    assert with_links(text, host) == (
        f"[why](../faq.md), [report]({host}/blob/main/docs/faq.md), [`all`]({host}/tree/main/examples), "
        "[gone](../../benchmarks/gone.md)"
    )
    assert with_links(text, "") == "[why](../faq.md), report, `all`, [gone](../../benchmarks/gone.md)"
    button = "[Source](../README.md){ .md-button }"
    assert with_links(button, host, "v0.1.0") == f"[Source]({host}/blob/v0.1.0/README.md){{ .md-button }}"
    assert with_links(button, "") == ""


def test_every_reference_entry_has_a_docstring():
    objects = {name: resolve(name) for name in documented()}
    bare = [name for name, value in objects.items() if not value.__doc__ and (isfunction(value) or isclass(value))]
    assert not bare, f"write a docstring, or leave the `:::` entry out: {', '.join(bare)}"


def exceptions(base: type = BaseException) -> Iterator[type]:
    """The exception classes of the package, of those modules that are imported."""
    for kind in base.__subclasses__():
        # A private one never leaves its module, and the command line catches its own.
        private = kind.__name__.startswith("_") or kind.__module__.startswith("jaxdist._cli.")
        if kind.__module__.startswith("jaxdist.") and not private:
            yield kind
        yield from exceptions(kind)


def test_every_exception_is_on_the_page_of_errors():
    for module in walk_packages(jaxdist.__path__, "jaxdist."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
    page = (ROOT / "docs/reference/errors.md").read_text()
    linked = {resolve(name) for name in re.findall(r"\]\[(jaxdist\.\S+?)\]", page)}
    missing = sorted(f"{kind.__module__}.{kind.__name__}" for kind in set(exceptions()) - linked)
    assert not missing, f"say on docs/reference/errors.md what to do about {', '.join(missing)}"


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")]
    missing = [page for page in pages if page not in navigation]
    assert not missing, f"add to `nav:` in mkdocs.yml: {', '.join(missing)}"
