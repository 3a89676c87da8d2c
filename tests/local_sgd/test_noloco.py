"""NoLoCo: pairs, their equation, what stays, what is sent."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import problems
import pytest
from local_run import targets, to_target
from reference.noloco import noloco as reference

import jaxdist as jd
from jaxdist.local_sgd import noloco
from jaxdist.local_sgd.noloco import tournament


def run(tx, drawn, start=None, **extras):
    """Parameters `[steps, W, n]` and the last state `[W, ...]`; extras are `[steps, W]`."""

    def worker(drawn, start, extras):
        def step(state, inputs):
            params, opt_state = state
            updates, opt_state = tx.update(to_target(params, inputs[0]), opt_state, params, **inputs[1])
            params = optax.apply_updates(params, updates)
            return (params, opt_state), params

        state, params = jax.lax.scan(step, (start, tx.init(start)), (drawn, extras))
        return params, state[1]

    starts = np.zeros(drawn.shape[1:], np.float32) if start is None else start
    mapped = jax.jit(jax.vmap(worker, in_axes=(1, 0, 1), out_axes=(1, 0), axis_name="data"))
    params, state = mapped(*jax.tree.map(jnp.asarray, (drawn, starts, extras)))
    return np.asarray(params), state


def drawn_pairs(workers, rounds, seed=0):
    """What all workers draw for themselves."""
    table = np.array([[partner for _, partner in one] for one in tournament(workers)])
    keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(seed)))(jnp.arange(rounds))
    return table[np.asarray(jax.vmap(lambda key: jax.random.randint(key, (), 0, len(table)))(keys))]


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8, 13])
def test_in_a_tournament_everybody_meets_everybody_once(workers):
    rounds = tournament(workers)
    assert len(rounds) == max(workers - 1 + workers % 2, 1)
    met = set()
    for pairs in rounds:
        partner = dict(pairs)
        assert all(partner[partner[i]] == i for i in range(workers))
        assert sum(partner[i] == i for i in range(workers)) == workers % 2
        met |= {frozenset(pair) for pair in pairs if pair[0] != pair[1]}
    assert len(met) == workers * (workers - 1) // 2


def test_narrow_steps_do_not_round_a_round():
    """A worker ends a round at its slow model, whatever the dtype of the inner optimizer's steps."""
    narrow = optax.stateless(lambda updates, _: optax.tree.cast(updates, jnp.bfloat16))
    tx = noloco(optax.chain(optax.sgd(0.1), narrow), sync_period=2)
    params, state = run(tx, targets(4))
    np.testing.assert_allclose(params[-1], state.slow.value, atol=1e-6)


@pytest.mark.sampled(13)
@pytest.mark.parametrize(("workers", "pull"), [(4, None), (5, 0.3)])
def test_twenty_rounds_equal_the_paper(workers, pull):
    """One array is sent in place of two, and the numbers are those of two."""
    drawn = targets(100, workers)
    tx = noloco(optax.sgd(0.1), sync_period=5, momentum=0.5, pull=pull)
    found, state = run(tx, drawn)
    pairs = drawn_pairs(workers, 20)
    assert len({tuple(one) for one in pairs.tolist()}) > 2  # the draws differ
    gamma = 0.7 if pull is None else pull
    expected = reference(drawn, pairs, rate=0.1, period=5, beta=0.7, gamma=gamma, mu=0.5)
    np.testing.assert_allclose(found, expected, rtol=0, atol=3e-6)
    # The bytes of one model a round, on average over workers: with an odd number one of them rests.
    model = 4 * 6 * (1 - (workers % 2) / workers)
    assert np.asarray(state.sent)[0].tolist() == [0, pytest.approx(20 * model, abs=20)]


def test_the_mean_is_that_of_heavy_ball():
    """Whatever the pairs: mean(φ) follows `m = μ m + β mean(θ - φ)`, which on quadratics is DiLoCo's own."""
    drawn = targets(60)
    found, _ = run(noloco(optax.sgd(0.1), sync_period=5), drawn)
    tx = jd.local_steps(optax.sgd(0.1), optax.sgd(0.7, momentum=0.5), sync_period=5)
    expected, _ = run(tx, drawn)
    np.testing.assert_allclose(found.mean(1), expected.mean(1), atol=2e-6)
    assert np.abs(found - expected)[4::5].max() > 0.01  # but workers do not agree


