"""`jaxdist tune`, and the costs of layers that it goes by."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import jaxdist as jd
from jaxdist._cli import layers
from jaxdist._cli import main as cli
from jaxdist._cli.models import gpt
from jaxdist._cli.spellings import parse

TINY = ["tune", "--model", "gpt:tiny,context=8,width=16,layers=3", "--batch", "8", "--workers", "4"]


def test_layers_of_a_gpt_cost_what_they_should():
    config = gpt.GPTConfig(layers=11, width=16, heads=2, context=8)
    params = jax.eval_shape(lambda: gpt.init(config, jax.random.key(0)))
    batch = jnp.zeros((3, 9), jnp.int32)
    found = layers.layers_of(lambda params, batch: gpt.loss(config, params, batch), params, batch)
    blocks = [f"block_{number}" for number in range(11)]
    assert [layer.name for layer in found] == ["tokens", "positions", *blocks, "final_norm", "out"]
    by_name = {layer.name: layer for layer in found}
    tokens, width = 3 * 8, 16
    products, attention = 2 * tokens * 12 * width**2, 2 * 2 * tokens * 8 * width
    assert by_name["block_10"].flops == products + attention
    assert by_name["out"].flops == 2 * tokens * width * 256
    assert by_name["out"].bytes == 4 * width * 256
    assert by_name["tokens"].flops == 0


def test_layers_of_a_convolutional_net():
    workload = parse.parse_workload("digits", "convnet:4")
    params = jax.eval_shape(workload.init, jax.random.key(0))
    batch = workload.batch(0, 0, 2)
    found = layers.layers_of(workload.loss, params, batch)
    analysed = jax.jit(workload.loss).lower(params, batch).compile().cost_analysis()
    assert analysed is not None
    # The compiler counts additions and such too, and no products with padding.
    assert sum(layer.flops for layer in found) == pytest.approx(analysed["flops"], rel=0.3)
    assert sum(layer.bytes for layer in found) == sum(4 * leaf.size for leaf in jax.tree.leaves(params))


def test_a_loop_over_layers_counts_each_round():
    params = {"w": jnp.zeros((5, 4, 4))}

    def loss(params, x):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, params["w"])[0].sum()

    (layer,) = layers.layers_of(loss, params, jnp.zeros((2, 4)))
    assert layer.flops == 5 * 2 * 2 * 4 * 4


LINK = {"--flops": "1e9", "--bandwidth": "500mbit", "--latency": "5us", "--overhead": "20us"}


def tuned(capsys, tmp_path, **change):
    """The rows of the table, and what is recommended: seconds and expression."""
    link = [word for option in {**LINK, **change}.items() for word in option]
    assert cli.main([*TINY, *link, "--evaluations", "8", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    rows = re.findall(r"^ (\S.*?)  .* ([\d,.]+) +-?[\d,.]+ +([\d.]+)x", printed, re.M)
    said = re.findall(r"^(\w+ \w+ \w+|\w+ steps), ([\d,.]+) ms: (jd\..*)$", printed, re.M)
    return {name: float(seconds) for name, seconds, _ in rows}, {where: (float(ms), what) for where, ms, what in said}


def test_tune_prints_the_schedules_and_the_winner(capsys, tmp_path):
    times, said = tuned(capsys, tmp_path)
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert len(times) == 6
    best = times["layers together or in parts, tuned"]
    assert times["no order can beat"] <= times["no order inside a step can beat"] <= best
    assert best <= times["a message for each layer"] < times["one message (exact)"]
    assert list(said) == ["inside a step"]
    assert said["inside a step"][0] == best


def all_reduces(reducer, like):
    """The bytes of each message of the compiled program, in the order of its schedule."""

    def step(state, gradient):
        out, _ = reducer.reduce(jax.tree.map(lambda x: x[0], gradient), state, jd.comm.over("data"))
        return state, out.mean

    mesh = jd.make_mesh({"data": 4}, devices=jax.devices()[:4])
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((4, *x.shape), x.dtype), like)
    compiled = jd.distribute(step, mesh, donate=False).lower(reducer.init(like), rows).compile()
    return [op.bytes for op in jd.analysis.collectives(compiled).ops]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("overhead", ["20us", "1us", "1ms"])
def test_what_is_recommended_is_what_was_simulated(capsys, tmp_path, overhead):
    times, said = tuned(capsys, tmp_path, **{"--overhead": overhead})
    promised, what = said["inside a step"]
    assert promised <= min(times["a message for each layer"], times["one message (exact)"])
    workload = parse.parse_workload("text", TINY[2])
    params = jax.eval_shape(workload.init, jax.random.key(0))
    costs = layers.layers_of(workload.loss, params, workload.batch(0, 0, 2))
    # The arguments that the expression has, and the bytes that the reducer sends.
    reducers = SimpleNamespace(partitioned=lambda _, **options: options)
    options = eval(what, {"jd": SimpleNamespace(exact=lambda: {}, reducers=reducers)})
    options = options or {"layers": [tuple(layer.name for layer in costs)]}
    link = {"bandwidth": 62.5e6 / 1.5, "overhead": parse.parse_link(f"1gbit,{overhead}").latency, "latency": 3e-5}
    profile = layers.profile_from_rate(costs, flops=1e9)
    played = layers.step_of(costs, profile, groups=options.pop("layers"), **options, **link)
    assert 1e3 * played.makespan == pytest.approx(promised, abs=0.006)
    sent = [(message.end - message.start - link["overhead"]) * link["bandwidth"] for message in played.messages]
    assert all_reduces(eval(what, {"jd": jd}), params) == pytest.approx(sent)


def test_across_steps_the_promise_is_that_of_pipelined(capsys, tmp_path):
    times, said = tuned(capsys, tmp_path, **{"--overhead": "0us", "--latency": "0us"})
    promised, what = said["across steps"]
    overlap = SimpleNamespace(pipelined=lambda *_, **options: options)
    told = eval(what, {"jd": SimpleNamespace(overlap=overlap), "loss": None, "tx": None})
    assert promised == times[f"pipelined, first {told['defer']} layers deferred"] < said["inside a step"][0]
    assert told["layers"] == ("tokens", "positions", "block_0", "block_1", "block_2", "final_norm", "out")


@pytest.mark.slow
def test_tune_times_real_steps(capsys):
    assert cli.main([*TINY, "--measured", "--steps", "3", "--evaluations", "2"]) == 0
    printed = capsys.readouterr().out
    assert len(re.findall(r"trial \d", printed)) == 2
    assert "one message (exact)" in printed
    assert re.search(
        r"jd.reducers.partitioned\(jd.exact\(\), partition_bytes=.*order='fifo', layers=|nothing is faster", printed
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bandwidth", "10"], "a link is a bandwidth and a latency, such as 100mbit,20ms"),
        (["--flops", "-1"], "--flops must be positive, got -1"),
        (["--flops", "inf"], "--flops must be finite, got inf"),
        (["--flops", "1e-300"], "as in 3e12 for 3 TFLOP/s, and at 1e-300 a step of"),
        (["--measured", "--bandwidth", "10gbit"], "--bandwidth is for a simulated link: leave it out, or --measured"),
        (["--measured", "--out", "runs/tune"], "--out is for a simulated link: leave it out, or --measured"),
        (["--workers", "3"], "--batch must be a multiple of the 3 workers, got 8"),
        (["--workers", "1"], "--workers must be at least 2, got 1: one worker sends nothing"),
        (["--evaluations", "0"], "--evaluations must be at least 1, got 0"),
        (["--model", "gpt:vast"], "unknown size 'vast'"),
    ],
)
def test_tune_says_in_one_line_what_cannot_be(options, message, capsys):
    assert cli.main([*TINY, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
