"""Checkpoints and messages are data: nothing in the library unpickles or evaluates what it reads."""

import ast
import pathlib

import jax.numpy as jnp
import pytest

import jaxdist as jd
from jaxdist import checkpoint

ROOT = pathlib.Path(jd.__file__).parent
MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "yaml"}
BUILT_IN = {"eval", "exec", "compile", "__import__"}
# A driver on Ray sends its user's functions to the processes that it starts, by Ray's own means.
ALLOWED = {
    ("asynchronous/ray_engine/driver.py", "cloudpickle"),
    ("asynchronous/ray_engine/actor.py", "cloudpickle"),
}


def found(source):
    """What in a source could run what it reads."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            yield from [node.module] if (node.module or "").split(".")[0] in MODULES else []
        elif isinstance(node, ast.Attribute) and node.attr in MODULES:
            yield node.attr
        elif isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            given = {one.arg: getattr(one.value, "value", None) for one in node.keywords}
            if isinstance(node.func, ast.Name) and name in BUILT_IN:
                yield name
            if ast.unparse(node.func) in ("np.load", "numpy.load") and given.get("allow_pickle") is not False:
                yield "np.load without allow_pickle=False"
            if given.get("allow_pickle"):
                yield "allow_pickle"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "ray.cloudpickle.loads(x)",
        "eval(text)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "numpy.save(path, x, allow_pickle=True)",
        "import yaml",
    ],
)
def test_the_search_sees(source):
    assert list(found(source))


def test_no_file_of_the_library_runs_what_it_reads():
    files = sorted(ROOT.rglob("*.py"))
    assert len(files) > 100
    seen = {(str(file.relative_to(ROOT)), what) for file in files for what in found(file.read_text())}
    assert seen == ALLOWED


def test_a_manifest_of_an_attacker_names_no_code(tmp_path):
    """Its checksums hold; marks and dtypes are looked up by name among few, and nothing else is called."""
    ran = tmp_path / "ran"
    state = {"e": jd.PerWorker(jnp.ones((2, 1)), axis="data")}
    folder = checkpoint.save(tmp_path / "run", state, 1)
    good = (folder / "manifest.json").read_text()
    call = f"__import__('pathlib').Path({str(ran)!r}).touch()"
    for was, attack in {'"PerWorker"': call, '"float32"': call, '"mean"': call, '"mark"': "__class__"}.items():
        assert was in good
        (folder / "manifest.json").write_text(good.replace(was, '"' + attack + '"'))
        (folder / "SHA256SUMS").unlink()
        (folder / "SHA256SUMS").write_text(checkpoint._files._sum_files(folder))
        with pytest.raises((ValueError, KeyError, TypeError)):
            checkpoint.restore(tmp_path / "run", state)
    assert not ran.exists()
