"""Hop: how far workers lead each other, whom they wait for, and what they average."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference.hop import hop as transcribed

from jaxdist import topology
from jaxdist.asynchronous import durations, links, replay, rules
from jaxdist.asynchronous.rules.peers.hop import model_weights

SGD = optax.sgd(0.1)
RNG = np.random.default_rng(0)
GOALS = RNG.standard_normal((8, 3)).astype(np.float32)
TASK = replay.Task(
    np.zeros(3, np.float32), lambda x, goal: 0.5 * jnp.sum((x - goal) ** 2), lambda seed, i, k: GOALS[i] * (1 + k % 3)
)
SLOW = durations.constant([6.0] + [1.0] * 7)
NOISY = durations.random_slow(durations.exponential(1.0), factor=6, probability=1 / 8)
HOPS = np.minimum(np.arange(8), 8 - np.arange(8))
DISTANCE = HOPS[(np.arange(8)[:, None] - np.arange(8)) % 8]


def leads(run, workers=8):
    """The most iterations that each worker was ever ahead of each other, by rows."""
    done, most = np.zeros(workers, int), np.zeros((workers, workers), int)
    for tick in np.split(np.arange(len(run.trace.gradients)), np.flatnonzero(np.diff(run.trace.gradients.tick)) + 1):
        for row in run.trace.gradients[tick]:
            done[row.worker] = row.version + 1
        most = np.maximum(most, done[:, None] - done)
    return most


def per_worker(run, workers=8):
    return np.bincount(run.trace.gradients.worker, minlength=workers)


def hop(law, seconds=300, seed=0, graph=topology.ring, **options):
    rule = rules.hop(graph, SGD, **options)
    return replay.run(rule, durations=law, workers=8, seconds=seconds, seed=seed, record_events=False)


def test_the_gap_to_a_slow_worker_is_the_distance():
    run = hop(SLOW)
    assert leads(run)[:, 0].tolist() == [0, 1, 2, 3, 4, 3, 2, 1]
    assert per_worker(run).tolist() == [50, 51, 52, 53, 54, 53, 52, 51]
    assert replay.delays(run.trace).max() == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(3))
def test_nobody_leads_by_more_than_the_rule_says(seed):
    assert (leads(hop(NOISY, seed=seed)) <= DISTANCE).all()
    for staleness in (1, 3):
        most = leads(hop(NOISY, seed=seed, staleness=staleness))
        assert (most <= (staleness + 1) * DISTANCE).all()
        assert (most > DISTANCE).any()
    for tokens in (1, 4):
        most = leads(hop(NOISY, seed=seed, tokens=tokens, backup=1))
        assert (most <= tokens * DISTANCE).all()
    assert (most > DISTANCE).any()


def test_both_tokens_and_models_bound_a_lead_where_arcs_have_one_direction():
    def one_way(workers):
        return topology.ring(workers, directed=True)

    ahead = (np.arange(8) - np.arange(8)[:, None]) % 8  # arcs from the row to the column
    free, held = (leads(hop(NOISY, graph=one_way, **options)) for options in ({}, {"tokens": 2}))
    assert (free <= ahead.T).all()
    assert free.max() > 4
    assert (held <= np.minimum(ahead.T, 2 * ahead)).all()


def test_backup_workers_do_not_wait_while_there_are_tokens():
    """A slow worker is waited for when the tokens are used up: what remedies that is skipping."""
    run = hop(SLOW, seconds=40, tokens=40, backup=1)
    assert per_worker(run).tolist() == [6, *[40] * 7]
    assert per_worker(hop(SLOW, seconds=40)).max() == 10
    assert leads(hop(SLOW, seconds=240, tokens=5, backup=1))[:, 0].tolist() == [0, 5, 10, 15, 16, 15, 10, 5]
    plain, spare = (len(hop(NOISY, **options).trace.steps) for options in ({}, {"tokens": 10, "backup": 1}))
    assert spare > 1.5 * plain


@pytest.mark.parametrize("wait", [{"backup": 1}, {"staleness": 6}])
def test_a_slow_worker_jumps_and_the_others_go_at_full_speed(wait):
    run = hop(SLOW, seconds=300, tokens=8, skip=8, **wait)
    assert per_worker(run)[0] == 50
    assert (per_worker(run)[1:] >= 297).all()
    rows = run.trace.gradients
    own = rows.worker == 0
    assert set((rows.version - rows.read)[own][2:].tolist()) <= {4, 5, 6}  # it enters the iteration of the others
    assert rows.version[own][-1] > 290


def test_skipping_takes_the_neighbors_model_and_adds_the_gradient():
    rule = rules.hop(topology.ring, SGD, tokens=9, backup=1, skip=9)
    clock = replay.simulator(rule, TASK, workers=3, durations=durations.constant([5.5, 1, 1]))
    before = clock.advance(clock.init(), seconds=4.5)  # the others are at iteration 4
    after = clock.advance(before, seconds=5.5)
    assert [role.iteration for role in before.roles[:3]] == [0, 4, 4]
    assert [role.iteration for role in after.roles[:3]] == [5, 5, 5]
    expected = (before.roles[1].params + before.roles[2].params) / 2 + 0.1 * GOALS[0]
    np.testing.assert_allclose(after.roles[0].params, expected, rtol=1e-6)


def test_weights_sum_to_one_and_fall_linearly():
    weights = tuple(topology.matrix(topology.star(4))[0].tolist())
    for found in ([], [(1, 7, None)], [(0, 7, None), (2, 5, None)], [(0, 5, None), (1, 7, None), (2, 9, None)]):
        for staleness in (0, 2):
            assert model_weights(weights, found, 7, staleness).sum() == pytest.approx(1, abs=1e-6)
    np.testing.assert_allclose(
        model_weights((0.25, 0.25, 0.25, 0.25), [(0, 5, None), (1, 6, None), (2, 7, None)], 7, 2),
        np.array([3, 1, 2, 3]) / 9,
    )
    still = TASK._replace(params=np.ones(3, np.float32), loss=lambda x, goal: 0 * x.sum())
    rule = rules.hop(topology.ring, SGD, tokens=3, backup=1, staleness=1, skip=3)
    run = replay.run(rule, still, workers=4, durations=NOISY, seconds=30)
    np.testing.assert_allclose(run.params, 1, rtol=1e-5)


def test_without_extras_it_is_d_psgd_whatever_the_speeds():
    graph = topology.ring(5)
    models = transcribed(topology.matrix(graph), lambda x, i, k: x - GOALS[i] * (1 + k % 3), np.zeros((5, 3)), 40, 0.1)
    for options in ({}, {"tokens": 1}):
        clock = replay.simulator(rules.hop(graph, SGD, **options), TASK, workers=5, durations=NOISY, seed=3)
        state = clock.advance(clock.init(), gradients=100)
        reached = [role.iteration for role in state.roles[:5]]
        assert max(reached) > min(reached) >= 18
        for worker, k in enumerate(reached):
            np.testing.assert_allclose(state.roles[worker].params, models[k, worker], rtol=2e-4, atol=1e-6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tokens": 2},
        {"tokens": 4, "backup": 1},
        {"tokens": 4, "backup": 1, "skip": 8},
        {"staleness": 2},
        {"tokens": 3, "staleness": 2, "skip": 3},
        {"tokens": 3, "staleness": 1, "backup": 1, "skip": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("graph", [topology.ring, topology.exponential])
def test_failures_stop_nobody_for_good(options, graph):
    law = durations.failures(durations.exponential(1.0), up=12, down=4)
    for seed in range(1):
        rule = rules.hop(graph, SGD, **options)
        settings = {"workers": 6, "links": links.alpha_beta(0.05, 20.0), "seed": seed, "record_events": False}
        clock = replay.simulator(rule, durations=law, **settings)
        state = clock.init()
        for until in (100, 200, 300):
            before = [role.iteration for role in state.roles[:6]] if until > 100 else [0] * 6
            state = clock.advance(state, seconds=until)
            assert all(role.iteration >= k + 5 for role, k in zip(state.roles, before))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, "tokens must be at least 1, got 0"),
        ({"backup": -1}, "backup must be at least 0, got -1"),
        ({"staleness": -1}, "staleness must be at least 0, got -1"),
        ({"backup": 1}, "backup=1 needs token queues.*set tokens="),
        ({"skip": 1, "tokens": 2, "backup": 1}, "skip must be at least 2 iterations, or 0 for no skipping, got 1"),
        ({"skip": 2, "staleness": 1}, "skip=2 needs token queues.*set tokens="),
        ({"skip": 2, "tokens": 3}, "skip=2 needs neighbors that may be ahead.*set backup= or staleness="),
        ({"backup": 2, "tokens": 3}, "backup must be less than the 2 neighbors of worker 0, got 2"),
        ({"graph": topology.ring(4)}, "the ring has 4 workers, but the run has 8"),
        ({"graph": topology.random_matchings}, "changes from step to step.*needs a static topology"),
        ({"graph": topology.digraph(8, [(k, (k + 1) % 8) for k in range(8)] + [(0, 2)])}, "rows .* must sum to 1"),
    ],
)
def test_what_cannot_work_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        hop(SLOW, **options)
