"""One reducer before a step, another one after it; laws and bytes are in `test_laws.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from register import CODES
from register_run import ran
from workers import trajectory

import jaxdist as jd
from jaxdist.reducers import Law


def rows(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.slow
def test_first_one_then_the_other():
    updates, code = rows(4, 3, 20), jd.compressed(jd.top_k(0.2))
    means, owns, states = trajectory(jd.reducers.reducer_schedule(jd.exact(), code, 2), updates)
    np.testing.assert_array_equal(means[:2], trajectory(jd.exact(), updates)[0][:2])
    later = trajectory(code, updates[2:])
    np.testing.assert_array_equal(means[2:], later[0])
    np.testing.assert_array_equal(owns, np.concatenate([updates[:2], later[1]]))
    assert np.asarray(states.count)[:, 0].tolist() == [1, 2, 3, 4]
    assert np.asarray(states.then.count)[:, 0].tolist() == [0, 0, 1, 2]


def test_power_sgd_that_starts_later_is_such_a_switch():
    updates = rows(4, 3, 12, 8)
    switched = jd.error_feedback(jd.reducers.reducer_schedule(jd.exact(), jd.power_sgd(2), 2))
    means = trajectory(switched, updates)[0]
    np.testing.assert_array_equal(means, trajectory(jd.error_feedback(jd.power_sgd(2, start_step=2)), updates)[0])


@pytest.mark.slow
def test_each_step_sends_what_its_own_reducer_sends(mesh):
    both = ran("reducer_schedule").collectives
    assert [(op.kind, op.dtype) for op in both.ops] == [("all-reduce", "float32")]
    _, _, states = trajectory(
        jd.reducers.with_stats(jd.reducers.reducer_schedule(jd.exact(), jd.compressed(jd.top_k(0.1)), 1)),
        rows(2, 4, 100),
    )
    words = np.asarray(states.bytes)[:, 0].astype(np.float64) @ [2.0**32, 1]
    assert words.tolist() == [1.5 * 400, 1.5 * 400 + 3 * CODES["top_k"].bytes(100)]


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True])
def test_a_count_around_another_counts_the_branch_that_ran(inside):
    """`with_stats` around `with_stats`, and around branches that have it; statistics count each byte once."""
    stats = jd.reducers.with_stats
    within = stats if inside else lambda reducer: reducer
    switch = jd.reducers.reducer_schedule(within(jd.exact()), within(jd.compressed(jd.top_k(0.1))), 1)
    _, _, states = trajectory(stats(switch if inside else stats(switch)), rows(2, 4, 100))
    words = np.asarray(states.bytes)[:, 0].astype(np.float64) @ [2.0**32, 1]
    first, then = 1.5 * 400, 3 * CODES["top_k"].bytes(100)
    assert words.tolist() == [first, first + then]
    last = jax.tree.map(lambda x: x[-1], states)
    assert float(jd.transforms.stats(last)["bytes"]) == first + then
    if inside:
        parts = [np.asarray(part.bytes)[0] @ [2.0**32, 1] for part in (last.reducer.first, last.reducer.then)]
        assert parts == [first, then]


@pytest.mark.slow
def test_a_round_counts_the_branch_that_ran():
    """The count of `local_steps` around that of its reducer, and beside that of an inner optimizer's."""
    switch = jd.reducers.reducer_schedule(jd.exact(), jd.compressed(jd.top_k(0.1)), 1)
    inner = optax.chain(jd.all_reduce(jd.reducers.with_stats(jd.exact()), axis="chip"), optax.sgd(0.1))
    tx = jd.local_steps(inner, optax.sgd(1.0), sync_period=1, reducer=jd.reducers.with_stats(switch), axis="pod")

    def worker(x):
        state = tx.init(x)
        for _ in range(2):
            updates, state = tx.update(x, state, x)
            x = x + updates
        return jd.transforms.stats(state)["bytes"]

    found = jax.jit(jax.vmap(jax.vmap(worker, axis_name="chip"), axis_name="pod"))(jnp.asarray(rows(4, 2, 100)))
    between_pods = 1.5 * 400 + 3 * CODES["top_k"].bytes(100)
    np.testing.assert_array_equal(found, between_pods + 2 * 400)


@pytest.mark.slow
def test_the_weaker_law_and_both_debts():
    sign, exact = jd.two_shot(jd.compressors.scaled_sign()), jd.exact()
    assert jd.reducers.reducer_schedule(exact, exact, 3).law == Law.EXACT
    assert jd.reducers.reducer_schedule(exact, sign, 3).law == Law.TELESCOPING
    assert jd.reducers.reducer_schedule(sign, jd.two_shot(jd.qsgd(4)), 3).law == Law.UNBIASED
    assert jd.reducers.reducer_schedule(jd.reducers.majority_vote(), exact, 3).law == Law.NONE
    updates = rows(5, 4, 32)
    means, owns, states = trajectory(jd.reducers.reducer_schedule(sign, jd.two_shot(jd.top_k(0.1)), 2), updates)
    debts = [np.asarray(part.residuals[0].value)[-1].ravel() for part in (states.first, states.then)]
    np.testing.assert_allclose(means.sum(0) + debts[0] + debts[1], owns.mean(1).sum(0), atol=1e-5)
    assert all(debt.any() for debt in debts)


def test_inside_feedback_both_are_contractions():
    unbiased = jd.compressed(jd.compressors.random_k(0.1, unbiased=True))
    reducer = jd.error_feedback(jd.reducers.reducer_schedule(jd.exact(), unbiased, 1))
    x = jnp.ones(20)
    state = reducer.init(x)
    for _ in range(2):
        reduced, state = reducer.reduce(x, state, jd.comm.alone())
    assert np.unique(np.asarray(reduced.mean)).tolist() == [0, 1]  # not 10
    with pytest.raises(ValueError, match="needs to know what each worker contributed"):
        jd.error_feedback(jd.reducers.reducer_schedule(jd.reducers.majority_vote(), jd.exact(), 1))


def test_the_step_is_checked():
    with pytest.raises(ValueError, match="step must be at least 0, got -1"):
        jd.reducers.reducer_schedule(jd.exact(), jd.exact(), -1)
    with pytest.raises(ValueError, match=r"step must be less than 2\*\*31, got 2147483648"):
        jd.reducers.reducer_schedule(jd.exact(), jd.exact(), 2**31)
    x = jnp.arange(4.0)
    never = jd.reducers.reducer_schedule(jd.compressed(jd.top_k(0.25)), jd.exact(), 0)
    np.testing.assert_array_equal(jax.jit(lambda x: never.reduce(x, never.init(x), jd.comm.alone())[0].mean)(x), x)
