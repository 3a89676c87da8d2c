"""Rules that hide or shrink the wait: against loops in float64, against `simulate`, and their times by hand."""

import itertools
from inspect import unwrap
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from local_run import run as simulated
from local_run import targets
from reference.unequal_speeds import ata as reference_ata

import jaxdist as jd
from jaxdist.asynchronous import durations, links, replay, rules
from jaxdist.schedule import allocate_tasks

SGD = optax.sgd(0.1)
STEPS, WORKERS = 20, 4
DRAWN = targets(2 * STEPS)


def loss(x, goal):
    return 0.5 * jnp.sum((x - goal) ** 2)


TASK = replay.Task(np.zeros(6, np.float32), loss, lambda seed, worker, job: DRAWN[job % len(DRAWN), worker])
UNEVEN: dict[str, Any] = {"durations": durations.exponential(1.0), "workers": WORKERS, "seed": 3}
EVEN: dict[str, Any] = {"durations": durations.constant(1.0), "workers": WORKERS}


def taus(*seconds) -> dict[str, Any]:
    return {"durations": durations.constant(seconds), "workers": len(seconds)}


def same_runs(left, right):
    for a, b in zip(left.trace[:3], right.trace[:3]):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(left.params, right.params)


# Pipe-SGD.


def test_pipe_sgd_of_width_one_is_bsp():
    settings = dict(UNEVEN, links=links.alpha_beta(0.05, 100.0))
    adam = optax.adam(0.05)
    one, bsp = (
        replay.run(rule, TASK, steps=12, **settings) for rule in (rules.pipe_sgd(adam, width=1), rules.bsp(adam))
    )
    same_runs(one, bsp)


@pytest.mark.parametrize("width", [2, 3])
def test_pipe_sgd_is_sgd_with_old_means(width):
    """x_{t+1} = x_t - γ ḡ_{t-(W-1)}, in float64, however uneven the workers."""
    models, means = [np.zeros(6)], []
    for t in range(STEPS + width - 1):
        means.append((models[t] - DRAWN[t]).mean(0))
        models.append(models[-1] - 0.1 * means[t - (width - 1)] if t >= width - 1 else models[-1])
    clock = replay.simulator(rules.pipe_sgd(SGD, width=width), TASK, links=links.alpha_beta(0.1), **UNEVEN)
    state = clock.advance(clock.init(), steps=STEPS)
    run = clock.result(state)
    np.testing.assert_allclose(state.roles[0].params, models[-1], atol=1e-5)
    assert replay.delays(run.trace).max() == replay.step_delays(run.trace).max() == width - 1
    assert (np.diff(run.trace.steps.version) == 1).all()


@pytest.mark.parametrize(("compute", "latency"), [(1.0, 0.05), (1.0, 0.25), (0.4, 0.25)])
def test_pipe_sgd_takes_the_longer_of_computation_and_communication(compute, latency):
    settings = dict(EVEN, durations=durations.constant(compute), links=links.alpha_beta(latency))
    run = replay.run(rules.pipe_sgd(SGD), steps=STEPS, **settings)
    reduction = 6 * latency
    assert set(np.diff(run.trace.steps.tick).tolist()) == {round(max(compute, reduction) * 1e9)}
    bsp = replay.run(rules.bsp(SGD), steps=STEPS, **settings)
    assert set(np.diff(bsp.trace.steps.tick).tolist()) == {round((compute + reduction) * 1e9)}


# Local steps.


