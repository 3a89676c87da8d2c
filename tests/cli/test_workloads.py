import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdist as jd
from jaxdist._cli import losses, results
from jaxdist._cli.models import digits, gpt, text
from jaxdist._cli.spellings import parse
from jaxdist._cli.training import one_worker, train

TINY = gpt.SIZES["tiny"]


@pytest.fixture(scope="module")
def writing():
    return text.text_workload(TINY, held_out_examples=32)


@pytest.fixture(scope="module")
def run(writing, mesh):
    reducer = parse.parse_reducer("ef:power_sgd:1,min_compression_rate=1.0")
    return train.prepare(writing, reducer, optax.adam(3e-3), mesh=mesh, batch_size=16, seed=1)


@pytest.fixture(scope="module")
def finished(run):
    """The run's records, its last state and the evaluation before and after: `steps` takes the state over."""
    before = run.evaluate(run.state)
    pairs = list(train.steps(run, 12))
    return [record for record, _ in pairs], pairs[-1][1], before, run.evaluate(pairs[-1][1])


def test_gpt_starts_at_chance():
    batch = np.random.default_rng(0).integers(0, 256, (8, TINY.context + 1)).astype(np.uint8)
    loss = jax.jit(lambda key: gpt.loss(TINY, gpt.init(TINY, key), batch))(jax.random.key(0))
    assert abs(float(loss) - np.log(256)) < 0.1


def test_gpt_looks_back_only():
    tokens = np.arange(TINY.context)[None]
    other = np.where(tokens < 9, tokens, 7)
    params = jax.jit(lambda: gpt.init(TINY, jax.random.key(0)))()
    logits = jax.jit(lambda tokens: gpt.GPT(TINY).apply({"params": params}, tokens))
    np.testing.assert_array_equal(logits(tokens)[:, :9], logits(other)[:, :9])
    assert float(jnp.abs(logits(tokens)[:, 9:] - logits(other)[:, 9:]).max()) > 1e-3


def test_demo_size_is_about_half_a_million():
    shapes = jax.eval_shape(lambda: gpt.init(gpt.SIZES["demo"], jax.random.key(0)))
    assert 500_000 < sum(leaf.size for leaf in jax.tree.leaves(shapes)) < 1_000_000


@pytest.mark.parametrize("work", ["writing", "images"])
def test_batches_follow_from_seed_and_step(work, writing):
    workload = writing if work == "writing" else digits.digits_workload(4)
    first, again = workload.batch(3, 5, 8), workload.batch(3, 5, 8)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    for other in (workload.batch(3, 6, 8), workload.batch(4, 5, 8)):
        assert any((a != b).any() for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True))


def test_standard_library_is_real_ordered_and_split_by_file():
    corpus = text.corpus()
    assert corpus.train.size > 1_000_000
    assert corpus.held_out.size > 100_000
    assert not set(corpus.train_files) & set(corpus.held_out_files)
    assert list(corpus.train_files) == sorted(corpus.train_files)
    assert not any("test" in name.split("/") or "site-packages" in name for name in corpus.train_files)
    assert b"def " in corpus.train.tobytes()


def test_split_stays_when_files_are_added(tmp_path):
    for n in range(40):
        (tmp_path / f"{n}.txt").write_text(f"file {n}\n" * 20)
    before = text.corpus(tmp_path)
    (tmp_path / "another.txt").write_text("more\n" * 20)
    after = text.corpus(tmp_path)
    assert set(before.held_out_files) <= set(after.held_out_files)
    assert before.held_out_files
    assert not set(after.train_files) & set(after.held_out_files)


def test_own_file_gives_its_tail(tmp_path):
    path = tmp_path / "own.txt"
    path.write_bytes(bytes(range(200)) * 10)
    corpus = text.corpus(path)
    assert corpus.train.tobytes() + corpus.held_out.tobytes() == path.read_bytes()
    assert corpus.held_out.size == 200


