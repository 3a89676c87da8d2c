"""The first mistakes of a new user: each is refused, with what to do."""

import jax
import jax.numpy as jnp
import optax
import pytest
from problems import batch, fresh, loss, make_step, params

import jaxdist as jd


@pytest.fixture
def launched(monkeypatch):
    """As one of two processes of `jaxdist launch`, before `initialize`."""
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")


def test_a_forgotten_initialize(mesh, launched):
    for build in (jd.make_mesh, lambda: jd.distribute(make_step(optax.sgd(0.1)), mesh)):
        with pytest.raises(ValueError, match=r"JAX_NUM_PROCESSES=2.*call jaxdist.initialize\(\) at the start"):
            build()


@pytest.mark.parametrize("variable", ["1", "", "two"])
def test_a_single_process_needs_no_initialize(monkeypatch, variable):
    monkeypatch.setenv("JAX_NUM_PROCESSES", variable)
    assert jd.make_mesh().size == jax.device_count()


NOT_FIRST = {
    "no all_reduce": lambda: optax.chain(optax.adam(0.1)),
    "no all_reduce, no state": lambda: optax.sgd(0.1),
    "all_reduce last": lambda: optax.chain(optax.adam(0.1), jd.all_reduce(jd.exact())),
}


@pytest.mark.parametrize("make", NOT_FIRST.values(), ids=NOT_FIRST)
def test_an_optimizer_of_local_gradients(mesh, make):
    tx = make()
    advice = r"differs between workers.*begin the chain with all_reduce"
    with pytest.raises(ValueError, match=advice):
        jd.distribute(make_step(tx), mesh)(fresh(tx, mesh), batch())
    with pytest.raises(ValueError, match=advice):
        jd.simulate(make_step(tx), 8)(fresh(tx, 8), batch())


def averaging():
    return optax.chain(jd.all_reduce(jd.exact()), optax.sgd(0.1))


PARTLY = {
    "masked": lambda: optax.masked(averaging(), matrices),
    "partition": lambda: optax.partition({True: averaging(), False: optax.set_to_zero()}, matrices),
    "partition of optimizers": lambda: optax.partition({True: averaging(), False: optax.sgd(0.1)}, matrices),
}


def matrices(tree):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, tree)


@pytest.mark.parametrize("make", PARTLY.values(), ids=PARTLY)
def test_some_leaves_are_not_averaged(mesh, make):
    tx = make()
    with pytest.raises(
        ValueError, match=r"differs between workers.*put it in front.*per_leaf\(label_fn.*'frozen': None"
    ):
        jd.distribute(make_step(tx), mesh)(fresh(tx, mesh), batch())


def test_other_state_that_differs_is_marked(mesh):
    tx = optax.chain(jd.all_reduce(jd.exact()), optax.sgd(0.1))
    state = jd.init_state(lambda: {"seen": jnp.zeros(()), "opt": tx.init(params())}, mesh)

    def step(state, batch):
        return {"seen": jax.tree.leaves(batch)[0].sum(), "opt": state["opt"]}, {}

    with pytest.raises(ValueError, match=r"leaf `seen` differs between workers.*mark it PerWorker"):
        jd.distribute(step, mesh)(state, batch())


def test_a_donated_state(mesh):
    def step(state, batch):
        return {"w": state["w"] + jax.lax.pmean(batch.mean(), "data")}, {}

    state, run = jd.init_state(lambda: {"w": jnp.zeros(4)}, mesh), jd.distribute(step, mesh)
    run(state, jnp.ones(8))
    for again in (run, jd.simulate(step, 8)):
        with pytest.raises(ValueError, match=r"leaf `w` of the state has been deleted.*donate=False"):
            again(state, jnp.ones(8))


PLATEAU = optax.contrib.reduce_on_plateau()
BESIDE = r"in front of it says, and what differs comes in beside them: an extra argument of the update, such as value="
# Where in the state the leaf is that differs, and what the message says: all_reduce lacks only where it does.
CAUSES = {
    "value behind all_reduce": (optax.chain(jd.all_reduce(jd.exact()), PLATEAU), r"`opt\.1\.scale`.*" + BESIDE),
    "value in a guard": (
        jd.skip_nonfinite(optax.chain(jd.all_reduce(jd.exact()), PLATEAU)),
        r"`opt\.inner\.1\.scale`.*" + BESIDE,
    ),
    "value in every part": (
        optax.partition({"a": optax.chain(jd.all_reduce(jd.exact()), PLATEAU)}, {"w": "a", "b": "a"}),
        r"`opt\.inner_states\.a\.inner_state\.1\.scale`.*" + BESIDE,
    ),
    "momentum in front": (
        optax.chain(optax.trace(0.9), jd.all_reduce(jd.exact())),
        r"`opt\.0\.trace\.b`.*: it is in front of the transformation that averages gradients.*per_worker",
    ),
    "factor of the parameters": (
        optax.chain(jd.all_reduce(jd.exact()), optax.polyak_sgd()),
        r"`params\.b`.*: mark it PerWorker, or reduce it before it enters the state; if it is trained, look for",
    ),
    "no all_reduce": (
        optax.chain(optax.trace(0.9), PLATEAU),
        r"`opt\.0\.trace\.b`.*: .*begin the chain with all_reduce",
    ),
}


