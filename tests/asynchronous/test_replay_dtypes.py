"""Sums and means of half precision and of float64: neither stalls, overflows, drifts nor is rounded to float32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdist as jd
from jaxdist.asynchronous import durations, links, replay, rules

FULL, NONE = optax.sgd(1.0), optax.sgd(0.0)


def task(dtype, gradient, model=0.0):
    def loss(x, batch):
        return (x * batch).astype(jnp.float32)

    return replay.Task(jnp.asarray(model, dtype), loss, lambda *job: jnp.asarray(gradient, dtype))


@pytest.mark.parametrize(
    ("make_rule", "workers"),
    [
        (lambda: rules.bsp(FULL), 512),
        (lambda: rules.dude(FULL), 512),
        (lambda: rules.ringleader(FULL), 512),
        (lambda: rules.malenia(512, FULL), 4),
        (lambda: rules.rennala(1000, FULL), 4),
        (lambda: rules.any_batch(1000.5, FULL), 1),
        (lambda: rules.task_allocation(1000, FULL), 1),
    ],
)
def test_a_mean_of_many_small_floats_does_not_stall(make_rule, workers):
    # In bfloat16, 256 + 1 is 256.
    run = replay.run(make_rule(), task(jnp.bfloat16, 1.0), workers=workers, steps=1)
    assert (run.params.dtype, float(run.params)) == (jnp.bfloat16, -1.0)


def test_the_final_model_is_the_mean_of_all():
    rule = rules.ad_psgd(jd.topology.ring, NONE)
    assert float(replay.run(rule, task(jnp.bfloat16, 0.0, 1.0), workers=512, seconds=1).params) == 1.0


def test_half_precision_does_not_overflow_on_the_way():
    assert float(replay.run(rules.bsp(FULL), task(jnp.float16, 3e4), workers=4, steps=1).params) == -3e4
    # λ g² is above the range of float16, and the model has not changed since.
    assert float(replay.run(rules.dc_asgd(FULL), task(jnp.float16, 2e3), workers=1, steps=1).params) == -2e3
    rule = rules.dc_asgd(FULL, compensation=2.0, decay=0.9)
    assert float(replay.run(rule, task(jnp.float16, 2e3), workers=1, steps=1).params) == -2e3
    gossip = rules.any_batch_gossip(1000.5, jd.topology.ring, NONE)
    assert float(replay.run(gossip, task(jnp.float16, 0.0, 100.0), workers=3, seconds=1100).params) == 100.0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_residual_is_not_rounded_away(dtype):
    gradient = jnp.array([1.0, 2**-9], dtype)
    work = replay.Task(jnp.zeros(2, dtype), lambda x, b: jnp.sum(x * gradient).astype(jnp.float32), lambda *job: None)
    rule = rules.compressed(rules.asgd(optax.sgd(2**-5)), {"gradient": jd.top_k(0.5)}, feedback=("gradient",))
    sent = float(replay.run(rule, work, workers=1, steps=550).params[1]) * -(2**5)
    # The residual passes 1 after 512 steps; in bfloat16 it would stay at 1/2.
    assert sent == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize(
    "make_rule",
    [
        lambda: rules.hop(jd.topology.ring, NONE),
        lambda: rules.hop(jd.topology.ring, NONE, staleness=2, tokens=5),
        lambda: rules.any_batch_gossip(3.5, jd.topology.ring, NONE),
        lambda: rules.d_psgd(jd.topology.ring, NONE),
    ],
)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_equal_models_stay_as_they_are(make_rule, dtype):
    with jax.enable_x64(True):
        model = 1 + 1e-12 if dtype == "float64" else 1.1015625
        law = durations.constant([1.0, 1.5, 2.0])
        run = replay.run(make_rule(), task(dtype, 0.0, model), workers=3, durations=law, seconds=12)
        assert float(run.params) == pytest.approx(model, abs=1e-15)


def test_numpy_models_count_the_bytes_that_jax_stores():
    def count(leaf, timing_only):
        work = replay.Task({"w": leaf}, lambda x, batch: jnp.sum((x["w"] - 1) ** 2), lambda *job: None)
        slow = links.alpha_beta(0.0, 4000.0)
        run = replay.run(rules.asgd(FULL), work, workers=1, steps=4, timing_only=timing_only, links=slow)
        return run.seconds, run.links

    expected = count(np.zeros(1000, np.float32), False)
    assert [count(np.zeros(1000), timing_only) for timing_only in (False, True)] == [expected, expected]


@pytest.mark.parametrize(
    "leaf", [np.arange(3, dtype=np.int32), jnp.array(True), jax.random.key(0)], ids=["int", "bool", "key"]
)
@pytest.mark.parametrize("timing_only", [False, True])
def test_a_leaf_without_a_gradient_is_named(leaf, timing_only):
    work = replay.Task({"kept": leaf, "w": jnp.ones(())}, lambda x, batch: x["w"] ** 2, lambda *job: None)
    with pytest.raises(ValueError, match=rf"the model \['kept'\] has dtype {leaf.dtype} and so no gradient"):
        replay.run(rules.bsp(FULL), work, workers=2, steps=1, timing_only=timing_only)
