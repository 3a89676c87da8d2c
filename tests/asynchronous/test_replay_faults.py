"""Outages, deadlocks with outages, the clock, and arguments that a run refuses."""

from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdist as jd
from jaxdist.asynchronous import durations, links, portable, ray_engine, replay, rules
from jaxdist.asynchronous.replay import engine


def unchecked(function):
    """The function as users call it, without the type checks of the tests."""
    return getattr(function, "__wrapped__", function)


SGD, CODE = optax.sgd(0.1), jd.top_k(0.1)


def test_stuck_workers_that_also_fail_are_a_deadlock():
    ended = durations.recorded([[1.0], [1.0]], mode="stop")
    with pytest.raises(replay.DeadlockError):
        replay.run(rules.asgd(SGD), durations=durations.failures(ended, up=3, down=1), workers=2, steps=10)


def test_a_recovery_that_wakes_a_worker_is_no_deadlock():
    # The first gradient never ends; the second one, after the outage, does.
    def draw(rng, worker, first, count, state):
        return np.where(np.arange(first, first + count) == 0, np.inf, 1.0), None

    law = durations.Durations("late", draw, outages=lambda rng, worker: iter([(50.0, 1.0)]))
    assert len(replay.run(rules.asgd(SGD), durations=law, workers=2, steps=10).trace.steps) == 10


def test_outages_may_end():
    law = durations.constant(1.0)._replace(outages=lambda rng, i: iter([(2.5, 1.0)] if i == 0 else []))
    run = replay.run(rules.asgd(SGD), workers=2, seconds=10, durations=law)
    assert run.down.tolist() == [0.1, 0.0]
    assert len(run.trace.steps) == 2 + 6 + 10


def test_events_are_counted_alike_after_a_restore(tmp_path):
    law = durations.failures(durations.constant(1.0), up=3, down=1)
    clock = replay.simulator(rules.asgd(SGD), workers=2, durations=law)
    state = clock.advance(clock.init(), seconds=5)
    replay.save(tmp_path / "run.npz", clock, state)
    restored = replay.restore(tmp_path / "run.npz", clock)
    assert restored.live == state.live == engine.count_live(state.heap) < len(state.heap)


def test_a_recovered_worker_counts_once_in_a_synchronous_step():
    # It gets the second model twice, on its recovery and with all others; worker 2 is slow.
    never, goals = (1e8, 1.0), jnp.array([0.0, 0.0, 6.0])
    law = durations.constant([1.0, 1.0, 20.0])
    law = law._replace(outages=lambda rng, i: iter([(22.5, 1.0), never] if i == 0 else [never]))
    task = replay.Task(jnp.zeros(()), lambda x, b: x * b, lambda seed, worker, job: goals[worker])
    rule = rules.backup_workers(0, optax.sgd(1.0))
    run = replay.run(rule, task, workers=3, durations=law, links=links.alpha_beta(2.0), steps=2)
    assert float(run.params) == -4.0
    used = run.trace.gradients
    assert sorted(zip(used.read[used.accepted], used.worker[used.accepted])) == [
        (v, w) for v in (0, 1) for w in range(3)
    ]


def test_a_harmonic_mean_that_is_reached_exactly_is_enough():
    run = replay.run(rules.malenia(15, SGD, stop=True), workers=3, durations=durations.constant(1.0), seconds=25)
    assert (run.trace.steps.tick / 1e9).tolist() == [5, 10, 15, 20, 25]


def test_periods_of_workers_are_those_that_the_schedule_makes():
    periods = jd.schedule.proportional_steps([1.0, 1.0, 32.0], 32)
    law = durations.constant([1.0, 1.0, 1 / 32])
    run = replay.run(rules.local_sgd(SGD, sync_period=periods), workers=3, durations=law, seconds=10)
    assert len(run.trace.steps) == 10


def test_the_clock_never_runs_backwards():
    clock = replay.simulator(rules.asgd(SGD), workers=1)
    state = clock.advance(clock.advance(clock.init(), seconds=5), seconds=3)
    assert clock.result(state).seconds == 5.0
    assert replay.run(rules.asgd(SGD), workers=1, seconds=float("inf"), steps=2).seconds == 2.0


def test_staleness_among_peers_where_iterations_are_skipped():
    law = durations.constant([6, 1, 1, 1])
    rule = rules.hop(jd.topology.ring, SGD, tokens=5, backup=1, skip=5)
    run = replay.run(rule, durations=law, workers=4, seconds=60)
    # Six seconds of the three others.
    assert replay.peer_delays(run.trace, 0)[1:].mean() == pytest.approx(18, abs=4)
    averages = replay.run(rules.lasgd(SGD), durations=law, workers=4, seconds=60).trace
    with pytest.raises(ValueError, match="several gradients of a version"):
        replay.peer_delays(averages)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: replay.run(rules.asgd(SGD), workers=1, seconds=-5, steps=2), "seconds must be at least 0, got -5"),
        (lambda: replay.run(rules.asgd(SGD), workers=1, seconds=float("nan")), "seconds must be at least 0, got nan"),
        (lambda: unchecked(durations.recorded)([[1.0]], mode="once"), "mode must be"),
        (lambda: unchecked(rules.rennala)(2.5, SGD), "batch must be a whole number, got 2.5"),
        (lambda: unchecked(rules.ringmaster)(float("nan"), SGD), "max_delay must be a whole number, got nan"),
        (lambda: unchecked(rules.backup_workers)(0.5, SGD), "spare must be a whole number, got 0.5"),
        (
            lambda: replay.run(
                rules.asgd(SGD), workers=4, seconds=1, durations=durations.one_slow(durations.constant(1.0), worker=4)
            ),
            r"one_slow\(constant\) name worker 4, got workers=4",
        ),
        (lambda: rules.compressed(rules.bsp(SGD), {"gradient": CODE}), "bsp has no server to send a gradient to"),
        (lambda: unchecked(links.stragglar)(np.full((5, 5), 0.1)), "one latency and one bandwidth"),
        (
            lambda: unchecked(ray_engine.run)(
                rules.asgd(SGD), replay.Task(np.zeros(2), abs, abs), workers=1, steps=1, on_death="replace"
            ),
            "on_death must be 'restart' or 'continue', got 'replace'",
        ),
    ],
)
def test_what_would_pass_silently_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_an_ordered_mapping_keeps_its_type_and_order():
    value = OrderedDict(b=1.0, a=2.0)
    found = portable.read(portable.write(value, lambda array: 0), dict)
    assert (type(found), list(found.items())) == (OrderedDict, [("b", 1.0), ("a", 2.0)])


def test_slow_messages_between_outages_are_no_deadlock():
    law = durations.failures(durations.constant(0.05), up=1.0, down=1.0)
    slow = links.alpha_beta(100.0)
    assert len(replay.run(rules.asgd(SGD), workers=2, durations=law, links=slow, steps=5).trace.steps) == 5


def test_a_class_of_a_script_is_known_before_it_is_written():
    from typing import NamedTuple

    class Local(NamedTuple):
        x: int

    text = portable.write(Local(3), lambda array: 0)
    portable._WRITTEN_CLASSES.clear()
    with pytest.raises(ValueError, match="is not an imported NamedTuple"):
        portable.read(text, dict)
    portable.know_classes((Local(0), jax.numpy.zeros(2)))
    assert portable.read(text, dict) == Local(3)
