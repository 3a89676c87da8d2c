"""The metadata of the package: its README has to work on the page of a package index, too."""

import re
import runpy
import tomllib

import pytest
import yaml
from paths import REPOSITORY

import jaxdist

hatchling = pytest.importorskip("hatchling.metadata.core")
HOST = "https://example.org/team/jaxdist"


def build_metadata():
    manager = pytest.importorskip("hatchling.plugin.manager").PluginManager()
    return hatchling.ProjectMetadata(str(REPOSITORY), manager).core


def test_links_of_the_readme_are_absolute_in_the_package(monkeypatch):
    monkeypatch.setenv("JAXDIST_REPOSITORY", f"{HOST}/")
    monkeypatch.setenv("JAXDIST_REVISION", "abc123")
    core = build_metadata()
    targets = re.findall(r"\]\(([^)\s]+)", core.readme)
    assert len(targets) > 50
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
    for wanted in (
        f"{HOST}/actions/workflows/tests.yml/badge.svg",
        f"{HOST}/raw/abc123/docs/images/compare.png",
        f"{HOST}/blob/abc123/docs/all-of-jaxdist.md",
    ):
        assert wanted in targets
    assert core.urls["Repository"] == HOST


@pytest.mark.skipif(not (REPOSITORY / "benchmarks").exists(), reason="a source distribution has no reports")
def test_links_of_the_readme_lead_to_files_of_the_repository():
    targets = re.findall(r"\]\(([^)\s#]+)", (REPOSITORY / "README.md").read_text())
    local = [target for target in targets if not target.startswith(("https://", "../../"))]
    assert local
    assert [target for target in local if not (REPOSITORY / target).exists()] == []


def test_without_a_repository_the_package_has_no_urls(monkeypatch):
    monkeypatch.delenv("JAXDIST_REPOSITORY", raising=False)
    core = build_metadata()
    assert core.urls == {}
    assert core.readme == (REPOSITORY / "README.md").read_text()


def test_a_picture_inside_a_link_and_a_section_of_a_page():
    hook = runpy.run_path(str(REPOSITORY / "scripts" / "absolute_links.py"))["make_absolute"]
    text = "[![a](a.png)](b/c.md#d) [e](#f) [g](https://h) ![i](j.svg)"
    wanted = (
        f"[![a]({HOST}/raw/main/a.png)]({HOST}/blob/main/b/c.md#d) [e](#f) [g](https://h) ![i]({HOST}/raw/main/j.svg)"
    )
    assert hook(text, HOST, "main") == wanted


def test_a_version_is_the_same_in_all_files():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    recipe = yaml.safe_load((REPOSITORY / "scripts/conda/recipe.yaml").read_text())
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    versions = {project["version"], jaxdist.__version__, recipe["context"]["version"], citation["version"]}
    assert len(versions) == 1, versions


def test_the_recipe_for_conda_needs_what_the_package_needs():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    recipe = yaml.safe_load((REPOSITORY / "scripts/conda/recipe.yaml").read_text())
    run = [line.replace(" ", "") for line in recipe["requirements"]["run"] if not line.startswith("python ")]
    assert run == project["dependencies"]
    extras = {line for lines in project["optional-dependencies"].values() for line in lines}
    constraints = [line.replace(" ", "").replace("-base", "") for line in recipe["requirements"]["run_constraints"]]
    assert set(constraints) <= extras
    assert recipe["build"]["python"]["entry_points"] == [f"jaxdist = {project['scripts']['jaxdist']}"]
    assert recipe["about"]["license"] == project["license"]
