"""The time of a step over a link: against numbers that were computed by hand."""

import math

import jax
import pytest

from jaxdist.analysis.base import make_collective, summarize
from jaxdist.analysis.cost import Link
from jaxdist.analysis.step_time import (
    Schedule,
    StepCost,
    Traffic,
    break_even,
    mean_traffic,
    network_seconds,
    step_seconds,
    step_seconds_if_hidden,
    traffic,
    uses_gloo,
)

LINK = Link("100mbit,20ms", latency=0.02, bandwidth=12.5e6)


def _traffic_of(*ops, workers=4, gloo=False):
    made = [make_collective(kind, operands, devices=workers, where="") for kind, operands in ops]
    return traffic(summarize(made, []), workers=workers, gloo=gloo)


def _traffic_of_permutation(pairs, *, workers, size=2**20):
    op = make_collective("collective-permute", [("uint8", size)], pairs=pairs, devices=workers, where="")
    return traffic(summarize([op], []), workers=workers, gloo=True)


@pytest.mark.parametrize(
    ("kind", "sent", "hops"),
    [
        # Rings of four over an operand of 1000 bytes: 2 · 3/4 of it in 2 · 3 hops, and so on.
        ("all-reduce", 1500.0, 6.0),
        ("all-gather", 3000.0, 3.0),
        ("reduce-scatter", 750.0, 3.0),
        ("all-to-all", 750.0, 3.0),
    ],
)
def test_bytes_and_hops_of_each_collective(kind, sent, hops):
    assert _traffic_of((kind, [("uint8", 1000)])) == Traffic(sent, hops)


def test_every_operand_of_a_merged_reduction_is_a_message():
    merged = _traffic_of(("all-reduce", [("float32", 400), ("float32", 600)]))
    assert merged == Traffic(1500.0, 12.0)


def test_a_permutation_takes_one_hop():
    ring = make_collective("collective-permute", [("uint8", 1000)], pairs=((0, 1), (1, 0)), devices=2, where="")
    assert traffic(summarize([ring], []), workers=2) == Traffic(1000.0, 1.0)


@pytest.mark.parametrize(
    ("workers", "size", "hops"),
    [
        # Two segments for each worker at least, and two on their way at a time: as an ideal ring.
        (2, 1000, 2.0),
        (4, 4 * 2**20, 6.0),
        # 19 segments of 1 MiB are 10 for each of two workers: five pairs of them are reduced, and five gathered.
        (2, 19 * 2**20 - 5, 10.0),
        # Of four workers each has five of 20: 15 steps of the ring, in pairs 8, twice.
        (4, 19 * 2**20 - 5, 16.0),
    ],
)
def test_gloo_reduces_in_segments(workers, size, hops):
    found = _traffic_of(("all-reduce", [("uint8", size)]), workers=workers, gloo=True)
    assert found == _traffic_of(("all-reduce", [("uint8", size)]), workers=workers)._replace(hops=hops)


def test_each_message_has_segments_of_its_own():
    # Two messages of 12 MiB: six segments for each of two workers, so six hops for each message.
    merged = ("all-reduce", [("uint8", 12 * 2**20), ("uint8", 12 * 2**20)])
    assert _traffic_of(merged, workers=2, gloo=True).hops == 12.0


@pytest.mark.parametrize(
    ("kind", "workers", "share"),
    [
        ("all-to-all", 2, 1.0),
        ("all-to-all", 4, 0.75),
        ("all-gather", 2, 0.5),
        ("all-gather", 4, 0.0),
        ("all-reduce", 2, 0.0),
        ("reduce-scatter", 2, 0.0),
    ],
)
def test_gloo_leaves_a_direction_idle(kind, workers, share):
    found = _traffic_of((kind, [("uint8", 2**20)]), workers=workers, gloo=True)
    assert found.idle_bytes == share * found.wire_bytes
    assert _traffic_of((kind, [("uint8", 2**20)]), workers=workers).idle_bytes == 0
    # What fits into the buffer of the socket is sent before anything is received.
    assert _traffic_of((kind, [("uint8", 2**13)]), workers=workers, gloo=True).idle_bytes == 0


