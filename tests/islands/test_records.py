"""Bodies and records: the bytes of a run, and those that are damaged."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist.islands import DamagedError
from jaxdist.islands.records import Anchor, Commit, Drift, Member, hash_of, pack, parse, to_json, unpack

ARRAYS = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.zeros((0, 4), np.uint8),
    np.asarray(jnp.ones(3, jnp.bfloat16)),
]
RECORDS = [
    Member("a", "hash", 1.5, None),
    Drift(3, "hash", "base", 2.0, 0.1, True, False),
    Anchor(20, "hash", "digest", (("a", "hash"), ("b", "other"))),
    Commit("base", (Member("a", "h", 1.0, None), Member("b", "i", 2.0, 0.5)), ("c",), (), ("d",), ("a", "b")),
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


@settings(max_examples=40, deadline=None)
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
