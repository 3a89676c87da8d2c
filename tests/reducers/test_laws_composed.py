"""Every reducer of the register inside optax's wrappers and on leaves of every kind."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import assert_close
from register import CASES
from register_run import State, gradients, params, train_step, where

import jaxdist as jd
from jaxdist.reducers import Extras

each_case = pytest.mark.parametrize("name", CASES)


LABELS = {"b": "train", "s": "other", "w": "train"}


def wrapped(case, axis):
    """Every wrapper that may stand around `all_reduce`, and hyperparameters that are injected outside of it."""
    reduce = jd.all_reduce(case.make(), axis=axis)
    plain = jd.all_reduce(jd.exact(), axis=axis)
    return optax.chain(
        optax.partition({"train": optax.chain(reduce, optax.trace(0.9)), "other": plain}, LABELS),
        optax.masked(optax.add_decayed_weights(0.1), {"b": False, "s": False, "w": True}),
        optax.inject_hyperparams(optax.sgd)(learning_rate=optax.linear_schedule(0.5, 0.1, 10)),
    )


@pytest.mark.sampled(30)
@each_case
def test_inside_the_wrappers_of_optax(name, request):
    """On the mesh and in simulation in turn; both with `--slow`."""
    case = CASES[name]
    axis, workers, mesh = where(case)
    tx = wrapped(case, axis)
    state = State(params(), tx.init(params()))
    placed = jax.eval_shape(lambda: jd.init_state(lambda: state, workers, axis=axis))
    batch = jax.eval_shape(lambda: gradients(0))
    runs = [
        jd.distribute(train_step(tx, axis), mesh, axis=axis),
        jd.simulate(train_step(tx, axis), workers, axis=axis),
    ]
    for run in runs if request.config.getoption("--slow") else [runs[list(CASES).index(name) % 2]]:
        after, _ = jax.eval_shape(run, placed, batch)
        assert jax.tree.structure(after) == jax.tree.structure(placed)
    mapped = optax.tree.map_params(tx, lambda x: x, state.opt)
    assert jax.tree.structure(mapped) == jax.tree.structure(state.opt)


@pytest.mark.slow
def test_wrappers_leave_the_numbers_alone():
    """Masked and partitioned: the same updates as for the leaves alone, and none for the others."""
    reducer = jd.error_feedback(jd.compressed(jd.top_k(0.1)))
    rate = optax.inject_hyperparams(optax.sgd)(learning_rate=optax.linear_schedule(0.5, 0.1, 10))
    plain = optax.chain(jd.all_reduce(reducer), rate)
    split = optax.chain(optax.partition({"train": jd.all_reduce(reducer), "other": optax.set_to_zero()}, LABELS), rate)
    mask = {"b": True, "s": False, "w": True}
    masked = optax.chain(
        optax.masked(jd.all_reduce(reducer), mask),
        optax.masked(optax.set_to_zero(), jax.tree.map(lambda x: not x, mask)),
        rate,
    )
    results = []
    for tx in (plain, split, masked):
        state = jd.init_state(lambda tx=tx: State(params(), tx.init(params())), 8)
        run = jd.simulate(train_step(tx, "data"), 8)
        for number in range(2):
            state, _ = run(state, gradients(number))
        results.append(state.params)
    for found in results[1:]:  # to rounding: the programs have other leaves, and the compiler fuses them in another way
        assert_close({"b": found["b"], "w": found["w"]}, {"b": results[0]["b"], "w": results[0]["w"]}, tolerance=1e-6)
        assert float(found["s"]) == 0.0
    assert float(results[0]["s"]) != 0.0


LEAVES = {
    "empty": ((0,), jnp.float32),
    "no rows": ((0, 4), jnp.float16),
    "scalar": ((), jnp.float64),
    "one": ((1,), jnp.bfloat16),
    "vector": ((7,), jnp.float16),
    "matrix": ((8, 6), jnp.float64),
    "half matrix": ((8, 6), jnp.bfloat16),
    "many dimensions": ((2, 3, 1, 2, 2), jnp.float32),
}


# The others see leaves through one of these, but the last, which takes leaves of one dtype.
ELSEWHERE = ("top_k", "feedback of qsgd 2", "power_sgd", "tracked", "hierarchical two_shot")
ON_LEAVES = [name for name in CASES if name not in ELSEWHERE]


@pytest.mark.sampled(30)
@pytest.mark.parametrize("name", ON_LEAVES)
def test_leaves_of_every_kind(name, request):
    """Finite results of the same shape and dtype, in one tree, for one worker; half of the leaves without `--slow`."""
    case, turn = CASES[name], list(CASES).index(name) % 2
    kinds = list(LEAVES.items()) if request.config.getoption("--slow") else list(LEAVES.items())[turn::2]
    comm = jd.comm.nested(jd.comm.alone(), jd.comm.alone()) if case.levels == 2 else jd.comm.alone()
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        updates = {key: jnp.asarray(rng.standard_normal(shape), dtype) for key, (shape, dtype) in kinds}
        updates["missing"] = None
        reducer = case.make()
        reduced, _ = jax.jit(lambda x: reducer.reduce(x, reducer.init(x), comm, Extras(params=x)))(updates)
    assert jax.tree.structure(reduced.mean) == jax.tree.structure(updates)
    for key, mean in reduced.mean.items():
        if mean is not None:
            assert (mean.shape, mean.dtype) == (updates[key].shape, updates[key].dtype), key
            assert np.isfinite(np.asarray(mean, np.float64)).all(), key


def test_float64_is_reduced_in_float64(mesh):
    with jax.enable_x64(True):
        rows = np.random.default_rng(0).standard_normal((8, 6, 4))
        for reducer in (
            jd.exact(),
            jd.error_feedback(jd.power_sgd(4, min_compression_rate=0)),
            jd.reducers.with_stats(jd.exact()),
        ):
            tx = jd.all_reduce(reducer)

            def step(state, batch, tx=tx):
                mean, opt = tx.update(batch[0], state.opt)
                return State(mean, opt), {}

            state = jd.init_state(lambda tx=tx: State(jnp.zeros((6, 4)), tx.init(jnp.zeros((6, 4)))), mesh)
            compiled = jd.distribute(step, mesh).lower(state, rows).compile()
            state, _ = compiled(state, rows)
            np.testing.assert_allclose(np.asarray(state.params), rows.mean(0), rtol=1e-12)
            assert {op.dtype for op in jd.analysis.collectives(compiled).ops} == {"float64"}


@pytest.mark.sampled(3)
@each_case
def test_integer_leaves_are_refused(name):
    axis, _, _ = where(CASES[name])
    tx = jd.all_reduce(CASES[name].make(), axis=axis)
    with pytest.raises(ValueError, match=r"'steps'.*int32.*only floating leaves"):
        tx.init({"steps": jnp.zeros(3, jnp.int32), "w": jnp.zeros(3)})
