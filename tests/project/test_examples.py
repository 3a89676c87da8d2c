"""Every example runs as its docstring says, and prints what it promises."""

import json
import os
import re
import runpy
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from paths import REPOSITORY
from transcripts import DECIMAL, assert_alike

import jaxdist as jd

EXAMPLES = REPOSITORY / "examples"
# What guides show below the command that runs an example.
SHOWN = re.compile(r"^python examples/(\w+\.py)\n```\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TRANSCRIPTS = dict(match for page in REPOSITORY.glob("docs/how-to/*.md") for match in SHOWN.findall(page.read_text()))
PROMISES = {
    "any_batch_regret.py": "times less regret than with fixed batches",
    "chain_with_optax.py": "test accuracy 0.9",
    "does_not_fit.py": "of Adam's moments are in",
    "follow_weights.py": "of the bytes of a whole copy",
    "flax_models.py": "4 workers, steps 40 to 80",
    "grain_data.py": "the same 40 batches, and the same bits",
    "hospitals.py": "quasi-global momentum  8",
    "islands.py": "rounds: 0.",
    "tensor_parallel.py": "the losses without compression are those of one device",
    "train_gpt.py": "step 40: loss",
    "two_clusters.py": "times fewer bytes between clusters",
    "two_processes.py": "one worker sends",
    "uneven_workers.py": "times faster than bsp",
    "your_own_compressor.py": "the laws hold",
}


def test_all_examples_are_tested_and_short():
    files = {path.name: path.read_text().count("\n") for path in EXAMPLES.glob("*.py")}
    assert set(files) == set(PROMISES)
    # Three versions of one model, a complete training script, and two kinds of mesh.
    assert max(files.pop(name) for name in ("flax_models.py", "train_gpt.py", "tensor_parallel.py")) < 200
    assert max(files.values()) < 100


def start(command):
    """Runs a command with the settings of a reader, and returns what it prints."""
    environment = {k: v for k, v in os.environ.items() if k != "NPROC"}
    # Devices are the example's business; with how much effort to compile is ours.
    flags = [flag for flag in environment.pop("XLA_FLAGS", "").split() if "device_count" not in flag]
    environment["XLA_FLAGS"] = " ".join(flags)
    run = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


# The others compile more programs, or run in several processes; the README's diff is a chain that runs by default.
QUICK = {"two_clusters.py"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in PROMISES]
)
def test_example_runs(name):
    printed = start([EXAMPLES / name])
    assert PROMISES[name] in printed
    if name in TRANSCRIPTS:
        check_transcript(name, printed, TRANSCRIPTS[name])


def check_transcript(name, printed, shown):
    """Words and bytes are equal, and losses close; what the clock or the version of JAX decides is left out."""
    texts = printed, shown
    if name == "train_gpt.py":
        texts = [DECIMAL.sub("0.0", text) for text in texts]
    if jax.__version_info__ >= (0, 12):
        texts = ["".join(line for line in text.splitlines(keepends=True) if "Explicit" not in line) for text in texts]
    assert_alike(*texts)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["zero", "diloco"])
def test_gpt_resumes_with_the_same_bits(method, tmp_path, monkeypatch):
    """A run that was preempted after ten steps and one that was not: the same losses, batches and parameters."""
    main = runpy.run_path(EXAMPLES / "train_gpt.py")["main"]
    options = ["--method", method, "--pods", "2", "--sync-period", "4", "--steps", "20"]
    main([str(tmp_path / "whole"), *options])
    with monkeypatch.context() as patch:
        patch.setattr(jd.processes, "preemption_requested", lambda number: number == 10)
        main([str(tmp_path / "parts"), *options])
    assert jd.checkpoint.latest(tmp_path / "parts/checkpoints") == 10
    main([str(tmp_path / "parts"), *options])
    ends = [jd.checkpoint.load(tmp_path / name / "checkpoints", step=20) for name in ("whole", "parts")]
    bits = [[leaf.tobytes() for leaf in jax.tree.leaves(end.state)] for end in ends]
    assert bits[0] == bits[1]
    assert ends[0].data == ends[1].data
    logs = [(tmp_path / name / "log.jsonl").read_text().splitlines() for name in ("whole", "parts")]
    whole, parts = ([json.loads(line) for line in log] for log in logs)
    assert [(line["step"], line["loss"]) for line in whole] == [(line["step"], line["loss"]) for line in parts]
    assert [line["step"] for line in whole] == [10, 20]
    assert whole[1]["loss"] < whole[0]["loss"] < 6
    assert all(line["tokens_per_second"] > 0 and line["mfu"] is None for line in parts)


@pytest.mark.slow
def test_gpt_on_two_processes_with_a_hundred_million_parameters_planned(tmp_path):
    launch = ["-m", "jaxdist.processes.launch", "-n", "2", EXAMPLES / "train_gpt.py", tmp_path]
    printed = start([*launch, "--method", "diloco", "--pods", "2"])
    assert "diloco on {'pod': 2, 'data': 4}" in printed
    assert "step 40: loss" in printed
    planned = start([EXAMPLES / "train_gpt.py", "--size", "125m", "--plan"])
    assert "129,368,064 parameters" in planned
    assert "loss" not in planned


def test_mfu_counts_the_operations_of_the_compiler(monkeypatch):
    """Three times those of the forward pass, within what norms and nonlinearities add."""
    script = runpy.run_path(EXAMPLES / "train_gpt.py")
    size = script["Size"](layers=1, width=128, heads=4, context=64, batch=8, at_once=8, rate=1e-3)
    assert jnp.isnan(script["full_speed"](size))
    chip = jd.analysis.cost.CHIPS["v5e"]._replace(name="cpu", flops={"bfloat16": 1e12, "other": 5e11})
    monkeypatch.setitem(jd.analysis.cost.CHIPS, "cpu", chip)
    operations = jax.device_count() * 1e12 / script["full_speed"](size)
    # A loop of one pass: the compiler counts loops once.
    model = jax.eval_shape(lambda: script["GPT"](size, nnx.Rngs(0)))
    batch = jax.ShapeDtypeStruct((8, 65), jnp.uint8)
    counted = jax.jit(script["loss_fn"]).lower(model, batch).cost_analysis()["flops"]
    assert 3 * counted / (8 * 64) == pytest.approx(operations, rel=0.1)
