"""A step of one's own in `plan` and `advise`: the one of the guide, and what is refused by name."""

import csv
import re
import shlex
from pathlib import Path

import jax
import pytest
from paths import REPOSITORY
from readers_modules import modules_in

import jaxdist as jd
from jaxdist._cli import main as cli
from jaxdist._cli import planning
from jaxdist.analysis import pods

GUIDE = (REPOSITORY / "docs" / "how-to" / "before-you-rent-a-pod.md").read_text()
SECTION = GUIDE[GUIDE.index("## Your own step") : GUIDE.index("### From Python")]
PAGE = (REPOSITORY / "docs" / "reference" / "cli_runs.md").read_text()
REFERENCE = PAGE[PAGE.index("## A step of your own") : PAGE.index("## Chips that fail")]
MODULE = """
import jax, jax.numpy as jnp, jaxdist as jd, optax
from jax.sharding import NamedSharding, PartitionSpec as P

number = 3

def rows(mesh, sharding=P("data")):
    return jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, sharding))

def mean(mesh, donated: bool = True):
    step = lambda state, batch: (state + jax.lax.psum(batch, "data").mean(), {})
    state, batch = jd.analysis.pods.abstract(lambda: jnp.zeros((1024, 1024)), rows(mesh), mesh)
    return jd.distribute(step, mesh, donate=donated), state, batch

def on_host(mesh):
    tx = jd.offload.host(optax.adam(0.1))
    def step(state, batch):
        updates, state = tx.update(jax.lax.pmean(batch.sum(0), "data"), state)
        return state, updates
    state, batch = jd.analysis.pods.abstract(lambda: tx.init(jnp.zeros(64)), rows(mesh), mesh)
    return jd.distribute(step, mesh), state, batch

def reduced(mesh, rows_of_one: int = 16, reducer=jd.exact()):
    # Gradients of two leaves, and a loss.
    tx = jd.all_reduce(reducer)
    def make_state():
        params = {"w": jnp.zeros((64, 32)), "b": jnp.zeros(32)}
        return params, tx.init(params)
    def step(state, batch):
        params, opt_state = state
        loss = lambda params, x: jnp.mean((x @ params["w"] + params["b"][None]) ** 2)
        loss, grads = jd.local_value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), jax.lax.pmean(loss, "data")
    batch = jax.ShapeDtypeStruct((rows_of_one * mesh.size, 64), jnp.float32)
    return jd.distribute(step, mesh), *jd.analysis.pods.abstract(make_state, batch, mesh)

def fixed_batch(mesh, reducer=jd.exact()):
    step, state, _ = reduced(mesh, reducer=reducer)
    return step, state, rows(mesh)

def ignored(mesh, reducer=jd.exact()):
    return reduced(mesh)

def no_mesh():
    pass

def not_jitted(mesh):
    return lambda state: state, rows(mesh)

def nothing(mesh):
    pass

def alone(mesh):
    return (jax.jit(lambda state: state),)

def wrong_count(mesh):
    return jax.jit(lambda state, batch: state), rows(mesh)

def wrong_shape(mesh):
    return jax.jit(lambda x: x @ jnp.ones((3, 3))), rows(mesh)

def half(mesh):
    return jax.jit(lambda x: x + 1), rows(jax.sharding.Mesh(mesh.devices[:2], ("data",)))

def no_shardings(mesh):
    return jax.jit(lambda x: x + 1), jax.ShapeDtypeStruct((64, 64), jnp.float32)

def eager(mesh):
    # Devices of a target that is not attached compute nothing.
    weights = jax.random.normal(jax.random.key(0), (64, 64))
    assert weights.devices() == {jax.devices()[0]}, weights.devices()
    return jax.jit(lambda x: x @ weights), rows(mesh)

def elsewhere(mesh):
    return jax.jit(lambda x: x + 1), jax.device_put(jnp.ones(3), jax.devices()[-1])

def fails(mesh):
    return {}["w"]

def refuses(mesh, width: int):
    raise ValueError(f"width must be even, got {width}")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with modules of its own in it, and this machine's devices in the place of a target's."""

    def gpu(target, axes=None):
        found = re.fullmatch(r"(\w+):(\d+)x(\d+)", target)
        count = int(found[2]) * int(found[3])
        axes = pods._check_axes(axes, {"data": count}, count, target)
        return jd.make_mesh(dict(axes), devices=jax.devices()[:count])

    monkeypatch.setattr(planning.pods, "gpu", gpu)
    block = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)[0]
    with modules_in(tmp_path, monkeypatch, own_steps=MODULE, my_step=block):
        yield tmp_path


