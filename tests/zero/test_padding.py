"""Pieces that workers own are padded, and what has been computed of the padding stays there."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import TrainState, assert_close

import jaxdist as jd
from jaxdist import compressors as jc
from jaxdist.comm import over
from jaxdist.reducers.reducer import shards_of
from jaxdist.wire.buffers import rows_of_workers
from jaxdist.wire.shards import clear_padding

INT8 = jc.int8()


def decompress(payload, like):
    x = INT8.decompress(payload, like)
    return jnp.where(x == 0, jnp.asarray(1e9, x.dtype), x)


# A code that makes something large of zeros, which a scale of a later code must not see.
FILLS = INT8._replace(decompress=decompress)
TWO_SHOTS = jd.two_shot(FILLS, second=INT8, server_feedback=False)
TWO_LEVELS = jd.hierarchical(inner=jd.two_shot(FILLS), outer=jd.two_shot(INT8, server_feedback=False))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 48])
@pytest.mark.parametrize("groups", [1, 2])
def test_cleared(size, groups):
    """What is inside stays, at every place of every pod."""
    workers = 3
    expected = rows_of_workers(jnp.ones(size), workers, groups=groups)
    found = [
        clear_padding(jnp.full(row.size, 1.0), size, workers, jnp.array(i), groups=groups)
        for i, row in enumerate(expected)
    ]
    np.testing.assert_array_equal(jnp.stack(found), expected)
    filled = clear_padding(jnp.zeros(expected.shape[1]), size, workers, jnp.array(2), groups=groups, fill=-jnp.inf)
    np.testing.assert_array_equal(filled, jnp.where(expected[2] == 1, 0, -jnp.inf))


@pytest.mark.slow
@pytest.mark.parametrize("reducer", [TWO_SHOTS, jd.reducers.ring(FILLS)])
def test_one_level(reducer):
    grads = jnp.arange(1.0, 7).reshape(2, 3)

    def one_worker(x):
        return reducer.reduce(x, reducer.init(x), over("data"))[0].mean

    np.testing.assert_allclose(jax.vmap(one_worker, axis_name="data")(grads)[0], grads.mean(0), rtol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("scattered", [False, True])
def test_two_levels(scattered):
    """In one of both pods the last chip has padding alone."""
    grads = jnp.arange(1.0, 37).reshape(2, 2, 9)

    def one_worker(x):
        form = shards_of(TWO_LEVELS) if scattered else TWO_LEVELS
        return form.reduce({"x": x}, form.init({"x": x}), over(("pod", "chip")))[0].mean["x"]

    found = jax.vmap(jax.vmap(one_worker, axis_name="chip"), axis_name="pod")(grads)
    found = found.ravel()[:9] if scattered else found[0, 0]
    np.testing.assert_allclose(found, grads.mean((0, 1)), rtol=0.03)


def stepped(tx, params, workers=2, steps=2):
    """Steps with gradients of one sign, whose size is that of the worker's number."""

    def step(state, batch):
        grads = jax.tree.map(lambda p: jnp.ones_like(p) * batch[0].astype(p.dtype), state.params)
        updates, opt = tx.update(grads, state.opt, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt), {}

    state, run = jd.place(TrainState(params, tx.init(params)), workers), jd.simulate(step, workers)
    for _ in range(steps):
        state, _ = run(state, jnp.arange(1.0, workers + 1))
    return state


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("dtype", "inner", "options"),
    [
        (jnp.float16, optax.adam(0.1), {}),  # eps of 1e-8 is zero in float16, and a step from zero is 0/0
        (jnp.float32, optax.adam(0.1, eps=0.0), {}),
        (jnp.float32, optax.adam(0.1, eps=0.0), {"master_dtype": jnp.float32}),
        (jnp.float16, optax.adam(0.1, eps=0.0), {"master_dtype": jnp.float32}),
    ],
)
def test_steps_that_are_nan_at_zero_gradients(dtype, inner, options):
    """7 of 15 entries were NaN after one step; and no NaN stays in the padding of the state."""
    params = {"w": jnp.zeros((5, 3), dtype)}
    state = stepped(jd.zero_redundancy(inner, compressor=INT8, **options), params)
    plain = stepped(jd.zero_redundancy(inner, **options), params)
    assert_close(state.params, plain.params, 2e-3)
    for leaf in jax.tree.leaves((state, plain)):
        assert jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) or np.isfinite(leaf).all()


@pytest.mark.slow
@pytest.mark.parametrize("secondary", [False, True])
def test_gathered_codes_see_no_padding(secondary):
    """Cut parameters that some other optimizer has moved, padding and all."""
    axis = ("pod", "chip") if secondary else "data"
    layer = jd.zero.gathered(lambda p: p["w"], axis=axis, compressor=INT8, secondary_partition=secondary)
    state = jd.place(jd.zero.shard({"w": jnp.arange(1.0, 16)}, smallest=0), 4, axis="data")
    pieces = state["w"].value.at[15:].set(jnp.nan).reshape(2, 2, 8)

    def one_worker(piece):
        return layer({"w": jd.Sharded(piece, shape=(15,), axis=axis, multiple=8)})

    if secondary:
        found = jax.vmap(jax.vmap(one_worker, axis_name="chip"), axis_name="pod")(pieces)[1, 1]
    else:
        found = jax.vmap(one_worker, axis_name="data")(pieces.reshape(4, 8))[3]
    np.testing.assert_allclose(found, jnp.arange(1.0, 16), rtol=0.04)