def test_only_permutations_that_exchange_leave_a_direction_idle():
    assert _traffic_of_permutation(((0, 1), (1, 0)), workers=2).idle_bytes == 2**20
    assert _traffic_of_permutation(((0, 1), (1, 2), (2, 0)), workers=3).idle_bytes == 0
    assert _traffic_of_permutation(((0, 0), (1, 1)), workers=2).idle_bytes == 0


def test_idle_bytes_take_time_and_move_the_break_even():
    cost = StepCost(0.2, 0.0, Traffic(1e6, 1.0, idle_bytes=0.5e6))
    assert network_seconds(cost, LINK) == pytest.approx(0.02 + 1.5e6 / 12.5e6)
    plain = StepCost(0.1, 0.0, Traffic(4e6, 1.0))
    # 2.5 MB of time less, for 0.1 s.
    assert break_even(cost, plain, latency=0.02) == pytest.approx(2.5e6 / 0.1)


def test_processes_on_cpu_use_gloo(monkeypatch):
    assert jax.default_backend() == "cpu"
    assert uses_gloo() == (jax.config.jax_cpu_collectives_implementation == "gloo")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not uses_gloo()


def test_steps_of_a_round_are_averaged():
    assert mean_traffic(Traffic(8e6, 6.0), Traffic(0.0, 0.0), 1 / 8) == Traffic(1e6, 0.75)


def test_without_delay_a_step_is_a_sum():
    cost = StepCost(0.2, 0.03, Traffic(2.5e6, 6.0))
    # Six hops of 20 ms, and 2.5 MB at 12.5 MB/s.
    assert network_seconds(cost, LINK) == pytest.approx(0.12 + 0.2)
    assert step_seconds(cost, LINK) == pytest.approx(0.2 + 0.03 + 0.32)


def test_local_steps_pay_for_a_round_once():
    # A round of 8 steps sends 20 MB: 2.5 MB and 0.75 hops a step.
    cost = StepCost(0.2, 0.01, Traffic(2.5e6, 0.75), Schedule(period=8))
    assert step_seconds(cost, LINK) == pytest.approx(0.2 + 0.01 + 0.015 + 0.2)


def test_with_a_delay_a_step_is_a_maximum():
    late = Schedule(delay=1)
    slow, fast = Traffic(5e6, 1.0), Traffic(1e6, 1.0)
    assert step_seconds(StepCost(0.2, 0.03, slow, late), LINK) == pytest.approx(0.03 + 0.42)
    assert step_seconds(StepCost(0.2, 0.03, fast, late), LINK) == pytest.approx(0.03 + 0.2)


def test_a_delayed_round_hides_behind_one_step_only():
    # A round takes 10 · 0.08 = 0.8 s, of which one step of 0.2 s hides a part: 0.6 s are shared by ten steps.
    cost = StepCost(0.2, 0.0, Traffic(1e6, 0.0), Schedule(period=10, delay=1))
    assert step_seconds(cost, LINK) == pytest.approx(0.2 + 0.06)
    # In four fragments it is 0.2 s each, and each hides behind a step of its own.
    fragments = cost._replace(schedule=Schedule(period=10, fragments=4, delay=1))
    assert step_seconds(fragments, LINK) == pytest.approx(0.2)
    assert step_seconds_if_hidden(cost, LINK) == pytest.approx(0.2)


def test_at_the_break_even_both_steps_are_equal():
    plain, coded = StepCost(0.2, 0.0, Traffic(20e6, 2.0)), StepCost(0.2, 0.1, Traffic(2e6, 4.0))
    rate = break_even(coded, plain, latency=0.02)
    # 18 MB less, for 0.1 s of coding and two more hops.
    assert rate == pytest.approx(18e6 / 0.14)
    at = Link("", 0.02, rate)
    assert step_seconds(coded, at) == pytest.approx(step_seconds(plain, at))
    assert break_even(plain, coded, latency=0.02) == 0
    assert break_even(coded._replace(coding=0.0), plain, latency=0.0) == math.inf
    # With equal bytes, fewer hops are always shorter.
    fewer = plain._replace(traffic=Traffic(20e6, 1.0))
    assert break_even(fewer, plain, latency=0.02) == math.inf
    assert break_even(fewer, plain, latency=0.0) == break_even(plain, fewer, latency=0.02) == 0