def plan(capsys, *arguments, target="h100:1x4"):
    status = cli.main(["plan", "--target", target, *arguments])
    captured = capsys.readouterr()
    return status, " ".join(captured.out.split()), captured.err


def test_the_guide_is_planned_on_its_axes(folder, capsys):
    """FSDP inside slices and codes between them: the program's bytes by the axis that they cross, and its memory."""
    status, said, _ = plan(capsys, "--step", "my_step:make:64", "--axes", "dcn=2,fsdp=2")
    assert status == 0
    assert "my_step:make:64, on 4 h100 (h100:1x4, dcn=2,fsdp=2)" in said
    # Parameters and two moments of 2 [64, 256] in float32, of which a device has half, and its rows of the batch.
    held = 3 * 2 * 64 * 256 * 4 / 2 + 64 * 64 * 4
    assert f"arguments {held / 1e3:.1f} kB" in said
    # Each device sends the codes of its half: four bits an entry, scales, and four bytes of the loss.
    (across,) = re.findall(r"across dcn: ([\d.]+) kB of each device", said)
    assert 2 * 64 * 256 / 2 / 2 < 1e3 * float(across) < 1.1 * 2 * 64 * 256 / 2 / 2
    assert "across fsdp: " in said
    assert (folder / "runs" / "plan" / "plan.png").exists()


@pytest.mark.parametrize(
    ("name", "advice"),
    [("on_host", "keeps arrays in host memory (jaxdist.offload.host)"), ("mean", "try parts of the step")],
)
def test_a_compiler_that_fails_at_host_memory_is_told_apart(name, advice, folder, monkeypatch, capsys):
    """XLA ends in an internal error where arrays of a GPU that is not attached are on its host."""

    def fail(self, **options):
        raise RuntimeError("INTERNAL: the async shape at index {0}")

    monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
    status, _, refused = plan(capsys, "--step", f"own_steps:{name}")
    assert status == 2
    assert "the compiler of h100:1x4 failed: INTERNAL: the async shape" in refused
    assert advice in refused


def test_a_distributed_step_on_the_default_axis(folder, capsys):
    status, said, _ = plan(capsys, "--step", "own_steps:mean")
    assert status == 0
    # The sum of [16, 64] over four devices: 2 · 3/4 of 4 kB.
    assert "all-reduce float32 4 1 6.1 kB" in said
    assert "across data: 6.1 kB of each device" in said
    assert "donate the state" not in said


def test_a_state_that_is_not_donated_is_told(folder, capsys):
    _, said, _ = plan(capsys, "--step", "own_steps:mean:False")
    assert "outputs 4.2 MB" in said
    assert "donate the state, jax.jit(step, donate_argnums=0): outputs take" in said


def test_arguments_without_shardings_are_on_all_devices(folder, capsys):
    status, said, _ = plan(capsys, "--step", "own_steps:no_shardings")
    assert status == 0
    assert "arguments 16.4 kB" in said


@pytest.mark.parametrize("target", ["h100:1x4", "v5e:2x2"])
def test_arrays_may_be_made_beside_the_step(folder, capsys, target):
    """On this machine: the devices of the target are not attached."""
    if target.startswith("v5e"):
        pytest.importorskip("libtpu", reason="libtpu is not installed")
    status, _, refused = plan(capsys, "--step", "own_steps:eager", "--axes", "data=4", target=target)
    assert status == 0, refused


def test_what_does_not_fit_is_told(folder, capsys):
    status, said, _ = plan(capsys, "--memory", "1MB", "--step", "own_steps:mean")
    assert status == 1
    assert "does not fit" in said
    assert "try shard the state: zero_redundancy" in said


