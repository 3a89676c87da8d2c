"""The protocol of a run: its bytes and records, those that are damaged, and the decisions of a round."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist.islands import DamagedError
from jaxdist.islands.protocol import (
    Anchor,
    Commit,
    Drift,
    Member,
    Next,
    Seen,
    decide,
    hash_of,
    make_commit,
    missing_islands,
    pack,
    parse,
    see,
    to_json,
    unpack,
)

ARRAYS = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.zeros((0, 4), np.uint8),
    np.asarray(jnp.ones(3, jnp.bfloat16)),
]
RECORDS = [
    Member("a", "hash", 1.5, None, 3.0, 8),
    Drift(3, "00000002/hash", 9, "base", 2.0, 6.0, 12, 0.1, True, False),
    Anchor(20, "hash", "digest", (("a", "hash"), ("b", "other"))),
    Commit(
        "a",
        "base",
        (Member("a", "h", 1.0, None, 1.0, 8), Member("b", "i", 2.0, 0.5, 0.0, 8)),
        ("c",),
        (),
        ("d",),
        ("a", "b"),
    ),
    Commit("a", "base", (Member("a", "h", 1.0, None, 1.0, 8, ("x", "y")),), (), (), (), ()),
]


def test_arrays_come_back_in_every_bit():
    body = pack("rounds/1", ARRAYS)
    for x, y in zip(ARRAYS, unpack(hash_of(body), body, ARRAYS), strict=True):
        assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())


def test_equal_arrays_of_two_rounds_have_two_names():
    assert hash_of(pack("rounds/1", ARRAYS)) != hash_of(pack("rounds/2", ARRAYS))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_records_come_back(record):
    assert parse(type(record), "name", to_json(record)) == record


@settings(max_examples=40)
@given(cut=st.integers(0, 200), flip=st.integers(0, 10**6))
def test_a_damaged_body_is_named(cut, flip):
    body = pack("x", ARRAYS)
    name = hash_of(body)
    altered = bytearray(body)
    altered[flip % len(body)] ^= 1
    for damaged in (body[: cut % len(body)], bytes(altered), b""):
        with pytest.raises(DamagedError, match=name):
            unpack(name, damaged, ARRAYS)


def test_arrays_of_another_model_are_refused_before_they_are_read():
    body = pack("x", ARRAYS)
    with pytest.raises(DamagedError, match="other arrays than this run's"):
        unpack(hash_of(body), body, ARRAYS[:2])


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"null", b"{", b'{"round": 1}', b"[" * 100_000])
@pytest.mark.parametrize("kind", [Commit, Drift, Anchor])
def test_an_odd_record_is_named(kind, body):
    with pytest.raises(DamagedError, match=f"rounds/1 is not a record of {kind.__name__}"):
        parse(kind, "rounds/1", body)


NAMES = st.frozensets(st.sampled_from("abcdef"))
SEEN = st.builds(Seen, st.booleans(), NAMES, NAMES, NAMES)
LIMITS = {"since_few": 0.0, "round_timeout": 10.0, "grace": 10.0, "at_least": 1, "quorum": 1}


def drift(base="x", *, waited=True, leaving=False, weight=1.0):
    return Drift(1, "00000002/hash", 9, base, weight, weight, 1, None, waited, leaving)


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


def test_a_round_waits_for_those_that_are_missing_as_long_as_the_grace():
    limits = {**LIMITS, "quorum": 2, "grace": 3.0}
    assert decide(seen("ab"), "abc", elapsed=9, **limits) is Next.WAIT
    assert decide(seen("ab"), "abc", elapsed=9, **{**limits, "since_few": 3}) is Next.COMMIT
    assert decide(seen("a"), "abc", elapsed=9, **{**limits, "since_few": 3}) is Next.WAIT
    assert decide(seen("a"), "abc", elapsed=10, **limits) is Next.WAIT
    assert decide(seen("ab"), "abc", elapsed=10, **limits) is Next.COMMIT
    # The first round needs more of them, until the timeout.
    first = {**limits, "at_least": 3, "since_few": 3}
    assert decide(seen("ab"), "", elapsed=9, **first) is Next.WAIT
    assert decide(seen("ab"), "", elapsed=10, **first) is Next.COMMIT


@given(SEEN, NAMES, st.floats(0, 100), st.floats(0, 100), st.floats(0, 10), st.integers(1, 4))
def test_a_commit_ends_the_round_and_no_round_is_smaller_than_the_quorum(
    found, expected, elapsed, since_few, grace, quorum
):
    since_few = min(since_few, elapsed)
    limits = {**LIMITS, "quorum": quorum, "grace": grace, "since_few": since_few}
    action, is_enough = decide(found, expected, elapsed=elapsed, **limits), len(found.drifts) >= quorum
    assert (action is Next.READ) == found.committed
    if not found.committed:
        is_over = elapsed >= 10 or since_few >= grace or not missing_islands(found, expected)
        assert (action is Next.COMMIT) == (is_enough and is_over)


@given(SEEN, NAMES, st.randoms())
def test_a_commit_does_not_depend_on_the_order_in_which_drifts_are_seen(found, expected, rng):
    drifts = {name: drift(rng.choice("xy"), waited=rng.random() < 0.8) for name in found.drifts}
    damaged = {name for name in drifts if rng.random() < 0.2}
    shuffled = dict(rng.sample(sorted(drifts.items()), len(drifts)))
    one, other = (make_commit(found, expected, d, damaged, "x", "a") for d in (drifts, shuffled))
    assert one == other
    members = [member.name for member in one.members]
    assert members == sorted(members)
    assert {*members, *one.differing, *one.damaged} == set(drifts)
    assert len({drifts[name].base for name in members}) <= 1


def test_most_decide_which_parameters_count_and_oneself_among_equals():
    drifts = {"a": drift("x"), "b": drift("y"), "c": drift("y")}
    assert make_commit(seen("abc"), "", drifts, (), "x", "a").differing == ("a",)
    assert make_commit(seen("ab"), "", {"a": drift("x"), "b": drift("y")}, (), "y", "a").differing == ("a",)


def test_those_that_leave_or_are_always_late_are_not_waited_for_again():
    drifts = {"a": drift(), "b": drift(leaving=True), "c": drift(waited=False)}
    commit = make_commit(seen("abc"), "abcd", drifts, (), "x", "a")
    assert commit.expected == ("a",)
    assert commit.missing == ("d",)
