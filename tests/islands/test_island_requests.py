"""How many requests an island and round take: they follow from the protocol, not from how long islands wait."""

import statistics

import pytest
from island_paces import FRAGMENTS, play_paces

from jaxdist import islands

NAMES = ("a", "b", "c", "d")
ROUNDS = 10
# The first rounds, in which islands learn for how long they wait, are not counted.
COUNTED = 6


def steady(name, draws):
    return 1.0


def uneven(name, draws):
    """Each island takes a second longer than the one before."""
    return 1.0 + NAMES.index(name)


def far_apart(name, draws):
    """One island takes a minute longer than all others."""
    return 60.0 if name == "c" else 0.1


def loaded(name, draws):
    """As on a machine that does other work."""
    return 1.0 + draws.expovariate(2.0)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("fragments", [1, FRAGMENTS])
@pytest.mark.parametrize("request_seconds", [0.02, pytest.param(0.2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("pace", [steady, uneven, far_apart, loaded], ids=lambda pace: pace.__name__)
def test_an_island_and_round_take_at_most_ten_requests(pace, request_seconds, fragments, monkeypatch):
    """On a clock that only sleeps move, so that the number is the same on every machine; a fragment's is a round."""
    found = play_paces(
        monkeypatch,
        NAMES,
        pace,
        store=islands.memory(),
        meetings=ROUNDS,
        request_seconds=request_seconds,
        fragments=fragments,
    )
    reports = [report for played in found.values() for report in played.reports[-COUNTED:]]
    assert all(report.counted and not report.late for report in reports)
    assert statistics.mean(report.requests for report in reports) <= 10
