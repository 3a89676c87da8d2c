"""The link between two passes: closed form, event simulation, and what partition, priority and credit do."""

import itertools
import math
import random
from inspect import unwrap
from typing import Any

import pytest
from reference.schedule import best_order, unit_steps

from jaxdist.schedule import (
    Profile,
    bound,
    choose_defer,
    merge_layers,
    optimum,
    pipelined_time,
    profile_of,
    starting_point,
    step_timeline,
    timeline,
)

CASES = {
    "two layers": Profile([2, 1], [1, 4], [1, 1]),
    "late and large": Profile([6, 4, 2], [1, 1, 6], [2, 2, 2]),
    "first is largest": Profile([3, 2, 1], [4, 1, 1], [1, 1, 1]),
    "slow forward": Profile([3, 2, 1], [1, 1, 10], [3, 3, 3]),
}


def run(profile, partition=None, credit=None, **settings):
    settings = {"bandwidth": 1, **settings}
    return timeline(profile, partition_bytes=partition, credit_bytes=credit, **settings)


def instances(number, *, layers=8, largest=12, seed=0, ordered=True):
    rng = random.Random(seed)
    for _ in range(number):
        n = rng.randint(1, layers)
        ready = [rng.randint(0, 20) for _ in range(n)]
        sizes, forward = ([rng.randint(0, largest) for _ in range(n)] for _ in range(2))
        yield Profile(sorted(ready, reverse=True) if ordered else ready, sizes, forward)


@pytest.mark.parametrize(
    ("case", "partition", "credit", "overhead", "seconds"),
    [
        ("two layers", 1, 1, 0, 7),
        ("two layers", None, 0.5, 0, 8),
        ("late and large", 1, 1, 0, 13),
        ("late and large", 2, 2, 0, 14),
        ("late and large", 1, 4, 0, 16),
        ("late and large", 1, 1, 0.5, 16),
        ("first is largest", 1, 1, 0, 10),
        ("slow forward", 1, 1, 0, 16),
        ("slow forward", None, 0.5, 0, 21),
    ],
)
def test_known_steps_take_what_they_should(case, partition, credit, overhead, seconds):
    assert run(CASES[case], partition, credit, overhead=overhead).makespan == seconds


@pytest.mark.parametrize(("case", "seconds"), list(zip(CASES, (8, 16, 10, 22))))
def test_known_steps_behind_a_barrier(case, seconds):
    assert run(CASES[case], policy="fifo", barrier=True).makespan == seconds
    assert optimum(CASES[case], bandwidth=1, barrier=True) == seconds


def test_layers_are_done_when_they_should_be():
    found = run(CASES["late and large"], 1, 1)
    assert found.done == (7, 5, 10)
    assert found.forward == ((7, 9), (9, 11), (11, 13))
    order = [(2, 0), (2, 1), (1, 0), (2, 2), (0, 0), (2, 3), (2, 4), (2, 5)]
    assert [(m.layer, m.part) for m in found.messages] == order
    assert [(m.start, m.end) for m in found.messages] == [(t, t + 1) for t in range(2, 10)]


@pytest.mark.parametrize(("number", "ordered"), [(2000, True), (300, False)])
def test_unit_messages_in_order_of_layers_attain_the_closed_form(number, ordered):
    for profile in instances(number, seed=1, ordered=ordered):
        assert run(profile, 1, 1).makespan == optimum(profile, bandwidth=1), profile
        behind = run(profile, 1, 1, barrier=True).makespan
        assert behind == optimum(profile, bandwidth=1, barrier=True), profile


def test_unit_messages_equal_steps_of_a_second():
    for profile in instances(300, seed=2, ordered=False):
        for barrier in (False, True):
            assert run(profile, 1, 1, barrier=barrier).makespan == unit_steps(*profile, barrier=barrier), profile


def test_no_order_is_better():
    for profile in instances(300, layers=3, largest=4, seed=3, ordered=False):
        assert optimum(profile, bandwidth=1) == best_order(*profile), profile


def test_never_above_the_bound_nor_below_the_optimum():
    rng = random.Random(4)
    for profile in instances(400, seed=5):
        partition, credit, overhead = rng.uniform(0.5, 6), rng.uniform(0.2, 12), rng.choice([0, rng.uniform(0, 2)])
        settings = {"bandwidth": rng.uniform(0.3, 3), "overhead": overhead}
        found = timeline(profile, partition_bytes=partition, credit_bytes=credit, **settings).makespan
        most = bound(profile, partition_bytes=partition, credit_bytes=credit, **settings)
        assert optimum(profile, bandwidth=settings["bandwidth"]) <= found + 1e-9
        assert found <= most + 1e-9


