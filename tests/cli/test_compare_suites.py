"""Several reducers over several seeds: what is kept, what beats what, and the drawing."""

import csv
import itertools

import jax
import numpy as np
import optax
import pytest

import jaxdist as jd
from jaxdist._cli import figures, losses, results
from jaxdist._cli import main as cli
from jaxdist._cli.commands import compare
from jaxdist._cli.models import digits
from jaxdist._cli.spellings import parse
from jaxdist._cli.training import suites, train


def _result(name, loss, wire_bytes, accuracy=0.5):
    records = (train.Record(1, loss, 0.1, 10.0, wire_bytes, wire_bytes),)
    return results.RunResult(name, records, {"loss": loss, "accuracy": accuracy}, wire_bytes, 1.0)


def _spreads(rows):
    baseline = [_result("exact", 1.0, 100.0), _result("exact", 2.0, 100.0)]
    return [
        suites.collect_seeds([_result(name, a, sent), _result(name, b, sent)], baseline) for name, a, b, sent in rows
    ]


def test_differences_are_taken_seed_by_seed():
    (one,) = _spreads([("other", 1.5, 2.25, 10.0)])
    assert one.difference.tolist() == [0.5, 0.25]
    assert one.held_out["loss"].tolist() == [1.5, 2.25]
    assert (one.wire_bytes, one.family) == (10.0, "")


def test_the_front_holds_what_nothing_beats_in_both():
    spreads = _spreads(
        [
            ("exact", 1.0, 1.0, 100.0),
            ("good", 1.1, 1.1, 10.0),
            ("worse and larger", 1.2, 1.2, 20.0),
            ("tiny", 3.0, 3.0, 1.0),
            ("broken", np.nan, 1.0, 0.5),
        ]
    )
    assert [one.name for one in suites.pareto_front(spreads)] == ["tiny", "good", "exact"]


def test_every_spelling_of_the_suite_can_be_built():
    names = suites.list_reducers()
    assert names[0] == "exact"
    assert len(set(names)) == len(names)
    for name in names:
        parse.parse_method(name, "sgd:0.1")


def test_the_drawing_survives_a_reducer_that_fails(tmp_path):
    spreads = _spreads([("exact", 1.0, 1.0, 100.0), ("broken", np.nan, np.inf, 10.0), ("fair", 1.1, 1.3, 5.0)])
    for drawn in (spreads, spreads[1:2]):
        path = losses.draw_seeds(drawn, tmp_path / "pareto.png", title="reducers", unit="nats")
        assert path.read_bytes().startswith(b"\x89PNG")
        path.unlink()


@pytest.mark.slow
def test_another_seed_of_a_compiled_run_is_the_run_of_that_seed(mesh):
    def prepare(seed):
        workload = digits.digits_workload(2)
        return train.prepare(workload, jd.exact(), optax.sgd(0.1), mesh=mesh, batch_size=16, seed=seed)

    seeded, own = prepare(0).with_seed(5), prepare(5)
    np.testing.assert_array_equal(seeded.batch(3).images, own.batch(3).images)
    *_, (record, state) = train.steps(seeded, 2)
    *_, (other, again) = train.steps(own, 2)
    assert record.loss == other.loss
    jax.tree.map(np.testing.assert_array_equal, state.params, again.params)


@pytest.mark.slow
def test_compare_over_seeds(tmp_path, capsys):
    arguments = ["compare", "--workload", "digits", "--model", "convnet:2", "--steps", "2", "--batch", "8"]
    arguments += ["--reducers", "exact", "f16", "--devices", "2", "--seeds", "2", "--out", str(tmp_path)]
    arguments += ["--table", str(tmp_path / "new" / "table.csv")]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert "* f16" in printed
    # Both differences have an interval: that of the baseline from itself is zero.
    assert "+0.0000 ±0.0000" in printed
    assert printed.count(" ±0.") == 6
    exact, f16 = csv.DictReader((tmp_path / "new" / "table.csv").read_text().splitlines())
    assert (f16["name"], f16["seeds"], exact["difference_max"]) == ("f16", "2", "0.0")
    assert 1.9 < float(f16["times_fewer_bytes"]) < 2
    low, mean, high, deviation = (float(f16[f"difference_{name}"]) for name in ("min", "mean", "max", "std"))
    assert mean == pytest.approx((low + high) / 2)
    assert deviation == pytest.approx((high - low) / 2**0.5)
    lines = results.read_log(tmp_path / "log.jsonl")
    assert [(line["reducer"], line["seed"]) for line in lines if line["kind"] == "run"] == [
        ("exact", 0),
        ("exact", 1),
        ("f16", 0),
        ("f16", 1),
    ]