def test_folder_leaves_out_what_is_not_text(tmp_path):
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / ".hidden").write_text("secret")
    (tmp_path / "page.md").write_text("words")
    assert list(text.files_under(tmp_path)) == ["page.md"]


def test_large_files_do_not_hide_the_text_after_them(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "MAX_BYTES", 100)
    (tmp_path / "a.bin").write_bytes(bytes(200))
    (tmp_path / "b.txt").write_text("words" * 50)
    (tmp_path / "c.txt").write_text("more")
    assert list(text.files_under(tmp_path)) == ["b.txt"]
    (tmp_path / "b.txt").unlink()
    assert list(text.files_under(tmp_path)) == ["c.txt"]


def test_unusable_texts_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no file or folder"):
        text.corpus(tmp_path / "missing")
    with pytest.raises(ValueError, match="no text files"):
        text.corpus(tmp_path)
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(ValueError, match="too short for a context of 16"):
        text.text_workload(TINY, path=tmp_path)


def test_held_out_windows_do_not_overlap(writing):
    batches = writing.held_out(8)
    assert [batch.shape for batch in batches] == [(8, TINY.context + 1)] * 4
    corpus = text.corpus()
    joined = corpus.held_out.tobytes()
    starts = np.linspace(0, corpus.held_out.size - 17, 32).astype(int)
    assert np.diff(starts).min() >= 17
    assert batches[1][0].tobytes() == joined[starts[8] : starts[8] + 17]


def test_digits_splits_are_disjoint_and_whole():
    seen, held_out = digits.splits()
    assert len(seen.labels) + len(held_out.labels) == 1797
    assert set(held_out.labels.tolist()) == set(range(10))
    every = np.concatenate([seen.images, held_out.images]).reshape(1797, -1)
    assert len(np.unique(every, axis=0)) == 1797
    assert every.min() == 0
    assert every.max() == 1


@pytest.mark.slow
def test_training_learns(finished):
    records, _, before, after = finished
    assert after["loss"] < before["loss"] - 0.3
    assert [record.step for record in records] == list(range(1, 13))
    assert records[-1].loss < records[0].loss


@pytest.mark.slow
def test_records_carry_the_compiled_programs_bytes(run, finished):
    records = finished[0]
    assert run.wire_bytes == jd.analysis.collectives(run.program.compiled).wire_bytes > 0
    np.testing.assert_allclose([r.total_wire_bytes for r in records], run.wire_bytes * np.arange(1, 13))
    assert run.wire_bytes < 2 * 7 / 8 * 4 * run.parameters  # what a plain all-reduce over eight sends
    assert all(r.units_per_second * r.seconds == pytest.approx(16 * TINY.context) for r in records)


@pytest.mark.slow
def test_equal_seeds_see_equal_tokens(writing, mesh, run):
    other = train.prepare(writing, jd.exact(), optax.sgd(0.1), mesh=mesh, batch_size=16, seed=1)
    np.testing.assert_array_equal(other.batch(4), run.batch(4))
    assert other.batch(4).sharding.spec == jax.P("data")


def first_state(workload, spelling, mesh):
    """That of a run, of which no step is compiled."""
    worker = one_worker.one_worker(workload, parse.parse_method(spelling, "adam:1e-3"))
    return jd.init_state(lambda: worker.make_state(1), mesh)


def test_checkpoint_comes_back_bit_equal(tmp_path):
    mesh = jd.make_mesh({"data": 2}, devices=jax.devices()[:2])
    state = first_state(digits.digits_workload(1), "ef:qsgd:4", mesh)
    # As after a step: no moment or residual is zero.
    state = jax.tree.map(lambda x: x + 0.3 if jnp.issubdtype(x.dtype, jnp.floating) else x, state)
    where = results.save(tmp_path / "checkpoint", state)
    results.save(where, state)  # replaces
    restored = results.restore(where, state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)

    def same(a, b):
        assert a.sharding == b.sharding
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()

    jax.tree.map(same, state, restored)


