"""The two-shot reducer; its laws and bytes are in `test_laws.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import two_shot as reference
from workers import trajectory

import jaxdist as jd
from jaxdist import compressors as jc
from jaxdist.reducers import Law


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def rows(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def coded(code, x):
    return jax.jit(lambda x: code.decompress(code.compress(x, jax.random.key(0)), x))(jnp.asarray(x))


def nearest(levels):
    """Rounds to so many levels of the largest entry; the oracle of 8-bit blocks."""

    def compress(x, key):
        del key
        scale = jnp.max(jnp.abs(x), initial=0.0) / levels
        return jnp.round(x / jnp.where(scale == 0, 1, scale)).astype(jnp.int8), scale

    def decompress(payload, like):
        return (payload[0].astype(like.dtype) * payload[1].astype(like.dtype)).reshape(like.shape)

    return jd.compressors.Compressor(compress, decompress, contraction=lambda shape: 0.0)


def test_worker_and_server_errors_follow_the_reference(float64):
    updates = rows(20, 4, 64)
    reducer = jd.error_feedback(jd.two_shot(jd.compressors.scaled_sign()))
    means, _, states = trajectory(reducer, updates)
    expected, mine, server = reference.two_shot(updates, reference.scaled_sign, reference.scaled_sign)
    # The scale of a sign code travels in float32.
    np.testing.assert_allclose(means, expected, atol=1e-5)
    np.testing.assert_allclose(states.residual.value, mine, atol=1e-5)
    np.testing.assert_allclose(np.asarray(states.reducer.residuals[0].value).reshape(20, 64), server, atol=1e-5)


def test_both_errors_telescope_over_50_steps(float64):
    updates = {"a": rows(50, 4, 5, 7), "b": rows(50, 4, 6, seed=1)}
    reducer = jd.error_feedback(jd.two_shot(jd.qsgd(2), second=jd.compressors.scaled_sign()))
    means, _, states = trajectory(reducer, updates)
    server = np.asarray(states.reducer.residuals[0].value)[-1].ravel()
    for name, held in (("a", server[:35].reshape(5, 7)), ("b", server[35:41])):
        residual = np.asarray(states.residual.value[name])[-1].mean(0)
        expected = updates[name].mean(1).sum(0)
        np.testing.assert_allclose(means[name].sum(0) + residual + held, expected, atol=1e-11)


def test_identity_is_the_exact_mean():
    updates = {"a": rows(1, 4, 5, 3).astype(np.float32), "b": rows(1, 4, 2).astype(np.float16)}
    means, owns, _ = trajectory(jd.two_shot(jc.identity()), updates)
    np.testing.assert_allclose(means["a"], updates["a"].mean(1), atol=1e-6)
    np.testing.assert_allclose(means["b"], updates["b"].mean(1), atol=1e-3)
    np.testing.assert_array_equal(owns["a"], updates["a"])


def test_long_vectors_are_cut_into_whole_buckets():
    """Padding chunks of ten million entries to buckets took as long as coding them."""
    sizes = np.arange(2**22 + 3, dtype=np.float32), np.arange(5, dtype=np.float32)
    x = [np.stack([leaf, leaf + 2]) for leaf in sizes]
    reducer = jd.two_shot(jc.identity(), server_feedback=True)
    assert reducer.init(list(sizes)).residuals[0].multiple == 512
    reducer = jd.two_shot(jc.identity())

    def worker(x):
        return reducer.reduce(x, reducer.init(x), jd.comm.over("data"))[0].mean

    for found, leaf in zip(jax.jit(jax.vmap(worker, axis_name="data"))(x), x, strict=True):
        np.testing.assert_array_equal(found, np.broadcast_to(leaf.mean(0), leaf.shape))


def test_one_worker_gets_the_code_of_the_code():
    first, second = nearest(5), nearest(3)
    reducer, x = jd.two_shot(first, second=second), jnp.asarray(rows(24), jnp.float32)
    reduced, state = reducer.reduce(x, reducer.init(x), jd.comm.alone())
    np.testing.assert_array_equal(reduced.mean, coded(second, coded(first, x)))
    np.testing.assert_array_equal(reduced.own, coded(first, x))
    np.testing.assert_allclose(state.residuals[0].value, reduced.own - reduced.mean)


def test_rounding_twice_is_off_by_half_a_step_each():
    updates = rows(1, 4, 256).astype(np.float32)
    means, _, _ = trajectory(jd.two_shot(nearest(127), server_feedback=False), updates)
    chunks = np.abs(updates[0]).reshape(4, 4, 64).max((0, 2))
    off = np.abs(means[0] - updates[0].mean(0)).reshape(4, 64)
    assert (off <= chunks[:, None] / 127 * (0.5 + 0.5)).all()
    assert off.max() > chunks.max() / 127 / 8


def test_an_unbiased_second_code_is_right_on_average_and_the_biased_one_by_its_residual():
    """A constant update of one large entry in each chunk: two levels cannot tell what lies between them."""
    update = np.tile(np.array([1.0, 0.3, -0.2, 0.05, 0.0, 0.0, 0.0, 0.0], np.float32), 4)
    updates = np.broadcast_to(update, (400, 4, 32))

    def off(reducer):
        return np.abs(trajectory(reducer, updates)[0].mean(0) - update).max()

    exact = jc.identity()
    assert off(jd.two_shot(exact, second=nearest(1), server_feedback=False)) == pytest.approx(0.3)
    assert off(jd.two_shot(exact, second=nearest(1))) < 0.01
    assert off(jd.two_shot(exact, second=jd.qsgd(2))) < 5 * 0.5 / 400**0.5


@pytest.mark.slow
def test_odd_sizes_fewer_entries_than_workers_and_no_entries():
    for size in (0, 1, 3, 8, 9, 65):
        x = rows(2, 8, size).astype(np.float32)
        means, _, states = trajectory(jd.error_feedback(jd.two_shot(jd.compressors.scaled_sign())), x)
        assert means.shape == (2, size)
        assert np.isfinite(means).all()
        chunk = -(-size // 64) * 8
        held = np.asarray(states.reducer.residuals[0].value)[-1].reshape(8 * chunk)
        assert not held[size:].any()
        residual = np.asarray(states.residual.value)[-1].mean(0)
        np.testing.assert_allclose(means.sum(0) + residual + held[:size], x.mean(1).sum(0), atol=1e-5)


@pytest.mark.slow
def test_draws_differ_between_directions_steps_workers_and_chunks():
    updates = np.broadcast_to(np.linspace(0, 1, 64, dtype=np.float32), (2, 4, 64))
    means, owns, _ = trajectory(jd.two_shot(jd.qsgd(2)), updates)
    assert (owns[0, 0] != owns[0, 1]).any()
    assert (owns[0] != owns[1]).any()
    assert (means[0] != means[1]).any()
    means, owns, _ = trajectory(jd.two_shot(jd.compressors.random_k(0.5, unbiased=True)), updates[:, :1] + 1)
    assert (owns[:, 0] != 0).sum() > (means != 0).sum()  # another subset on the way back
    same = np.tile(updates[..., 16:32], (1, 1, 4))
    first, second = trajectory(jd.two_shot(jd.qsgd(2)), same)[1][0, 0].reshape(4, 16)[:2]
    assert (first != second).any()


def test_laws_follow_the_second_code():
    assert jd.two_shot(jd.qsgd(4)).law == Law.UNBIASED
    assert jd.two_shot(jd.qsgd(4), server_feedback=True).law == Law.TELESCOPING
    assert jd.two_shot(jd.qsgd(4), second=jd.compressors.scaled_sign()).law == Law.TELESCOPING
    assert jd.two_shot(jd.compressors.scaled_sign(), second=jd.qsgd(4)).law == Law.UNBIASED
    biased = jd.two_shot(jd.compressors.scaled_sign(), server_feedback=False)
    assert biased.law == Law.NONE
    with pytest.raises(ValueError, match="two_shot of a biased code with server_feedback=False"):
        jd.error_feedback(biased)


def test_what_cannot_work_is_refused():
    unknown = jc.top_k(0.1)._replace(contraction=None)
    for factory in (jd.two_shot, lambda code: jd.two_shot(jd.qsgd(4), second=code)):
        with pytest.raises(ValueError, match="neither its contraction δ nor its variance"):
            factory(unknown)
    with pytest.raises(ValueError, match="neither its contraction δ nor its variance"):
        jd.error_feedback(jd.two_shot(unknown, second=jd.qsgd(4)))
    with pytest.raises(ValueError, match="keep it in a server residual"):
        jd.reducers.ef21(jd.two_shot(jd.qsgd(4)))


def test_ef21_arrives_through_a_server_residual(float64):
    """The servers' residual dies out with the change that is sent."""
    gradient = rows(1, 4, 32)
    means, _, _ = trajectory(jd.reducers.ef21(jd.two_shot(jd.top_k(0.3))), np.broadcast_to(gradient, (200, 4, 32)))
    np.testing.assert_allclose(means[-1], gradient[0].mean(0), atol=1e-12)


def test_workers_that_come_and_go_keep_the_server_residual():
    reducer = jd.two_shot(jd.compressors.scaled_sign())
    like = {"w": jnp.zeros(21)}
    state = jd.init_state(lambda: {"r": reducer.init(like)}, 4)
    residual = state["r"].residuals[0]
    held = jnp.arange(32.0) * (jnp.arange(32) < 21)
    state["r"] = state["r"]._replace(residuals=[jd.Sharded(held, shape=residual.shape, axis="data", multiple=8)])

    for placed in (state, jd.resize(state, 2)):
        np.testing.assert_array_equal(placed["r"].residuals[0].value[:21], jnp.arange(21.0))
