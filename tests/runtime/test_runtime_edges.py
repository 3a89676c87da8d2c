"""States that were donated, wrappers of ZeRO, complex leaves, and what `simulate` takes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jaxdist as jd
from jaxdist._core import hashing
from jaxdist.state import with_value


@pytest.fixture
def mesh():
    return jd.make_mesh({"data": 4}, devices=jax.devices()[:4])


def test_a_donated_state_is_named_before_it_is_read(mesh):
    batch = np.ones(8, np.float32)
    old = jd.place({"w": jnp.ones(3)}, mesh)
    step = jd.distribute(lambda s, b: ({"w": s["w"] - jax.lax.pmean(b.mean(), "data")}, {}), mesh)
    mean = jd.evaluate(lambda s, b: jax.lax.pmean((s["w"].sum() * b).mean(), "data"), mesh)
    new, _ = step(old, batch)
    assert float(mean(new, batch)) == 0.0
    assert mean.lower(new, batch)
    for read in (lambda: mean(old, batch), lambda: jd.runtime.disagreement(old, mesh)):
        with pytest.raises(ValueError, match="leaf `w` of the state has been deleted"):
            read()


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda tx: optax.apply_if_finite(tx, 2), r"use skip_nonfinite\(tx\)"),
        (lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(), "accumulates gradients that differ"),
    ],
)
def test_wrappers_that_decide_on_each_worker_do_not_go_around_zero(mesh, wrap, message):
    params = {"w": jnp.ones((7, 5))}

    def run(tx, on):
        def step(state, batch):
            gradients = jax.tree.map(lambda p: p - batch.mean(), state[0])
            updates, opt = tx.update(gradients, state[1], state[0])
            return (optax.apply_updates(state[0], updates), opt), {}

        state = jd.place((params, tx.init(params)), mesh if on == "mesh" else 4)
        return (jd.distribute(step, mesh) if on == "mesh" else jd.simulate(step, 4))(state, np.ones(8, np.float32))

    for on in ("mesh", "one device"):
        with pytest.raises(ValueError, match=message):
            run(wrap(jd.zero_redundancy(optax.adam(1e-2))), on)
    # With the mean made before, all workers decide alike.
    chain = optax.chain(jd.all_reduce(jd.exact()), wrap(jd.zero_redundancy(optax.adam(1e-2), reducer=None)))
    state, _ = run(chain, "one device")
    assert np.isfinite(state[0]["w"]).all()


def test_complex_leaves_are_compared(mesh):
    state = jd.place({"w": jnp.ones(3), "c": jnp.arange(2, dtype=jnp.complex64) * 1j}, mesh)
    assert jd.runtime.disagreement(state, mesh) == ()
    x = np.arange(4, dtype=np.complex64) * (1 + 2j)
    assert hashing.hash_of(x) == int(hashing.hash_array(jnp.asarray(x)))


def test_a_single_worker_may_have_no_axis():
    run = jd.simulate(lambda state, batch: (state + batch.mean(), {"mean": batch.mean()}), 1, axis=None)
    state, metrics = run(jnp.zeros(()), jnp.arange(4.0))
    assert (float(state), float(metrics["mean"])) == (1.5, 1.5)


def test_the_order_of_axes_decides_which_worker_gets_which_rows():
    sizes, axis = {"pod": 2, "chip": 4}, ("chip", "pod")
    mesh = jd.make_mesh(sizes)

    def step(state, batch):
        return batch[0], {}

    def rows(run, where):
        state = jd.init_state(lambda: jd.PerWorker(jnp.zeros(()), axis=axis), where, axis=axis)
        return np.ravel(run(state, jnp.arange(8.0))[0].value).tolist()

    assert rows(jd.distribute(step, mesh, axis=axis), mesh) == list(range(8))
    assert rows(jd.simulate(step, sizes, axis=axis), sizes) == list(range(8))


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            lambda step: jd.simulate(step, 4)(None, {"x": jnp.ones(8), "lr": 0.1}),
            r"batch\['lr'\] of shape \(\) does not",
        ),
        (
            lambda step: jd.simulate(step, 4, batch_specs=PartitionSpec("nope"))(None, {"x": jnp.ones(8)}),
            "batch_specs names the axis 'nope'",
        ),
        (
            lambda step: jd.simulate(step, 4, batch_specs={"x": PartitionSpec("data")})(
                None, {"x": jnp.ones(8), "y": jnp.ones(8)}
            ),
            r"batch_specs must have a PartitionSpec for each array, .*: there is none for \['y'\]",
        ),
        (lambda step: jd.simulate(step, 2, axis=None), "axis=None is a single worker without an axis, got workers=2"),
        (lambda step: jd.make_mesh({"data": 0}), "number of devices of axis 'data' must be at least 1, got 0"),
    ],
)
def test_simulate_explains_as_distribute_does(run, message):
    with pytest.raises(ValueError, match=message):
        run(lambda state, batch: (state, {}))


class OwnState(NamedTuple):
    """The state of a user's transformation, which declares its mark as the library's states do."""

    count: jax.Array
    kept: jd.PerWorker


def test_a_whole_state_that_declares_its_marks_keeps_them():
    def step(state, batch):
        return OwnState(state.count + 1, with_value(state.kept, state.kept.value + batch[0])), {}

    state = jd.place(OwnState(jnp.zeros(()), jd.PerWorker(jnp.zeros(()))), 2)
    state, _ = jd.simulate(step, 2)(state, jnp.array([1.0, 2.0]))
    assert state.kept.value.tolist() == [1, 2]