def test_priority_is_never_slower_than_fifo_and_more_bandwidth_never_slower_than_less():
    strictly = 0
    for profile in instances(150, seed=6):
        fast = run(profile, 1, 1).makespan
        fifo = run(profile, 1, 1, policy="fifo").makespan
        assert fast <= fifo <= run(profile, policy="fifo", barrier=True).makespan
        strictly += fast < fifo
        times = [run(profile, 1, 1, policy="fifo", bandwidth=b).makespan for b in (0.5, 1, 2, 4, math.inf)]
        assert times == sorted(times, reverse=True)
    assert strictly > 15


def test_without_credit_limit_messages_go_as_they_come():
    for profile in instances(100, seed=7):
        apart = profile._replace(ready=[2 * r + 0.1 * (len(profile.ready) - i) for i, r in enumerate(profile.ready)])
        assert run(apart, 2).messages == run(apart, 2, policy="fifo").messages


def test_the_link_is_one_and_all_bytes_cross_it():
    for profile in instances(200, seed=8):
        found = run(profile, 2.5, 4, bandwidth=2, overhead=0.25, latency=0.5)
        for one, two in itertools.pairwise(found.messages):
            assert one.end <= two.start
        for layer, size in enumerate(profile.sizes):
            mine = [m for m in found.messages if m.layer == layer]
            assert sum(m.end - m.start - 0.25 for m in mine) == pytest.approx(size / 2)
            assert found.done[layer] == (mine[-1].end + 0.5 if mine else profile.ready[layer])


def test_credit_hides_latency():
    """Stop and wait pays it for each message, an open window once."""
    one = Profile([0], [10], [1])
    assert run(one, 1, 1, latency=1).makespan == 10 + 10 + 1
    assert run(one, 1, 2, latency=1).makespan == 10 + 1 + 1


def test_pipelined_steps():
    profile = CASES["slow forward"]
    # Nothing deferred: as behind a barrier. All: messages one after the other, then layers, then the backward pass.
    assert pipelined_time(profile, defer=0, bandwidth=1) == 22
    assert pipelined_time(profile, defer=2, bandwidth=1) == 10 + 11
    assert pipelined_time(profile, defer=3, bandwidth=1) == 15 + 3
    assert choose_defer(profile, bandwidth=1) == 3
    assert choose_defer(CASES["first is largest"], bandwidth=1) == 0
    assert choose_defer(profile, bandwidth=math.inf) == 0
    assert pipelined_time(profile, defer=3, bandwidth=1, overhead=1, partition_bytes=5) == 19 + 3


def test_pipelined_steps_lie_between_the_optimum_and_plain_ones():
    shorter = 0
    for profile in instances(150, seed=9):
        plain = optimum(profile, bandwidth=1, barrier=True)
        assert pipelined_time(profile, defer=0, bandwidth=1) == plain
        best = pipelined_time(profile, defer=choose_defer(profile, bandwidth=1), bandwidth=1)
        assert optimum(profile, bandwidth=1) <= best <= plain
        shorter += best < plain
    assert shorter > 30


def test_a_step_that_sends_the_first_layers_first_hides_nothing():
    """Twelve blocks and an output layer: a queue beside the program, and what a program itself can do."""
    forward = [0, *[3e-3] * 12, 4e-3]
    profile = profile_of(forward=forward, backward=[2 * t for t in forward], sizes=[6e6, *[12e6] * 12, 50e6])
    link: Any = {"bandwidth": 1.25e9, "overhead": 1e-4}
    start: Any = starting_point(profile, **link)
    orders = [step_timeline(profile, order=order, **start, **link) for order in ("priority", "fifo")]
    found = [timeline(profile, **start, **link), *orders, step_timeline(profile, **link)]
    assert [int(1e3 * run.makespan) for run in found] == [178, 286, 214, 209]
    assert found[1].messages[0].start == max(profile.ready)


def test_a_step_takes_its_messages_in_turn():
    # Layers 2, 1 and 0 are ready at 2, 4 and 6; two messages may be under way, and each takes 3 to arrive.
    run = step_timeline(CASES["late and large"], bandwidth=1, partition_bytes=4, credit_bytes=8, latency=3)
    assert [(m.layer, m.part, m.start, m.end) for m in run.messages] == [
        (2, 0, 2, 6), (2, 1, 6, 8), (1, 0, 9, 10), (0, 0, 11, 12),
    ]  # fmt: skip
    assert (run.done, run.makespan) == ((15, 13, 11), 15 + 6)
    chosen = step_timeline(CASES["late and large"], bandwidth=1, order=[1, 2, 0])
    assert [m.start for m in chosen.messages] == [4, 5, 11]
    with pytest.raises(ValueError, match=r"once for each of its messages, \[1, 1, 1\], got \[0, 1\]"):
        step_timeline(CASES["late and large"], bandwidth=1, order=[0, 1])