def test_what_the_compiler_refuses_for_its_memory_is_told(folder, capsys, monkeypatch):
    def refuse(self, **options):
        raise RuntimeError("RESOURCE_EXHAUSTED: Used 2.0G of 1.0G hbm")

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    status, said, _ = plan(capsys, "--step", "own_steps:mean")
    assert status == 1
    assert "at the most 2.1 GB" in said
    assert "try temporaries are the larger part" in said


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("own_steps", "--step must be MODULE:FUNCTION, as in my_step:make, got 'own_steps'; write FUNCTION(mesh, ...)"),
        ("missing_module:make", "step 'missing_module:make': no module 'missing_module' in"),
        ("own_steps:absent", "unknown step 'own_steps:absent'; known: rows, mean"),
        ("own_steps:number", "number is no function; write FUNCTION(mesh, ...) that returns (step, *arguments)"),
        ("own_steps:no_mesh", "no_mesh has no first argument for the mesh; write"),
        (
            "own_steps:mean:True,3",
            "step 'own_steps:mean:True,3': too many positional arguments; it takes [donated=True]",
        ),
        ("own_steps:not_jitted", "returned the function <lambda> in place of a step, which cannot be compiled; write"),
        ("own_steps:nothing", "own_steps:nothing returned a NoneType; write"),
        ("own_steps:alone", "own_steps:alone returned a tuple of 1; write"),
        ("own_steps:wrong_count", "its step fails: TypeError: "),
        ("own_steps:wrong_shape", "its step fails: TypeError: dot_general requires contracting dimensions"),
        ("own_steps:half", "its step fails: ValueError: Received incompatible devices"),
        ("own_steps:elsewhere", "returned an argument[0] on "),
        ("own_steps:fails", "step 'own_steps:fails': fails fails: KeyError: 'w'"),
        ("own_steps:refuses:3", "step 'own_steps:refuses:3': width must be even, got 3"),
    ],
)
def test_what_is_refused_is_one_line(folder, capsys, step, said):
    status, _, error = plan(capsys, "--step", step)
    assert status == 2
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--step", "own_steps:mean", "--reducer", "f16"], "mean has no argument for the reducer: write mean("),
        (["--step", "own_steps:reduced:reducer=f16", "--reducer", "f16"], "names its reducer: leave it out"),
        (["--step", "own_steps:reduced", "--reducer", "sing"], "did you mean sign?"),
        (["--step", "own_steps:reduced", "--sync", "diloco:H=5"], "--sync is for the step of --model"),
        (["--step", "own_steps:mean", "--zero", "3"], "--zero is for the step of --model"),
        (["--step", "own_steps:mean", "--axes", "data=3"], "do not make up the 4 devices"),
        (["--step", "own_steps:mean", "--axes", "data"], "--axes must be names with sizes, slow links first"),
        (["--step", "own_steps:mean", "--axes", "data=2,data=2"], "--axes must be names with sizes"),
        (["--axes", "data=4"], "--axes is for --step"),
    ],
)
def test_options_that_do_not_go_together_are_refused(folder, capsys, options, said):
    status, _, error = plan(capsys, *options)
    assert status == 2
    assert said in error


def test_a_plan_has_another_reducer_in_the_step(folder, capsys):
    status, said, _ = plan(capsys, "--step", "own_steps:reduced", "--reducer", "two_shot:qsgd:4")
    assert status == 0
    assert "own_steps:reduced, two_shot:qsgd:4, on 4 h100" in said
    assert "all-to-all uint8 4" in said


def advise(capsys, *arguments):
    """Advice for links on which only bytes and hops take time; returns also the rows of the table."""
    status = cli.main(["advise", "--link", "1mbit,0s", "--compute", "1", "--table", "advice.csv", *arguments])
    captured = capsys.readouterr()
    written = Path("advice.csv").read_text().splitlines() if status == 0 else []
    return status, captured.out, captured.err, {row["name"]: row for row in csv.DictReader(written)}


def test_bytes_of_a_step_are_those_that_it_sends_between_workers(folder, capsys):
    names = ["exact", "f16", "ef:qsgd:4"]
    status, said, _, found = advise(capsys, "--step", "own_steps:reduced", "--workers", "4", "--reducers", *names)
    assert status == 0
    assert "4 workers, links of 1.0 Mbit/s and 0.00 ms, 1 ms of the step's own work" in said
    # Two leaves of 2,080 entries round a ring of four, and the loss.
    assert float(found["exact"]["wire_bytes"]) == 2 * 3 / 4 * 4 * (64 * 32 + 32 + 1)
    assert float(found["f16"]["wire_bytes"]) == 2 * 3 / 4 * (2 * (64 * 32 + 32) + 4)
    assert float(found["ef:qsgd:4"]["wire_bytes"]) < float(found["f16"]["wire_bytes"])
    # A step is its work, coding and the bytes over the link.
    for row in found.values():
        seconds = 1e-3 + float(row["coding"]) + float(row["wire_bytes"]) / 125e3
        assert float(row["step"]) == pytest.approx(seconds)
    assert "Take ef:qsgd:4: " in said


