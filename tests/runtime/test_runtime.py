"""Running a step: on a mesh and simulated, donating or not, evaluated, scanned; what is refused before it runs."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P, lax
from problems import TrainState, assert_close, batch, fresh, loss, make_step, params

import jaxdist as jd


def chain(axis="data"):
    return optax.chain(
        jd.all_reduce(jd.error_feedback(jd.compressed(jd.compressors.cast(jnp.bfloat16))), axis=axis), optax.adam(1e-2)
    )


TX = chain()


@pytest.fixture(scope="module")
def run(mesh):
    return jd.distribute(make_step(TX), mesh)


@pytest.fixture(scope="module")
def simulated():
    return jd.simulate(make_step(TX), 8)


def train(run, state, steps=3):
    for seed in range(steps):
        state, metrics = run(state, batch(seed=seed))
    return state, metrics


# ---- the same step, wherever


def test_mesh_and_simulation_agree(mesh, run, simulated):
    assert_close(train(run, fresh(TX, mesh)), train(simulated, fresh(TX, mesh)))
    assert_close(train(run, fresh(TX, mesh)), train(simulated, fresh(TX, 8)))


@pytest.mark.slow
def test_several_axes(pods, run, mesh):
    axis = ("pod", "chip")
    on_mesh = train(
        jd.distribute(make_step(chain(axis), axis=axis), pods, axis=axis), fresh(chain(axis), pods, axis=axis)
    )
    sizes = {"pod": 2, "chip": 4}
    alone = train(jd.simulate(make_step(chain(axis), axis=axis), sizes), fresh(chain(axis), sizes, axis=axis))
    assert_close(on_mesh, alone)
    assert_close(on_mesh[0].params, train(run, fresh(TX, mesh))[0].params)
    assert on_mesh[0].opt[0].reducer.residual.value["w"].sharding.spec == P(axis)


@pytest.mark.slow
def test_explicit_axes(mesh, run):
    explicit = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    found = train(jd.distribute(make_step(TX), explicit), fresh(TX, explicit))
    assert_close(found, train(run, fresh(TX, mesh)))


@pytest.mark.slow
def test_one_device(simulated):
    one = jd.make_mesh({"data": 1}, devices=jax.devices()[:1])
    found = train(jd.distribute(make_step(TX), one), fresh(TX, one))
    assert_close(found, train(jd.simulate(make_step(TX), 1), fresh(TX, 1)))
    assert found[0].opt[0].reducer.residual.value["w"].shape == (1, 6, 4)


def test_a_further_axis_is_left_to_the_compiler(run, mesh):
    tx = optax.chain(jd.all_reduce(jd.exact()), optax.adam(1e-2))
    wide = jd.make_mesh({"data": 4, "model": 2})
    narrow = jd.make_mesh({"data": 4}, devices=jax.devices()[:4])
    found = train(jd.distribute(make_step(tx), wide), fresh(tx, wide))
    assert_close(found, train(jd.distribute(make_step(tx), narrow), fresh(tx, narrow)))


class Local(NamedTuple):
    params: Any
    rounds: Any


def test_parameters_of_each_worker(mesh):
    """A field that is `PerWorker` arrives as plain parameters and leaves as it came; `consensus` gives one model."""

    def step(state, data):
        _, gradient = jd.local_value_and_grad(loss)(state.params, data)
        moved = jax.tree.map(lambda p, g: p - 0.1 * g, state.params, gradient)
        return Local(moved, state.rounds + 1), {}

    def build():
        return Local(jd.PerWorker(params()), jnp.zeros((), jnp.int32))

    state, _ = jd.distribute(step, mesh)(jd.init_state(build, mesh), batch())
    other, _ = jd.simulate(step, 8)(jd.init_state(build, 8), batch())
    assert_close(state, other)
    assert state.params.value["w"].shape == (8, 6, 4)
    one_step = jax.tree.map(lambda p, g: p - 0.1 * g, params(), jax.jit(jax.grad(loss))(params(), batch()))
    assert_close(jd.consensus(state).params, one_step)  # of one step, the mean of local steps is the global step


def test_cut_state(mesh):
    """A worker sees its part of a `Sharded` leaf, and says with the others what the whole is."""

    def step(state, data):
        part = state["m"] + 1
        return {"m": part}, {"total": lax.psum(part.sum(), "data")}

    state, metrics = jd.distribute(step, mesh)(jd.place({"m": jd.Sharded(jnp.arange(10.0))}, mesh), batch())
    other, expected = jd.simulate(step, 8)(jd.place({"m": jd.Sharded(jnp.arange(10.0))}, 8), batch())
    assert_close((state, metrics), (other, expected))
    assert jd.consensus(state)["m"].tolist() == list(range(1, 11))
    assert float(metrics["total"]) == 45 + 16


# ---- states of other kinds, names of leaves


@pytest.mark.sampled(13)
@pytest.mark.parametrize("run", [jd.simulate, lambda step, size: jd.distribute(step, jd.make_mesh({"data": size}))])
@pytest.mark.parametrize("make", [jd.reducers.dgc, lambda density: jd.error_feedback(jd.compressed(jd.top_k(density)))])
def test_the_state_of_a_reducer_may_be_the_whole_state(run, make):
    reducer = make(0.5)

    def step(state, batch):
        reduced, state = reducer.reduce({"w": batch[0]}, state, jd.comm.over("data"))
        return state, reduced.mean

    place = 2 if run is jd.simulate else jd.make_mesh({"data": 2})
    state = jd.place(reducer.init({"w": jnp.zeros(4)}), place)
    state, mean = run(step, 2)(state, np.ones((2, 4), np.float32))
    assert mean["w"].tolist() == [1, 1, 0, 0]


def test_who_misses_a_mark_is_told_that_it_was_taken_off():
    state = jd.place({"mine": jd.PerWorker(jnp.zeros(3))}, 2)
    with pytest.raises(AttributeError, match="has no attribute") as error:
        jd.simulate(lambda state, batch: ({"mine": state["mine"].value}, {}), 2)(state, np.ones(2))
    assert "a whole field, is removed before the step sees it" in error.value.__notes__[0]


def test_a_tree_of_one_leaf_has_a_name_in_messages(mesh):
    def stepped(tx, gradient=lambda x: x):
        state = {"x": jnp.zeros(3), "opt": tx.init(jnp.zeros(3))}

        def step(state, batch):
            return tx.update(gradient(state["x"]), state["opt"], state["x"])

        jd.distribute(step, mesh)(jd.place(state, mesh), batch())

    with pytest.raises(ValueError, match=r"^the gradient is the same on all workers"):
        stepped(jd.all_reduce(jd.exact()))
    tx = jd.local_steps(optax.sgd(0.1), optax.sgd(1.0), sync_period=2)
    with pytest.raises(ValueError, match=r"^the parameter is the same on all workers"):
        stepped(tx, lambda x: jd.comm.over("data").varying(x))
    with pytest.raises(ValueError, match=r"^the state was float32\[3\] before the step and is now float32\[4\]"):
        jd.simulate(lambda state, batch: (jnp.zeros(4), {}), 2)(jnp.zeros(3), np.ones(2))
    with pytest.raises(ValueError, match=r"^the tree, which is one leaf, has label 'b'"):
        jd.reducers.per_leaf(lambda path, leaf: "b", {"a": jd.exact()}).init(jnp.zeros(3))


# ---- memory, traces, programs


@pytest.mark.parametrize(
    "make", [jd.simulate, lambda step, workers: jd.distribute(step, jd.make_mesh({"data": workers}))]
)
@pytest.mark.parametrize("start", [jd.place, lambda state, place: jd.init_state(lambda: state, place)])
def test_numbers_without_a_type_are_traced_once(make, start):
    """`x` comes weakly typed and an update makes it strong; `flag` the other way round."""
    traces, tx = [], optax.adam(0.1)

    def step(state, batch):
        traces.append(None)
        updates, opt = tx.update(jax.lax.pmean(state["x"] * batch[0], "data"), state["opt"], state["x"])
        x = {"x": optax.apply_updates(state["x"], updates), "mine": jax.tree.map(lambda x: x + batch[0], state["mine"])}
        return x | {"opt": opt, "flag": jnp.where(state["x"] > 0, 1.0, 0.0), "rate": state["rate"]}, {}

    x = jnp.asarray(1.0)
    state = {"x": x, "mine": jd.PerWorker(x), "opt": tx.init(x), "flag": jnp.float32(0), "rate": 0.1}
    run = make(step, 2)
    state = start(state, 2 if make is jd.simulate else jd.make_mesh({"data": 2}))
    for _ in range(3):
        state, _ = run(state, np.ones(2, np.float32))
    assert (len(traces), run._cache_size()) == (1, 1)
    assert (state["rate"] * jnp.ones(1, jnp.bfloat16)).dtype == jnp.bfloat16  # what has no type keeps to that


@pytest.mark.parametrize("start", [jd.place, lambda state, place: jd.init_state(lambda: state, place)])
def test_empty_leaves_are_compiled_once(start):
    """Of an array without entries XLA forgets how it is sharded."""
    mesh = jd.make_mesh({"data": 2}, devices=jax.devices()[:2])
    state = {"mine": jd.PerWorker(jnp.zeros((0, 3))), "part": jd.Sharded(jnp.zeros(0)), "x": jnp.ones(2)}
    run = jd.distribute(lambda state, batch: (jax.tree.map(lambda x: x + 1, state), {}), mesh)
    state = start(state, mesh)
    for _ in range(2):
        state, _ = run(state, np.ones(2, np.float32))
    assert run._cache_size() == 1
    assert state["mine"].value.shape == (2, 0, 3)


def test_state_is_donated(mesh, run):
    state = fresh(TX, mesh)
    held = jax.tree.leaves(state)
    run(state, batch())
    assert all(leaf.is_deleted() for leaf in held)


def test_donation_can_be_turned_off(mesh):
    state = fresh(TX, mesh)
    after, _ = jd.distribute(make_step(TX), mesh, donate=False)(state, batch())
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((state, after)))


def test_one_trace(mesh):
    traces = []

    def step(state, data):
        traces.append(1)
        return make_step(TX)(state, data)

    for run, state in ((jd.distribute(step, mesh), fresh(TX, mesh)), (jd.simulate(step, 8), fresh(TX, 8))):
        traces.clear()
        train(run, state, steps=4)
        assert len(traces) == 1


def test_state_keeps_its_shardings(mesh, run):
    state = fresh(TX, mesh)
    before = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    after = train(run, state)[0]
    assert jax.tree.structure(before) == jax.tree.structure(after)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert (old.shape, old.dtype) == (new.shape, new.dtype)
        assert old.sharding.is_equivalent_to(new.sharding, new.ndim)


def test_static_arguments_make_programs(mesh):
    def step(state, data, *, sync):
        mean = lax.pmean(data["x"].sum(), "data") if sync else jnp.zeros(())
        return state + mean, {}

    run = jd.distribute(step, mesh, static_argnames=("sync",), donate=False)
    simulated = jd.simulate(step, 8, static_argnames=("sync",))
    for f in (run, simulated):
        synced, _ = f(jnp.zeros(()), batch(), sync=True)
        alone, _ = f(jnp.zeros(()), batch(), sync=False)
        np.testing.assert_allclose(synced, batch()["x"].sum() / 8, rtol=1e-5)
        assert float(alone) == 0
    programs = [run.lower(jnp.zeros(()), batch(), sync=sync).compile() for sync in (True, False)]
    assert [len(jd.analysis.collectives(program).ops) for program in programs] == [1, 0]


@pytest.mark.slow
def test_several_steps_in_one_call(mesh, run):
    many = {k: np.stack([batch(seed=seed)[k] for seed in range(3)]) for k in ("x", "y")}

    def steps(state, data):
        return lax.scan(make_step(TX), state, data)

    one_by_one, last = train(run, fresh(TX, mesh))
    for f in (
        jd.distribute(steps, mesh, batch_specs=P(None, "data")),
        jd.simulate(steps, 8, batch_specs=P(None, "data")),
    ):
        state, metrics = f(fresh(TX, mesh), many)
        assert_close(state, one_by_one)
        np.testing.assert_allclose(metrics["loss"][-1], last["loss"], rtol=1e-5)


def test_batches_that_all_workers_share(mesh):
    def step(state, data):
        return state, {"seen": lax.psum(data["mine"].sum() * data["shared"], "data")}

    data = {"mine": np.arange(8.0, dtype=np.float32), "shared": np.float32(2)}
    specs = {"mine": P("data"), "shared": P()}
    for f in (jd.distribute(step, mesh, batch_specs=specs), jd.simulate(step, 8, batch_specs=specs)):
        assert float(f(jnp.zeros(()), data)[1]["seen"]) == 56


def test_evaluation(mesh):
    state = fresh(TX, mesh)
    measure = jd.evaluate(lambda state, data: lax.pmean(loss(state.params, data), "data"), mesh)
    np.testing.assert_allclose(measure(state, batch()), loss(params(), batch()), rtol=1e-6)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    with pytest.raises(ValueError, match="metric differs between workers"):
        jd.evaluate(lambda state, data: loss(state.params, data), mesh)(state, batch())


def test_global_batches(mesh):
    data = jd.global_batch(batch(), mesh)
    assert data["x"].sharding == jax.NamedSharding(mesh, P("data"))
    np.testing.assert_array_equal(data["x"], batch()["x"])
    with pytest.raises(ValueError, match=r"\(12, 6\) does not divide among the 8 workers of process 0"):
        jd.global_batch(batch(12), mesh)
    wide = jd.make_mesh({"data": 4, "model": 2})
    assert {s.data.shape for s in jd.global_batch(batch(), wide)["x"].addressable_shards} == {(4, 6)}


def test_meshes():
    assert dict(jd.make_mesh().shape) == {"data": 8}
    assert jd.make_mesh({"pod": 2, "chip": 2}).devices.shape == (2, 2)
    with pytest.raises(ValueError, match="needs 16 devices, but there are 8"):
        jd.make_mesh({"data": 16})


# ---- what is refused, before anything is sent


def everywhere(step, mesh, state, data, message):
    for f in (jd.distribute(step, mesh), jd.simulate(step, 8)):
        with pytest.raises(ValueError, match=message):
            f(state, data)


def test_a_state_that_was_not_placed(mesh, run):
    state = TrainState(params(), TX.init(params()))
    with pytest.raises(ValueError, match=r"PerWorker leaf .* should be for the 8 workers .* init_state"):
        run(state, batch())
    four = fresh(TX, 4)
    with pytest.raises(ValueError, match="should be for the 8 workers"):
        run(four, batch())


def test_a_batch_that_does_not_divide(mesh):
    everywhere(make_step(TX), mesh, fresh(TX, mesh), batch(12), "does not divide among 8 workers")


def test_an_axis_that_the_mesh_lacks(mesh):
    with pytest.raises(ValueError, match=r"no axis 'dat'; its axes are \('data',\)"):
        jd.distribute(make_step(TX), mesh, axis="dat")


def test_a_metric_that_differs(mesh):
    def step(state, data):
        return state, {"loss": data["x"].mean()}

    everywhere(step, mesh, jnp.zeros(()), batch(), "metric.* differs between workers.*pmean")


def test_a_state_that_differs(mesh):
    def step(state, data):
        return {**state, "shift": state["shift"] + data["x"].mean()}, {}

    everywhere(
        step, mesh, {"shift": jnp.zeros(()), "b": jnp.ones(2)}, batch(), "leaf `shift` differs between workers.*: mark"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {**s, "new": s["w"]}, "another tree than it received"),
        (
            lambda s: {"w": s["w"].astype(jnp.float16)},
            r"`w` .* was float32\[3\] before the step and is now float16\[3\]",
        ),
        (lambda s: {"w": s["w"][:2]}, r"is now float32\[2\]"),
        (lambda s: {"w": jd.PerWorker(s["w"])}, "another tree than it received"),
    ],
)
def test_a_state_that_changes(mesh, change, message):
    everywhere(lambda s, d: (change(s), {}), mesh, {"w": jnp.ones(3)}, batch(), message)


def test_arguments(mesh):
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        jd.simulate(make_step(TX), 0)
    with pytest.raises(ValueError, match="give the number of workers of each"):
        jd.simulate(make_step(TX), 8, axis=("pod", "chip"))
