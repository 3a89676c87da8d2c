"""Loss-biased sampling and rounds of H_i steps, against Biased Local SGD in float64."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference.unequal_speeds import biased_local_sgd, loss_table

import jaxdist as jd
from jaxdist.asynchronous import durations, links, replay, rules
from jaxdist.local_sgd import loss_biased_sampling
from jaxdist.schedule import proportional_steps

EXAMPLES, POOL, BATCH, WORKERS, PERIODS = 30, 6, 3, 4, (4, 4, 2, 1)
GOALS = np.random.default_rng(0).normal(size=(EXAMPLES, 5)).astype(np.float32) * np.linspace(0.1, 3, EXAMPLES)[:, None]
SAMPLING = loss_biased_sampling(EXAMPLES, pool=POOL)
TX = jd.local_sgd.local_sgd(optax.sgd(0.1), sync_period=max(PERIODS))


class State(NamedTuple):
    params: Any
    opt: Any
    table: Any
    count: Any


def train_step(state, key):
    worker = jax.lax.axis_index("data")
    active = state.count % max(PERIODS) < jnp.array(PERIODS)[worker]
    drawn = SAMPLING.draw(state.table, key[0], BATCH, worker >= 2)
    goals = jnp.asarray(GOALS, jnp.float32)[drawn]
    losses = jnp.sum((state.params[None] - goals) ** 2, axis=1) / 2
    updates, opt = TX.update(jnp.mean(state.params[None] - goals, 0), state.opt, state.params, active=active)
    table = SAMPLING.record(state.table, drawn, losses, state.count % max(PERIODS) == max(PERIODS) - 1, active)
    new = State(optax.apply_updates(state.params, updates), opt, table, state.count + 1)
    gather = jd.comm.over("data").all_gather
    return new, {"drawn": gather(drawn), "losses": gather(losses)}


def start():
    x = jnp.zeros(5)
    return State(jd.PerWorker(x), TX.init(x), SAMPLING.init(), jnp.zeros((), jnp.int32))


def keys(step):
    return jax.random.split(jax.random.key(step), WORKERS)


def test_a_table_may_be_donated():
    table = loss_biased_sampling(EXAMPLES, pool=POOL, axis=None).init()
    donated = jax.jit(lambda table: table, donate_argnums=0)(table)
    assert len(jax.tree.leaves(donated)) == 3


def test_training_with_the_table_equals_the_paper():
    run, state, rounds = jd.simulate(train_step, workers=WORKERS), jd.place(start(), WORKERS), 12
    drawn, losses, tables = [], [], []
    for step in range(rounds * max(PERIODS)):
        hardest = set(np.asarray(state.table.hardest).tolist())
        state, seen = run(state, keys(step))
        drawn.append(np.asarray(seen["drawn"]))
        losses.append(np.asarray(seen["losses"]))
        # Slow workers draw from the hardest examples only, fast ones from all.
        assert set(drawn[-1][2:].ravel().tolist()) <= hardest
        tables += [np.asarray(state.table.losses)] if (step + 1) % max(PERIODS) == 0 else []
        order = np.sort(np.asarray(state.table.losses))[::-1]
        np.testing.assert_array_equal(np.asarray(state.table.losses)[np.asarray(state.table.hardest)], order[:POOL])
    assert {int(k) for step in drawn for k in step[:2].ravel()} == set(range(EXAMPLES))
    # The model and the losses, from the examples drawn alone.
    jobs = [[r * max(PERIODS) + s for r in range(rounds) for s in range(period)] for period in PERIODS]
    goals = [[GOALS[drawn[step][worker]] for step in jobs[worker]] for worker in range(WORKERS)]
    anchors = biased_local_sgd(lambda worker, job: goals[worker][job].mean(0), PERIODS, rounds, 0.1)
    np.testing.assert_allclose(jd.local_sgd.global_params(state.opt), anchors[-1], atol=2e-6)
    records = [
        [
            (worker, drawn[r * max(PERIODS) + s][worker], losses[r * max(PERIODS) + s][worker])
            for worker in range(WORKERS)
            for s in range(PERIODS[worker])
        ]
        for r in range(rounds)
    ]
    np.testing.assert_allclose(tables, loss_table(EXAMPLES, records), rtol=1e-6)
    # Steps of workers that were not active left no trace: they drew examples too.
    everything = [
        [(w, drawn[r * 4 + s][w], losses[r * 4 + s][w]) for w in range(WORKERS) for s in range(4)]
        for r in range(rounds)
    ]
    assert np.abs(loss_table(EXAMPLES, everything)[-1] - tables[-1]).max() > 0.01


@pytest.mark.slow
def test_a_mesh_does_the_same_and_sends_the_table_once_a_round():
    mesh = jd.make_mesh({"data": WORKERS})
    step, simulated = jd.distribute(train_step, mesh), jd.simulate(train_step, workers=WORKERS)
    state, twin = jd.place(start(), mesh), jd.place(start(), WORKERS)
    for count in range(9):
        state, _ = step(state, keys(count))
        twin, _ = simulated(twin, keys(count))
    for x, y in zip(jax.tree.leaves(state.table), jax.tree.leaves(twin.table), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)
    compiled = step.lower(state, keys(0)).compile()
    counts = [
        sum(op.bytes for op in jd.analysis.collectives(compiled, branch=branch).ops if op.bytes == 4 * EXAMPLES)
        for branch in ("max", "min")
    ]
    assert counts == [4 * EXAMPLES, 0]


def test_the_clock_takes_the_same_steps():
    """`H_i` in proportion to speed: no worker waits, and the average is that of the transformation."""
    seconds = (1.0, 1.0, 2.0, 4.0)
    periods = proportional_steps([1 / tau for tau in seconds], max(PERIODS)).tolist()
    assert periods == list(PERIODS)
    drawn = np.random.default_rng(1).normal(size=(200, WORKERS, 5)).astype(np.float32)
    task = replay.Task(
        np.zeros(5, np.float32), lambda x, goal: jnp.sum((x - goal) ** 2) / 2, lambda seed, i, k: drawn[k, i]
    )
    rule = rules.local_sgd(optax.sgd(0.1), sync_period=periods)
    cluster = {"durations": durations.constant(seconds), "workers": WORKERS}
    run = replay.run(rule, task, steps=20, **cluster)
    assert run.seconds == 20 * 4
    np.testing.assert_allclose(run.computing, 1)
    expected = biased_local_sgd(lambda worker, job: drawn[job, worker], PERIODS, 20, 0.1)
    np.testing.assert_allclose(run.params, expected[-1], atol=2e-6)
    # A synchronous step waits for the slowest worker each time.
    equal = replay.run(rules.local_sgd(optax.sgd(0.1), sync_period=4), steps=20, links=links.instant(), **cluster)
    assert equal.seconds == 20 * 16


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: loss_biased_sampling(5, pool=6), "pool must be between 1 and the 5 examples, got 6"),
        (lambda: loss_biased_sampling(5, pool=0), "pool must be between 1 and the 5 examples, got 0"),
        (lambda: rules.local_sgd(optax.sgd(0.1), sync_period=[2, 0]), "sync_period must be at least 1, got 0"),
        (
            lambda: replay.run(rules.local_sgd(optax.sgd(0.1), sync_period=[2, 1]), workers=3, seconds=1),
            r"sync_period must be one number or 3, one a worker, got \(2, 1\)",
        ),
    ],
)
def test_what_cannot_work_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_an_exchange_that_only_some_workers_enter_is_refused():
    def step(state, key):
        table = SAMPLING.record(state, jnp.zeros(1, jnp.int32), jnp.zeros(1), jax.lax.axis_index("data") == 0)
        return table, {}

    mesh = jd.make_mesh({"data": WORKERS})
    with pytest.raises(ValueError, match="exchange must be equal on all workers"):
        jd.distribute(step, mesh)(jd.place(SAMPLING.init(), mesh), keys(0))