@pytest.mark.parametrize("name", CAUSES)
def test_a_difference_is_blamed_on_what_causes_it(name):
    tx, message = CAUSES[name]

    def step(state, batch):
        value, gradients = jd.local_value_and_grad(loss)(state["params"], batch)
        updates, opt = tx.update(gradients, state["opt"], state["params"], value=value)
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {}

    state = jax.eval_shape(lambda: jd.init_state(lambda: {"params": params(), "opt": tx.init(params())}, 8))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(jd.simulate(step, 8), state, batch())


def average_step(state, batch):
    params, average = state
    params = jax.tree.map(lambda p: p - jax.lax.pmean(batch.mean(), "data"), params)
    return (params, jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params)), {}


def replicated(x, mesh):
    """The same values on all devices; that of `x` keeps its memory."""
    return jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))


def test_one_array_in_two_places_of_the_state(mesh):
    """JAX names no leaf, or does not notice: only what two leaves have in common is looked at, nothing is run."""
    params = {"w": jnp.zeros(4), "x": jnp.zeros(0)}
    run = jd.distribute(average_step, mesh)
    expected = r"leaf `0\.w` of the state and leaf `1\.w` of the state have one memory.*jnp\.copy.*donate=False"
    for again in (params, jax.tree.map(lambda x: jnp.asarray(x), params), replicated(params, mesh)):
        with pytest.raises(ValueError, match=expected):
            run((params, again), jnp.ones(8))
    # Made by place or init_state they are two, as they are in what a step returns.
    for state in (jd.place((params, params), mesh), jd.init_state(lambda: (params, params), mesh)):
        after, _ = run(state, jnp.ones(8))
        with pytest.raises(ValueError, match=expected):
            run((after[0], after[0]), jnp.ones(8))
        with pytest.raises(ValueError, match=expected):
            run((after[0], replicated(after[0], mesh)), jnp.ones(8))
        after, _ = run(after, jnp.ones(8))
    kept, _ = jd.distribute(average_step, mesh, donate=False)((after[0], after[0]), jnp.ones(8))
    assert float(kept[0]["w"][0]) == -3.0
    traced, _ = jax.jit(lambda params, batch: run((params, params), batch))(after[0], jnp.ones(8))
    assert float(traced[0]["w"][0]) == -3.0


def test_a_batch_that_shares_an_array_with_the_state_or_is_gone(mesh):
    x = jnp.ones(8)
    run = jd.distribute(lambda state, batch: (state + jax.lax.pmean(batch.mean(), "data"), {}), mesh)
    for data in (x, replicated(x, mesh)):
        with pytest.raises(ValueError, match=r"the state and the batch have one memory.*copy the array of the batch"):
            run(x, data)
    x.delete()
    for again in (run, jd.simulate(lambda state, batch: (state, {}), 8)):
        with pytest.raises(ValueError, match=r"the batch has been deleted: .*copy it"):
            again(jnp.ones(8), x)
    for use in (jd.consensus, lambda x: jd.place(x, mesh), lambda x: jd.resize(x, mesh)):
        with pytest.raises(ValueError, match="leaf `w` of the state has been deleted"):
            use({"w": x})


def test_all_reduce_before_zero_redundancy(mesh):
    tx = optax.chain(jd.all_reduce(jd.exact()), jd.zero_redundancy(optax.sgd(0.1)))
    with pytest.raises(
        ValueError, match=r": if all_reduce comes before zero_redundancy, leave it out.*; otherwise jax.grad"
    ):
        jd.distribute(make_step(tx), mesh)(fresh(tx, mesh), batch())


LOSSES = {
    "operator": lambda p, x: (x * p["w"]).sum(),
    "function": lambda p, x: jnp.square(p["w"]).sum(),
    "method": lambda p, x: p["w"].sum(),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_sharded_parameters_that_are_not_gathered(mesh, loss):
    def step(state, x):
        value, _ = jd.local_value_and_grad(lambda p: loss(p, x[0]))(state["params"])
        return state, jax.lax.pmean(value, "data")

    state = jd.place({"params": jd.zero.shard({"w": jnp.arange(3.0)}, smallest=0)}, mesh)
    with pytest.raises((TypeError, AttributeError)) as caught:
        jd.distribute(step, mesh)(state, jnp.ones(8))
    assert any("zero.gathered" in note for note in getattr(caught.value, "__notes__", []))
