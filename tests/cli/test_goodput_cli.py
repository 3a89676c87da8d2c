"""`jaxdist goodput`."""

import functools
import re

import pytest

from jaxdist._cli import main as cli
from jaxdist._cli.commands import goodput as command
from jaxdist.analysis import goodput

FEW = ["goodput", "--chips", "512", "--slice", "64", "--mtbf", "30d", "--repair", "1h", "--islands", "2", "4"]


@pytest.fixture(autouse=True)
def few_failures(monkeypatch):
    monkeypatch.setattr(goodput, "simulate", functools.partial(goodput.simulate, failures=1500))


def _shares(printed, name):
    (line,) = re.findall(rf"^ *{name}.*$", printed, re.MULTILINE)
    return [float(share) for share in re.findall(r"([\d.]+)%", line)]


def test_goodput_prints_every_scheme_and_draws(tmp_path, capsys):
    assert cli.main([*FEW, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    names = ("synchronous", "elastic, restarts", "elastic, shrinks", "2 islands", "4 islands")
    shares = {name: _shares(printed, name) for name in names}
    for kept, estimate, *lost, available in shares.values():
        assert kept + sum(lost) == pytest.approx(100, abs=0.4)
        assert abs(kept - estimate) < 5
        assert available >= kept
    assert shares["synchronous"][0] < shares["elastic, shrinks"][0] < shares["4 islands"][0]
    assert "one failure or preemption in 1.4 h" in printed
    assert "tokens" not in printed
    assert (tmp_path / "goodput.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("chips", "names"), [("1024", ["4", "16"]), ("512", ["4", "8"]), ("128", ["2"]), ("64", [])])
def test_by_default_there_are_as_many_islands_as_slices_allow(chips, names):
    chosen = command.GoodputOptions(chips=int(chips), slice=64)
    found = command._list_schemes(chosen, chosen.chips // chosen.slice)
    assert [name.split()[0] for name in found if "islands" in name] == names


def test_goodput_has_a_price(tmp_path, capsys):
    priced = ["--tokens", "2e6", "--price", "0.6", "--egress", "0.08", "--message", "4GB", "--link", "2gbit"]
    assert cli.main([*FEW, "--preemption", "12h", "--outage", "30min", *priced, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "preemptions of a slice every 12h" in printed
    (line,) = re.findall(r"^ *elastic, shrinks.*$", printed, re.MULTILINE)
    kept, tokens, hour, billion = _shares(line, "elastic")[0], *map(float, line.split()[-3:])
    assert tokens == pytest.approx(3600 * 2e6 * kept / 100, rel=0.01)
    assert hour == pytest.approx(307, abs=1)
    assert billion == pytest.approx(1e9 * 307.2 / tokens, rel=0.01)
    # The exchanges of an island leave its cloud.
    (line,) = re.findall(r"^ *2 islands.*$", printed, re.MULTILINE)
    assert float(line.split()[-2]) > 330


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--mtbf", "1w"], "--mtbf is a number with one of the units s, min, h, d, y, as in 90s, got '1w'"),
        (["--mtbf", "0y"], "mtbf must be positive, got 0.0"),
        (["--slice", "7"], "chips must be a multiple of slice_chips=7, got 512; 511 is one"),
        (["--islands", "16"], "16 islands need as many slices, got 8"),
        (["--price", "1"], "--tokens and --price need each other"),
        (["--tokens", "-1", "--price", "1"], "--tokens must be positive, got -1.0"),
        (["--link", "fast"], "a link is a bandwidth and a latency"),
        (["--message", "much"], "--message must be a number of bytes, such as 24GB"),
        (["--spares", "8"], "spares must be fewer than the 8 slices of a group, got 8"),
    ],
    ids=["unit", "never", "slice", "islands", "price", "tokens", "link", "message", "spares"],
)
def test_goodput_names_bad_values(given, message, tmp_path, capsys):
    assert cli.main([*FEW, "--out", str(tmp_path), *given]) == 2
    assert message in capsys.readouterr().err
