"""float16 parameters: gradients that underflow without a scale, a scale that overflows, and all workers of one mind."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import TrainState, assert_close

import jaxdist as jd


def loss(params, batch):
    """Nothing in it is too small for float16 but the gradient by `y`, about 1e-8."""
    y = batch.astype(jnp.float16) @ params["w"]
    return 1e-8 * jnp.mean((y.astype(jnp.float32) - 3) ** 2)


def start():
    return {"w": jnp.full((3, 1), 0.5, jnp.float16)}


def guarded(**options):
    chain = optax.chain(jd.zero_redundancy(optax.adam(1e-2), master_dtype=jnp.float32))
    return jd.transforms.dynamic_loss_scale(chain, **{"initial": 2.0**15, "growth_interval": 3, **options})


def make(tx, scaled=True):
    def step(state, batch):
        scale = jd.transforms.loss_scale(state.opt) if scaled else None
        value, grads = jd.local_value_and_grad(loss, scale=scale)(state.params, batch)
        assert grads["w"].dtype == jnp.float16
        updates, opt = tx.update(grads, state.opt, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt), jax.lax.pmean(value, "data")

    return step


def batch(seed=0):
    return jnp.abs(jax.random.normal(jax.random.key(seed), (8, 3))) + 0.5


@pytest.fixture(scope="module")
def run():
    return jd.simulate(make(guarded()), 2)


def placed(tx, workers=2):
    return jd.place(TrainState(start(), tx.init(start())), workers)


def test_trains_where_unscaled_gradients_vanish(run):
    bare = jd.zero_redundancy(optax.adam(1e-2), master_dtype=jnp.float32)
    state, _ = jd.simulate(make(bare, scaled=False), 2)(placed(bare), batch())
    np.testing.assert_array_equal(state.params["w"], start()["w"])
    state = placed(guarded())
    for seed in range(4):
        state, value = run(state, batch(seed))
    assert 0 < float(value) < 1e-6  # that of the loss, not of a multiple
    moved = jd.consensus(state.opt.inner.inner[0].master)["w"] - 0.5
    assert (np.asarray(moved) > 0.02).all()  # four steps of Adam, all in one direction
    assert float(jd.transforms.loss_scale(state.opt)) == 2.0**16  # after three good steps
    assert float(jd.transforms.stats(state.opt)["loss_scale"]) == 2.0**16


@pytest.mark.parametrize("worker", [0, 1])
def test_one_worker_overflows_and_all_skip(run, worker):
    state, _ = run(placed(guarded()), batch())
    bad = batch(1).at[4 * worker].set(jnp.inf)
    after, _ = run(state, bad)
    assert_close(after.params, state.params, 0)
    assert_close(after.opt.inner.inner, state.opt.inner.inner, 0)
    assert float(jd.transforms.loss_scale(after.opt)) == 2.0**14
    assert (int(jd.transforms.stats(after.opt)["skips"]), int(after.opt.since)) == (1, 0)
    for seed in range(3):
        after, _ = run(after, batch(seed))
    assert float(jd.transforms.loss_scale(after.opt)) == 2.0**15


def test_a_round_may_reset_the_moments_of_wide_gradients():
    """They are in float32, and `init` would make those of the parameters in float16."""
    tx = jd.local_steps(optax.adam(0.1), optax.sgd(1.0), sync_period=1, buffers="reset", axis=None)
    tx, x = jd.transforms.dynamic_loss_scale(tx, axis=None), jnp.ones(3, jnp.float16)
    state = tx.init(x)
    after = jax.eval_shape(tx.update, x, state, x)[1]
    assert [leaf.dtype for leaf in jax.tree.leaves(after)] == [leaf.dtype for leaf in jax.tree.leaves(state)]


def test_what_does_not_fit_shrinks_until_it_fits():
    """The scale itself makes the gradient infinite; no step of these is lost for ever."""
    tx = guarded(initial=2.0**50, growth_interval=1000, factor=2.0**8)
    simulated, state = jd.simulate(make(tx), 2), placed(tx)
    for seed in range(6):
        state, _ = simulated(state, batch(seed))
    assert 1 <= int(state.opt.inner.skipped) < 6
    assert float(jnp.abs(state.params["w"] - 0.5).max()) > 0


def test_clipping_sees_true_sizes_on_a_mesh():
    """Behind an all-reduce, in every bit the update of unscaled gradients: powers of two round nothing."""
    mesh = jd.make_mesh({"data": 2}, devices=jax.devices()[:2])
    chain = optax.chain(jd.all_reduce(jd.exact()), optax.clip_by_global_norm(1e-3), optax.adam(1e-2))

    def one(tx, scaled):
        def step(state, data):
            scale = jd.transforms.loss_scale(state.opt) if scaled else None

            def square(params, data):
                return jnp.mean((data @ params) ** 2), 7

            (_, aux), grads = jd.local_value_and_grad(square, has_aux=True, micro_batches=2, scale=scale)(
                state.params, data
            )
            updates, opt = tx.update(grads, state.opt, state.params)
            return TrainState(optax.apply_updates(state.params, updates), opt), jax.lax.pmean(aux, "data")

        params = jnp.ones(3)
        state, aux = jd.distribute(step, mesh)(jd.place(TrainState(params, tx.init(params)), mesh), batch())
        assert int(aux) == 14
        return state.params

    np.testing.assert_array_equal(one(jd.transforms.dynamic_loss_scale(chain), True), one(chain, False))


def test_moments_of_float16_parameters_are_float32():
    tx = jd.transforms.dynamic_loss_scale(optax.adam(0.1), axis=None)
    state = tx.init(start())
    updates, after = tx.update(start(), state, start())
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, state)
    assert jax.tree.leaves(optax.apply_updates(start(), updates))[0].dtype == jnp.float16


def test_refusals():
    with pytest.raises(ValueError, match=r"initial must be at least 1 and finite, got 0\.5"):
        jd.transforms.dynamic_loss_scale(optax.adam(0.1), initial=0.5)
    with pytest.raises(ValueError, match="growth_interval must be at least 1, got 0"):
        jd.transforms.dynamic_loss_scale(optax.adam(0.1), growth_interval=0)
    with pytest.raises(ValueError, match=r"factor must be above 1 and finite, got 1\.0"):
        jd.transforms.dynamic_loss_scale(optax.adam(0.1), factor=1.0)
    with pytest.raises(ValueError, match="no dynamic_loss_scale inside"):
        jd.transforms.loss_scale(optax.adam(0.1).init(start()))


def test_several_scales_are_named():
    """The loss has one factor: that of the first group made the steps of the others too long."""
    group = jd.transforms.dynamic_loss_scale(optax.sgd(0.1), initial=16.0, axis=None)
    tx = optax.partition({"a": group, "b": group}, {"w": "a", "v": "b"})
    state = tx.init({"w": jnp.zeros(2), "v": jnp.zeros(1)})
    with pytest.raises(ValueError, match=r"in each of 'inner_states\.a\.inner_state', 'inner_states\.b\.inner_state'"):
        jd.transforms.loss_scale(state)
    found = jd.transforms.stats(state)
    assert float(found["loss_scale.inner_states.a.inner_state"]) == 16.0
    nested = jd.transforms.dynamic_loss_scale(group, axis=None).init(jnp.zeros(2))
    with pytest.raises(ValueError, match=r"in each of 'this state', 'inner\.inner'"):
        jd.transforms.loss_scale(nested)
    assert float(jd.transforms.loss_scale(nested.inner)) == 16.0