def test_bytes_over_other_axes_than_the_first_are_inside_a_worker(folder, capsys):
    settings = ["--step", "my_step:make:64", "--reducers", "exact"]
    sent = {}
    for axes in ("dcn=4,fsdp=1", "dcn=4,fsdp=2"):
        status, _, _, found = advise(capsys, *settings, "--axes", axes)
        assert status == 0
        sent[axes] = float(found["exact"]["wire_bytes"])
    # Each device sends the half of the parameters that it holds.
    assert sent["dcn=4,fsdp=1"] == 2 * sent["dcn=4,fsdp=2"] == 2 * 3 / 4 * 4 * 2 * 64 * 256


def test_the_work_of_a_step_is_timed_on_one_device(folder, capsys):
    settings = ["--link", "1gbit", "--workers", "4", "--reducers", "exact"]
    assert cli.main(["advise", "--step", "own_steps:reduced", *settings]) == 0
    assert re.search(
        r"4 workers, links of 1.0 Gbit/s and .* ms, \d+ ms of the step's own work", capsys.readouterr().out
    )


def test_reducers_that_a_step_refuses_are_left_out(folder, capsys):
    names = ["--reducers", "exact", "two_shot:int8", "--axes", "dcn=4,fsdp=1"]
    status, said, _, found = advise(capsys, "--step", "my_step:make:64", *names)
    assert status == 0
    assert list(found) == ["exact"]
    assert "Left out two_shot:int8: specs= needs a reducer with" in said


@pytest.mark.slow
def test_the_pages_advise(folder, capsys):
    shown = re.findall(r"^jaxdist (advise .*)", (SECTION + REFERENCE).replace("\\\n", ""), re.M)
    assert len(shown) == 3
    for command in shown:
        assert cli.main(shlex.split(command)) == 0
        said = capsys.readouterr().out
        assert "4 workers, links of" in said
        assert "Left out two_shot:int8: " in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--step", "own_steps"], "--step must be MODULE:FUNCTION, as in my_step:make, got 'own_steps'"),
        (["--step", "own_steps:mean"], "mean has no argument for the reducer: write mean(mesh, ..., reducer="),
        (["--step", "own_steps:ignored"], "own_steps:ignored does not use its reducer: give it to jaxdist.all_reduce"),
        (["--step", "own_steps:reduced", "--model", "gpt:tiny"], "--model is for the step of --model"),
        (["--step", "own_steps:reduced", "--batch", "64"], "--batch is for the step of --model"),
        (["--step", "own_steps:reduced", "--axes", "dcn=4"], "the mesh has no axis 'data'"),
        (["--step", "own_steps:reduced", "--axes", "data=4", "--workers", "4"], "--workers is the first of --axes"),
        (["--step", "own_steps:reduced", "--workers", "1"], "--workers must be at least 2, got 1"),
        (
            ["--step", "own_steps:reduced", "--reducers", "exact", "diloco:H=5"],
            "--step takes reducers, and diloco:H=5 is a method around them",
        ),
        (["--step", "own_steps:reduced", "--reducers", "zero:1"], "--step takes reducers, and zero:1 is"),
        (["--axes", "data=4"], "--axes is for --step"),
    ],
)
def test_advise_refuses_what_a_step_cannot_answer(folder, capsys, options, said):
    status, _, error, _ = advise(capsys, *options)
    assert status == 2
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (["own_steps:fixed_batch"], "batch of own_steps:fixed_batch is [(64, 64)] on one device, and [(8, 64)]"),
        (["my_step:make", "--axes", "dcn=4,fsdp=2"], "a worker of my_step:make has several devices, of which one is"),
    ],
)
def test_a_step_that_cannot_be_timed_here_needs_its_time(folder, capsys, step, said):
    assert cli.main(["advise", "--link", "1gbit", "--reducers", "exact", "--step", *step]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "give its time as --compute, in milliseconds" in error


def test_commands_that_train_name_what_they_take_instead(capsys):
    for command in ("compare", "train"):
        assert cli.main([command, "--step", "my_step:make"]) == 2
        assert f"{command} trains, and a step has neither first parameters nor data" in capsys.readouterr().err
