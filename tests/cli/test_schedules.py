"""Learning-rate schedules in the spelling of `--optimizer`."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdist as jd
from jaxdist._cli import main as cli
from jaxdist._cli.spellings import parse, tables


def rates(spelling, steps=10):
    """The rate of every step, from the updates that the optimizer makes of gradients of 1."""
    tx: Any = parse.parse_optimizer(spelling, steps)
    params = jnp.zeros(())
    state, found = tx.init(params), []
    for _ in range(steps + 2):
        updates, state = tx.update(jnp.ones(()), state, params)
        found.append(-float(updates))
    return np.array(found)


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ("sgd:0.5", [0.5] * 12),
        ("sgd:0.5,warmup_steps=2", [0.25] + [0.5] * 11),
        ("sgd:0.5,schedule=constant,warmup_steps=5", [0.1, 0.2, 0.3, 0.4] + [0.5] * 8),
        ("sgd:0.5,schedule=linear", [0.5 * (1 - t / 10) for t in range(10)] + [0, 0]),
        ("sgd:learning_rate=0.5,schedule=linear,decay_steps=2", [0.5, 0.25] + [0] * 10),
        ("sgd:0.5,schedule=cosine", [0.25 * (1 + np.cos(np.pi * t / 10)) for t in range(10)] + [0, 0]),
        # By hand: up to 0.5 in two steps, then the cosine over the eight that are left, to a tenth.
        (
            "sgd:0.5,schedule=cosine,warmup_steps=2,end_factor=0.1",
            [0.25, 0.5] + [0.05 + 0.225 * (1 + np.cos(np.pi * t / 8)) for t in range(8)] + [0.05, 0.05],
        ),
        ("sgd:0.5,schedule=linear,warmup_steps=1,decay_steps=3", [0.5, 0.5, 0.25] + [0] * 9),
    ],
)
def test_rates_of_a_schedule(spelling, expected):
    np.testing.assert_allclose(rates(spelling), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("spelling", "message"),
    [
        ("sgd:0.5,schedule=cosin", "unknown schedule 'cosin'; did you mean cosine.*constant, cosine, linear"),
        ("adamw:1e-3,sched=cosine", "unknown argument 'sched' of optimizer .*did you mean schedule"),
        ("adamw:1e-3,warmup_step=3", "did you mean warmup_steps"),
        ("adamw:1e-3,weigth_decay=3", "did you mean weight_decay"),
        ("sgd:0.5,schedule=cosine,warmup_steps=10", "warmup_steps=10 leaves none of the 10 steps"),
        ("sgd:0.5,warmup_steps=0.1", "warmup_steps must be a whole number of steps, got 0.1"),
        ("sgd:0.5,schedule=cosine,decay_steps=-3", "decay_steps must be a whole number of steps, got -3"),
        ("sgd:0.5,schedule=linear,end_factor=2", "end_factor must be from 0 to 1, got 2"),
        ("sgd:0.5,end_factor=0.1", "end_factor goes with schedule=cosine"),
        ("adamw:1e-3,b1=x", "b1 must be a number, got 'x'"),
        ("sgd:fast,schedule=cosine", "the learning rate must be a number, got 'fast'"),
    ],
)
def test_a_wrong_schedule_is_named(spelling, message):
    with pytest.raises(ValueError, match=message):
        parse.parse_optimizer(spelling, 10)


def test_a_command_without_steps_needs_the_length():
    with pytest.raises(ValueError, match="add decay_steps=N"):
        parse.parse_optimizer("sgd:0.5,schedule=cosine")
    assert parse.parse_optimizer("sgd:0.5,schedule=cosine,decay_steps=7")


@pytest.mark.slow
def test_methods_that_need_the_rate_get_the_schedule():
    """SlowMo divides by the rate of each local step."""
    spelling = "sgd:0.5,schedule=linear"
    rate: Any = parse.learning_rate(spelling, 10)
    assert [float(rate(step)) for step in (0, 5, 10)] == [0.5, 0.25, 0.0]
    method = parse.parse_method("slowmo:H=2", spelling, 10)
    by_hand = jd.local_sgd.slowmo(optax.sgd(rate), sync_period=2, learning_rate=rate)

    def step(tx):
        def run(state, gradient):
            params, opt_state = state
            updates, opt_state = tx.update(gradient[0], opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), {}

        state = jd.place((jd.PerWorker(jnp.zeros(())), tx.init(jnp.zeros(()))), 2)
        simulated = jd.simulate(run, 2)
        for _ in range(6):
            state, _ = simulated(state, jnp.array([1.0, 3.0]))
        return float(jd.local_sgd.global_params(state[1]))

    assert step(method.optimizer) == step(by_hand)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["compare", "--reducers", "exact", "local_sgd:H=2"], ["train", "--no-baseline"]])
def test_commands_take_the_length_from_steps(arguments, tmp_path):
    common = ["--workload", "digits", "--model", "convnet:4", "--batch", "8", "--devices", "2", "--out", str(tmp_path)]
    assert cli.main([*arguments, *common, "--steps", "3", "--optimizer", "sgd:0.1,schedule=linear,warmup_steps=1"]) == 0
    # Three steps of a warm-up of three leave nothing to decay: the command has passed its number of steps.
    assert cli.main([*arguments, *common, "--steps", "3", "--optimizer", "sgd:0.1,schedule=linear,warmup_steps=3"]) == 2


def test_plans_do_not_depend_on_the_length():
    method = parse.parse_method("exact", "adamw:1e-3,schedule=cosine,warmup_steps=100", tables.ANY_STEPS)
    state = method.optimizer.init(jnp.zeros(3))
    assert method.optimizer.update(jnp.ones(3), state, jnp.zeros(3))