@pytest.mark.slow
def test_a_restored_run_goes_on_as_if_never_stopped(writing, mesh, tmp_path):
    reducer = parse.parse_reducer("ef:top_k:0.05")
    run = train.prepare(writing, reducer, optax.adam(1e-3), mesh=mesh, batch_size=8)
    like = run.with_seed(1).state
    *_, (_, state) = train.steps(run, 2)
    results.save(tmp_path / "checkpoint", state)
    through = [record.loss for record, _ in train.steps(run._replace(state=state), 2, first=2)]
    again = run._replace(state=results.restore(tmp_path / "checkpoint", like))
    stopped = [record for record, _ in train.steps(again, 2, first=2)]
    assert [record.loss for record in stopped] == through
    assert [record.step for record in stopped] == [3, 4]


def test_batch_must_divide_among_workers(writing, mesh):
    with pytest.raises(ValueError, match="multiple of the 8 workers, got 12"):
        train.prepare(writing, jd.exact(), optax.sgd(0.1), mesh=mesh, batch_size=12)


def test_evaluation_needs_an_example_for_each_worker(writing, mesh):
    few = writing._replace(held_out=lambda size: [writing.held_out(size)[0][:3]])
    with pytest.raises(ValueError, match="fewer held-out examples than the 8 workers"):
        train._make_evaluation(few, mesh, 8)(first_state(writing, "exact", mesh))


def _result(name, losses, wire_bytes=100.0):
    records = [train.Record(n + 1, loss, 0.1, 10.0, wire_bytes, (n + 1) * wire_bytes) for n, loss in enumerate(losses)]
    return results.RunResult(name, tuple(records), {"loss": losses[-1]}, wire_bytes, 1.0)


def test_summary_compares_with_the_baseline():
    baseline, other = _result("exact", [5.0] * 9 + [3.0]), _result("half", [5.0] * 9 + [3.5], 50.0)
    summary = results.summarize(other, baseline)
    assert summary.times_fewer_bytes == 2
    assert summary.difference == 0.5
    assert summary.train_loss == 3.5
    assert summary.step_milliseconds == pytest.approx(100)
    assert results.summarize(other).difference is None


def test_log_is_json_even_when_the_loss_is_not_finite(tmp_path):
    path = tmp_path / "log.jsonl"
    with path.open("w") as log:
        results.write_line(log, {"loss": float("nan"), "held_out": {"loss": float("inf")}, "step": 1})
    assert results.read_log(path) == [{"loss": None, "held_out": {"loss": None}, "step": 1}]


def test_running_mean_is_centred():
    np.testing.assert_allclose(results.running_mean([1.0, 2.0, 6.0, 4.0, 5.0], 3), [1, 3, 4, 5, 4.5])
    np.testing.assert_allclose(results.running_mean([*map(float, range(9))], 5), [0, 1, 2, 3, 4, 5, 6, 6.5, 7])


def test_plots_survive_runs_that_explode(tmp_path):
    runs = [_result("exact", [5.0, 4.0, 3.0] * 4), _result("bad", [5.0, 1e30, float("inf"), float("nan")] * 3, 0.0)]
    for path in (
        losses.draw_compare([*([run] for run in runs), runs], tmp_path / "compare.png", title="two runs"),
        losses.draw_train(runs[1], runs[0], tmp_path / "train.png", title="one run"),
    ):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_rows_of_a_batch_go_to_their_worker():
    work = digits.digits_workload(4, workers=4, concentration=0.1)
    train = digits.splits()[0]
    parts = digits.equal_parts(train.labels, 4, concentration=0.1)
    labels = work.batch(0, 3, 32).labels.reshape(4, 8)
    for mine, part in zip(labels, parts, strict=True):
        assert set(mine) <= set(train.labels[part])
    with pytest.raises(ValueError, match="multiple of the 4 workers, got 6"):
        work.batch(0, 0, 6)
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        parse.parse_workload("digits", "convnet:4,workers=0")
    with pytest.raises(ValueError, match="workers=4 divides the images by label: add concentration"):
        parse.parse_workload("digits", "convnet:4,workers=4")