def test_no_step_beats_the_optimum_behind_a_barrier_and_fifo_attains_it():
    for profile in instances(150, seed=10):
        least = optimum(profile, bandwidth=1, barrier=True)
        assert step_timeline(profile, bandwidth=1).makespan == least
        assert timeline(profile, bandwidth=1, policy="fifo", barrier=True).makespan == least
        cut = step_timeline(profile, bandwidth=1, order="priority", partition_bytes=2, credit_bytes=3, overhead=0.5)
        assert cut.makespan >= least
        groups = [range(len(profile.ready))]
        assert step_timeline(merge_layers(profile, groups), bandwidth=1).makespan >= least


def test_a_profile_from_the_times_of_layers():
    assert profile_of(forward=[1, 2], backward=[3, 4], sizes=[5, 6]) == Profile((7, 4), (5, 6), (1, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"partition_bytes": 0}, "partition_bytes must be positive and finite, got 0"),
        ({"credit_bytes": -1}, "credit_bytes must be positive, got -1"),
        ({"bandwidth": 0}, "bandwidth must be positive, got 0"),
        ({"overhead": -0.5}, "overhead must be at least 0 and finite, got -0.5"),
        ({"latency": math.inf}, "latency must be at least 0 and finite, got inf"),
        ({"profile": Profile([1], [1, 2], [1])}, "one number for each layer"),
        ({"profile": Profile([], [], [])}, "one number for each layer"),
        ({"profile": Profile([1, 2], [1, -2], [1, 1])}, r"sizes\[1\] must be at least 0 and finite, got -2"),
        ({"profile": Profile([1], [1e9], [1]), "partition_bytes": 1}, "1,000,000,000 messages.*use at least 954"),
    ],
)
def test_what_makes_no_sense_is_refused(change, message):
    settings = {"profile": CASES["two layers"], "bandwidth": 1, **change}
    with pytest.raises(ValueError, match=message):
        timeline(settings.pop("profile"), **settings)


def test_orders_that_do_not_exist_are_refused():
    profile = CASES["two layers"]
    # The type checks of the tests would raise first.
    with pytest.raises(ValueError, match='policy must be "priority" or "fifo", got \'lifo\''):
        unwrap(timeline)(profile, bandwidth=1, policy="lifo")
    with pytest.raises(ValueError, match=r'order must be "priority", "fifo" or .*, got \'lifo\''):
        unwrap(step_timeline)(profile, bandwidth=1, order="lifo")


@pytest.mark.parametrize("groups", [[[0, 1], [1]], [[0]], [[0, 2], [1]]])
def test_merged_layers_are_all_layers_once(groups):
    with pytest.raises(ValueError, match="groups must name each of 2 layers once, got"):
        merge_layers(CASES["two layers"], groups)


def test_more_layers_than_there_are_cannot_be_deferred():
    with pytest.raises(ValueError, match=r"defer must be in \[0, 2\].*got 3"):
        pipelined_time(CASES["two layers"], defer=3, bandwidth=1)


def test_no_limit_is_none_and_not_infinity():
    profile, sizes = Profile([6, 4, 2], [1, 1, 6], [2, 2, 2]), {"bandwidth": 1, "partition_bytes": math.inf}
    for run in (timeline, step_timeline):
        with pytest.raises(
            ValueError, match="partition_bytes must be positive and finite, got inf; None means no limit"
        ):
            run(profile, **sizes)
        # Any number of messages may be under way.
        assert run(profile, bandwidth=1, credit_bytes=math.inf) == run(profile, bandwidth=1)
    with pytest.raises(ValueError, match="credit_bytes must be positive and finite"):
        bound(profile, bandwidth=1, partition_bytes=1, credit_bytes=math.inf)


@pytest.mark.parametrize(("size", "credit"), [(1e10, 1e-7), (1e17, 1)])
def test_a_credit_that_is_lost_in_rounding(size, credit):
    """Each message waits for the one before, as with any credit below a message."""
    profile = Profile([3, 2], [size, size], [1, 1])
    slow, plain = (timeline(profile, bandwidth=1e9, credit_bytes=each) for each in (credit, size / 2))
    assert slow == plain
