"""Two levels: conditions of the outer reducer, and the marks of its state; the laws are in `test_laws.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist as jd

AXES = {"pod": 2, "chip": 2}
SIZE = 24
CONDITIONAL = {
    "alq": lambda: jd.reducers.alq(3),
    "intsgd": jd.reducers.intsgd,
    "reducer_schedule": lambda: jd.reducers.reducer_schedule(jd.exact(), jd.two_shot(jd.qsgd(4)), 1),
    "dgc": lambda: jd.reducers.dgc(0.1, warmup_densities=[0.5], warmup_steps=2),
    "with_regime": lambda: jd.reducers.with_regime(jd.exact(), epoch_steps=1, interval_steps=1),
    "accordion": lambda: jd.reducers.accordion(jd.exact(), jd.two_shot(jd.qsgd(8)), epoch_steps=1, interval_steps=1),
}


def in_pods(outer):
    return jd.hierarchical(inner=jd.exact(), outer=outer)


def step_of(tx):
    """A step whose first half of the vector is as large as `batch` says, and the second half stays as it is."""

    def step(state, batch):
        comm = jd.comm.over(tuple(AXES))
        x = jnp.sin(jnp.arange(float(SIZE)) + comm.index)
        x = jnp.where(jnp.arange(SIZE) < SIZE // 2, x * batch[0], x)
        updates, state = tx.update(comm.varying(x), state)
        return state, updates

    return step


def run_both(reducer, scales):
    """The means of all steps on a mesh and in simulation, and the last state on the mesh."""
    tx, axes = jd.all_reduce(reducer, axis=tuple(AXES)), tuple(AXES)
    mesh = jd.make_mesh(AXES)
    runs = [(jd.distribute(step_of(tx), mesh, axis=axes), mesh), (jd.simulate(step_of(tx), AXES, axis=axes), AXES)]
    means, states = [], []
    for run, place in runs:
        state, found = jd.place(tx.init(jnp.zeros(SIZE)), place), []
        for factor in scales:
            state, mean = run(state, jnp.full(4, factor))
            found.append(np.asarray(mean))
        means.append(found)
        states.append(state)
    return *means, states[0]


@pytest.mark.slow
@pytest.mark.parametrize("make", CONDITIONAL.values(), ids=CONDITIONAL)
def test_conditions_of_the_outer_reducer(make):
    """A count is equal on all workers, though the state of each chip has a copy of its own."""
    mesh, simulated, _ = run_both(in_pods(make()), [1.0, 2.0, 2.0])
    for found, expected in zip(mesh, simulated, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_chips_of_a_pod_may_decide_differently():
    """The norm of the first chip's shard changes in each step, and that of the second does not."""
    reducer = jd.reducers.with_stats(in_pods(CONDITIONAL["accordion"]()))
    mesh, simulated, state = run_both(reducer, [1.0, 3.0, 1.0, 3.0])
    np.testing.assert_allclose(mesh, simulated, atol=1e-6)
    verdicts = next(x for x in jax.tree.leaves(state) if x.dtype == jnp.bool_)
    assert verdicts.tolist() == [True, False]
    # Between pods 48 bytes by exact(), in two steps 24 by one chip's two_shot, whose mean with the other is 36, and 4
    # for the verdict; in a pod a reduce-scatter, two gathers of 48, and 4 for each of two conditions.
    assert jd.transforms.stats(state)["bytes"] == 2 * 48 + 2 * 36 + 4 * (4 + 3 * 48 + 2 * 4)


@pytest.mark.parametrize(
    "outer",
    [
        jd.reducers.loco(jd.two_shot(jd.qsgd(4))),
        jd.reducers.partitioned(jd.exact(), partition_bytes=32),
        jd.reducers.partitioned(jd.two_shot(jd.qsgd(8)), partition_bytes=32),
    ],
    ids=repr,
)
def test_state_that_no_chip_has_a_part_of_is_refused(outer):
    tx = jd.all_reduce(in_pods(outer), axis=tuple(AXES))
    with pytest.raises(ValueError, match=r"cannot shard what outer=(loco|partitioned)\(.*in place of loco"):
        tx.init(jnp.zeros(SIZE))


def test_a_server_residual_of_several_dtypes_is_refused():
    """It is one vector of them all, of which the chips' parts are no parts."""
    tx = jd.all_reduce(in_pods(jd.error_feedback(jd.two_shot(jd.compressors.scaled_sign()))), axis=tuple(AXES))
    tx.init({"w": jnp.zeros(SIZE), "b": jnp.zeros(SIZE)})
    with pytest.raises(ValueError, match="cast gradients to one dtype"):
        tx.init({"w": jnp.zeros(SIZE), "b": jnp.zeros(SIZE, jnp.bfloat16)})


@pytest.mark.parametrize("size", [1, 2, 3])
def test_only_what_follows_the_length_is_sharded(size):
    """Two words of bytes are no vector, even if there are two parameters."""
    reducer = in_pods(jd.error_feedback(jd.reducers.with_stats(jd.exact())))
    state = jax.eval_shape(reducer.init, jnp.zeros(size))
    assert isinstance(state.reducer.bytes, jd.PerWorker)
    assert [type(x) for x in state.residual.value] == [jd.Sharded]
