"""What holds for every optimizer that communicates inside."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizers_run import OPTIMIZERS, make_state, ran, train_step
from problems import assert_close, batch, fresh, loss, make_step, numbers
from register_run import gradients, params

import jaxdist as jd
from jaxdist._cli import results

each = pytest.mark.parametrize("name", OPTIMIZERS)


@pytest.mark.sampled(13)
@each
def test_the_wire_carries_what_the_docstring_says(name):
    optimizer, found = OPTIMIZERS[name], jd.analysis.collectives(ran(name).compiled)
    assert found.wire_bytes == optimizer.bytes(8)
    assert found.wire_bytes == ran(name).logical.wire_bytes
    kinds = [(op.kind, op.dtype) for op in found.ops for _ in range(op.messages)]
    assert sorted(kinds) == sorted(optimizer.wire)
    cheapest = jd.analysis.collectives(ran(name).compiled, branch="min").wire_bytes
    assert cheapest == (optimizer.cheapest or optimizer.bytes)(8)


@pytest.mark.sampled(6)
@each
def test_mesh_and_simulation_agree(name):
    """To a rounding of the largest entry of each leaf: residuals are small differences of numbers as large as that."""
    for mine, other in zip(ran(name).mesh, ran(name).simulated, strict=True):
        mine, other = numbers(mine), numbers(other)
        sizes = jax.tree.map(lambda x: np.maximum(1, np.abs(x).max(initial=0)), other)
        assert_close(*(jax.tree.map(np.divide, tree, sizes) for tree in (mine, other)), tolerance=1e-5)


@pytest.mark.sampled(6)
@each
def test_traced_once_and_the_state_stays_as_it_is(name):
    assert ran(name).traces == 1
    for states in (ran(name).mesh, ran(name).simulated):
        assert len({str(jax.tree.map(lambda x: (x.shape, str(x.dtype)), state)) for state in states}) == 1
    first, last = ran(name).mesh[0], ran(name).mesh[-1]
    assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), first, last))


def test_a_checkpoint_gives_every_state_back(tmp_path):
    mesh = jd.make_mesh({"data": 8})

    def number(x):
        """Entries unlike each other, where a first state has zeros."""
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        return jax.device_put(np.arange(x.size).reshape(x.shape).astype(x.dtype), x.sharding)

    states = {
        name: jax.tree.map(number, jd.init_state(make_state(optimizer, optimizer.make(0.1)), mesh))
        for name, optimizer in OPTIMIZERS.items()
    }
    results.save(tmp_path / "states", states)
    assert_close(results.restore(tmp_path / "states", states), states, tolerance=0)


@pytest.mark.slow
@each
def test_inside_the_wrappers_of_optax(name):
    """A learning rate that is injected is one that is given; masks and maps over the parameters find their way."""
    optimizer = OPTIMIZERS[name]
    injected = optax.inject_hyperparams(optimizer.make, static_args=optimizer.static)
    others = optax.masked(optax.set_to_zero(), {"b": False, "s": True, "w": False})
    tx = jd.skip_nonfinite(optax.chain(optax.masked(injected(0.1), {"b": True, "s": False, "w": True}), others))
    state = jd.init_state(make_state(optimizer, tx), 8)
    after, _ = jd.simulate(train_step(tx), 8)(state, gradients(0))
    found, wanted = (jd.consensus(state.params)["w"] for state in (after, ran(name).simulated[1]))
    assert_close(found, wanted, 1e-6)
    mapped = optax.tree.map_params(tx, lambda x: x, state.opt)
    assert jax.tree.structure(mapped) == jax.tree.structure(state.opt)


@pytest.mark.sampled(13)
@each
def test_a_schedule_is_asked_for_each_step(name):
    tx = OPTIMIZERS[name].make(lambda count: jnp.where(count < 1, 0.0, 0.1), axis=None)
    update = jax.jit(tx.update)
    gradient = jax.tree.map(jnp.ones_like, params())
    first, state = update(gradient, tx.init(params()), params())
    second, _ = update(gradient, state, params())
    assert float(jnp.abs(first["w"]).max()) == 0
    assert float(jnp.abs(second["w"]).min()) > 0


LEAVES = {
    "empty": ((0,), jnp.float32),
    "no rows": ((0, 4), jnp.float16),
    "scalar": ((), jnp.float64),
    "one": ((1,), jnp.bfloat16),
    "prime": ((7,), jnp.float16),
    "matrix": ((8, 6), jnp.float64),
    "half matrix": ((8, 6), jnp.bfloat16),
    "many dimensions": ((2, 3, 1, 2, 2), jnp.float32),
}


@pytest.mark.slow
@each
def test_leaves_of_every_kind(name):
    """One worker: updates of the same shape and dtype, finite, for gradients and for zeros."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        leaves = {key: jnp.asarray(rng.standard_normal(shape), dtype) for key, (shape, dtype) in LEAVES.items()}
        leaves["missing"] = None
        tx = OPTIMIZERS[name].make(0.1, axis=None)
        state, update = tx.init(leaves), jax.jit(tx.update)
        for gradient in (leaves, jax.tree.map(jnp.zeros_like, leaves), leaves):
            updates, state = update(gradient, state, leaves)
            assert jax.tree.all(jax.tree.map(lambda u, g: (u.shape, u.dtype) == (g.shape, g.dtype), updates, leaves))
            assert all(np.isfinite(np.asarray(u, np.float64)).all() for u in jax.tree.leaves(updates))


@each
def test_summed_gradients_are_refused(name, mesh):
    tx = OPTIMIZERS[name].make(0.1)
    with pytest.raises(ValueError, match=r"is the same on all workers .* local_value_and_grad"):
        jd.distribute(make_step(tx, grad=jax.value_and_grad(loss)), mesh)(fresh(tx, mesh), batch())


@each
def test_what_it_refuses(name):
    tx = OPTIMIZERS[name].make(0.1)
    with pytest.raises(ValueError, match="only floating leaves"):
        tx.init({"n": jnp.zeros(3, jnp.int32)})
    with pytest.raises(ValueError, match="axis 'data' is not bound here"):
        tx.update(params(), tx.init(params()), params())
    wrapped = optax.MultiSteps(tx, 2)
    with pytest.raises(ValueError, match="micro_batches"):
        jd.simulate(make_step(wrapped), 8)(fresh(wrapped, 8), batch())


def test_further_mesh_axes_are_refused():
    mesh = jd.make_mesh({"data": 4, "model": 2})
    tx = OPTIMIZERS["dion"].make(0.1)
    with pytest.raises(ValueError, match=r"further axes \('model',\).*all_reduce\(reducer, specs=\)"):
        jd.distribute(make_step(tx), mesh)(fresh(tx, mesh), batch())


def test_workers_without_examples_do_not_count():
    tx = OPTIMIZERS["dion"].make(0.1)
    rows, counts = gradients(0), jnp.array([1, 3, 0, 4, 0, 0, 0, 0])

    def one(gradient, count):
        return tx.update(gradient, tx.init(gradient), gradient, examples=count)[0]

    found = jax.jit(jax.vmap(one, axis_name="data"))(rows, counts)
    mean = jax.tree.map(lambda x: (x * counts.reshape(8, *[1] * (x.ndim - 1))).sum(0) / 8, rows)
    alone = OPTIMIZERS["dion"].make(0.1, axis=None)
    wanted, _ = jax.jit(alone.update)(mean, alone.init(mean), mean)
    assert_close(jax.tree.map(lambda x: x[3], found), wanted)
