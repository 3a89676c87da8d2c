"""The table of what can be combined is the one that the reducers give."""

import inspect

import compositions
from paths import REPOSITORY

from jaxdist import reducers

PAGE = (REPOSITORY / "docs/reference/compositions.md").read_text()
# They return no reducer, or are of other tools.
NO_REDUCERS = {
    "accordion_batch",
    "cast_like",
    "check_use",
    "critical_regime",
    "forward_forms",
    "forward_limits",
    "from_generator",
    "reason_against",
    "step_key",
    "widen_like",
}


def test_the_page_has_the_table():
    assert "\n".join(compositions.table()) in PAGE


def test_every_reducer_has_a_row():
    public = {name for name, found in vars(reducers).items() if inspect.isfunction(found) and name.islower()}
    assert public - NO_REDUCERS == {call.split("(")[0] for call in compositions.REDUCERS}
