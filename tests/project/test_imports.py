"""What `import jaxdist` imports: the time that it takes depends on nothing else."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import jaxdist

# jaxtyping prints types with wadler_lindig.
OUTSIDE = {"jax", "jaxtyping", "numpy", "wadler_lindig"}
# Type checkers do not see them.
ROOMS = vars(jaxdist)["_ROOMS"]
LATER = (*ROOMS, *vars(jaxdist)["_ROOM_OF"])
PROGRAM = """
import sys
import jax, optax
before = set(sys.modules)
import jaxdist
print(*(set(sys.modules) - before))
"""


@pytest.fixture(scope="module")
def imported():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_no_room_is_imported_that_most_programs_do_without(imported):
    assert "jaxdist.reducers" in imported
    assert [room for room in ROOMS if f"jaxdist.{room}" in imported] == []


def test_no_other_package_is_imported(imported):
    packages = {module.partition(".")[0] for module in imported} - sys.stdlib_module_names - {"jaxdist"}
    assert packages <= OUTSIDE, "import it in the function that needs it"


def test_no_slow_module_is_imported(imported):
    assert imported.isdisjoint(("numpy.testing", "jax.experimental.topologies", "jax.experimental.pallas", "asyncio"))


@pytest.mark.parametrize("name", LATER)
def test_what_is_imported_later_is_found(name):
    assert getattr(jaxdist, name)
    assert name in dir(jaxdist)


def test_type_checkers_see_what_is_imported_later():
    source = ast.parse(Path(jaxdist.__file__).read_text())
    (block,) = (node for node in source.body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "_typing.TYPE_CHECKING"
    assert {alias.asname for node in block.body for alias in getattr(node, "names", ())} == set(LATER)


def test_an_unknown_name_is_an_attribute_error():
    name = "reducer"
    with pytest.raises(AttributeError, match="module 'jaxdist' has no attribute 'reducer'"):
        getattr(jaxdist, name)