def local_loop(period, delay, rounds, rate=0.1):
    """Local SGD whose averages of the snapshots are taken over `delay` steps later, in float64: all models, by step."""
    x, sent, out = np.zeros((WORKERS, 6)), np.zeros((WORKERS, 6)), []
    for step in range(rounds * period + delay):
        x = x - rate * (x - DRAWN[step])
        since = (step + 1) % period
        if step >= period and since == delay and delay:
            x = sent.mean(0) + (x - sent)
        if since == 0:
            sent = x
            if not delay:
                x = np.broadcast_to(x.mean(0), x.shape)
        out.append(x)
    return np.stack(out), sent.mean(0)


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_dasgd_keeps_the_steps_taken_meanwhile(delay):
    models, mean = local_loop(4, delay, 5)
    clock = replay.simulator(rules.dasgd(SGD, sync_period=4, delay=delay), TASK, links=links.alpha_beta(0.2), **UNEVEN)
    state, seen = clock.advance(clock.init(), steps=5), 0
    np.testing.assert_allclose(clock.result(state).params, mean, atol=1e-5)
    for _ in range(20):  # each worker takes over after steps of its own
        for model, role in zip(models[-1], state.roles[:WORKERS]):
            if role.total == 20 + delay and role.version == 5:
                np.testing.assert_allclose(role.params, model, atol=1e-5)
                seen += 1
        state = clock.advance(state, gradients=len(state.gradients) // 5 + 1)
    assert seen >= WORKERS


@pytest.mark.parametrize(("period", "delay"), [(4, 0), (4, 2), (1, 0)])
def test_rounds_are_those_of_local_steps(period, delay):
    rounds = STEPS // period
    keep = {"delay": delay, "overlap_correction": True} if delay else {}
    inner = optax.adam(0.05)
    tx = jd.local_steps(inner, optax.sgd(1.0), sync_period=period, **keep)
    _, anchors, _ = simulated(tx, DRAWN[: rounds * period + delay])
    run = replay.run(rules.dasgd(inner, sync_period=period, delay=delay), TASK, steps=rounds, **UNEVEN)
    np.testing.assert_allclose(run.params, anchors[-1], atol=1e-6)


def test_palsgd_is_the_transformation_coins_included():
    args: dict[str, Any] = {"learning_rate": 0.1, "sync_period": 5, "probability": 0.3, "pull": 0.4}
    _, anchors, _ = simulated(jd.local_sgd.palsgd(SGD, **args, warmup_steps=0, seed=UNEVEN["seed"]), DRAWN[:STEPS])
    run = replay.run(rules.palsgd(SGD, **args), TASK, steps=STEPS // 5, **UNEVEN)
    np.testing.assert_allclose(run.params, anchors[-1], atol=1e-6)
    rule = rules.palsgd(SGD, **dict(args, learning_rate=lambda step: 0.1))
    np.testing.assert_array_equal(replay.run(rule, TASK, steps=STEPS // 5, **UNEVEN).params, run.params)
    diloco = rules.local_sgd(SGD, sync_period=5, outer=optax.sgd(0.7, momentum=0.9, nesterov=True))
    none = rules.palsgd(SGD, **dict(args, probability=0))
    same_runs(*(replay.run(rule, TASK, steps=4, **UNEVEN) for rule in (none, diloco)))


def test_where_messages_take_no_time_all_are_local_sgd():
    """Equal workers, infinite bandwidth: what is taken over at once is what local SGD has."""
    made = [
        rules.local_sgd(SGD, sync_period=3),
        rules.lasgd(SGD, sync_period=3),
        rules.dasgd(SGD, sync_period=3, delay=0),
    ]
    local, *others = (replay.run(rule, TASK, steps=6, **EVEN) for rule in made)
    for other in others:
        np.testing.assert_array_equal(local.params, other.params)
        for a, b in zip(local.trace[1:3], other.trace[1:3]):
            np.testing.assert_array_equal(a, b)


def test_lasgd_never_waits():
    """Two fast workers and one six times slower, over links of 2 s: all compute all the time."""
    settings = dict(taus(1, 1, 6), links=links.alpha_beta(0.5))
    run = replay.run(rules.lasgd(SGD), TASK, seconds=121, **settings)
    assert run.computing.min() > 0.999
    assert set(np.diff(run.trace.steps.tick) // 10**8) == {60}  # one average for each step of the slow worker
    assert replay.delays(run.trace).max() == 1  # begun before an average, applied after
    bsp = replay.run(rules.bsp(SGD), TASK, seconds=121, **settings)
    assert len(run.trace.gradients) > 4 * len(bsp.trace.gradients)


@pytest.mark.parametrize(("interval", "between"), [(0.0, 6), (5.0, 6), (10.0, 10), (25.0, 25)])
def test_lasgd_averages_by_the_clock(interval, between):
    """The slow worker takes six seconds a step, and its snapshot comes after that or the interval."""
    settings = dict(taus(1, 1, 6), links=links.alpha_beta(0.5))
    run = replay.run(rules.lasgd(SGD, interval=interval), TASK, seconds=181, **settings)
    assert run.computing.min() > 0.999
    assert set(np.diff(run.trace.steps.tick) // 10**9) == {between}


def test_lasgd_keeps_its_interval_through_failures():
    law = durations.failures(durations.constant(1.0), up=30, down=0.5)
    settings: dict[str, Any] = {"workers": 1, "seconds": 1000, "durations": law}
    run = replay.run(rules.lasgd(SGD, interval=10), **settings)
    assert np.diff(run.trace.steps.tick).min() >= 10 * 10**9
    # A failure winds the clock anew, which makes snapshots rarer, but does not stop them.
    assert len(run.trace.steps) > 60


def test_lasgd_adds_what_averaging_changes():
    """x <- x + mean(s) - s for one average that travels 2.5 steps: 2 whole steps are kept, and one is under way."""
    settings = dict(EVEN, links=links.alpha_beta(2.5 / 6))
    clock = replay.simulator(rules.lasgd(SGD), TASK, **settings)
    state = clock.advance(clock.init(), seconds=4.25)
    sent = -0.1 * -DRAWN[0].astype(np.float64)
    x = sent - 0.1 * (sent - DRAWN[1])
    x = x - 0.1 * (x - DRAWN[2])
    moved = x + sent.mean(0) - sent
    expected = moved - 0.1 * (x - DRAWN[3])  # the gradient is that of the model before
    np.testing.assert_allclose([role.params for role in state.roles[:WORKERS]], expected, atol=1e-6)


# Batches that fit the time.


def test_any_batch_takes_what_is_done():
    seconds, window = (0.3, 0.5, 1.1, 5.0), 2.2
    counts = [7, 4, 2, 0]
    settings = dict(taus(*seconds), links=links.alpha_beta(0.01))
    run = replay.run(rules.any_batch(window, SGD), TASK, steps=5, **settings)
    assert run.trace.steps.tick.tolist() == [round((window + 0.06) * 1e9) * (k + 1) for k in range(5)]
    assert np.bincount(run.trace.gradients.worker, minlength=4).tolist() == [5 * count for count in counts]
    x, first = np.zeros(6), np.zeros(4, int)
    for _ in range(5):
        drawn = [DRAWN[job, i] for i in range(4) for job in range(first[i], first[i] + counts[i])]
        x = x - 0.1 * (x - np.stack(drawn).astype(np.float64)).mean(0)
        first += np.array(counts) + 1  # what is thrown away has used its data
    np.testing.assert_allclose(run.params, x, atol=1e-5)


@pytest.mark.parametrize("feedback", [(), ("reduced",)])
@pytest.mark.parametrize(
    ("code", "size"),
    [
        (jd.compressors.natural(), 9),  # a payload of eight entries at least
        (jd.qsgd(4, norm="l2", code="elias"), None),  # of variable length
    ],
)
def test_any_batch_leaves_the_number_of_gradients_uncoded(code, size, feedback):
    """Five gradients of 0.8 in each window: their sum is a power of two, which all of these codes keep; 5 is none."""
    task = replay.Task(np.zeros(1, np.float32), lambda x, b: (0.8 * x).sum(), lambda *job: np.zeros(1, np.float32))
    rule = rules.compressed(rules.any_batch(5.5, optax.sgd(1.0)), {"reduced": code}, feedback=feedback)
    run = replay.run(rule, task, steps=40, durations=durations.constant(1.0), workers=2)
    assert float(-run.params[0]) == pytest.approx(40 * 0.8, rel=1e-2)
    if size is not None:
        # Of two members each sends its own once: the code of the sum, and four bytes for the number.
        assert run.sent.tolist()[:2] == [40 * (size + 4)] * 2


def test_any_batch_in_which_nobody_is_done_changes_nothing():
    run = replay.run(rules.any_batch(0.5, optax.adam(0.1)), TASK, steps=3, **EVEN)
    np.testing.assert_array_equal(run.params, 0)
    assert len(run.trace.gradients) == 0


@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize("batch", [4, 16, 37])
def test_shares_finish_as_soon_as_can_be(batch, least):
    """Against all ways to deal out, by threshold: the least time in which all are done."""
    for seconds in ((1.0, 1.0, 2.0, 4.0), (0.3, 1.7, 1.1, 9.0), (1.0,) * 4):
        dealt = allocate_tasks(seconds, batch, least=least)
        np.testing.assert_array_equal(allocate_tasks(np.asarray(seconds), batch, least=least), dealt)
        assert dealt.sum() == batch
        assert dealt.min() >= least
        times = sorted({count * tau for tau in seconds for count in range(1, batch + 1)})
        room = [t for t in times if all(t >= least * tau for tau in seconds)]
        soonest = next(t for t in room if sum(int(t / tau * (1 + 1e-12)) for tau in seconds) >= batch)
        assert (dealt * seconds).max() == pytest.approx(soonest)


def test_task_allocation_deals_out_by_speed():
    seconds = (1.0, 1.0, 2.0, 4.0)
    run = replay.run(rules.task_allocation(44, SGD), seconds=2000, **taus(*seconds))
    dealt = np.bincount(run.trace.gradients.worker[-44:], minlength=4)
    assert dealt.tolist() == [16, 16, 8, 4]  # 44 / (1 + 1 + 1/2 + 1/4) = 16 for a speed of 1
    ticks = np.diff(run.trace.steps.tick) / 1e9
    assert ticks[1:].tolist() == [16.0] * (len(ticks) - 1)
    even = 44  # 11 microbatches of the slowest
    assert ticks[-1] / even < 2 / 3


def test_task_allocation_follows_speeds_that_change():
    law = durations.power([0, 100], [[1.0, 0.25], [1.0, 1.0]])
    run = replay.run(rules.task_allocation(20, SGD), seconds=700, durations=law, workers=2)
    assert np.bincount(run.trace.gradients.worker[:20]).tolist() == [10, 10]
    assert np.bincount(run.trace.gradients.worker[-40:]).tolist() == [8, 32]


def test_task_allocation_is_minibatch_sgd():
    """With a microbatch each it is bsp; with more, the mean over all of them, in float64."""
    one, bsp = (replay.run(rule, TASK, steps=9, **EVEN) for rule in (rules.task_allocation(4, SGD), rules.bsp(SGD)))
    np.testing.assert_array_equal(one.params, bsp.params)
    np.testing.assert_array_equal(one.trace.steps, bsp.trace.steps)
    run = replay.run(rules.task_allocation(6, SGD), TASK, steps=STEPS, **taus(1, 1, 1, 3))
    x, first = np.zeros(6), np.zeros(4, int)
    for _ in range(STEPS):
        counts = np.array([2, 2, 1, 1])
        drawn = [DRAWN[job, i] for i in range(4) for job in range(first[i], first[i] + counts[i])]
        x, first = x - 0.1 * (x - np.stack(drawn).astype(np.float64)).mean(0), first + counts
    np.testing.assert_allclose(run.params, x, atol=1e-5)


def test_static_allocation_leaves_a_hopeless_worker_out():
    """Minibatch SGD with shares 3, 2, 1 and 0, in float64; the slow worker sends zeros and delays no round."""
    law, given = (1.0, 1.5, 3.0, 60.0), [1.0, 1.5, 3.0, 60.0]
    run = replay.run(rules.task_allocation(6, SGD, seconds=given), TASK, steps=STEPS, **taus(*law))
    assert run.seconds == pytest.approx(3.0 * STEPS)
    counts, x = np.array([3, 2, 1, 0]), np.zeros(6)
    for k in range(STEPS):
        drawn = [DRAWN[(k * counts[i] + job) % len(DRAWN), i] for i in range(4) for job in range(counts[i])]
        x = x - 0.1 * (x - np.stack(drawn).astype(np.float64)).mean(0)
    np.testing.assert_allclose(run.params, x, atol=1e-5)
    assert run.computing[3] == 0
    # Nothing is measured, so nothing but sums is sent: 24 bytes in a ring of four, 2 (n - 1)/n each.
    assert run.sent[:4].tolist() == [STEPS * 36] * 4


def test_ata_equals_the_paper():
    """Shares of every round from drawn durations: the bounds and the recursive selection, in float64."""
    law, workers, batch = durations.lognormal(1.0, 0.5), 4, 7
    scaled = law._replace(draw=lambda rng, w, first, count, state: _scale(law.draw(rng, w, first, count, state), w))
    settings = {"durations": scaled, "workers": workers, "seed": 5}
    run = replay.run(rules.ata(batch, SGD, confidence=0.3), steps=60, **settings)
    drawn = [list(itertools.islice(durations.stream(scaled, 5, i), 60 * batch)) for i in range(workers)]
    expected = reference_ata(drawn, batch, 60, 0.3)
    found = np.stack(
        [np.bincount(run.trace.gradients.worker[k * batch : (k + 1) * batch], minlength=4) for k in range(60)]
    )
    np.testing.assert_array_equal(found, expected)
    # The slowest of all, ten times slower, is tried ever more rarely; the fastest gets the largest share.
    assert found[:10, 3].sum() > found[-10:, 3].sum()
    assert found[-20:].sum(0).argmax() == 0
    assert found[:, 3].sum() < found[:, 0].sum() / 10


def _scale(result, worker):
    drawn, state = result
    return drawn * (1.0, 1.5, 3.0, 10.0)[worker], state


# What all have to stand.

MADE = {
    "pipe_sgd": rules.pipe_sgd(optax.adam(0.05), width=3),
    "lasgd": rules.lasgd(optax.adam(0.05)),
    "lasgd by the clock": rules.lasgd(optax.adam(0.05), interval=2.5),
    "palsgd": rules.palsgd(SGD, learning_rate=0.1, sync_period=2),
    "any_batch": rules.any_batch(2.0, SGD),
    "task_allocation": rules.task_allocation(6, SGD),
    "static": rules.task_allocation(6, SGD, seconds=[1.0, 1.0, 2.0, 30.0]),
    "ata": rules.ata(6, SGD, confidence=0.3),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MADE)
def test_a_run_goes_on_from_a_file_and_with_codes(name, tmp_path):
    rule = rules.compressed(MADE[name], {"reduced": jd.compressors.cast(jnp.float16)})
    law = durations.failures(durations.exponential(1.0), up=9, down=1)
    settings = dict(UNEVEN, durations=law, links=links.alpha_beta(0.05, 1e4))
    clock = replay.simulator(rule, TASK, **settings)
    half = clock.advance(clock.init(), seconds=8)
    replay.save(tmp_path / "run.npz", clock, half)
    whole, resumed = (clock.advance(one, seconds=20) for one in (half, replay.restore(tmp_path / "run.npz", clock)))
    same_runs(clock.result(whole), clock.result(resumed))
    found = clock.result(whole)
    assert len(found.trace.steps) >= 4
    assert "recovered" in found.trace.words


@pytest.mark.parametrize("name", [*MADE, "dasgd"])
def test_failures_stop_nobody_for_good(name):
    """Many seeds of workers that fail about once in three gradients."""
    rule = MADE[name] if name in MADE else rules.dasgd(SGD, sync_period=3, delay=2)
    law = durations.failures(durations.exponential(1.0), up=3, down=1)
    for seed in range(6):
        settings = dict(UNEVEN, durations=law, links=links.alpha_beta(0.1), seed=seed)
        run = replay.run(rule, seconds=120, **settings)
        assert len(run.trace.steps) > 5
        assert run.trace.steps.tick[-1] > 60e9


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rules.pipe_sgd(SGD, width=0), "width must be at least 1, got 0"),
        (lambda: rules.local_sgd(SGD, sync_period=0), "sync_period must be at least 1, got 0"),
        (lambda: unwrap(rules.local_sgd)(SGD, sync_period=2.5), "sync_period must be a whole number, got 2.5"),
        (lambda: rules.dasgd(SGD, sync_period=3, delay=3), r"delay must be in \[0, sync_period=3\), got 3"),
        (lambda: rules.palsgd(SGD, learning_rate=0.1, probability=1.0), r"probability must be in \[0, 1\), got 1.0"),
        (lambda: rules.palsgd(SGD, learning_rate=0.1, pull=-1.0), "pull must be at least 0, got -1.0"),
        (lambda: rules.lasgd(SGD, interval=-1.0), "interval must be at least 0 and finite, got -1.0"),
        (lambda: rules.any_batch(0.0, SGD), "window must be positive and finite, got 0.0"),
        (lambda: rules.task_allocation(0, SGD), "batch must be at least 1, got 0"),
        (lambda: replay.run(rules.task_allocation(3, SGD), seconds=1, **EVEN), "each of the 4 workers, got 3"),
        (lambda: rules.task_allocation(3, SGD, seconds=[1.0, -1.0]), "seconds must be at least 0 and finite"),
        (
            lambda: replay.run(rules.task_allocation(3, SGD, seconds=[1.0, 2.0]), seconds=1, **EVEN),
            "seconds must be those of the 4 workers, got 2 numbers",
        ),
        (lambda: rules.ata(0, SGD), "batch must be at least 1, got 0"),
        (lambda: rules.ata(3, SGD, confidence=-1.0), "confidence must be at least 0 and finite, got -1.0"),
        (lambda: allocate_tasks([1.0, 2.0], 1, least=1), "tasks must be at least 1 for each of the 2 workers, got 1"),
    ],
)
def test_what_cannot_work_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
