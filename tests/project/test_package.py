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


def load_script():
    path = REPOSITORY / "scripts" / "package.py"
    if not path.exists():
        pytest.skip("a source distribution does not build itself")
    return runpy.run_path(str(path))


def test_the_installed_package_runs_the_program_of_the_readme_and_not_another():
    program, shown = load_script()["PROGRAM"].search((REPOSITORY / "README.md").read_text()).groups()
    assert "step = jd.distribute(train_step, jd.make_mesh())" in program
    assert shown.startswith("step 0: loss ")
    assert shown.splitlines()[-1].startswith("one worker sends")


@pytest.mark.parametrize(
    ("printed", "passes"),
    [
        ("step 0: loss 2.451\nall-reduce 8,356\n", True),
        ("step 0: loss 2.448\nall-reduce 8,357\n", False),
        ("step 0: loss 2.6\nall-reduce 8,356\n", False),
        ("", False),
    ],
    ids=["another rounding", "other bytes", "another loss", "nothing"],
)
def test_a_program_that_prints_something_else_stops_the_release(tmp_path, monkeypatch, printed, passes):
    check_program = load_script()["check_program"]
    readme = "```python\nx\n```\n\nIt prints:\n\n```text\nstep 0: loss 2.448\nall-reduce 8,356\n```\n"
    (tmp_path / "README.md").write_text(readme)
    monkeypatch.setitem(check_program.__globals__, "ROOT", tmp_path)
    monkeypatch.setitem(check_program.__globals__, "run", lambda *words, cwd: printed)
    if passes:
        check_program(tmp_path, tmp_path)
    else:
        with pytest.raises(SystemExit, match="README"):
            check_program(tmp_path, tmp_path)


@pytest.mark.skipif(not (REPOSITORY / ".github").exists(), reason="a source distribution has no workflows")
def test_a_release_uploads_what_was_installed_and_tried():
    workflows = REPOSITORY / ".github" / "workflows"
    release, package = (yaml.safe_load((workflows / f"{name}.yml").read_text()) for name in ("release", "package"))
    tried = {name for name, job in release["jobs"].items() if job.get("uses") == "./.github/workflows/package.yml"}
    assert {release["jobs"]["publish"]["needs"]} == tried
    commands = [step.get("run", "") for job in package["jobs"].values() for step in job["steps"]]
    assert [command.split()[2] for command in commands if "scripts/package.py" in command] == ["build", "install"]
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    supported = [line.rpartition(" ")[2] for line in project["classifiers"] if "Python :: 3." in line]
    assert package["jobs"]["install"]["strategy"]["matrix"]["python"] == supported


@pytest.mark.skipif(not (REPOSITORY / ".github").exists(), reason="a source distribution has no workflows")
def test_the_site_is_published_in_versions_with_links_to_its_sources():
    workflow = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "docs.yml").read_text())
    config = (REPOSITORY / "mkdocs.yml").read_text()
    asked = {*re.findall(r"!ENV (\w+)", config)}
    publish = workflow["jobs"]["publish"]
    assert asked <= {*workflow["env"], *publish["env"]}
    assert publish["env"]["JAXDIST_VERSIONS"] == "mike"
    # Only this environment switches it on: elsewhere there is no list of versions that the page could load.
    assert "provider: !ENV JAXDIST_VERSIONS" in config
    assert any("mike deploy" in step.get("run", "") for step in publish["steps"])


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
