"""`jaxdist tune`, and the costs of layers that it goes by."""

import re

import jax
import jax.numpy as jnp
import pytest

from jaxdist import cli
from jaxdist.workloads import gpt, layers, parse

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


def test_tune_prints_the_schedules_and_the_winner(capsys, tmp_path):
    link = ["--flops", "1e9", "--bandwidth", "500mbit", "--latency", "5us", "--overhead", "20us"]
    assert cli.main([*TINY, *link, "--evaluations", "8", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    rows = re.findall(r"^ (\S.*?)  .* ([\d,.]+) +-?[\d,.]+ +([\d.]+)x", printed, re.M)
    times = {name: float(seconds) for name, seconds, _ in rows}
    assert len(times) == 6
    assert times["no order can beat"] <= times["partitions, tuned"] <= times["partitions, at the start"]
    assert times["partitions, tuned"] < times["a message for each layer, and a barrier"]
    assert re.search(r"jd.scheduled\(jd.exact\(\), partition_bytes=\d+, credit_bytes=\d+\)", printed)


@pytest.mark.slow
def test_tune_times_real_steps(capsys):
    assert cli.main([*TINY, "--measured", "--steps", "3", "--evaluations", "2"]) == 0
    printed = capsys.readouterr().out
    assert len(re.findall(r"trial \d", printed)) == 2
    assert "one message (exact)" in printed
    assert re.search(r"jd.scheduled\(jd.exact\(\), partition_bytes=\d+|nothing is faster", printed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bandwidth", "10"], "a link is a bandwidth and a latency, such as 100mbit,20ms"),
        (["--flops", "-1"], "--flops must be positive, got -1"),
        (["--workers", "3"], "--batch must be a multiple of the 3 workers, got 8"),
        (["--evaluations", "0"], "--evaluations must be at least 1, got 0"),
        (["--model", "gpt:vast"], "unknown size 'vast'"),
    ],
)
def test_tune_says_in_one_line_what_cannot_be(options, message, capsys):
    assert cli.main([*TINY, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
