"""Leaves whose gradient is their next value, as the fp8 statistics of flax: the maximum over workers, or refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.linen import fp8_ops
from jax import lax

import jaxdist as jd
from jaxdist.transforms import agree_on_maximum

WORKERS = 4
VALUES = "_overwrite_with_gradient"
PARAMS = {"params": {"w": jnp.ones((3, 2))}, VALUES: {"amax": jnp.array([2.0, 7.0, 0.0])}}
ROWS = np.array([[1.0], [-2.0], [16.0], [-3.0]] * 2, np.float32)
TX = {
    "all_reduce": jd.all_reduce(jd.exact()),
    "late": jd.all_reduce(jd.exact(), delay=1),
    "hierarchical": jd.all_reduce(jd.hierarchical(inner=jd.exact(), outer=jd.exact()), axis=("pod", "data")),
    "bucketed": jd.all_reduce(jd.reducers.bucketed(jd.error_feedback(jd.compressed(jd.top_k(0.5))))),
    "two_shot": jd.all_reduce(jd.two_shot(jd.qsgd(8))),
    "zero_redundancy": jd.zero_redundancy(optax.sgd(0.1)),
    "accumulate": jd.accumulate(optax.sgd(0.1), 2),
    "skip_nonfinite": jd.skip_nonfinite(optax.chain(jd.all_reduce(jd.exact()), optax.sgd(0.1))),
    "loss scale": jd.transforms.dynamic_loss_scale(optax.chain(jd.all_reduce(jd.exact()), optax.sgd(0.1))),
    "local_steps": jd.local_steps(optax.sgd(0.1), optax.sgd(1.0), sync_period=2),
    "noloco": jd.local_sgd.noloco(optax.sgd(0.1), sync_period=2),
    "gossip": jd.gossip(optax.sgd(0.1), jd.topology.ring(4)),
    "demo": jd.optimizers.demo(0.1),
}


@jax.custom_vjp
def record(x, history):
    """A layer that keeps the largest inputs of its last calls; the gradient of the history is the next one."""
    return x


def next_history(saved, g):
    x, history = saved
    return g, jnp.roll(history, 1).at[0].set(jnp.abs(x).max())


record.defvjp(lambda x, history: (x, (x, history)), next_history)


def loss_fn(params, x):
    return jnp.mean((record(x, params[VALUES]["amax"]) @ jnp.ones((1, 3)) @ params["params"]["w"]) ** 2)


def train_step(tx, *, micro_batches=1, examples=None):
    def step(state, batch):
        params, opt = state
        x, number = batch
        given = None if examples is None else number[0]
        _, gradients = jd.local_value_and_grad(loss_fn, micro_batches=micro_batches)(params, x)
        gradients = agree_on_maximum(gradients, params, examples=given)
        updates, opt = tx.update(gradients["params"], opt, params["params"])
        return (
            {"params": optax.apply_updates(params["params"], updates), VALUES: gradients[VALUES]},
            opt,
        ), {}

    return step


def run(tx, where, **options):
    state = jd.init_state(lambda: (PARAMS, tx.init(PARAMS["params"])), where)
    step = train_step(tx, **options)
    many = jd.simulate(step, where) if isinstance(where, int) else jd.distribute(step, where)
    examples = np.asarray(options.get("examples") or [1] * WORKERS)
    state, _ = many(state, (ROWS, examples))
    return np.asarray(state[0][VALUES]["amax"])


@pytest.mark.sampled(9)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_values_are_those_of_the_whole_batch(micro_batches):
    tx = optax.chain(jd.all_reduce(jd.error_feedback(jd.two_shot(jd.compressors.scaled_sign()))), optax.adam(0.1))
    whole = jax.grad(loss_fn)(PARAMS, ROWS)[VALUES]["amax"]
    mesh = jd.make_mesh({"data": WORKERS}, devices=jax.devices()[:WORKERS])
    for where in (WORKERS, mesh):
        np.testing.assert_array_equal(run(tx, where, micro_batches=micro_batches), whole)
    assert whole.tolist() == [16.0, 2.0, 7.0]


def test_workers_without_examples_are_left_out():
    tx = jd.zero_redundancy(optax.sgd(0.1))
    assert run(tx, WORKERS, examples=[1, 0, 1, 0]).tolist() == [2.0, 2.0, 7.0]
    assert run(tx, WORKERS, examples=[0, 0, 0, 0]).tolist() == PARAMS[VALUES]["amax"].tolist()


def test_a_value_that_is_not_finite_is_not_taken():
    gradients = {"params": jnp.ones(()), VALUES: {"a": jnp.array([jnp.inf, 1.0]), "b": jnp.array([5.0])}}
    params = {"params": jnp.ones(()), VALUES: {"a": jnp.array([3.0, 4.0]), "b": jnp.array([0.0])}}
    found = agree_on_maximum(gradients, params, axis=None)
    assert {name: value.tolist() for name, value in found[VALUES].items()} == {"a": [3.0, 4.0], "b": [5.0]}
    with pytest.raises(ValueError, match="gradients have the structure"):
        agree_on_maximum(gradients, params["params"], axis=None)


@pytest.mark.parametrize("name", TX)
def test_no_transformation_takes_them_for_derivatives(name):
    with pytest.raises(ValueError, match="agree_on_maximum"):
        TX[name].init(PARAMS)


def test_an_update_refuses_them_too():
    tx = jd.all_reduce(jd.exact(), axis=None)
    with pytest.raises(ValueError, match=r"'amax'\] is in the collection '_overwrite_with_gradient'"):
        tx.update(PARAMS, tx.init(PARAMS["params"]), PARAMS)


def test_a_state_that_would_keep_each_workers_own_says_what_to_do():
    def step(params, x):
        gradients = jd.local_value_and_grad(loss_fn)(params, x)[1]
        return {**lax.pmean(params, "data"), VALUES: gradients[VALUES]}, {}

    for run_step in (jd.simulate(step, 2), jd.distribute(step, jd.make_mesh({"data": 2}, devices=jax.devices()[:2]))):
        with pytest.raises(ValueError, match=r"amax` differs between workers.*agree_on_maximum"):
            run_step(PARAMS, ROWS)


def test_models_of_their_own_are_joined_by_the_maximum():
    values = {"w": jnp.array([[1.0], [3.0]]), VALUES: {"amax": jnp.array([[1.0], [3.0]])}}
    found = jd.consensus(jd.PerWorker(values, axis="data"))
    assert (found["w"].tolist(), found[VALUES]["amax"].tolist()) == ([2.0], [3.0])
    resized = jd.resize(jd.PerWorker(values), 1).value
    assert (resized["w"].tolist(), resized[VALUES]["amax"].tolist()) == ([[2.0]], [[3.0]])
    marked = jd.resize(jd.PerWorker(jnp.array([[1.0], [jnp.nan]]), resize="max"), 3)
    assert np.isnan(marked.value).all()


def test_they_are_not_sharded():
    sharded = jd.zero.shard(PARAMS, smallest=0)
    assert isinstance(sharded["params"]["w"], jd.Sharded)
    assert isinstance(sharded[VALUES]["amax"], jax.Array)


@pytest.mark.parametrize(("counts", "expected"), [((1.0, 0.0), 2.0), ((1.0, 1.0), 9.0), ((0.0, 0.0), 9.0)])
def test_statistics_of_a_part_without_weight_are_left_out(counts, expected):
    """Unless no part has any: then those of all are as good as others."""

    # A loss whose derivative with respect to the statistic is the largest entry of the part.
    def loss(params, batch):
        return jnp.sum(params["w"] * batch["x"]) + params[VALUES] * batch["x"].max()

    params = {"w": jnp.zeros(()), VALUES: jnp.zeros(())}
    batch = {"x": jnp.array([1.0, 2.0, 3.0, 9.0]), "count": jnp.repeat(jnp.array(counts), 2)}
    gradient = jd.local_value_and_grad(loss, micro_batches=2, weights=lambda part: part["count"].sum(), axis=None)
    assert gradient(params, batch)[1][VALUES] == expected


def test_layers_of_linen_in_nnx_keep_them_as_variables():
    """Whose class has the name of the collection, and whose paths have not."""
    layer = nnx.bridge.ToNNX(nn.Dense(2, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp), rngs=nnx.Rngs(0))
    nnx.bridge.lazy_init(layer, jnp.ones((1, 1)))
    structure, params, rest = nnx.split(layer, lambda path, value: not isinstance(value, nnx.RngState), ...)

    def loss(params, x):
        return jnp.mean((nnx.merge(structure, params, rest)(x, rngs={}) - 1) ** 2)

    def step(params, batch):
        _, gradients = jd.local_value_and_grad(loss, micro_batches=2)(params, batch)
        gradients = agree_on_maximum(gradients, params)
        # Equal on all workers, as a metric must be.
        return params, gradients["Fp8DirectDotGeneralOp_0"]

    _, agreed = jd.simulate(step, WORKERS)(params, ROWS)
    assert max(float(x.max()) for x in jax.tree.leaves(agreed["input_amax_history"])) == 16.0
    for refused in (jd.all_reduce(jd.exact()), jd.zero_redundancy(optax.sgd(0.1))):
        with pytest.raises(ValueError, match=r"input_amax_history.* is in the collection .*agree_on_maximum"):
            refused.init(params)
    assert not any(isinstance(x, jd.Sharded) for x in statistics(jd.zero.shard(params, smallest=0)))
    own = jax.tree.map(lambda x: jnp.stack([x, 3 * x]), jax.tree.map(jnp.ones_like, params))
    assert all(float(x.max()) == 3 for x in statistics(jd.consensus(jd.PerWorker(own, axis="data"))))


def statistics(params):
    return jax.tree.leaves(params["Fp8DirectDotGeneralOp_0"], is_leaf=lambda x: isinstance(x, jd.Sharded))


@pytest.mark.parametrize("examples", [None, 0, 5])
def test_a_worker_with_a_model_of_its_own_keeps_its_statistics_finite(examples):
    """`axis=None`: nothing is shared, and a batch of NaN, or without examples, leaves the old values."""
    for value in (5.0, np.nan):
        gradients = {"params": PARAMS["params"], VALUES: {"amax": jnp.array([value, 2.0, 7.0])}}
        found = agree_on_maximum(gradients, PARAMS, axis=None, examples=examples)[VALUES]["amax"]
        counts = np.isfinite(value) and examples != 0
        np.testing.assert_array_equal(found, gradients[VALUES]["amax"] if counts else PARAMS[VALUES]["amax"])
