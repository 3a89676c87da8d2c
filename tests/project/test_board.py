"""The board of methods: its tables are those of its entries, and a method of a user's own can be entered."""

import json
import re
import runpy
import sys
from types import SimpleNamespace

import pytest
from paths import REPOSITORY

from jaxdist._cli.spellings import parse

FOLDER = REPOSITORY / "benchmarks" / "board"
pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="a source distribution has no benchmarks")


@pytest.fixture
def board(monkeypatch):
    """The names of the script, whose neighbors are imported for this test alone."""
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks" / "race")
    before = {*sys.modules}
    yield runpy.run_path(str(REPOSITORY / "benchmarks" / "race" / "board.py"))
    for name in {*sys.modules} - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(REPOSITORY / "benchmarks")):
            del sys.modules[name]


def make_entry(title, **fields):
    entry = {"title": title, "method": "exact", "by": "jaxdist", "commit": "0123abcd", "steps": [40.0, 50.0, 60.0]}
    return entry | {"wire_bytes": 0.0, "hops": 0.0, "coding": 0.0, "compute": 0.1, "schedule": [1, 1, 0]} | fields


def test_seconds_are_computation_coding_and_the_link(board):
    bandwidth, latency = board["LINK"].bandwidth, board["LINK"].latency
    assert 0.95 * 12.5e6 < bandwidth < 12.5e6  # 100 Mbit/s without headers
    quick = make_entry("quick", steps=[70.0, 80.0, 90.0])
    slow = make_entry("slow", wire_bytes=0.2 * bandwidth, hops=0.05 / latency, coding=0.05)
    unmeasured = {name: value for name, value in make_entry("unmeasured").items() if name != "compute"}
    _, _, *rows = board["make_table"]([slow, unmeasured, quick]).splitlines()
    sent = f"{10 * bandwidth / 1e6:.1f} | 50 (40-60) | {200 * bandwidth / 1e6:,.0f}"
    assert rows == [
        "| quick, `exact` | 8.0 (7.0-9.0) | 0.0 | 80 (70-90) | 0 | 100 | jaxdist | `0123abcd` |",
        f"| slow, `exact` | 20.0 (16.0-24.0) | {sent} | 400 | jaxdist | `0123abcd` |",
    ]


def test_pages_have_the_table_of_the_entries(board):
    table = board["make_table"](board["read_entries"]())
    for page in board["PAGES"]:
        assert table in page.read_text(), f"{page.name}: run `python benchmarks/race board`"


def test_rules_are_those_of_the_script(board):
    readme = " ".join((FOLDER / "README.md").read_text().split())
    page = " ".join((REPOSITORY / "docs" / "board.md").read_text().split())
    assert f"**{board['TARGET']} in at most {board['STEPS']} steps" in readme
    assert f"the loss is {board['TARGET']} nats per byte of held-out text, within {board['STEPS']} steps" in page
    environment = json.loads((FOLDER / "environment.json").read_text())
    assert environment["jax"].startswith("0.12.")


def test_entries_can_be_made_again(board, monkeypatch):
    monkeypatch.syspath_prepend(board["METHODS"])
    entries = board["read_entries"]()
    assert len(entries) >= 6
    for entry in entries:
        assert len(entry["steps"]) == board["SEEDS"]
        assert max(entry["steps"]) <= board["STEPS"]
        assert re.fullmatch("[0-9a-f]{8}", entry["commit"])
        parse.parse_method(entry["method"], entry["optimizer"], board["STEPS"])
    assert {path.stem for path in board["METHODS"].glob("*.py")} == {
        entry["method"].partition(":")[0] for entry in entries if entry["method"].endswith(":make")
    }


@pytest.mark.slow
def test_a_method_of_ones_own_is_entered(board, monkeypatch, tmp_path):
    (tmp_path / "my_method.py").write_text("import jaxdist as jd\n\n\ndef make():\n    return jd.qsgd(8)\n")
    page = tmp_path / "page.md"
    page.write_text("Before.\n\n| method |\n\nAfter.\n")
    (tmp_path / "entries.json").write_text("[]")
    patched = {"FOLDER": tmp_path, "METHODS": tmp_path, "PAGES": (page,), "MODEL": "gpt:tiny", "STEPS": 20}
    for name, value in (patched | {"TARGET": 5.4, "SEEDS": 2, "find_commit": lambda: "0123abcd"}).items():
        monkeypatch.setitem(board["main"].__globals__, name, value)
    # One JAX sees the devices of these tests, the other those of a user.
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    given = {"method": "my_method:make", "title": "Mine", "by": "A. Person", "optimizer": "adamw:2e-3", "costs": False}
    board["main"](SimpleNamespace(**given))
    (entry,) = json.loads((tmp_path / "entries.json").read_text())
    assert len(entry["steps"]) == 2
    assert entry["compute"] > 0
    before, row, after = re.fullmatch(r"(Before.)\n\n\| method .*\n.*\n(.*)\n\n(After.)\n", page.read_text()).groups()
    assert row.startswith("| Mine, `my_method:make` |")
    assert (before, after) == ("Before.", "After.")
