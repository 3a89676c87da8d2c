"""The tables on what NaN and infinity become are those that the code gives."""

import not_finite
import pytest
from paths import REPOSITORY

ROWS = {("code_row", name): not_finite.code_row for name in not_finite.CODES}
ROWS |= {("reducer_row", name): not_finite.reducer_row for name in not_finite.REDUCERS}
PAGE = (REPOSITORY / "docs/explanation/compression.md").read_text().splitlines()


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("kind", "name"), ROWS)
def test_a_row_is_that_of_the_page(kind, name):
    row = ROWS[kind, name](name)
    assert row in PAGE, f"the row of `{name}` in docs/explanation/compression.md must be\n{row}"


def test_the_tables_have_no_other_rows():
    start = PAGE.index("## What NaN and infinity do")
    rows = [line for line in PAGE[start : PAGE.index("## References")] if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == [*not_finite.CODES, *not_finite.REDUCERS], (
        "the tables of docs/explanation/compression.md have the rows of docs/not_finite.py, in its order"
    )
