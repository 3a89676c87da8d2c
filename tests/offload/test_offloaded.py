"""`--zero` and `--offload`: the numbers of plain training, with the state somewhere else."""

import json

import jax
import numpy as np
import pytest

import jaxdist as jd
from jaxdist._cli import main as cli
from jaxdist._cli.models import digits, gpt, text
from jaxdist._cli.spellings import parse
from jaxdist._cli.training import one_worker, train

WORK = digits.digits_workload(8)
OPTIMIZER = "adamw:1e-2"
TINY = ["--workload", "digits", "--model", "convnet:8", "--batch", "8", "--optimizer", OPTIMIZER, "--devices", "2"]


def run(spelling, offload=None, workload=WORK):
    mesh = jd.make_mesh({"data": 2}, devices=jax.devices()[:2])
    method = parse.parse_method(spelling, OPTIMIZER)
    where = one_worker.parse_offload(offload)
    prepared = train.prepare(workload, **method._asdict(), mesh=mesh, batch_size=8, offload=where)
    losses, state = [], prepared.state
    for record, after in train.steps(prepared, 4 - prepared.first, first=prepared.first):
        losses.append(record.loss)
        state = after
    prepared.close()
    return prepared, [*losses, prepared.evaluate(state)["loss"]]


@pytest.fixture(scope="module")
def plain():
    return run("exact")


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("spelling", "offload"),
    [("zero:1", None), ("zero:3", None), ("zero:2", "host"), ("exact", "nvme"), ("zero:3", "nvme")],
)
def test_cut_and_offloaded_training_is_the_same_training(plain, spelling, offload, tmp_path):
    prepared, losses = run(spelling, f"nvme:{tmp_path}" if offload == "nvme" else offload)
    np.testing.assert_allclose(losses, plain[1], rtol=2e-5)
    # The model is one layer: some compilers make one gather of the two of stage 3, that of backward following at once.
    gathers = (1, 2) if spelling == "zero:3" else (1,)
    sent = prepared.wire_bytes / plain[0].wire_bytes
    assert any(sent == pytest.approx((1 + times) / 2, rel=0.1) for times in gathers)


@pytest.mark.slow
def test_blocks_are_whole_one_at_a_time():
    writing = text.text_workload(gpt.SIZES["tiny"]._replace(layers=2), held_out_examples=16)
    whole, cut = (run(spelling, workload=writing) for spelling in ("exact", "zero:3"))
    np.testing.assert_allclose(cut[1], whole[1], rtol=2e-5)
    sizes = jax.eval_shape(writing.init, jax.random.key(0))
    blocks, ends = (
        sum(x.size for name in sizes if name.startswith("block") is inside for x in jax.tree.leaves(sizes[name]))
        for inside in (True, False)
    )
    # Two gathers and a reduce-scatter; compilers may make one gather of the two of an end, where little lies between.
    sent = cut[0].wire_bytes / (4 / 2)
    assert 0.98 * (3 * blocks + 2 * ends) < sent < 1.02 * (3 * blocks + 3 * ends)


@pytest.mark.slow
def test_a_run_on_disk_goes_on(plain, tmp_path):
    arguments = ["train", *TINY, "--zero", "3", "--offload", f"nvme:{tmp_path / 'disk'}", "--no-baseline"]
    for steps in (2, 4):
        assert cli.main([*arguments, "--steps", str(steps), "--out", str(tmp_path)]) == 0
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == [3, 4]
    losses = [line["loss"] for line in lines if line["kind"] == "step"]
    np.testing.assert_allclose(losses, plain[1][2:4], rtol=2e-5)
    assert cli.main([*arguments, "--steps", "4", "--out", str(tmp_path)]) == 2  # nothing left to do


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--zero", "1", "--offload", "nvme:x"], "needs a reducer, or --zero 3"),
        (["--zero", "2", "--sync", "diloco:H=2"], "with --sync it is not"),
        (["--offload", "tape"], "host or nvme:FOLDER, got 'tape'"),
        (["--zero", "1", "--reducer", "ef:power_sgd:2"], "reduce-scatter"),
    ],
)
def test_what_cannot_be_offloaded_says_why(arguments, message, capsys, tmp_path, monkeypatch):
    """Before the baseline is trained, and without a folder that is left."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", *TINY, *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "compiling" not in printed.out
    assert list(tmp_path.iterdir()) == []
