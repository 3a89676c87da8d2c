"""Goodput under failures: closed forms, the simulation by events, and single chips second by second."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import REPOSITORY
from reference.goodput import shares_by_seconds

from jaxdist.analysis import goodput
from jaxdist.analysis.goodput import bill, checkpoint_interval, elastic, estimate, fleet, islands, simulate, synchronous

YEAR = 365.25 * 86400
SHARES = ("goodput", "redone", "saving", "stopped", "waiting", "absent")
SMALL = {"mtbf": 8000, "slice_chips": 4, "detect": 5, "restart": 10, "save": 2, "interval": 30, "step": 5}
SHRINK = elastic(resize=6)


@pytest.mark.parametrize(
    ("times", "scheme", "reference"),
    [
        pytest.param({"reload": 5}, synchronous(), {"kind": "fixed"}, id="at-once"),
        pytest.param({"reload": 5, "repair": 60}, synchronous(), {"kind": "fixed"}, id="wait", marks=pytest.mark.slow),
        pytest.param({"reload": 5, "repair": 60}, synchronous(spares=1), {"kind": "fixed", "spares": 1}, id="spare"),
        pytest.param({"reload": 5, "repair": 60}, elastic(), {"kind": "restart"}, id="restart", marks=pytest.mark.slow),
        pytest.param({"reload": 5, "repair": 60}, SHRINK, {"kind": "shrink", "resize": 6}, id="shrink"),
    ],
)
def test_shares_are_those_of_single_chips_second_by_second(times, scheme, reference):
    few = fleet(32, **SMALL, **times)
    found = simulate(few, scheme, failures=5000)
    # About 160 failures, so 8 % of what they cost.
    expected = shares_by_seconds(few, **reference, seconds=40_000)
    np.testing.assert_allclose([getattr(found, name) for name in SHARES[:4]], expected, atol=0.025)


@pytest.mark.parametrize(
    ("scheme", "times"),
    [
        pytest.param(synchronous(), {}, id="synchronous"),
        pytest.param(synchronous(), {"repair": 3600}, id="wait"),
        pytest.param(synchronous(spares=6), {"repair": 3600}, id="spares"),
        pytest.param(elastic(), {"repair": 3600}, id="restart"),
        pytest.param(elastic(resize=20), {"repair": 3600}, id="shrink"),
        pytest.param(elastic(), {"preemption": 1e6, "outage": 7200}, id="preempted"),
        pytest.param(islands(4, period=50), {"repair": 600}, id="islands"),
        pytest.param(islands(8, period=48, fragments=8, overlap=2, inner=SHRINK), {"repair": 3600}, id="decoupled"),
        pytest.param(islands(8, period=50, quorum=6), {"repair": 3600}, id="quorum"),
        pytest.param(islands(8, period=50, grace=30), {"repair": 3600}, id="grace"),
    ],
)
def test_closed_form_is_that_of_the_simulation(scheme, times):
    many = fleet(2048, mtbf=6e6, slice_chips=64, **times)
    assert estimate(many, scheme) == pytest.approx(simulate(many, scheme, failures=5000).goodput, abs=0.01)


def test_a_single_group_without_waits_is_dalys_model():
    # T = M exp(R / M) (exp((τ + δ) / M) - 1) T_s / τ.
    mean, reload, save, interval = 1000.0, 200.0, 10.0, 130.0
    one = fleet(16, mtbf=16 * mean, detect=0, restart=0, reload=reload, save=save, interval=interval)
    time = mean * math.exp(reload / mean) * (math.exp((interval + save) / mean) - 1) / interval
    assert estimate(one, synchronous()) == pytest.approx(1 / time, rel=1e-12)
    assert simulate(one, synchronous(), failures=5000).goodput == pytest.approx(1 / time, abs=0.01)


@pytest.mark.parametrize("mean", [100.0, 3600.0, 1e6])
def test_the_interval_of_checkpoints_loses_least(mean):
    def kept(interval):
        return estimate(fleet(1, mtbf=mean, save=10.0, interval=interval), synchronous())

    best = checkpoint_interval(10.0, mean)
    intervals = np.geomspace(best / 10, best * 10, 400)
    assert kept(best) > 0.999 * max(kept(interval) for interval in intervals)
    assert fleet(1, mtbf=mean).interval is None
    assert estimate(fleet(1, mtbf=mean), synchronous()) == pytest.approx(kept(best), rel=1e-12)


def test_the_interval_is_youngs_where_failures_are_rare():
    assert checkpoint_interval(1.0, 1e8) == pytest.approx(math.sqrt(2e8), rel=1e-3)
    assert checkpoint_interval(10.0, 4.0) == 4.0
    assert checkpoint_interval(0.0, 4.0) == 0.0
    assert checkpoint_interval(1.0, math.inf) == math.inf


@pytest.mark.parametrize("scheme", [synchronous(), elastic(), elastic(resize=5)], ids=["all", "restart", "shrink"])
def test_without_failures_only_checkpoints_cost(scheme):
    calm = fleet(64, mtbf=math.inf, slice_chips=8, save=10.0, interval=90.0)
    assert simulate(calm, scheme).goodput == pytest.approx(0.9, rel=1e-12)
    assert estimate(calm, scheme) == pytest.approx(0.9, rel=1e-12)
    assert simulate(calm, scheme).availability == 1.0
    # Without failures, none is the best number of checkpoints.
    assert simulate(calm._replace(interval=None), scheme).goodput == estimate(calm._replace(interval=None), scheme) == 1


def test_an_exchange_costs_what_computation_does_not_hide():
    calm = fleet(64, mtbf=math.inf, slice_chips=8, step=2.0)
    whole = islands(4, period=10, message_bytes=8e9, bandwidth=1e9)
    assert simulate(calm, whole).goodput == pytest.approx(20 / 28, rel=1e-12)
    # Four seconds for each half, of which one step hides two.
    halves = islands(4, period=10, fragments=2, overlap=1, message_bytes=8e9, bandwidth=1e9)
    assert simulate(calm, halves).goodput == pytest.approx(20 / 24, rel=1e-12)
    assert estimate(calm, halves) == pytest.approx(20 / 24, rel=1e-12)
    # Two halves of twelve seconds share the link of a round of twenty, whatever the overlap.
    slow = islands(4, period=10, fragments=2, overlap=10, message_bytes=24e9, bandwidth=1e9)
    assert simulate(calm, slow).goodput == pytest.approx(20 / 24, rel=1e-12)


@pytest.mark.parametrize(
    "inner", [synchronous(spares=1), elastic(), elastic(resize=5)], ids=["all", "restart", "shrink"]
)
def test_one_island_is_its_inner_scheme(inner):
    few = fleet(256, mtbf=1e6, slice_chips=16, repair=600)
    one = islands(1, period=50, fragments=5, grace=60, message_bytes=1e9, bandwidth=1e6, inner=inner)
    assert simulate(few, one, failures=500) == simulate(few, inner, failures=500)
    assert estimate(few, one) == estimate(few, inner)


def test_the_seed_decides_and_nothing_else():
    few = fleet(256, mtbf=1e6, slice_chips=16, repair=600)
    first = simulate(few, islands(4, period=50), seed=3, failures=300)
    assert first == simulate(few, islands(4, period=50), seed=3, failures=300)
    assert first != simulate(few, islands(4, period=50), seed=4, failures=300)


@given(
    slices=st.integers(4, 40),
    mtbf=st.floats(1e3, 1e8),
    times=st.tuples(*[st.floats(0, 500)] * 5),
    preemption=st.sampled_from([math.inf, 3600.0]),
    kind=st.sampled_from([synchronous(), synchronous(spares=1), elastic(), elastic(resize=10.0)]),
    groups=st.integers(1, 3),
    fragments=st.integers(1, 4),
    data=st.data(),
)
@settings(max_examples=40)
def test_shares_add_up_to_one(slices, mtbf, times, preemption, kind, groups, fragments, data):
    detect, restart, reload, repair, save = times
    some = fleet(
        slices * 8,
        mtbf=mtbf,
        slice_chips=8,
        detect=detect,
        restart=restart,
        reload=reload,
        repair=repair,
        save=save,
        preemption=preemption,
        outage=1800.0,
    )
    quorum = data.draw(st.integers(1, groups))
    scheme = kind
    if groups > 1 and slices // groups > kind.spares:
        scheme = islands(groups, period=20, fragments=fragments, quorum=quorum, grace=20.0, inner=kind)
    found = simulate(some, scheme, failures=100)
    shares = [getattr(found, name) for name in SHARES]
    assert sum(shares) == pytest.approx(1, abs=1e-9)
    assert min(shares) >= -1e-9
    assert found.goodput <= found.availability + 1e-9
    assert 0 <= estimate(some, scheme) <= 1


def test_more_failures_and_longer_stops_cost_more():
    def kept(scheme=None, **changes):
        values = {"chips": 2048, "mtbf": 6e6, "slice_chips": 64, "repair": 1200} | changes
        return simulate(fleet(**values), scheme or synchronous(spares=4), failures=2000).goodput

    base = kept()
    assert kept(mtbf=3e6) < base < kept(mtbf=12e6)
    for name in ("detect", "restart", "reload", "save"):
        assert kept(**{name: 600}) < base, name
    by_count = [kept(islands(count, period=50)) for count in (2, 4, 8, 16)]
    assert by_count == sorted(by_count)
    by_quorum = [kept(islands(8, period=50, quorum=quorum)) for quorum in (1, 5, 7, 8)]
    assert by_quorum == sorted(by_quorum, reverse=True)
    by_period = [kept(islands(8, period=period)) for period in (10, 1000, 10_000)]
    assert by_period == sorted(by_period, reverse=True)


@pytest.mark.parametrize("fragments", [1, 2, 10])
def test_a_failure_loses_half_a_round_whatever_the_fragments(fragments):
    many = fleet(64, mtbf=64e4, detect=0, restart=0, reload=0, step=10.0)
    found = simulate(many, islands(8, period=20, fragments=fragments), failures=5000)
    # Of one island of eight, each 10,000 seconds.
    assert found.redone == pytest.approx(100 / 1e4 / 8, rel=0.03)


def test_availability_counts_seconds_and_goodput_chips():
    many = fleet(64, mtbf=3e5, detect=0, restart=600, reload=0)
    all_up, half = (simulate(many, islands(2, period=10, quorum=quorum), failures=5000) for quorum in (2, 1))
    one = simulate(many._replace(chips=32), synchronous(), failures=5000).availability
    assert half.availability == pytest.approx(1 - (1 - one) ** 2, abs=0.01)
    assert all_up.availability == pytest.approx(one**2, abs=0.01)
    assert half.goodput == pytest.approx(one, abs=0.01)
    assert all_up.goodput == pytest.approx(one**2, abs=0.01)


def test_a_preempted_slice_is_away_for_its_outage():
    spot = fleet(1024, mtbf=math.inf, slice_chips=64, preemption=36_000, outage=4000)
    found = simulate(spot, elastic(resize=1), failures=2000)
    assert found.absent == pytest.approx(0.1, abs=0.01)
    assert simulate(spot, synchronous(), failures=2000).goodput < 0.2 < 0.8 < found.goodput


# Douillard et al., arXiv:2604.21428: the goodput of 1.2 and 2.4 million chips that fail once a year, in percent.
PUBLISHED = {
    (1, "fixed"): (27, 18),
    (1, "shrink"): (58, 40),
    (2, "shrink"): (70, None),
    (8, "shrink"): (88, 80),
    (16, "shrink"): (93, 86),
}
MILLIONS = (1_228_800, 2_457_600)
SCHEMES = ["synchronous", "elastic", "elastic, 2 islands", "elastic, 8 islands", "elastic, 16 islands"]


def _decoupled(chips, groups, kind, *, failures):
    # The times are ours: `restart` is chosen for the 27 %, `resize` for the 88 %.
    many = fleet(chips, mtbf=YEAR, slice_chips=256, detect=5, restart=60, reload=0, repair=4800, save=0)
    mean = many.slices * many.slice_rate * many.mean_absence
    inner = elastic(resize=7) if kind == "shrink" else synchronous(spares=math.ceil(mean + 3 * math.sqrt(mean)))
    return simulate(many, islands(groups, period=24, fragments=24, overlap=2, inner=inner), failures=failures)


@pytest.mark.parametrize(("groups", "kind"), PUBLISHED, ids=SCHEMES)
def test_more_than_a_million_chips_have_the_goodput_of_decoupled_diloco(groups, kind):
    for chips, published in zip(MILLIONS, PUBLISHED[groups, kind], strict=True):
        found = _decoupled(chips, groups, kind, failures=3000)
        if published:
            assert 100 * found.goodput == pytest.approx(published, abs=4)
        if groups >= 8:
            assert found.availability > 0.999


@pytest.mark.slow
def test_the_page_has_these_figures():
    page = (REPOSITORY / "docs/how-to/what-failures-cost.md").read_text()
    for name, (groups, kind) in zip(SCHEMES, PUBLISHED, strict=True):
        few, many = (_decoupled(chips, groups, kind, failures=20_000) for chips in MILLIONS)
        published = [f"{share} %" if share else "" for share in PUBLISHED[groups, kind]]
        cells = [name, published[0], f"{100 * few.goodput:.1f} %", published[1], f"{100 * many.goodput:.1f} %"]
        row = " | ".join([*cells, f"{100 * few.availability:.1f} %"]).replace("|  |", "| |")
        assert f"| {row} |" in page


def test_a_bill_has_chips_and_bytes():
    few = fleet(100, mtbf=math.inf, slice_chips=10, step=1.0)
    pair = islands(2, period=10, fragments=2, message_bytes=2e9)
    spent = bill(few, pair, simulate(few, pair), tokens_per_second=1e6, price=2.0, egress=0.1)
    # 360 rounds of two islands an hour.
    assert spent.dollars_per_hour == pytest.approx(200 + 2 * 360 * 2 * 0.1)
    assert spent.tokens_per_hour == pytest.approx(3.6e9)
    assert spent.dollars_per_billion_tokens == pytest.approx(spent.dollars_per_hour / 3.6)
    dead = fleet(100, mtbf=1.0, slice_chips=10)
    nothing = bill(dead, synchronous(), simulate(dead, synchronous(), failures=100), tokens_per_second=1e6, price=2.0)
    assert nothing.dollars_per_billion_tokens == math.inf


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fleet(0, mtbf=1.0), "chips must be at least 1, got 0"),
        (lambda: fleet(10, mtbf=0.0), "mtbf must be positive, got 0.0"),
        (lambda: fleet(10, mtbf=math.nan), "mtbf must be positive, got nan"),
        (lambda: fleet(1000, mtbf=1.0, slice_chips=256), "multiple of slice_chips=256, got 1000; 1024 is one"),
        (lambda: fleet(10, mtbf=1.0, restart=-1.0), "restart must be at least 0 and finite, got -1.0"),
        (lambda: fleet(10, mtbf=1.0, outage=math.inf), "outage must be at least 0 and finite, got inf"),
        (lambda: fleet(10, mtbf=1.0, interval=0.0), "interval must be positive and finite, got 0.0"),
        (lambda: fleet(10, mtbf=1.0, step=math.inf), "step must be positive and finite, got inf"),
        (lambda: fleet(10, mtbf=1.0, preemption=0.0), "preemption must be positive, got 0.0"),
        (lambda: synchronous(spares=-1), "spares must be at least 0, got -1"),
        (lambda: elastic(resize=-1.0), "resize must be at least 0 and finite, got -1.0"),
        (lambda: islands(0, period=1), "count must be at least 1, got 0"),
        (lambda: islands(2, period=4, fragments=8), "fragments must be at most period=4, got 8"),
        (lambda: islands(2, period=4, fragments=2, overlap=5), "overlap must be at most period=4 steps, got 5"),
        (lambda: islands(2, period=4, quorum=3), "quorum must be at most the number of islands, 2, got 3"),
        (lambda: islands(2, period=4, grace=-1.0), "grace must be at least 0 and finite, got -1.0"),
        (lambda: islands(2, period=4, bandwidth=0.0), "bandwidth must be positive, got 0.0"),
        (lambda: islands(2, period=4, inner=islands(2, period=4)), "must be synchronous.. or elastic.., got 2 islands"),
        (lambda: simulate(fleet(4, mtbf=1.0), islands(8, period=1)), "8 islands need as many slices, got 4"),
        (lambda: estimate(fleet(4, mtbf=1.0), synchronous(spares=4)), "fewer than the 4 slices of a group, got 4"),
        (lambda: simulate(fleet(4096, mtbf=1.0, repair=3600.0), synchronous()), "1.5e.07 failures during the longest"),
        (lambda: simulate(fleet(4, mtbf=1.0), synchronous(), failures=0), "failures must be at least 1, got 0"),
        (lambda: simulate(fleet(4, mtbf=1.0), synchronous(), seed=-1), "seed must be at least 0, got -1"),
        (lambda: checkpoint_interval(-1.0, 1.0), "save must be at least 0 and finite, got -1.0"),
    ],
)
def test_bad_values_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_bill_names_bad_values():
    few = fleet(4, mtbf=1e6)
    found = simulate(few, synchronous(), failures=10)
    with pytest.raises(ValueError, match="tokens_per_second must be positive and finite, got 0"):
        bill(few, synchronous(), found, tokens_per_second=0, price=1.0)
    with pytest.raises(ValueError, match="price must be at least 0 and finite, got -1"):
        bill(few, synchronous(), found, tokens_per_second=1, price=-1)


def test_lost_work_counts_each_fragment_since_its_merge():
    group = goodput._Group(1, 0, "fixed", 10.0, 0.0, 3, 0.0, 0.0)
    # Merged at 10, 20, 30, 40, ...: at 44 the last merges of the three were at 40, 20 and 30.
    assert goodput._lost_work(group, 4, 4.0) == pytest.approx((4 + 24 + 14) / 3)
    # At 14 only the first one was ever merged.
    assert goodput._lost_work(group, 1, 4.0) == pytest.approx((4 + 14 + 14) / 3)


def test_the_probability_that_few_are_away_is_binomial():
    def exact(most, number, share):
        return sum(math.comb(number, k) * share**k * (1 - share) ** (number - k) for k in range(most + 1))

    for case in [(0, 8, 0.3), (3, 8, 0.3), (7, 8, 0.99), (40, 900, 0.04)]:
        assert goodput._at_most(*case) == pytest.approx(exact(*case), rel=1e-9)
    assert goodput._at_most(8, 8, 0.5) == goodput._at_most(3, 8, 0.0) == 1.0
    assert goodput._at_most(7, 8, 1.0) == 0.0
    # Of a mean of 8,000 half are below it.
    assert goodput._at_most(8000, 200_000, 0.04) == pytest.approx(0.5, abs=0.01)
