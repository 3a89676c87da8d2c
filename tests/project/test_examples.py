"""Every example runs as its docstring says, and prints what it promises."""

import json
import re
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from paths import REPOSITORY
from readers_modules import readers_environment
from transcripts import DECIMAL, assert_alike

import jaxdist as jd

EXAMPLES = REPOSITORY / "examples"
# What guides show below the command that runs an example.
SHOWN = re.compile(r"^python examples/(\w+\.py)\n```\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TRANSCRIPTS = dict(match for page in REPOSITORY.glob("docs/how-to/*.md") for match in SHOWN.findall(page.read_text()))
PROMISES = {
    "from_scratch/diloco.py": "15 messages of the size of the model in 300 steps",
    "from_scratch/gossip.py": "models 1.00 apart, 32 bytes to each neighbor",
    "from_scratch/islands.py": "of a and b: error",
    "from_scratch/power_sgd.py": "a step averages 88 numbers in place of 336",
    "from_scratch/streaming_diloco.py": "no message is longer than 72 bytes",
    "from_scratch/top_k.py": "without memory: loss",
    "from_scratch/two_shot_quantization.py": "a worker sends 288 bytes in a step",
    "from_scratch/zero.py": "424 bytes in place of 1,680",
    "any_batch_regret.py": "times less regret than with fixed batches",
    "chain_with_optax.py": "test accuracy 0.9",
    "does_not_fit.py": "of Adam's moments are in",
    "follow_weights.py": "of the bytes of a whole copy",
    "flax_models.py": "4 workers, steps 40 to 80",
    "fsdp_between_slices.py": "times fewer bytes between slices than exact",
    "grain_data.py": "the same 40 batches, and the same bits",
    "hospitals.py": "quasi-global momentum  8",
    "islands.py": "rounds: 0.",
    "lora.py": "times fewer",
    "tensor_parallel.py": "the losses without compression are those of one device",
    "train_gpt.py": "step 40: loss",
    "two_clusters.py": "times fewer bytes between clusters",
    "two_processes.py": "one worker sends",
    "uneven_workers.py": "times faster than bsp",
    "your_own_compressor.py": "the laws hold",
}


def test_all_examples_are_tested_and_short():
    paths = [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("from_scratch/*.py")]
    files = {path.relative_to(EXAMPLES).as_posix(): path.read_text().count("\n") for path in paths}
    assert set(files) == set(PROMISES)
    assert files.pop("train_gpt.py") < 420  # a complete training script, with five methods
    # Three versions of one model, a model that is trained twice, and two kinds of mesh.
    assert max(files.pop(name) for name in ("flax_models.py", "lora.py", "tensor_parallel.py")) < 200
    assert max(files.values()) <= 100


def start(command):
    """Runs a command with the settings of a reader, and returns what it prints."""
    options = {"capture_output": True, "text": True, "timeout": 300, "env": readers_environment()}
    run = subprocess.run([sys.executable, *command], check=False, **options)
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
        newer = ("Explicit", "JAX alone")
        texts = [
            "".join(line for line in text.splitlines(keepends=True) if not any(word in line for word in newer))
            for text in texts
        ]
    assert_alike(*texts)


@pytest.fixture
def documents(tmp_path):
    """A data set in a folder, as Hugging Face's library reads one."""
    pytest.importorskip("datasets", reason="needs Hugging Face's datasets: pip install datasets")
    (tmp_path / "documents").mkdir()
    texts = [page.read_text() for page in sorted(REPOSITORY.glob("docs/how-to/*.md"))]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "documents/train.jsonl").write_text(lines)
    return ["--dataset", str(tmp_path / "documents")]


def test_gpt_refuses_diloco_on_one_pod(capsys):
    """It would average gradients in every step, and be called DiLoCo."""
    with pytest.raises(SystemExit):
        runpy.run_path(EXAMPLES / "train_gpt.py")["main"](["--method", "diloco"])
    assert "--method diloco needs --pods 2 or more" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("method", ["exact", "power_sgd", "zero", "diloco", "streamed"])
def test_gpt_resumes_with_the_same_bits(method, tmp_path, monkeypatch, request):
    """A run that was preempted after ten steps and one that was not: the same losses, batches and parameters."""
    main = runpy.run_path(EXAMPLES / "train_gpt.py")["main"]
    options = ["--pods", "2", "--sync-period", "4", "--steps", "20", "--dropout", "0.1"]
    options += request.getfixturevalue("documents") if method == "streamed" else ["--method", method]
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
    # The run that was preempted has evaluated once more, at its end.
    (trained, more), (held_out, _) = (
        [[(line["step"], line[name]) for line in log if name in line] for log in (whole, parts)]
        for name in ("loss", "held_out_loss")
    )
    assert trained == more
    assert [step for step, _ in trained] == [10, 20]
    assert trained[1][1] < trained[0][1] < 6
    assert [step for step, _ in held_out] == [20]
    assert 2 < held_out[0][1] < 6
    speeds = [line for line in parts if "loss" in line]
    assert all(line["tokens_per_second"] > 0 and line["mfu"] is None for line in speeds)


@pytest.mark.slow
def test_two_islands_train_one_gpt(tmp_path):
    """Two jobs that share a folder alone: each takes the other's progress, and their held-out losses are close."""
    command = [EXAMPLES / "train_gpt.py", "--method", "islands", "--store", tmp_path / "run", "--timeout", "60"]
    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(start, [*command, tmp_path / name, "--name", name]) for name in ("a", "b")]
        printed = [job.result() for job in jobs]
    assert all("met as a and b" in text for text in printed)
    held_out = [float(re.findall(r"held-out loss (\S+)", text)[-1]) for text in printed]
    assert held_out[0] == pytest.approx(held_out[1], abs=0.1)
    assert max(held_out) < 3.2


def test_gpt_logs_to_every_tracker_in_one_call(tmp_path, monkeypatch):
    """The trackers' packages are not installed here: these stand for their public functions, and record the calls."""
    calls = []

    class Run:
        def __init__(self, **settings):
            calls.append(("init", settings["name"], settings["resume"]))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            calls.append("finish")

        def log(self, metrics, step):
            calls.append((step, dict(metrics)))

    class Board:
        def __init__(self, folder):
            calls.append(folder)

        def add_scalar(self, name, value, step):
            calls.append((step, name, value))

        def close(self):
            calls.append("close")

    finish = partial(calls.append, "finish")
    modules = {
        "wandb": {"init": Run},
        "trackio": {"init": Run, "finish": finish},
        "tensorboard.summary": {"Writer": Board},
    }
    for name, members in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**members))
    args = SimpleNamespace(tracker=["wandb", "trackio", "tensorboard"])
    with runpy.run_path(EXAMPLES / "train_gpt.py")["open_log"](tmp_path, args) as write:
        write(10, {"loss": 2.5})
    run = ("init", tmp_path.name, "allow")
    sent = [(10, {"loss": 2.5})] * 2 + [(10, "loss", 2.5)]
    assert calls == [run, run, str(tmp_path / "tensorboard"), *sent, "close", "finish", "finish"]
    assert json.loads((tmp_path / "log.jsonl").read_text()) == {"step": 10, "loss": 2.5}


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
    key = jax.random.key(0)
    counted = jax.jit(script["loss_fn"]).lower(model, batch, key).cost_analysis()["flops"]
    assert 3 * counted / (8 * 64) == pytest.approx(operations, rel=0.1)
