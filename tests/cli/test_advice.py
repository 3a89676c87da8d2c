"""`jaxdist advise`: what is predicted for links that are told, and what is measured of those that are here."""

import math
import os
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jaxdist as jd
from jaxdist import analysis
from jaxdist._cli import main as cli
from jaxdist._cli.commands import advise as advice
from jaxdist._cli.models import digits
from jaxdist._cli.spellings import parse
from jaxdist._cli.training import train
from jaxdist.analysis import cost, measured
from jaxdist.analysis.measured import fit

COMPUTE = 0.01


@pytest.fixture(scope="module")
def workload():
    return digits.digits_workload(4)


def predict(workload, names, link, workers=4):
    settings = {"optimizer": "adam:1e-3", "workers": workers, "batch_size": 4 * workers, "compute": COMPUTE}
    return advice.predict(workload, names, link=parse.parse_link(link), **settings)


@pytest.mark.slow
def test_bytes_are_those_of_the_compiled_step(workload):
    names = ("exact", "two_shot:int8", "local_sgd:H=5")
    mesh = jd.make_mesh({"data": 4}, devices=jax.devices()[:4])
    for name, found in zip(names, predict(workload, names, "1gbit"), strict=True):
        method = parse.parse_method(name, "adam:1e-3")
        run = train.prepare(workload, **method._asdict(), mesh=mesh, batch_size=16)
        assert found.wire_bytes == pytest.approx(run.wire_bytes - 6)  # less the mean of the loss


@pytest.mark.slow
def test_a_step_is_work_and_coding_and_network(workload):
    slow, fast = (predict(workload, ("exact", "ef:sign"), link) for link in ("1mbit,1ms", "100gbit,0us"))
    for one in (*slow, *fast):
        assert one.step == pytest.approx(COMPUTE + one.coding + one.network)
        assert one.hidden == pytest.approx(max(COMPUTE, one.network) + one.coding)
    plain = slow[0]
    # One message round a ring of four: six hops, and the bytes.
    assert plain.network == pytest.approx(6e-3 + plain.wire_bytes / 125e3)
    assert slow[1].step < plain.step
    assert advice.recommend(slow).name == "ef:sign"
    assert advice.recommend(fast).name == "exact"


@pytest.mark.slow
def test_at_the_break_even_both_take_as_long(workload):
    _, signs = predict(workload, ("exact", "ef:sign"), "10mbit")
    assert 0 < signs.break_even < math.inf
    coding = signs.coding
    plain, signs = predict(workload, ("exact", "ef:sign"), f"{8 * signs.break_even / 1e3}kbit")
    assert plain.step == pytest.approx(signs.step - signs.coding + coding)


def test_a_gather_is_decoded_as_often_as_there_are_workers():
    def decoded(workers):
        def decode(x, nought):
            return jnp.sin(measured._simulate_comm(workers, nought).all_gather(x)).sum(0)

        compiled = jax.jit(decode).lower(jax.ShapeDtypeStruct((64, 64), jnp.float32), jnp.int32(0)).compile()
        return (compiled.cost_analysis() or {})["transcendentals"]

    assert decoded(64) == 64 * decoded(1) > 0


def test_the_fit_finds_latency_and_bandwidth():
    sizes = (2**10, 2**16, 2**22)
    exact = [6 * 2e-4 + 1.5 * size / 1e8 for size in sizes]
    latency, beta = fit(sizes, exact, 4)
    assert (latency, 1 / beta) == pytest.approx((2e-4, 1e8))
    latency, beta = fit((2**20, 2**22), [1e-3, 5e-3], 4)  # faster than any latency would allow
    assert latency == 0
    assert beta > 0


def test_a_link_of_this_machine():
    link = analysis.measure_link(jd.make_mesh({"data": 2}, devices=jax.devices()[:2]), sizes=(2**10, 2**20), turns=2)
    assert link.name == "measured"
    assert link.bandwidth > 0
    assert link.latency >= 0
    with pytest.raises(ValueError, match="single worker"):
        analysis.measure_link(jd.make_mesh({"data": 1}, devices=jax.devices()[:1]))


def test_advise_says_what_to_take(capsys):
    small = ["advise", "--workload", "digits", "--model", "convnet:4", "--workers", "4", "--batch", "16"]
    small += ["--compute", "1", "--reducers", "exact", "f16"]
    assert cli.main([*small, "--link", "1kbit"]) == 0
    assert "Take f16: 2.0 times as fast, 2 times fewer bytes." in capsys.readouterr().out
    assert cli.main([*small, "--link", "400gbit"]) == 0
    assert "Stay with exact: compression will lose here, it starts to pay below" in capsys.readouterr().out


@pytest.mark.slow
def test_two_processes_measure_their_link():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [
        sys.executable,
        "-c",
        "from jaxdist._cli.main import main; raise SystemExit(main())",
        "advise",
        "--workload",
        "digits",
        "--model",
        "convnet:4",
    ]
    command += ["--batch", "16", "--reducers", "exact", "ef:sign"]
    told = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "XLA_FLAGS": ""}
    children = [
        subprocess.Popen(command, env=os.environ | told | {"JAX_PROCESS_ID": str(n)}, stdout=subprocess.PIPE, text=True)
        for n in range(2)
    ]
    printed = [child.communicate(timeout=300)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert "2 workers, links of" in printed[0]
    assert "exact:" in printed[0]
    assert "workers" not in printed[1]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"JAX_NUM_PROCESSES": "2"}, "must be set together"),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2", "JAX_COORDINATOR_ADDRESS": "h:1"}, "must be below"),
        ({"SLURM_NTASKS": "2"}, "this job has several processes"),
    ],
)
def test_initialize_refuses(variables, message, monkeypatch):
    assert jax.devices()
    assert not jd.initialize()  # JAX runs already, and there is nobody else
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        jd.initialize()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one, as in --link"),
        (["--link", "fast"], "such as 100mbit,20ms"),
        (["--link", "1gbit", "--workers", "1"], "--workers must be at least 2"),
        (["--link", "1gbit", "--workers", "5"], "multiple of the 5 workers"),
        (["--link", "1gbit", "--reducers", "demo:1e-3"], "an optimizer that communicates"),
        (["--link", "1gbit", "--reducers", "gzip"], "gzip"),
    ],
)
def test_advise_refuses(arguments, message, capsys):
    assert cli.main(["advise", "--workload", "digits", "--compute", "1", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_never_and_always():
    assert parse.parse_link("10gbit,2s") == cost.Link("10gbit,2s", 2.0, 1.25e9)
    twice = advice.Prediction("twice", 20.0, 0.0, 0.0, 1.0, 1.0, 0.0)
    assert advice.recommend([twice._replace(name="exact", wire_bytes=10.0), twice._replace(step=2.0)]).name == "exact"
