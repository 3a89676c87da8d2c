"""The decisions of a round, without a store: when to wait, when to commit, and who counts."""

from hypothesis import given
from hypothesis import strategies as st

from jaxdist.islands.records import Drift
from jaxdist.islands.rounds import Next, Seen, decide, make_commit, missing_islands, see

NAMES = st.frozensets(st.sampled_from("abcdef"))
SEEN = st.builds(Seen, st.booleans(), NAMES, NAMES, NAMES)
LIMITS = {"round_timeout": 10.0, "at_least": 1, "quorum": 1}


def drift(base="x", *, waited=True, leaving=False, weight=1.0):
    return Drift(1, "hash", base, weight, None, waited, leaving)


def seen(drifts="", here="", left="", *, committed=False):
    return Seen(committed, frozenset(drifts), frozenset(here), frozenset(left))


def test_names_of_a_round_are_sorted():
    assert see(["drift/a", "here/b", "left/c", "commit", "other"]) == seen("a", "b", "c", committed=True)


def test_a_round_waits_for_the_last_members_and_for_those_that_are_here():
    assert decide(seen("a"), "ab", elapsed=0, **LIMITS) is Next.WAIT
    assert decide(seen("a", here="b"), "a", elapsed=0, **LIMITS) is Next.WAIT
    assert decide(seen("ab"), "ab", elapsed=0, **LIMITS) is Next.COMMIT
    assert decide(seen("a", left="b"), "ab", elapsed=0, **LIMITS) is Next.COMMIT
    assert decide(seen("a"), "ab", elapsed=10, **LIMITS) is Next.COMMIT


def test_the_first_round_waits_for_so_many():
    limits = {**LIMITS, "at_least": 3}
    assert decide(seen("ab"), "", elapsed=9, **limits) is Next.WAIT
    assert decide(seen("ab"), "", elapsed=10, **limits) is Next.COMMIT


@given(SEEN, NAMES, st.floats(0, 100), st.integers(1, 4))
def test_a_commit_ends_the_round_and_no_round_is_smaller_than_the_quorum(found, expected, elapsed, quorum):
    action = decide(found, expected, elapsed=elapsed, **{**LIMITS, "quorum": quorum})
    assert (action is Next.READ) == found.committed
    if action is Next.COMMIT:
        assert len(found.drifts) >= quorum
        assert elapsed >= 10 or not missing_islands(found, expected)
    if not found.committed and elapsed >= 10 and len(found.drifts) >= quorum:
        assert action is Next.COMMIT


@given(SEEN, NAMES, st.randoms())
def test_a_commit_does_not_depend_on_the_order_in_which_drifts_are_seen(found, expected, rng):
    drifts = {name: drift(rng.choice("xy"), waited=rng.random() < 0.8) for name in found.drifts}
    damaged = {name for name in drifts if rng.random() < 0.2}
    shuffled = dict(rng.sample(sorted(drifts.items()), len(drifts)))
    one, other = (make_commit(found, expected, d, damaged, "x") for d in (drifts, shuffled))
    assert one == other
    members = [member.name for member in one.members]
    assert members == sorted(members)
    assert {*members, *one.differing, *one.damaged} == set(drifts)
    assert len({drifts[name].base for name in members}) <= 1


def test_most_decide_which_parameters_count_and_oneself_among_equals():
    drifts = {"a": drift("x"), "b": drift("y"), "c": drift("y")}
    assert make_commit(seen("abc"), "", drifts, (), "x").differing == ("a",)
    assert make_commit(seen("ab"), "", {"a": drift("x"), "b": drift("y")}, (), "y").differing == ("a",)


def test_those_that_leave_or_are_always_late_are_not_waited_for_again():
    drifts = {"a": drift(), "b": drift(leaving=True), "c": drift(waited=False)}
    commit = make_commit(seen("abc"), "abcd", drifts, (), "x")
    assert commit.expected == ("a",)
    assert commit.missing == ("d",)
