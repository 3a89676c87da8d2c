"""Deep gradient compression against its transcription, and its warm-up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import sparse
from workers import trajectory

import jaxdist as jd
from jaxdist.comm import count_sent, over, total_bytes
from jaxdist.reducers import dgc


def rows(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "options",
    [{}, {"nesterov": True, "clip_norm": 2.0}, {"masking": False, "momentum": 0.5}],
    ids=["plain", "nesterov clipped", "unmasked"],
)
def test_dgc_follows_the_reference(options):
    with jax.enable_x64(True):
        updates = rows(20, 4, 30)
        means, owns, states = trajectory(dgc(0.1, **options), updates)
    expected, u, v = sparse.dgc(updates, 3, **options)
    # The norm of the clipping is computed in float32.
    tolerance = 1e-5 if "clip_norm" in options else 1e-12
    np.testing.assert_allclose(means, expected, atol=tolerance)
    np.testing.assert_allclose(owns.mean(1), expected, atol=tolerance)
    np.testing.assert_allclose(states.momentum.value, u, atol=tolerance)
    np.testing.assert_allclose(states.unsent.value, v, atol=tolerance)


@pytest.mark.slow
def test_without_momentum_it_is_error_feedback():
    updates = rows(10, 4, 40).astype(np.float32)
    means, _, states = trajectory(dgc(0.1, momentum=0.0), updates)
    expected, _, others = trajectory(jd.error_feedback(jd.compressed(jd.top_k(0.1))), updates)
    np.testing.assert_array_equal(means, expected)
    np.testing.assert_array_equal(states.unsent.value, others.residual.value)


@pytest.mark.slow
def test_sending_everything_is_momentum_sgd_without_memory():
    """With masking all momentum is gone after each step; without it the velocities are those of heavy ball."""
    updates = rows(5, 4, 12).astype(np.float32)
    means, _, _ = trajectory(dgc(1.0, masking=False), updates)
    velocity, expected = 0.0, []
    for update in updates:
        velocity = 0.9 * velocity + update
        expected.append(velocity.mean(0))
    np.testing.assert_allclose(means, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(trajectory(dgc(1.0), updates)[0], updates.mean(1), rtol=1e-5, atol=1e-6)


def test_the_clip_is_that_of_all_leaves_together():
    reducer = dgc(1.0, clip_norm=1.0)
    updates = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0]]), "e": jnp.zeros((0, 4)), "n": None}
    run = jax.jit(lambda x: reducer.reduce(x, reducer.init(x), jd.comm.alone())[0])
    reduced = run(updates)
    np.testing.assert_allclose(reduced.mean["a"], [0.6, 0.0], rtol=1e-6)
    np.testing.assert_allclose(reduced.mean["b"], [[0.8]], rtol=1e-6)
    for factor in (1e-30, 1e30):
        tiny = jax.tree.map(lambda x, factor=factor: x * factor, updates)
        np.testing.assert_allclose(run(tiny).mean["b"], [[min(0.8, 4 * factor)]], rtol=1e-5)


@pytest.mark.slow
def test_the_warm_up_sends_at_each_density_for_its_part():
    reducer = dgc(0.1, warmup_densities=(0.5, 0.25), warmup_steps=4)
    updates = rows(6, 4, 40).astype(np.float32)
    _, owns, states = trajectory(reducer, updates)
    assert (owns != 0).sum(2).tolist() == [[20] * 4] * 2 + [[10] * 4] * 2 + [[4] * 4] * 2
    assert np.isfinite(states.momentum.value).all()

    @jax.jit
    def sent(count):
        ledger = []

        def one_worker(x):
            state = reducer.init(x)
            state = state._replace(reducer=state.reducer._replace(count=count))
            reducer.reduce(x, state, count_sent(over("data"), ledger))
            return jnp.asarray(total_bytes(ledger), jnp.float32)

        return jax.vmap(one_worker, axis_name="data")(updates[0])[0]

    plain = [jax.eval_shape(jd.top_k(part).compress, updates[0, 0], jax.random.key(0)) for part in (0.5, 0.25, 0.1)]
    sizes = [sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(payload)) for payload in plain]
    assert [sent(count) for count in (0, 2, 4, 100)] == [3 * size for size in (*sizes, sizes[-1])]


def test_error_feedback_around_it_is_refused():
    for wrap in (jd.error_feedback, jd.reducers.ef21):
        with pytest.raises(ValueError, match="dgc keeps what it does not send"):
            wrap(dgc(0.1))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"momentum": 1.0}, "momentum"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"warmup_steps": 3}, "warmup_densities"),
        ({"warmup_densities": (0.001, 0.5), "warmup_steps": 9}, "warmup_densities must fall"),
        ({"clip_norm": float("nan")}, "clip_norm must be positive, got nan"),
        ({"warmup_densities": (0.5,)}, "warmup_steps"),
        ({"warmup_densities": (0.5, 0.2), "warmup_steps": 1}, "warmup_steps"),
        ({"warmup_densities": (1.5,), "warmup_steps": 1}, "density"),
    ],
)
def test_arguments_are_checked(options, named):
    with pytest.raises(ValueError, match=named):
        dgc(0.1, **options)
