"""1-bit Adam and QAdam against their papers, and what a variance at rest needs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from adam_rows import rows
from optimizers_run import OPTIMIZERS, descend, ran
from problems import assert_close
from reference import optimizers as reference

import jaxdist as jd
from jaxdist._cli.models import digits
from jaxdist._cli.spellings import parse
from jaxdist._cli.training import train


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def test_one_bit_adam_follows_the_paper(float64):
    gradients, x = rows(20), np.random.default_rng(1).standard_normal(64)
    tx = jd.optimizers.one_bit_adam(0.1, freeze_step=5, b1=0.8, b2=0.9, eps=1e-3)
    params, _ = descend(tx, jnp.asarray(x), jnp.asarray(gradients))
    expected = reference.one_bit_adam(gradients, x, 0.1, 5, 0.8, 0.9, 1e-3)
    np.testing.assert_allclose(params, expected, atol=1e-5)  # scales travel in float32
    exact = reference.qadam(gradients, x, 0.1, 20, 0.8, 0.9, 1e-3)
    assert np.abs(params[-1] - exact[-1]).max() > 0.01


def test_qadam_with_a_code_without_loss_follows_the_paper(float64):
    gradients, x = rows(20), np.random.default_rng(1).standard_normal(64)
    tx = jd.optimizers.qadam(0.1, warmup_steps=5, b1=0.8, b2=0.9, eps=1e-3, reducer=jd.exact())
    params, _ = descend(tx, jnp.asarray(x), jnp.asarray(gradients))
    np.testing.assert_allclose(params, reference.qadam(gradients, x, 0.1, 5, 0.8, 0.9, 1e-3), atol=1e-12)


def test_the_warm_up_of_qadam_is_adam():
    """To the last step of it: public code drops the gradient of that one."""
    gradients, x = jnp.asarray(rows(6), jnp.float32), jnp.zeros(64)
    params, states = descend(jd.optimizers.qadam(0.1, warmup_steps=5, weight_decay=0.1), x, gradients)
    adam = optax.adamw(0.1, weight_decay=0.1)
    state = adam.init(x)
    for number in range(5):
        updates, state = adam.update(gradients[number].mean(0), state, x)
        x = x + updates
        np.testing.assert_allclose(params[number], x, atol=1e-5)
    assert_close(states[4].variance, state[0].nu, 1e-6)
    assert_close(states[5].variance, states[4].variance, 0)


def test_one_bit_adam_decays_weights_beside_its_steps():
    x = jnp.array([2.0, -4.0])
    plain, decayed = (
        tx.update(jnp.ones(2), tx.init(x), x)[0]
        for tx in (jd.optimizers.one_bit_adam(0.1, freeze_step=3, weight_decay=d, axis=None) for d in (0.0, 0.5))
    )
    np.testing.assert_allclose(decayed, plain - 0.1 * 0.5 * x, rtol=1e-6)


def test_steps_do_not_grow_after_the_warm_up():
    """With a constant gradient every step is as long as the learning rate."""
    tx = jd.optimizers.qadam(0.1, warmup_steps=3, reducer=jd.exact(), axis=None)
    state, update = tx.init(jnp.zeros(2)), jax.jit(tx.update)
    for _ in range(20):
        updates, state = update(jnp.array([1.0, -5.0]), state)
        np.testing.assert_allclose(updates, [-0.1, 0.1], rtol=1e-4)


def test_one_bit_adam_does_not_correct_the_bias():
    tx = jd.optimizers.one_bit_adam(1.0, freeze_step=3, axis=None)
    updates, _ = tx.update(jnp.array([2.0, -3.0]), tx.init(jnp.zeros(2)))
    np.testing.assert_allclose(updates, [-(0.1 / 0.001**0.5), 0.1 / 0.001**0.5], rtol=1e-5)


def test_entries_without_variance_stay():
    """An embedding that no batch of the warm-up touched: a sign over `eps` alone would throw it to infinity."""
    gradients = rows(8).astype(np.float32)
    gradients[:3, :, :10] = 0
    params, states = descend(jd.optimizers.one_bit_adam(0.01, freeze_step=3), jnp.zeros(64), jnp.asarray(gradients))
    np.testing.assert_array_equal(params[-1][:10], 0)
    assert 0.01 < np.abs(params[-1][10:]).max() < 10
    assert np.isfinite(states[-1].reducer.residual.value).all()


def test_residuals_of_entries_that_are_always_zero_stay_small():
    """Signs alternate there, and what they owe is never more than what the others do."""
    gradients = rows(60, size=16).astype(np.float32)
    gradients[:, :, :4] = 0
    _, states = descend(jd.optimizers.one_bit_adam(0.01, freeze_step=2), jnp.zeros(16), jnp.asarray(gradients))
    found = np.abs([state.reducer.residual.value for state in states])
    assert 0 < found[:, :, :4].max() < found[:, :, 4:].max()


@pytest.mark.slow
def test_what_each_phase_sends():
    """Floats in the warm-up, then bytes: of chunks of signs and their scales, one message each way."""
    found = jd.analysis.collectives(ran("one_bit_adam").compiled, branch="min")
    assert sorted((op.kind, op.dtype) for op in found.ops) == [("all-gather", "uint8"), ("all-to-all", "uint8")]
    tx = jd.optimizers.one_bit_adam(
        0.1, freeze_step=3, reducer=jd.reducers.with_stats(jd.error_feedback(jd.two_shot(jd.compressors.scaled_sign())))
    )
    _, states = descend(tx, jnp.zeros(102), jnp.asarray(rows(5, 8, 102), jnp.float32))
    assert [int(jd.transforms.stats(state)["syncs"]) for state in states] == [0, 0, 0, 1, 2]
    optimizer = OPTIMIZERS["one_bit_adam"]
    assert float(jd.transforms.stats(states[-1])["bytes"]) == 3 * optimizer.bytes(8) + 2 * optimizer.cheapest(8)


@pytest.mark.slow
def test_the_command_line_counts_its_bytes(mesh):
    method = parse.parse_method("one_bit_adam:1e-3,freeze_step=1", "sgd:0.1")
    run = train.prepare(digits.digits_workload(4), **method._asdict(), mesh=mesh, batch_size=8)
    found = [record.wire_bytes for record, _ in train.steps(run, 2)]
    assert found == [2 * 7 / 8 * 4 * run.parameters, 7 * 2 * (-(-run.parameters // 64) + 4)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jd.optimizers.one_bit_adam(0.1, freeze_step=0), "freeze_step must be at least 1, got 0"),
        (lambda: jd.optimizers.one_bit_adam(0.1, freeze_step=1, b1=1.0), "b1 must be .* got 1.0"),
        (lambda: jd.optimizers.qadam(0.1, b2=-0.1), "b2 must be .* got -0.1"),
        (lambda: jd.optimizers.qadam(0.1, eps=-1.0), "eps must be .* got -1.0"),
        (lambda: jd.optimizers.qadam(0.1, weight_decay=-1.0), "weight_decay must be .* got -1.0"),
    ],
)
def test_arguments_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()
