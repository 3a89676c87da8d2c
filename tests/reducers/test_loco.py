"""LoCo; its laws and bytes are in `test_laws.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import loco as reference
from workers import trajectory

import jaxdist as jd
from jaxdist import compressors as jc


def int4():
    def compress(x, key):
        del key
        top = jnp.max(jnp.abs(x), initial=0.0)
        return jnp.clip(jnp.round(x * 8 / jnp.where(top == 0, 1, top)), -8, 7).astype(jnp.int8), top

    def decompress(payload, like):
        return (payload[0].astype(like.dtype) * payload[1].astype(like.dtype) / 8).reshape(like.shape)

    return jd.compressors.Compressor(compress, decompress, contraction=lambda shape: 0.5)


def error(states):
    codes, scales = states.error.value
    return (np.asarray(codes, np.float64) * np.asarray(scales, np.float64)).reshape(*codes.shape[:2], -1)


def test_the_first_step_of_the_paper():
    x = np.array([[[0.3, -0.7, 0.1, 1.0]]], np.float32)
    means, _, states = trajectory(jd.reducers.loco(jd.compressed(int4()), beta=0.8), x)
    np.testing.assert_allclose(means[0], [0.25, -0.75, 0.125, 0.875])
    np.testing.assert_allclose(error(states)[0, 0], [0.01, 0.01, -0.005, 0.025], atol=0.025 / 254)


def test_follows_the_reference():
    with jax.enable_x64(True):
        updates = np.random.default_rng(0).standard_normal((20, 4, 30))
        means, owns, states = trajectory(jd.reducers.loco(jd.compressed(int4()), reset_every=7, block=16), updates)
        expected, sent, errors = reference.loco(updates, 0.8, 7, 16)
    # Scales are kept in float32.
    np.testing.assert_allclose(means, expected, atol=1e-6)
    np.testing.assert_allclose(owns, sent, atol=1e-6)
    np.testing.assert_allclose(error(states)[..., :30], errors, atol=1e-6)
    assert not error(states)[[6, 13]].any()


@pytest.mark.slow
def test_feedback_does_not_end_after_so_many_steps_that_a_count_would():
    reducer = jd.reducers.loco(jd.compressed(int4()), reset_every=4, block=16)
    x = jnp.array([0.3, -0.7, 0.1, 1.0])
    state = reducer.init(x)._replace(count=jnp.int32(2**31 - 1))
    counts, kept = [], []
    for _ in range(5):
        _, state = reducer.reduce(x, state, jd.comm.alone())
        counts.append(int(state.count))
        kept.append(bool(np.any(state.error.value[1])))
    assert counts == [0, 1, 2, 3, 0]
    assert kept == [False, True, True, True, False]


def test_what_was_sent_telescopes_with_a_gain():
    """Up to the rounding of the stored error, half a step of each block's scale."""
    updates = np.random.default_rng(1).standard_normal((60, 2, 64)).astype(np.float32)
    _, owns, states = trajectory(jd.reducers.loco(jd.compressed(int4()), beta=0.8, block=64), updates)
    e = error(states)
    off = owns.sum(0) - (updates.sum(0) - e[-1] / 0.2)
    rounding = np.abs(e).max(2).sum(0)[:, None] / 254 / 0.2
    assert (np.abs(off) <= rounding * 1.01 + 1e-4).all()
    assert np.abs(off).max() > 1e-3  # the bound is no formality
    assert np.abs(owns.sum(0) - updates.sum(0)).max() < 10


def test_no_feedback_drifts_and_loco_does_not():
    """A constant update whose small entries round to zero."""
    update = np.tile(np.array([1.0, 0.05, -0.05, 0.02], np.float32), 4)
    updates = np.broadcast_to(update, (300, 2, 16))

    def off(reducer):
        return np.abs(trajectory(reducer, updates)[0].mean(0) - update).max()

    assert off(jd.compressed(int4())) > 0.04
    assert off(jd.reducers.loco(jd.compressed(int4()), block=16)) < 0.01


def test_the_error_costs_a_byte_an_entry():
    state = jax.eval_shape(jd.reducers.loco(jd.compressed(int4())).init, jax.ShapeDtypeStruct((1000,), jnp.bfloat16))
    codes, scales = state.error.value
    assert (codes.shape, codes.dtype) == ((4, 256), jnp.int8)
    assert (scales.shape, scales.dtype) == ((4, 1), jnp.float32)


def test_arguments_are_checked():
    code = jd.compressed(int4())
    for wrong, name in (({"beta": 1.0}, "beta"), ({"reset_every": 0}, "reset_every"), ({"block": 0}, "block")):
        with pytest.raises(ValueError, match=f"{name} must be .*, got {next(iter(wrong.values()))}"):
            jd.reducers.loco(code, **wrong)
    with pytest.raises(ValueError, match="has error feedback already"):
        jd.error_feedback(jd.reducers.loco(code))
    with pytest.raises(ValueError, match="neither its contraction δ nor its variance"):
        jd.reducers.loco(jd.compressed(jc.top_k(0.1)._replace(contraction=None)))
