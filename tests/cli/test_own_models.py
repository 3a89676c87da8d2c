"""A model of one's own on the command line: the one of the reference, other forms, and what is refused by name."""

import csv
import re
from importlib import import_module

import jax
import numpy as np
import optax
import pytest
from paths import REPOSITORY
from readers_modules import modules_in

import jaxdist as jd
from jaxdist._cli import main as cli
from jaxdist._cli import planning, planning_disk
from jaxdist._cli.spellings import parse
from jaxdist._cli.training import one_worker

PAGE = (REPOSITORY / "docs" / "reference" / "cli_runs.md").read_text()
SECTION = PAGE[PAGE.index("## A model of your own") : PAGE.index("## Machines that are not attached")]
MODULE = """
import jax, jax.numpy as jnp, numpy as np
from jaxdist import offload

rows = np.arange(60.0, dtype=np.float32).reshape(20, 3)

def loss(params, batch):
    return jnp.mean(batch @ params["w"])

w = {"w": jnp.ones(3)}
number = 3

def arrays():
    return loss, w, rows

def functions():
    return loss, lambda key: w, lambda seed, step, size: rows[:size] + seed % 7 + step

def of_layers(count: int = 2, key="layers"):
    stack = offload.LayerStack(
        embed=lambda p, batch: batch @ p["w"],
        layer=lambda p, x: x + jnp.tanh(x @ p["w"]),
        head=lambda p, x, batch: jnp.mean((x @ p["w"] - 1) ** 2),
    )
    init = lambda key_: {
        "embed": {"w": jnp.ones((3, 8)) / 10},
        key: [{"w": jnp.eye(8) / (i + 1)} for i in range(count)],
        "head": {"w": jnp.ones((8, 1)) / 10},
    }
    return stack, init, rows

def stack_alone():
    return of_layers()[0]

def pair():
    return loss, w

def named():
    return {"loss": loss}

def no_loss():
    return 3, w, rows

def no_params():
    return loss, {}, rows

def text_params():
    return loss, {"w": "none"}, rows

def uneven():
    return loss, w, (rows, rows[:3])

def one_row():
    return loss, w, rows[:1]

def scalar():
    return loss, w, 3.0

def vector():
    return lambda params, batch: batch @ params["w"], w, rows

def integer():
    return lambda params, batch: jnp.sum(batch).astype(int), w, rows

def wrong_shape():
    return loss, {"w": jnp.ones(4)}, rows

def refuses(width: int):
    raise ValueError(f"width must be even, got {width}")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with modules of its own in it; they are forgotten afterwards."""
    (block,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    with modules_in(tmp_path, monkeypatch, own_models=MODULE, my_model=block):
        yield tmp_path


def test_given_arrays_and_functions(folder):
    found = parse.parse_workload("text", "own_models:arrays")
    batch = found.batch(0, 0, 500)
    # The last tenth of twenty examples is held out.
    assert batch.max() < 54
    assert len(np.unique(batch[:, 0])) == 18
    np.testing.assert_array_equal(found.batch(0, 0, 500), batch)
    assert not np.array_equal(found.batch(0, 1, 500), batch)
    assert [x[0, 0] for x in found.held_out(1)] == [54, 57]
    assert [x.shape for x in found.held_out(32)] == [(2, 3)]
    params = found.init(jax.random.key(0))
    assert float(found.loss(params, batch)) == pytest.approx(batch.sum(1).mean())
    assert found.metrics(params, batch) == {"loss": found.loss(params, batch)}
    made = parse.parse_workload("digits", "own_models:functions")
    assert made.batch(0, 2, 4)[0, 0] == 2
    assert len(made.held_out(4)) == 4
    assert made.held_out(4)[0][0, 0] == (2**31 - 1) % 7


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("own_models:pair", "own_models:pair returned a tuple of 2; return (loss, params, batch): loss(params, batch)"),
        ("own_models:named", "returned a dict; return"),
        ("own_models:no_loss", "returned a tuple of 3; return"),
        ("own_models:stack_alone", "own_models:stack_alone returned a LayerStack; return (loss, params, batch)"),
        ("own_models:of_layers:key=blocks", "its loss fails: KeyError: 'layers'; return (stack, params, batch)"),
        ("own_models:no_params", "returned params without arrays"),
        ("own_models:text_params", "with other things among them"),
        ("own_models:uneven", "whose arrays have 3, 20 examples: all must have the same number"),
        ("own_models:one_row", "have 1 examples"),
        ("own_models:scalar", "things that are no arrays of examples"),
        (
            "own_models:vector",
            "its loss returns ShapeDtypeStruct(shape=(2,), dtype=float32) and not one floating number",
        ),
        ("own_models:integer", "and not one floating number"),
        ("own_models:wrong_shape", "its loss fails: TypeError: dot_general requires contracting dimensions"),
        ("own_models:number", "number is no function; return"),
        ("own_models:refuses:3", "model 'own_models:refuses:3': width must be even, got 3"),
        ("own_models:arrays:3", "it takes no arguments"),
        ("own_models:absent", "unknown model 'own_models:absent'"),
        ("missing_module:make", "no module 'missing_module' in"),
        ("gtp:tiny", "did you mean gpt?"),
    ],
)
def test_what_is_refused_is_one_line(folder, capsys, model, said):
    for command in (["plan", "--target", "h100:1x1"], ["advise", "--link", "1gbit"], ["compare"]):
        assert cli.main([*command, "--model", model]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1


def commands():
    (block,) = re.findall(r"```shell\n(.*?)```", SECTION, re.DOTALL)
    found = {line.split()[1]: line.split()[1:] for line in block.splitlines()}
    assert list(found) == ["compare", "advise", "plan"]
    return found


@pytest.mark.slow
def test_the_reference_compares(folder, capsys):
    assert cli.main([*commands()["compare"], "--steps", "3", "--table", "out.csv"]) == 0
    assert len(list(csv.DictReader((folder / "out.csv").read_text().splitlines()))) == 2
    assert "my_model:make, 0.00 M parameters" in " ".join(capsys.readouterr().out.split())


def test_the_reference_advises(folder, capsys):
    assert cli.main([*commands()["advise"], "--compute", "5", "--reducers", "exact", "f16"]) == 0
    assert "8 workers" in capsys.readouterr().out


def test_the_reference_plans(folder, monkeypatch, capsys):
    """With the compiler of this machine in the place of the target's."""
    mesh = jd.make_mesh({"data": 1}, devices=jax.devices()[:1])
    monkeypatch.setattr(planning.pods, "gpu", lambda target, axes: mesh)
    assert cli.main(commands()["plan"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "my_model:make:4096, 69,632 parameters, on 1 rtx4090" in said
    assert "examples/s" in said
    assert cli.main([*commands()["plan"], "--offload", "host_layers"]) == 2
    refused = capsys.readouterr().err
    assert "my_model:make:4096 returned one function for all of its layers" in refused
    assert "return (stack, params, batch): stack, a jaxdist.offload.LayerStack" in refused


def test_layers_of_ones_own_are_planned_one_by_one(folder, monkeypatch, capsys):
    """Three of six layers are on the device; the rest, and what enters each layer, is on the host."""
    mesh = jd.make_mesh({"data": 1}, devices=jax.devices()[:1])
    monkeypatch.setattr(planning.pods, "gpu", lambda target, axes: mesh)
    layered = parse.parse_layers("own_models:of_layers:6")
    # An example is 8 entries of float32 between two layers.
    assert (layered.count, layered.input_bytes) == (6, 32)
    method = parse.parse_method("exact", "adam:1e-3")
    found = planning_disk.plan_layers("rtx4090:1x1", layered, method, place="host", batch_size=4)
    assert found.parameters == 24 + 6 * 64 + 8
    assert found.device_bytes["parameters"] == 3 * 64 * 4
    assert found.device_bytes["optimizer state"] == 3 * 64 * 8
    assert found.host_bytes["parameters"] == 4 * found.parameters
    assert found.host_bytes["inputs of layers"] == 6 * 4 * 32
    assert cli.main(["plan", "--target", "rtx4090:1x1", "--model", "own_models:of_layers", "--offload", "layers"]) == 0
    assert "own_models:of_layers, 160 parameters" in capsys.readouterr().out


def test_a_stack_is_one_loss_for_training(folder):
    """Its layers in order, as `offload.host_layers` computes them; ZeRO gathers one after the other."""
    workload = parse.parse_workload("text", "own_models:of_layers:3")
    stack, init, _ = import_module("own_models").of_layers(3)
    params, batch = init(None), workload.batch(0, 0, 8)
    run = jd.offload.host_layers(stack, optax.sgd(0.1))
    state = run.init(lambda i: params["layers"][i], 3, embed=params["embed"], head=params["head"])
    np.testing.assert_allclose(workload.loss(params, batch), run.loss(state, batch), rtol=1e-6)
    compare_stages(workload)


@pytest.mark.slow
def test_its_losses_rank_methods_over_other_links(folder, capsys):
    """`advise` takes the model from the log of a comparison."""
    arguments = ["compare", "--model", "own_models:functions", "--batch", "8", "--steps", "2", "--link", "1gbit"]
    assert cli.main([*arguments, "--reducers", "exact", "f16", "--out", "log"]) == 0
    assert cli.main(["advise", "--link", "10mbit", "--losses", "log/log.jsonl"]) == 0
    assert "exact" in capsys.readouterr().out


def test_zero_gathers_it_as_one_layer(folder):
    compare_stages(parse.parse_workload("text", "my_model:make"))


def compare_stages(workload):
    """Losses of three steps with sharded parameters are those with replicated ones."""
    mesh = jd.make_mesh({"data": 4}, devices=jax.devices()[:4])
    losses = []
    for spelled in ("exact", "zero:3"):
        worker = one_worker.one_worker(workload, parse.parse_method(spelled, "sgd:0.1"))
        state = jd.init_state(lambda worker=worker: worker.make_state(0), mesh)
        step = jd.distribute(worker.step, mesh)
        losses.append([])
        for k in range(3):
            state, metrics = step(state, workload.batch(0, k, 8))
            losses[-1].append(float(metrics["loss"]))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
