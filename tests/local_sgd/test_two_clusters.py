"""Workers inside a cluster average every gradient, clusters meet every H steps: two axes, two kinds of link."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import assert_close, batch, loss, params

import jaxdist as jd
from jaxdist import analysis

SIZES = {"outer": 2, "inner": 2}
AXES = ("outer", "inner")
ENTRIES = 28
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
INNER = optax.chain(jd.all_reduce(jd.exact(), axis="inner"), optax.adamw(0.05))
TX = jd.local_steps(INNER, NESTEROV, sync_period=3, axis="outer")


class State(NamedTuple):
    params: Any
    opt: Any
    loss: Any


def make(tx):
    def train_step(state, data):
        value, gradient = jd.local_value_and_grad(loss, axis=AXES)(state.params, data)
        updates, opt = tx.update(gradient, state.opt, state.params)
        # The mean over a cluster stays in the cluster.
        return State(optax.apply_updates(state.params, updates), opt, jax.lax.pmean(value, "inner")), {}

    return train_step


def fresh(tx, place, axis="outer"):
    held = jd.PerWorker(jnp.zeros(()), axis="outer")
    return jd.place(State(jd.PerWorker(params(), axis=axis), tx.init(params()), held), place, axis=AXES)


@pytest.fixture(scope="module")
def compiled():
    mesh = jd.make_mesh(SIZES)
    step = jd.distribute(make(TX), mesh, axis=AXES)
    return mesh, step.lower(fresh(TX, mesh), batch()).compile()


@pytest.fixture(scope="module")
def simulated():
    """The states after each of seven steps."""
    run, states = jd.simulate(make(TX), SIZES), [fresh(TX, SIZES)]
    for number in range(7):
        states.append(run(states[-1], batch(seed=number))[0])
    return states[1:]


@pytest.mark.slow
def test_the_mesh_does_what_the_simulation_does(compiled, simulated):
    """And what is agreed, is: clusters part between rounds and only there."""
    mesh, run = compiled
    state = fresh(TX, mesh)
    for number, wanted in enumerate(simulated):
        state, _ = run(state, batch(seed=number))
        apart = float(jnp.ptp(wanted.params.value["w"], axis=0).max())
        assert (apart > 1e-3) == ((number + 1) % 3 != 0)
    assert state.params.value["w"].shape == (2, 6, 4)
    assert jd.runtime.disagreement(state, mesh, axis=AXES) == ()
    assert_close(state, simulated[-1])


def test_clusters_are_workers_with_larger_batches(simulated):
    """The same run with one worker for each cluster, whose gradient is that of the whole cluster's batch."""
    single = jd.local_steps(optax.adamw(0.05), NESTEROV, sync_period=3, axis="outer")

    def step(state, data):
        _, gradient = jd.local_value_and_grad(loss, axis="outer")(state.params, data)
        updates, opt = single.update(gradient, state.opt, state.params)
        return state._replace(params=optax.apply_updates(state.params, updates), opt=opt), {}

    two = jd.place(State(jd.PerWorker(params()), single.init(params()), None), {"outer": 2}, axis="outer")
    run = jd.simulate(step, {"outer": 2})
    for number in range(4):
        two, _ = run(two, batch(seed=number))
    assert_close(jd.local_sgd.global_params(two.opt), jd.local_sgd.global_params(simulated[3].opt))
    assert_close(two.params.value, simulated[3].params.value, 2e-5)


def test_a_drift_cut_among_the_devices_of_a_cluster_is_the_same(simulated):
    """`hierarchical` over both axes: every device sends a part, and the result is that of sending all of it."""
    reducer = jd.hierarchical(inner=jd.exact(), outer=jd.exact())
    cut = jd.local_steps(INNER, NESTEROV, sync_period=3, axis=AXES, reducer=reducer)
    run, state = jd.simulate(make(cut), SIZES), fresh(cut, SIZES, AXES)
    for number in range(6):
        state, _ = run(state, batch(seed=number))
    assert_close(jd.local_sgd.global_params(state.opt), jd.local_sgd.global_params(simulated[5].opt))
    for leaf in jax.tree.leaves(state.params.value):
        np.testing.assert_array_equal(leaf[0::2], leaf[1::2])  # the devices of a cluster


def crosses(op):
    """Whether a collective connects devices of different clusters: 0 and 1 are one cluster, 2 and 3 the other."""
    return any(len({position // SIZES["inner"] for position in group}) > 1 for group in op.replica_groups)


def test_between_rounds_no_byte_leaves_a_cluster(compiled):
    """Read from the compiled program: the groups of every collective in the branch that does not meet."""
    _, run = compiled
    quiet, meeting = (analysis.collectives(run, branch=branch).ops for branch in ("min", "max"))
    assert quiet
    assert not any(crosses(op) for op in quiet)
    assert sum(op.wire_bytes for op in quiet) == 4 * ENTRIES + 4  # the gradient and the loss, in a cluster of two
    slow = [op for op in meeting if crosses(op)]
    assert sum(op.wire_bytes for op in slow) == 4 * ENTRIES  # the drift, once in a round
    assert {op.replica_groups for op in slow} == {((0, 2), (1, 3))}
    assert np.sum([op.wire_bytes for op in meeting if not crosses(op)]) == 4 * ENTRIES + 4
