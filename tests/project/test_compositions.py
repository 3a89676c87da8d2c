"""The table of what can be combined is the one that the reducers give, and every method is in the register."""

import inspect
import re

import compositions
from paths import SUPPORT

from jaxdist import compressors, reducers

PAGE = compositions.PAGE.read_text()
REGISTER = (SUPPORT / "register.py").read_text()
# They return a reducer, but of the messages or the reducer that they are given.
BUILDING_BLOCKS = {"contraction_of", "from_generator"}


def test_the_page_has_the_table():
    assert "\n".join(compositions.table()) in PAGE, "run `python docs/compositions.py`, which writes the table"


def factories(package, made):
    """The public functions of a package that return a reducer or a compressor."""
    functions = {name: found for name, found in vars(package).items() if inspect.isfunction(found)}
    return {name for name, found in functions.items() if inspect.get_annotations(found).get("return") is made}


REDUCERS = factories(reducers, reducers.Reducer) - BUILDING_BLOCKS


def test_every_reducer_has_a_row():
    rows = {call.split("(")[0] for call in compositions.REDUCERS}
    missing = sorted(REDUCERS - rows)
    assert not missing, f"add a row to REDUCERS in docs/compositions.py for {', '.join(missing)}"
    assert not rows - REDUCERS, f"these rows of docs/compositions.py are no public reducers: {rows - REDUCERS}"


def test_every_reducer_and_compressor_is_in_the_register():
    made = factories(compressors, compressors.Compressor) | REDUCERS
    missing = sorted(name for name in made if not re.search(rf"\b(j[cdr]|reducers)\.{name}\b", REGISTER))
    assert not missing, f"add a line to tests/support/register.py for {', '.join(missing)}"