def test_two_workers_average_exactly():
    drawn = targets(20, 2)
    pairs, _ = run(noloco(optax.sgd(0.1), sync_period=4, learning_rate=1.0, momentum=0.0), drawn)
    average, _ = run(jd.local_steps(optax.sgd(0.1), optax.sgd(1.0), sync_period=4), drawn)
    np.testing.assert_allclose(pairs, average, atol=1e-6)


def test_workers_that_have_stopped_come_together():
    """Over 400 draws of pairs a deviation of 0.9 falls to 0.25, 0.08, 0.009 in 5, 10, 20 rounds; the mean stays."""
    start = np.random.default_rng(0).standard_normal((8, 200)).astype(np.float32)
    found, _ = run(noloco(optax.sgd(0.0), sync_period=1), np.zeros((20, 8, 200), np.float32), start)
    np.testing.assert_allclose(found.mean(1), np.broadcast_to(start.mean(0), (20, 200)), atol=1e-6)
    spread = [x.std(0).mean() for x in (start, found[4], found[9], found[19])]
    # What 95 % of all draws stay below.
    assert spread[0] > 0.8
    assert spread[1] < 0.37
    assert spread[2] < 0.15
    assert spread[3] < 0.021


def test_who_is_not_active_takes_no_step():
    drawn = targets(6, 2)
    active = np.ones((6, 2), bool)
    active[2:4, 1] = False
    found, _ = run(noloco(optax.sgd(0.1), sync_period=6), drawn, active=active)
    np.testing.assert_array_equal(found[1, 1], found[3, 1])
    assert (found[1, 0] != found[3, 0]).any()


@pytest.fixture(scope="module")
def ran():
    """Four workers on a mesh and in simulation: three rounds of two steps, and the compiled step."""
    tx = noloco(optax.adam(0.05), sync_period=2)

    def state_of(place):
        return jd.init_state(
            lambda: problems.TrainState(jd.PerWorker(problems.params()), tx.init(problems.params())), place
        )

    mesh = jd.make_mesh({"data": 4})
    step = jd.distribute(problems.make_step(tx), mesh, donate=False)
    on_mesh, simulated, simulate = state_of(mesh), state_of(4), jd.simulate(problems.make_step(tx), 4)
    compiled = step.lower(on_mesh, problems.batch()).compile()
    for i in range(6):
        on_mesh, _ = compiled(on_mesh, problems.batch(seed=i))
        simulated, _ = simulate(simulated, problems.batch(seed=i))
    return on_mesh, simulated, compiled


@pytest.mark.slow
def test_simulation_equals_the_mesh(ran):
    on_mesh, simulated, _ = ran
    problems.assert_close(on_mesh, simulated, 2e-5)
    assert int(jd.transforms.stats(on_mesh.opt)["rounds"]) == 3
    assert float(jd.transforms.stats(on_mesh.opt)["bytes"]) == 3 * 4 * 28
    assert jd.consensus(on_mesh).params["w"].shape == (6, 4)


def test_only_pairs_talk_and_only_at_the_end_of_a_round(ran):
    """One message of the whole model in each of the three permutations, all of them inside the condition."""
    *_, compiled = ran
    worst, least = (
        # The loss, a metric of this test, is averaged.
        [(op.kind, op.dtype, op.bytes) for op in jd.analysis.collectives(compiled, branch=branch).ops if op.bytes > 8]
        for branch in ("all", "min")
    )
    assert worst == [("collective-permute", "float32", 4 * 28)] * 3
    assert least == []


def test_what_cannot_work_says_so():
    tx = noloco(optax.sgd(0.1), sync_period=2, axis=None)
    params = jnp.zeros(2)
    with pytest.raises(ValueError, match="cannot weigh workers by examples"):
        tx.update(params, tx.init(params), params, examples=3)
    with pytest.raises(ValueError, match="params"):
        tx.update(params, tx.init(params))
    with pytest.raises(ValueError, match="learning_rate must be positive"):
        noloco(optax.sgd(0.1), sync_period=2, learning_rate=0.0)
    with pytest.raises(ValueError, match="sync_period must be at least 1"):
        noloco(optax.sgd(0.1), sync_period=0)
