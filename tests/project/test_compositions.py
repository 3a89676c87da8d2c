"""The table of what can be combined is the one that the reducers give."""

import inspect

import compositions
from paths import REPOSITORY

from jaxdist import reducers

PAGE = (REPOSITORY / "docs/reference/compositions.md").read_text()
# They return a reducer, but of the messages or the reducer that they are given.
BUILDING_BLOCKS = {"contraction_of", "from_generator"}


def test_the_page_has_the_table():
    assert "\n".join(compositions.table()) in PAGE, (
        "replace the table of docs/reference/compositions.md, and the notes below it, by what "
        "`python docs/compositions.py` prints"
    )


def test_every_reducer_has_a_row():
    public = {
        name
        for name, found in vars(reducers).items()
        if inspect.isfunction(found) and inspect.get_annotations(found).get("return") is reducers.Reducer
    }
    rows = {call.split("(")[0] for call in compositions.REDUCERS}
    missing = sorted(public - BUILDING_BLOCKS - rows)
    assert not missing, f"add a row to REDUCERS in docs/compositions.py for {', '.join(missing)}"
    assert not rows - public, f"these rows of docs/compositions.py are no public reducers: {rows - public}"
