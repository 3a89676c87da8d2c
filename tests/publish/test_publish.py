"""Weights that follow a trainer: every state whole and bit for bit, whatever is killed, lost, damaged or too slow."""

import collections
import json
import logging
import sys
import threading
from contextlib import suppress
from itertools import count, islice
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from buckets import forget_credentials, s3_bucket, s3_server
from hypothesis import given, settings
from hypothesis import strategies as st
from island_stores import KilledError, failing, killing, wrap, written_once
from jax.sharding import NamedSharding, PartitionSpec

import jaxdist as jd
from jaxdist import islands, publish
from jaxdist.publish import changes, protocol, requests
from jaxdist.publish.protocol import hash_of

FAST = {"poll": 0.005, "timeout": 0.0}


def make_state(seed, size=300):
    """A tree of several dtypes, of which every seed is another state."""
    rng = np.random.default_rng(seed)
    bits = jnp.asarray(rng.integers(0, 256, size, dtype=np.uint8))
    return {
        "matrix": jnp.asarray(rng.normal(size=(4, size // 4)), jnp.bfloat16),
        "half": jnp.asarray(rng.normal(size=7), jnp.float16),
        "fp8": jnp.asarray(rng.normal(size=(2, 3)), jnp.float8_e4m3fn),
        "scalar": jnp.float32(seed),
        "empty": jnp.zeros((0, 3), jnp.bfloat16),
        "flags": bits > 127,
        "codes": jax.lax.bitcast_convert_type(bits, jnp.int8),
    }


def step_from(params, seed, share=0.02):
    """Moves a share of the bits of a state: NaN and infinities come about, too."""
    rng = np.random.default_rng(seed)

    def move(x):
        if x.dtype == bool:
            return jax.device_put(np.asarray(x) ^ (rng.random(x.shape) < share), x.sharding)
        words = np.asarray(x).copy().reshape(-1).view(f"u{x.dtype.itemsize}")
        words[rng.random(words.shape) < share] ^= 1 << int(rng.integers(0, 8 * x.dtype.itemsize))
        return jax.device_put(words.view(x.dtype).reshape(x.shape), x.sharding)

    return jax.tree.map(move, params)


def bits_of(params):
    return [(np.asarray(x).tobytes(), str(x.dtype), x.shape) for x in jax.tree.leaves(params)]


def publish_all(store, states, sent=None, **options):
    with publish.open(store, **options) as out:
        for step, params in states:
            out.put(params, step=step)
            out.flush()
            if sent is not None:
                sent.append(step)
    return out


def read_into(found, store, like, start="oldest", **options):
    for params, step in publish.follow(store, like=like, start=start, **(FAST | options)):
        found.append((step, bits_of(params)))
    return found


def read_all(store, like, start="oldest", **options):
    return read_into([], store, like, start, **options)


def chain_of_states(count, seed=0):
    states = [(0, make_state(seed))]
    for number in range(1, count):
        states.append((number, step_from(states[-1][1], seed + number)))
    return states


@pytest.fixture(scope="module")
def states():
    return chain_of_states(12)


@pytest.fixture(scope="module")
def wanted(states):
    return [(step, bits_of(params)) for step, params in states]


def test_every_state_comes_back_bit_for_bit(states, wanted):
    store = written_once()
    publish_all(store, states, anchor_every=5)
    like = states[0][1]
    assert read_all(store, like) == wanted
    # One that comes later reads one anchor, of each fifth state, and the patches since.
    asked = []

    def around(number, name, function, arguments):
        asked.append((name, arguments[0]))
        return function(*arguments)

    assert read_all(wrap(store, around), like, "newest") == wanted[-1:]
    bodies = [name.partition("-")[0] for kind, name in asked if kind == "get" and "-" in name]
    assert bodies == ["anchors/00000011", "patches/00000012"]


@settings(max_examples=5)
@given(st.integers(0, 2**31), st.sampled_from([0.0, 0.01, 0.3, 1.0]), st.sampled_from([1, 3, 50]))
def test_random_changes_come_back(seed, share, anchor_every):
    store, params = islands.memory(), make_state(seed)
    states = [(0, params)]
    for number in range(1, 8):
        params = step_from(params, seed + number, share)
        states.append((number, params))
    publish_all(store, states, anchor_every=anchor_every)
    assert read_all(store, params) == [(step, bits_of(params)) for step, params in states]


DTYPES = ("bfloat16", "float16", "float32", "int8", "int32", "bool", "float8_e4m3fn", "complex64")
# Of four bits, each in a byte on the host; and without a sign, or a mantissa.
DTYPES += ("int4", "float4_e2m1fn", "uint16", "float8_e8m0fnu")


def draw_tree(rng, mesh):
    """One to four leaves of any dtype and shape, on one device, on all, or cut along one dimension."""

    def draw_leaf():
        shape = tuple(8 * rng.integers(0, 9, rng.integers(0, 3)))
        specs = [PartitionSpec(), *(PartitionSpec(*[None] * n, "data") for n in range(len(shape)))]
        x = rng.normal(size=shape).astype(jnp.dtype(rng.choice(DTYPES)))
        return jax.device_put(x, NamedSharding(mesh, specs[rng.integers(len(specs))]) if rng.random() < 0.7 else None)

    return [draw_leaf() for _ in range(rng.integers(1, 5))]


def publish_and_follow_with_kills(seed, count, mesh):
    """Publishers and followers are killed at any request, and others take their places."""
    rng = np.random.default_rng(seed)
    params = draw_tree(rng, mesh)
    # Anchors of one piece, or of three: with more, few would come to the end of one.
    pieces = int(rng.choice([1, 3]))
    with mock.patch.object(requests, "PIECE", 8 + sum(x.nbytes for x in jax.tree.leaves(params)) // pieces):
        publish_and_follow(rng, seed, params, count)


def publish_and_follow(rng, seed, params, count):
    store, wanted, number = islands.memory(), {}, 0
    while number < count:
        options = {"compare_on": str(rng.choice(["host", "device"])), "anchor_every": int(rng.integers(1, 9))}
        with suppress(KilledError), publish.open(killing(store, int(rng.integers(3, 50))), **options) as out:
            while number < count:
                wanted[number] = bits_of(params)
                out.put(params, step=number)
                out.flush()
                params, number = step_from(params, seed + number, float(rng.choice([0, 0.01, 0.3, 1]))), number + 1
        found = []
        with suppress(KilledError):
            read_into(found, killing(store, int(rng.integers(1, 50))), params, str(rng.choice(["newest", "oldest"])))
        assert all(bits == wanted[step] for step, bits in found)
        assert [step for step, _ in found] == sorted(step for step, _ in found)
    assert read_all(store, params, "newest") == [(count - 1, wanted[count - 1])]


def test_long_anchors_are_read_in_pieces(states, wanted, monkeypatch, caplog):
    monkeypatch.setattr(requests, "PIECE", 100)
    store, asked = islands.memory(), []
    publish_all(store, states[:8], anchor_every=3)

    def around(number, name, function, arguments):
        if "anchors/" in arguments[0] and name != "list":
            asked.append((name, *arguments))
        return function(*arguments)

    (first, second, third), like = store.list("anchors/"), states[0][1]
    assert read_all(wrap(store, around), like) == wanted[:8]
    size = len(store.get(first))
    assert sorted(asked) == [("get_range", first, start, min(start + 100, size)) for start in range(0, size, 100)]
    assert read_all(store._replace(get_range=None), like) == wanted[:8]
    # One after the other, where the first one takes long.
    monkeypatch.setattr(requests, "QUICK", 0)
    assert read_all(store, like) == wanted[:8]
    # Cut where a piece ends, so that the last ones are beyond its end; and altered within one.
    store.put(first, store.get(first)[:200])
    assert read_all(store, like) == wanted[3:8]
    store.put(second, store.get(second)[:299] + b"?" + store.get(second)[300:])
    assert read_all(store, like) == wanted[6:8]
    store.delete(third)
    assert read_all(store, like) == []
    assert all(f"{name} has other bytes than its hash says" in caplog.text for name in (first, second))


@pytest.fixture(scope="module")
def pair():
    """Two devices: each compiles programs of its own."""
    return jd.make_mesh({"data": 2}, devices=jax.devices()[:2])


@settings(max_examples=3)
@given(st.integers(0, 2**31))
def test_kills_of_both_sides(pair, seed):
    publish_and_follow_with_kills(seed, 6, pair)


@pytest.mark.slow
@settings(max_examples=40)
@given(st.integers(0, 2**31))
def test_a_thousand_patches_and_kills_of_both_sides(mesh, seed):
    publish_and_follow_with_kills(seed, 25, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["host", "device"])
def test_a_thousand_patches_of_one_chain(place):
    states = chain_of_states(1000)
    store = islands.memory()
    publish_all(store, states, anchor_every=50, keep=1000, compare_on=place)
    assert read_all(store, states[0][1]) == [(step, bits_of(params)) for step, params in states]


def stream_of(states, **options):
    store = islands.memory()
    publish_all(store, states, **options)
    return {name: store.get(name) for kind in ("patches/", "anchors/") for name in store.list(kind)}


def test_the_stream_is_the_same_wherever_words_are_compared(pair, monkeypatch):
    monkeypatch.setattr(changes, "LEAST_ROOM", 8)
    cut = {"rows": PartitionSpec("data"), "columns": PartitionSpec(None, "data"), "copies": PartitionSpec()}
    params = {
        name: jax.device_put(jax.random.normal(jax.random.key(0), (16, 24)), NamedSharding(pair, spec))
        for name, spec in cut.items()
    }
    params |= make_state(0) | {"pair": jnp.ones(3, jnp.complex64), "on the host": np.arange(5.0)}
    states = [(0, params)]
    for number, share in enumerate([0.0, 0.02, 0.4]):
        moved = step_from({key: x for key, x in states[-1][1].items() if key != "on the host"}, number, share)
        states.append((number + 1, moved | {"on the host": states[-1][1]["on the host"] + (number == 2)}))
    for dtype in (None, jnp.bfloat16):
        assert stream_of(states, dtype=dtype, compare_on="device") == stream_of(states, dtype=dtype)


def test_a_device_compiles_for_powers_of_two():
    compact = changes._compact
    compact.clear_cache()
    old = jnp.zeros(2**14)
    for changed in range(1, 4000, 99):
        found = changes.find_changes_on_device(old, jnp.asarray(np.arange(2**14) < changed, old.dtype))
        assert found.where.tolist() == list(range(changed))
    assert compact._cache_size() == 3  # 1,024, 2,048 and 4,096


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_requests_that_fail_are_tried_again(states, wanted, after, monkeypatch):
    monkeypatch.setattr(requests, "PAUSES", (0.001, 5.0))
    store = islands.memory()
    flaky = failing(store, range(0, 1000, 3), after=after)
    publish_all(flaky, states[:4])
    assert read_all(failing(store, range(0, 1000, 3)), states[0][1]) == wanted[:4]


@pytest.mark.parametrize("moment", [*range(0, 12), 20, 36])
def test_a_publisher_killed_at_any_request_goes_on_with_the_chain(states, wanted, moment):
    store, sent = written_once(), []
    with pytest.raises(KilledError):
        publish_all(killing(store, moment), states, sent, anchor_every=3)
    found = read_all(store, states[0][1])
    assert [step for step, _ in found[: len(sent)]] == sent
    assert found == wanted[: len(found)]
    publish_all(store, states[len(found) :], anchor_every=3)
    assert read_all(store, states[0][1]) == wanted
    records = [json.loads(store.get(name)) for name in store.list("commits/")]
    assert [one["previous"] for one in records[1:]] == [hash_of(store.get(name)) for name in store.list("commits/")][
        :-1
    ]


@pytest.mark.parametrize("moment", range(0, 16, 3))
def test_a_follower_killed_at_any_request_starts_again(states, wanted, moment):
    store = islands.memory()
    publish_all(store, states[:4])
    found = []
    with pytest.raises(KilledError):
        read_into(found, killing(store, moment), states[0][1], timeout=None)
    assert found == wanted[: len(found)]
    assert read_all(store, states[0][1], "newest") == wanted[3:4]


def test_a_restarted_publisher_sends_a_patch(states):
    store = islands.memory()
    publish_all(store, states[:3])
    out = publish_all(store, states[3:4])
    assert (out.newest.number, out.newest.session, out.newest.anchor) == (4, 2, "")
    assert out.newest.patch_bytes > 0


def test_of_two_publishers_the_older_one_is_refused(states, wanted):
    store = islands.memory()
    first = publish.open(store)
    first.put(states[0][1], step=0)
    first.flush()
    publish_all(store, states[1:2])
    first.put(states[2][1], step=2)
    with pytest.raises(publish.SecondPublisherError, match="number 1"):
        first.close()
    with pytest.raises(publish.SecondPublisherError):
        first.put(states[2][1], step=2)
    assert read_all(store, states[0][1]) == wanted[:2]


def test_a_last_record_of_the_older_publisher_is_gone_on_from(states, wanted):
    store, second = islands.memory(), None

    def around(number, name, function, arguments):
        # The older one creates its record when the newer one has found the end of the chain.
        nonlocal second
        if name == "create" and arguments[0] == "commits/00000002" and second is None:
            second = publish.open(store)
            second._check_leaves(publish.words.describe(states[0][1], None))
            second._resume()
            second._resume = lambda: None
        return function(*arguments)

    first = publish.open(wrap(store, around))
    for step, params in states[:2]:
        first.put(params, step=step)
        first.flush()
    second.put(states[2][1], step=2)
    second.close()
    assert (second.newest.number, second.newest.patch, bool(second.newest.anchor)) == (3, "", True)
    assert read_all(store, states[0][1]) == wanted[:3]


@pytest.mark.parametrize("harm", ["cut", "altered", "missing"])
@pytest.mark.parametrize("kind", ["patches", "commits"])
def test_what_is_damaged_is_skipped_to_the_next_anchor(states, wanted, caplog, kind, harm):
    store = islands.memory()
    publish_all(store, states[:9], anchor_every=4)
    (name,) = store.list(f"{kind}/00000003")
    body = store.get(name)
    store.delete(name)
    if harm != "missing":
        store.put(name, body[:-1] if harm == "cut" else body[:20] + b"9" + body[21:])
    with caplog.at_level(logging.WARNING, "jaxdist.publish"):
        found = read_all(store, states[0][1])
    assert "00000003" in caplog.text
    assert found == wanted[:2] + wanted[4:9]


def test_damage_without_an_anchor_is_an_error(states, wanted):
    store, found = islands.memory(), []
    publish_all(store, states[:4])
    (name,) = store.list("patches/00000003")
    store.put(name, b"other bytes")
    with pytest.raises(publish.PublishDamagedError, match=name):
        read_into(found, store, states[0][1], timeout=None, patience=0.01)
    assert found == wanted[:2]
    # The next anchor mends it, also where the publisher itself cannot read the state any more.
    publish_all(store, states[4:5])
    assert read_all(store, states[0][1]) == wanted[:2] + wanted[4:5]


def test_a_damaged_anchor_is_passed_by_patches(states, wanted, caplog):
    store = islands.memory()
    publish_all(store, states[:7], anchor_every=5)
    (name,) = store.list("anchors/00000006")
    store.put(name, store.get(name)[:-1] + b"?")
    assert read_all(store, states[0][1], "newest") == wanted[6:7]
    assert name in caplog.text


def forge(record, **fields):
    """A record that says something else, as early ones without a hash of themselves."""
    found = json.loads(record)
    return json.dumps({name: value for name, value in (found | fields).items() if name != "check"}).encode()


def test_a_record_is_damaged_if_any_byte_is_another(states, wanted):
    store = islands.memory()
    publish_all(store, states[:2])
    record = store.get("commits/00000002")
    for place in range(len(record)):
        for byte in (record[place] ^ 1, record[place] ^ 2, ord("9"), ord('"')):
            if byte != record[place]:
                altered = record[:place] + bytes([byte]) + record[place + 1 :]
                with pytest.raises(publish.PublishDamagedError):
                    protocol.read_publication("commits/00000002", altered)
    store.put("commits/00000002", record.replace(b'"step":1', b'"step":3'))
    assert read_all(store, states[0][1]) == wanted[:1]
    store.put("commits/00000002", forge(record))
    assert read_all(store, states[0][1]) == wanted[:2]


def test_a_state_of_other_bits_than_its_record_says_is_never_shown(states, wanted):
    store = islands.memory()
    publish_all(store, states[:3])
    store.put("commits/00000002", forge(store.get("commits/00000002"), digest="0" * 32))
    assert read_all(store, states[0][1]) == wanted[:1]


def test_what_was_yielded_stays_as_it_is(states):
    store = islands.memory()
    publish_all(store, states)
    following = publish.follow(store, like=states[0][1], start="oldest", **FAST)
    found = [params for params, _ in following]
    assert [bits_of(params) for params in found] == [bits_of(params) for _, params in states]


class Unreadable:
    """An array whose numbers take long to get."""

    shape, dtype = (3,), np.dtype(np.float32)

    def __array__(self, *args, **kwargs):
        raise AssertionError("copied to the host")


def test_to_describe_an_array_copies_nothing():
    (leaf,) = publish.words.describe([Unreadable()], jnp.bfloat16)
    assert (leaf.shape, leaf.dtype) == ((3,), "bfloat16")


def test_a_tree_is_described_once_and_another_one_is_refused():
    module, params = sys.modules["jaxdist.publish.publisher"], {"w": jnp.ones(3), "b": np.ones(2, np.float32)}
    store = islands.memory()
    with mock.patch.object(module, "describe", wraps=module.describe) as describe, publish.open(store) as out:
        for step in range(3):
            out.put(params, step=step)
        assert describe.call_count == 1
        for other in (jnp.ones(4), jnp.ones(3, jnp.bfloat16), {"w": jnp.ones(3)}):
            with pytest.raises(publish.PublishMismatchError, match="'w"):
                out.put(params | {"w": other}, step=3)
        with pytest.raises(ValueError, match="`w` is a key"):
            out.put(params | {"w": jax.random.split(jax.random.key(0), 3)}, step=3)
        out.put(params, step=4)
    assert read_all(store, params, "newest") == [(4, bits_of(params))]


@pytest.mark.parametrize("place", ["host", "device"])
def test_what_was_put_may_be_donated(place):
    double = jax.jit(lambda x: 2 * x, donate_argnums=0)
    store, x, wanted = islands.memory(), jnp.ones(1000), []
    with publish.open(store, compare_on=place) as out:
        for step in range(5):
            out.put(x, step=step)
            wanted.append((step, bits_of(x)))
            x = double(x)
            out.flush()
    assert read_all(store, x) == wanted


def test_newer_states_take_the_place_of_those_that_wait(states, wanted):
    store, gate = islands.memory(), threading.Event()

    def around(number, name, function, arguments):
        if name == "put":
            assert gate.wait(60)
        return function(*arguments)

    with publish.open(wrap(store, around)) as out:
        for step, params in states:
            out.put(params, step=step)
        gate.set()
    found = read_all(store, states[0][1])
    assert out.skipped == 12 - len(found) >= 10
    assert found[-1] == wanted[-1]
    assert all(one in wanted for one in found)


def test_the_newest_state_is_shown_where_the_caller_is_slow(states, wanted):
    store = islands.memory()
    following = publish.follow(store, like=states[0][1], poll=0.001)
    with publish.open(store) as out:
        for last in (2, 5, 11):
            for step, params in states[:last]:
                out.put(params, step=step)
                out.flush()
            params, step = next(following)
            assert (step, bits_of(params)) == wanted[last - 1]


def test_a_follower_that_reads_slower_than_a_trainer_publishes_is_shown_states(monkeypatch):
    monkeypatch.setattr(sys.modules["jaxdist.publish.follower"], "MOST_OVERTAKEN", 3)
    store, steps = islands.memory(), count()
    with publish.open(store) as out:

        def around(number, name, function, arguments):
            out.put(jnp.zeros(100), step=next(steps))
            out.flush()
            return function(*arguments)

        following = publish.follow(wrap(store, around), like=jnp.zeros(100), poll=0.001)
        shown = [step for _, step in islice(following, 3)]
    assert shown == sorted(shown)


def test_old_states_are_deleted_and_slow_followers_go_on(states, wanted, caplog):
    store = islands.memory()
    following = publish.follow(store, like=states[0][1], start="oldest", **FAST)
    publish_all(store, states[:2], anchor_every=3, keep=2)
    assert next(following)[1] == 0
    publish_all(store, states[2:], anchor_every=3, keep=2)
    assert store.list("commits/")[0] == "commits/00000007"
    assert [name[:16] for name in store.list("anchors/")] == ["anchors/00000007", "anchors/00000010"]
    assert [(step, bits_of(params)) for params, step in following] == wanted[6:]
    assert "cleaned up" in caplog.text
    assert read_all(store, states[0][1]) == wanted[6:]


def test_clean_up_by_number_and_age(states, wanted):
    store = islands.memory()
    publish_all(store, states, anchor_every=3)
    assert publish.clean_up(store, keep=2, older=3600) == 0
    assert publish.clean_up(store, keep=5) == 6 + 6 + 1  # records, patches and anchors of the first six
    assert read_all(store, states[0][1]) == wanted[6:]


def test_leaves_are_put_to_the_shardings_of_the_follower(mesh):
    split = NamedSharding(mesh, PartitionSpec("data"))
    params = {"w": jax.device_put(jnp.arange(64.0).reshape(16, 4), split), "b": jnp.ones(3)}
    store = islands.memory()
    with publish.open(store, dtype=jnp.bfloat16) as out:
        out.put(params, step=1)
    other = NamedSharding(mesh, PartitionSpec(None, None))
    for sharding in (split, other):
        like = {"w": jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=sharding), "b": np.zeros(3)}
        found, _ = next(publish.follow(store, like=like, **FAST))
        assert found["w"].sharding == sharding
        assert found["w"].dtype == found["b"].dtype == jnp.bfloat16
        assert (found["w"] == params["w"]).all()


def test_twenty_followers_of_a_folder(tmp_path, states, wanted):
    found, problems = [[] for _ in range(20)], []

    def follow(number):
        try:
            for params, step in publish.follow(tmp_path, like=states[0][1], poll=0.02, timeout=60):
                found[number].append((step, bits_of(params)))
                if step == states[-1][0]:
                    return
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=follow, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    publish_all(tmp_path, states, anchor_every=4)
    for thread in threads:
        thread.join()
    assert not problems
    for states_seen in found:
        assert states_seen[-1] == wanted[-1]
        assert all(one in wanted for one in states_seen)
        assert [step for step, _ in states_seen] == sorted(step for step, _ in states_seen)


def test_a_bucket(states, wanted, tmp_path, monkeypatch):
    pytest.importorskip("obstore")
    forget_credentials(monkeypatch, tmp_path)
    with s3_server() as url:
        store = s3_bucket(url, "s3://islands/policy")
        publish_all(store, states[:4], anchor_every=2, keep=2)
        assert read_all(store, states[0][1], "newest") == wanted[3:4]
        publish_all(store, states[4:5])
        assert read_all(store, states[0][1])[-1] == wanted[4]
        assert publish.status(store, verify=True).problems == ()
        name = store.list("patches/")[-1]
        store.put(name, store.get(name)[:-1])
        assert publish.status(store).problems[0].startswith(f"{name} is cut")


def test_status_names_what_is_wrong(states):
    store = islands.memory()
    with pytest.raises(publish.NothingPublishedError):
        publish.status(store)
    publish_all(store, states[:5], anchor_every=2)
    found = publish.status(store, last=3)
    assert ([one.step for one in found.publications], found.states, found.publishers) == ([2, 3, 4], 5, 1)
    assert found.leaves["matrix"] == "bfloat16[4, 75]"
    assert found.whole_bytes == sum(x.nbytes for x in jax.tree.leaves(states[0][1]))
    assert found.problems == ()
    (gone,) = store.list("patches/00000005")
    store.delete(gone)
    store.put("notes.txt", b"hello")
    store.put("commits/00000004", b"{}")
    problems = publish.status(store).problems
    assert problems[0] == "notes.txt is foreign"
    assert problems[1].startswith("commits/00000004 is no record")
    assert problems[2] == f"{gone} is missing"


def spoil(store, name, harm):
    body = store.get(name)
    store.delete(name)
    spoiled = {"cut": body[:-1], "longer": body + b"?", "altered": body[:-1] + b"?"}
    if harm != "missing":
        store.put(name, spoiled[harm])


@pytest.mark.parametrize("kind", ["patches/00000004", "anchors/00000005"])
def test_status_names_damaged_bytes(states, kind):
    store = islands.memory()
    said = {"missing": "is missing", "cut": "is cut or too long", "longer": "is cut or too long"}
    publish_all(store, states[:5], anchor_every=2)
    (name,), whole = store.list(kind), {name: store.get(name) for name in store.list("")}
    for harm, message in (said | {"altered": "has other bytes than its hash says"}).items():
        spoil(store, name, harm)
        (problem,) = publish.status(store, verify=True).problems
        assert problem.startswith(f"{name} {message}")
        assert publish.status(store).problems == ((problem,) if harm in said else ())
        # As far as a store tells without ranges.
        assert publish.status(store._replace(get_range=None), verify=True).problems
        store.put(name, whole[name])
    assert publish.status(store, verify=True).problems == ()


def test_status_names_records_that_are_missing_or_altered(states):
    store = islands.memory()
    publish_all(store, states[:9])
    for number in (3, 5, 6):
        store.delete(f"commits/{number:08d}")
    gaps = ("commits/00000003 is missing", "commits/00000005 to commits/00000006 are missing")
    assert publish.status(store, last=1).problems == gaps
    store.put("commits/00000008", forge(store.get("commits/00000008"), step=3))
    (problem,) = publish.status(store, last=2).problems[len(gaps) :]
    assert problem == "commits/00000009 does not follow the record before it: one of the two was altered"


def test_status_beside_a_clean_up(states):
    """A record that is gone after the names were listed is not damaged."""
    store = islands.memory()
    publish_all(store, states[:3])
    first = "commits/00000001"
    cleaned = wrap(store, lambda number, name, function, given: None if given[0] == first else function(*given))
    found = publish.status(cleaned)
    assert ([one.step for one in found.publications], found.problems) == ([1, 2], ())


def test_a_name_that_only_looks_like_one_of_the_protocol_is_foreign(states, wanted):
    store = islands.memory()
    publish_all(store, states[:2])
    # Sorted as text it is the last one.
    store.put("commits/5", b"mine")
    assert publish.status(store).problems == ("commits/5 is foreign",)
    publish_all(store, states[2:3])
    assert read_all(store, states[0][1]) == wanted[:3]


def test_what_is_refused(states, tmp_path):
    store = islands.memory()
    publish_all(store, states[:1])
    params = states[0][1]
    with pytest.raises(publish.PublishMismatchError, match="'half' is float16"):
        publish.open(store).put(params | {"half": jnp.zeros(8)}, step=1)
    with pytest.raises(publish.PublishMismatchError, match="'more' is absent there"):
        next(publish.follow(store, like=params | {"more": jnp.zeros(8)}))
    with pytest.raises(ValueError, match="key of random numbers"):
        publish.open(islands.memory()).put({"key": jax.random.key(0)}, step=0)
    with pytest.raises(ValueError, match="floating-point"):
        publish.open(store, dtype=jnp.int8)
    with pytest.raises(ValueError, match="anchor_every"):
        publish.open(store, anchor_every=0)
    with pytest.raises(ValueError, match="step must be at least 0"):
        publish.open(store).put(params, step=-1)
    careless = store._replace(create=lambda name, body: store.put(name, body) or True)
    with pytest.raises(publish.PublishError, match="create if absent"):
        publish.open(careless)
    store.put("publish.json", b"[]")
    with pytest.raises(publish.PublishDamagedError, match="restore it"):
        publish.open(store)


@pytest.mark.parametrize("leaf", ["text", object(), np.array([None]), np.zeros(2, np.longdouble), np.array(["a"])])
def test_a_leaf_that_is_no_array_of_numbers_is_refused(leaf):
    with pytest.raises(ValueError, match=r"`name` is .*, and no array of numbers; leave it out"):
        publish.open(islands.memory()).put({"name": leaf, "w": jnp.ones(3)}, step=0)


def test_numbers_of_python_are_those_that_jax_makes_of_them():
    store, params = islands.memory(), {"rate": 0.1, "count": 3, "flag": True, "phase": 1j}
    publish_all(store, [(0, params)])
    assert read_all(store, params) == [(0, bits_of(jax.tree.map(jnp.asarray, params)))]
    with pytest.raises(OverflowError):
        publish.open(islands.memory()).put(2**40, step=0)


@pytest.mark.parametrize("dtype", ["float64", "int64", "uint64", "complex128"])
def test_numbers_of_64_bits_are_not_rounded(dtype):
    store, params = islands.memory(), {"w": np.arange(3).astype(dtype) + 2**25}
    publish_all(store, [(0, params)])
    with pytest.raises(publish.PublishMismatchError, match=f"'w' in {dtype}, .* set jax_enable_x64"):
        read_all(store, params)
    with jax.enable_x64(True):
        assert read_all(store, params) == [(0, bits_of(params))]


def test_leaves_of_one_name_are_told_apart():
    """`value` is what marks add to a path, and also the head of an actor and critic; a dot is a letter, too."""
    store, params = islands.memory(), {"value": {"w": jnp.ones(3)}, "w": jnp.zeros(3), "a.b": jnp.ones(1)}
    params |= {"a": {"b": jnp.zeros(1)}}
    publish_all(store, [(0, params)])
    assert read_all(store, params) == [(0, bits_of(params))]
    assert len(publish.status(store).leaves) == 4
    for other in (
        {name: x for name, x in params.items() if name != "value"},
        params | {"value": {"w": jnp.ones(4)}},
        params | {"a.b": jnp.ones(2)},
    ):
        with pytest.raises(publish.PublishMismatchError, match="holds other parameters"):
            read_all(store, other)
        with pytest.raises(publish.PublishMismatchError, match="holds other parameters"):
            publish.open(store).put(other, step=1)


def test_a_sharding_without_devices_is_refused(mesh):
    """As `jax.eval_shape` makes it of arrays on a mesh of explicit axes."""
    sharding = NamedSharding(mesh.abstract_mesh, PartitionSpec("data"))
    like = {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)}
    with pytest.raises(ValueError, match=r"`w` on an abstract mesh.*NamedSharding\(mesh, spec\)"):
        publish.follow(islands.memory(), like=like)


FirstA = collections.namedtuple("FirstA", "a b")
FirstB = collections.namedtuple("FirstB", "b a")


def test_leaves_in_another_order_are_refused():
    """Their names and shapes are the same: words would be those of another leaf."""
    store, leaves = islands.memory(), {"a": jnp.ones(3), "b": jnp.zeros(3)}
    publish_all(store, [(0, FirstA(**leaves))])
    message = "in the order .'a', 'b'., not .'b', 'a'."
    with pytest.raises(publish.PublishMismatchError, match=message):
        read_all(store, FirstB(**leaves))
    with pytest.raises(publish.PublishMismatchError, match=message):
        publish.open(store).put(FirstB(**leaves), step=1)


def test_a_store_that_is_out_of_reach_is_an_error(states):
    away = failing(islands.memory(), range(100))
    with pytest.raises(publish.PublishOfflineError, match="503 SlowDown"):
        publish.open(away, patience=0)
    with pytest.raises(publish.PublishOfflineError):
        next(publish.follow(away, like=states[0][1], patience=0))

    def around(number, name, function, arguments):
        if name == "put":
            raise PermissionError("403")
        return function(*arguments)

    out = publish.open(wrap(islands.memory(), around))
    out.put(states[0][1], step=0)
    with pytest.raises(publish.PublishOfflineError, match="refuses a request: PermissionError: 403"):
        out.close()


def test_a_trainer_that_fails_says_why(states):
    out = publish.open(islands.memory())
    with pytest.raises(ZeroDivisionError), out:
        raise ZeroDivisionError
    with pytest.raises(publish.PublishError, match="is closed"):
        out.put(states[0][1], step=0)


def test_a_place_that_was_replaced_is_told(states):
    store = islands.memory()
    publish_all(store, states[:3])
    following = publish.follow(store, like=states[0][1], poll=0.001)
    next(following)
    for name in store.list(""):
        store.delete(name)
    publish_all(store, states[:1])
    with pytest.raises(publish.PublishMismatchError, match="was replaced"):
        list(islice(following, 1))


@pytest.mark.parametrize("start", ["newest", "oldest"])
def test_other_weights_are_not_taken_for_a_later_state(start):
    """The new trainer is ahead already, and its anchors have as many bytes, in another dtype."""
    store = islands.memory()
    publish_all(store, [(step, jnp.full(9, step, jnp.bfloat16)) for step in range(3)])
    following = publish.follow(store, like=jnp.zeros(9), start=start, poll=0.001)
    next(following)
    for name in store.list(""):
        store.delete(name)
    publish_all(store, [(step, jnp.full(9, step, jnp.float16)) for step in range(8)], anchor_every=2)
    with pytest.raises(publish.PublishMismatchError, match="was replaced"):
        next(following)


def test_the_module_is_in_the_package():
    assert jd.publish is publish