@pytest.mark.slow
def test_a_figure_that_cannot_be_drawn_leaves_the_tables(tmp_path, capsys, monkeypatch):
    def fail(*given, **labels):
        raise ValueError("nothing to scale by")

    monkeypatch.setattr(compare.losses, "draw_seeds", fail)
    monkeypatch.setattr(compare.suites, "list_reducers", lambda: ("exact", "qsgd:4"))
    table = tmp_path / "table.csv"
    sizes = ["--steps", "2", "--devices", "2", "--batch", "4", "--model", "gpt:tiny", "--out", str(tmp_path)]
    assert cli.main(["compare", "--suite", "compression", *sizes, "--table", str(table)]) == 2
    assert "qsgd:4" in capsys.readouterr().out
    assert table.exists()


def test_seeds_must_be_positive(capsys):
    assert cli.main(["compare", "--workload", "digits", "--seeds", "0", "--devices", "2"]) == 2
    assert "--seeds must be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.slow
def test_bytes_that_differ_from_step_to_step_are_counted(mesh):
    workload = digits.digits_workload(2)
    reducer = parse.parse_reducer("power_sgd:1,start_step=1,min_compression_rate=0")
    run = train.prepare(workload, reducer, optax.sgd(0.1), mesh=mesh, batch_size=8)
    first, second = (record.wire_bytes for record, _ in train.steps(run, 2))
    assert first == 2 * 7 / 8 * 4 * run.parameters
    assert run.wire_bytes == first + 2 * 7 / 8 * 4  # the loss, which is no part of the gradient
    assert 0 < second < first / 3


def test_collectives_around_a_code_can_be_spelled():
    assert parse.parse_reducer("ef:two_shot:sign").law == jd.reducers.Law.TELESCOPING
    assert parse.parse_code("top_k:0.1+qsgd:4").contraction is not None
    with pytest.raises(ValueError, match=r"'power_sgd:4' is not a code for one array, such as qsgd:4"):
        parse.parse_reducer("two_shot:power_sgd:4")


@pytest.mark.slow
def test_an_optimizer_that_communicates_takes_the_place_of_both(mesh):
    method = parse.parse_method("dion:1e-2,rank=2", "sgd:0.1")
    assert method.reducer is None
    run = train.prepare(digits.digits_workload(2), **method._asdict(), mesh=mesh, batch_size=16)
    before = run.evaluate(run.state)["loss"]
    *_, (record, state) = train.steps(run, 8)
    assert run.evaluate(state)["loss"] < before
    assert 0 < record.wire_bytes < 2 * 7 / 8 * 4 * run.parameters


def test_every_axis_of_bytes_has_labels():
    """Two at least, in a single decade too, and none over another one over many."""
    for sent, most in (([85e6, 540e6], 5), ([2e6, 9e6], 5), ([1e3, 1e9], 8)):
        figure, (axes, _) = figures.two_panels("")
        axes.plot(sent, [1.0, 2.0])
        figures.scale_by_log_bytes(axes, "sent")
        figure.draw_without_rendering()
        low, high = axes.get_xlim()
        ticks = [*axes.xaxis.get_major_ticks(), *axes.xaxis.get_minor_ticks()]
        shown = [tick for tick in ticks if low <= tick.get_loc() <= high and tick.label1.get_text()]
        assert 2 <= len(shown) <= most
        boxes = sorted(tick.label1.get_window_extent().intervalx.tolist() for tick in shown)
        assert all(left[1] < right[0] for left, right in itertools.pairwise(boxes))


def test_a_long_title_stays_on_the_figure():
    figure, _ = figures.two_panels("byte-level GPT on the standard library, " + "adamw:4e-3,schedule=cosine, " * 8)
    (title,) = figure.texts
    figure.draw_without_rendering()
    assert title.get_window_extent().x1 <= figure.bbox.x1
