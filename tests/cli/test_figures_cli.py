"""Figures of few and of many methods, with short and with long names: all text is on the figure and can be read."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from jaxdist._cli import figures, losses, race, results
from jaxdist._cli.spellings import parse
from jaxdist._cli.training.train import Record
from jaxdist.analysis.step_time import StepCost, Traffic

LONG = "streaming_diloco:H=50,fragments=4,warmup_steps=100/ef:two_shot:qsgd:4"
LINKS = [parse.parse_link(link) for link in ("100mbit,20ms", "1gbit,1ms")]
NAMES = pytest.mark.parametrize(
    "names", [["exact"], [f"{LONG}{n}" for n in range(5)], [f"{LONG}{n}" for n in range(24)]]
)


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are written, laid out."""
    kept = []

    def write(figure, path):
        figure.draw_without_rendering()
        kept.append(figure)
        return Path(path)

    monkeypatch.setattr(figures, "write", write)
    return kept


def _run(name, end, steps=20):
    curve = end + 2 * np.exp(-np.arange(steps) / 5)
    records = tuple(Record(n + 1, float(loss), 0.1, 100.0, 1e5, 1e5 * (n + 1)) for n, loss in enumerate(curve))
    evaluations = tuple(results.Evaluation(n, 1e5 * n, {"loss": float(curve[n - 1])}) for n in range(2, steps, 2))
    return results.RunResult(name, records, {"loss": float(curve[-1])}, 1e5, 1.0, evaluations)


def _check(figure):
    """All text but the ticks is on the figure, none is over another, and the panels have most of the room."""
    panels = [axes for axes in figure.axes if axes.axison]
    legends = [*figure.legends, *(axes.get_legend() for axes in panels if axes.get_legend())]
    texts = [*figure.texts, *(text for legend in legends for text in legend.get_texts())]
    for axes in panels:
        texts += [axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        assert axes.get_window_extent().width >= 0.2 * figure.bbox.width
        assert axes.get_window_extent().height >= 2.0 * figure.dpi
    boxes = {text: text.get_window_extent() for text in texts if text.get_text().strip()}
    for text, box in boxes.items():
        assert box.x0 >= -1, text
        assert box.x1 <= figure.bbox.x1 + 1, text
        assert box.y0 >= -1, text
        assert box.y1 <= figure.bbox.y1 + 1, text
    for (text, box), (other, beside) in itertools.combinations(boxes.items(), 2):
        # The box of a line has space above and below its letters.
        assert not box.padded(-2).overlaps(beside.padded(-2)), (text, other)


@pytest.mark.sampled(3)
@NAMES
@pytest.mark.parametrize("count", [1, 2])
def test_a_race_has_a_legend_that_fits(names, count, drawn):
    entrants = [race.enter(name, StepCost(0.1, 0.0, Traffic(1e5, 2.0)), [_run(name, 1.0)]) for name in names]
    race.draw_race(entrants, LINKS[:count], 1.6, "links.png", title="title " * 40, unit="nats")
    _check(drawn[0])
    assert len(drawn[0].legends[0].get_texts()) == len(names)


@NAMES
def test_a_comparison_labels_the_ends_of_its_curves(names, drawn):
    losses.draw_compare([[_run(name, 1 + n / 20)] for n, name in enumerate(names)], "compare.png", title="title " * 40)
    _check(drawn[0])


@NAMES
def test_a_run_is_drawn_as_large_beside_a_long_name(names, drawn):
    losses.draw_train(_run(names[0], 1.2), _run("exact", 1.0), "loss.png", title="title " * 40)
    _check(drawn[0])
    (legend,) = (axes.get_legend() for axes in drawn[0].axes if axes.get_legend())
    assert legend.get_window_extent().x1 <= legend.axes.bbox.x1


def test_a_name_is_broken_after_commas_and_slashes():
    assert figures.wrap_name("exact", 10) == "exact"
    assert figures.wrap_name("diloco:H=50,fragments=4/ef:qsgd:4", 26) == "diloco:H=50,fragments=4/\nef:qsgd:4"
    assert figures.wrap_name("x" * 12, 10) == "x" * 10 + "\n" + "xx"
    # A label is broken at its spaces, and keeps the others.
    assert figures.wrap_name("Top-k, 1 % of the entries", 12) == "Top-k, 1 %\nof the\nentries"


def test_a_figure_for_a_paper_has_its_settings_in_the_metadata_and_no_date(tmp_path):
    runs = [[_run("Ours, $k = 2$", 1.0), _run("Ours, $k = 2$", 1.1)], [_run("exact", 1.2), _run("exact", 1.0)]]
    for suffix in figures.SUFFIXES:
        one, two = (
            losses.draw_compare(runs, tmp_path / f"{n}{suffix}", title="of two\nseeds").read_bytes() for n in "12"
        )
        assert one == two
        if suffix != ".png":
            assert b"of two seeds" in one
            assert b"Date" not in one
    # Fonts that can be embedded, and text that stays text.
    pdf, svg = ((tmp_path / f"1{suffix}").read_bytes() for suffix in (".pdf", ".svg"))
    assert b"/CIDFontType2" in pdf
    assert b"/Type3" not in pdf
    assert svg.count(b"<text") > 10
    assert b"of two seeds" not in svg.partition(b"</metadata>")[2]


def test_several_seeds_have_bands_of_their_standard_deviation(drawn):
    losses.draw_compare([[_run("exact", end) for end in (1.0, 2.0, 6.0)]], "compare.png", title="")
    (band,) = drawn[0].axes[1].collections
    heights = band.get_paths()[0].vertices[1:-1, 1]
    # The curves differ by their ends alone: mean 3, deviation √7.
    assert np.ptp(heights[[0, -1]]) == pytest.approx(2 * 7**0.5, rel=1e-6)
