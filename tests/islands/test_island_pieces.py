"""Long bodies in pieces: sent and read several at once, resumed, verified, killed between two, and cleaned up."""

import itertools
import math
import threading
import tracemalloc
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from island_stores import PROBE_CALLS, KilledError, failing, killing, wrap, written_once
from islands_run import (
    GOALS,
    begin,
    commits_of,
    global_params,
    method,
    sgd,
    step_of,
    train,
    train_together,
    wait_for_upload,
)
from problems import assert_close

from jaxdist import islands
from jaxdist.islands import bodies, exchange, protocol
from jaxdist.islands.bodies import Body, unpack_found
from jaxdist.islands.cleanup import keep_anchor
from jaxdist.islands.connection import Connection

ARRAYS = [
    np.arange(50, dtype=np.float32).reshape(5, 10),
    np.zeros((0, 3), np.int8),
    np.asarray(jnp.arange(7, dtype=jnp.bfloat16)),
    np.arange(200, dtype=np.uint8),
    np.full((), 3.5, np.float32),
]
ROUND = 20


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """So small that the bodies of tests have several."""
    monkeypatch.setattr(bodies, "LONGEST_WHOLE", 100)
    monkeypatch.setattr(bodies, "PIECE", 64)


def asking(store):
    connection = Connection(store)
    connection.deadline = connection.now() + 30
    return connection


def stored(store):
    """A body in a store, in more pieces than are on the way at once."""
    body = Body(ROUND, "it", ARRAYS)
    asking(store).put_body(body)
    assert len(body.hashes) > 2 * bodies.TOGETHER
    return body


def read(store, place):
    return unpack_found(place, asking(store).get_body(place), ARRAYS)


def assert_whole(arrays):
    for found, expected in zip(arrays, ARRAYS, strict=True):
        assert (found.dtype, found.shape) == (expected.dtype, np.shape(expected))
        assert found.tobytes() == expected.tobytes()


# One body


@pytest.mark.parametrize("piece", [200, 301, 1000])
def test_a_long_body_is_stored_in_pieces_under_their_hashes_and_comes_back(piece, monkeypatch):
    monkeypatch.setattr(bodies, "PIECE", piece)
    store = islands.memory()
    body = Body(ROUND, "it", ARRAYS)
    asking(store).put_body(body)
    assert_whole(read(store, body.place))
    whole = protocol.pack("it", ARRAYS)
    assert body.size == len(whole)
    names = store.list("bodies/")
    assert set(names) == {protocol.body_name(body.place), *(f"bodies/{ROUND:08d}/{hashed}" for hashed in body.hashes)}
    assert b"".join(store.get(bodies.piece_name(body.place, hashed)) for hashed in body.hashes) == whole


def test_a_short_body_is_one_object_as_it_was(monkeypatch):
    monkeypatch.setattr(bodies, "LONGEST_WHOLE", 10_000)
    store, body = islands.memory(), Body(ROUND, "it", ARRAYS)
    asking(store).put_body(body)
    assert store.list("") == [protocol.body_name(body.place)]
    assert store.get(protocol.body_name(body.place)) == protocol.pack("it", ARRAYS)
    assert_whole(read(store, body.place))


def test_a_range_of_a_long_body_is_read_from_its_pieces():
    store = islands.memory()
    body, whole = stored(store), protocol.pack("it", ARRAYS)
    asked = []
    counted = wrap(store, lambda number, kind, function, arguments: asked.append(kind) or function(*arguments))
    for start, end in [(0, 1), (60, 70), (64, 128), (10, len(whole))]:
        assert asking(counted).get_range_of_body(body.place, body.size, start, end) == whole[start:end]
    # The index each time, and of (60, 70) two pieces.
    assert Counter(asked) == {"get": 4, "get_range": 1 + 2 + 1 + len(body.hashes)}


@pytest.mark.parametrize("after", [False, True], ids=["refused", "done, and the answer lost"])
def test_an_upload_that_is_cut_sends_that_piece_alone_again(after):
    store, puts = islands.memory(), Counter()
    moments, cut = {1, 5, 8}, failing(store, {1, 5, 8}, after=after)
    counting = cut._replace(put=lambda name, body: puts.update([name]) or cut.put(name, body))
    body = stored(counting)
    assert_whole(read(store, body.place))
    assert puts.total() == len(body.hashes) + 1 + len(moments)
    assert max(puts.values()) <= 1 + len(moments)


def test_bytes_and_requests_are_counted():
    store = islands.memory()
    connection = asking(store)
    body = Body(ROUND, "it", ARRAYS)
    connection.put_body(body)
    connection.get_body(body.place)
    traffic = connection.take_traffic()
    assert traffic.sent == traffic.received == body.size + len(body.stored)
    assert traffic.requests == 2 * (len(body.hashes) + 1)


@pytest.mark.parametrize("kind", ["put", "get"])
def test_pieces_are_on_the_way_several_at_once(kind, monkeypatch):
    """After the first, which shows how long one takes. The index is put last and read first."""
    monkeypatch.setattr(bodies, "QUICK", math.inf)
    store, lock, inside, most = islands.memory(), threading.Lock(), [], []
    together = threading.Barrier(bodies.TOGETHER)
    # As many as a barrier lets through in whole groups.
    arrays = [np.random.default_rng(0).integers(0, 256, 64 * (1 + 2 * bodies.TOGETHER) - 100, np.uint8)]
    body = Body(ROUND, "it", arrays)
    assert len(body.hashes) == 1 + 2 * bodies.TOGETHER
    calls = itertools.count()
    alone = {0} | ({1 + 2 * bodies.TOGETHER} if kind == "put" else {1})

    def around(number, name, function, arguments):
        if name == kind:
            with lock:
                call = next(calls)
                inside.append(call)
                most.append(len(inside))
            if call not in alone:
                together.wait(timeout=30)
            with lock:
                inside.remove(call)
        return function(*arguments)

    if kind == "get":
        asking(store).put_body(body)
    connection = asking(wrap(store, around))
    if kind == "put":
        connection.put_body(body)
    found = connection.get_body(body.place)
    assert max(most) == bodies.TOGETHER
    (array,) = unpack_found(body.place, found, arrays)
    np.testing.assert_array_equal(array, arrays[0])


def test_pieces_of_a_slow_link_come_one_after_another(monkeypatch):
    monkeypatch.setattr(bodies, "QUICK", -1.0)
    store, inside, most = islands.memory(), [], []

    def around(number, name, function, arguments):
        inside.append(name)
        most.append(len(inside))
        answer = function(*arguments)
        inside.pop()
        return answer

    slow = wrap(store, around)
    assert_whole(read(slow, stored(slow).place))
    assert max(most) == 1


@pytest.mark.parametrize("times", [1, bodies.TRIES - 1])
def test_a_piece_that_was_cut_on_the_way_is_read_again_alone(times):
    store = islands.memory()
    body, gets = stored(store), Counter()
    bad = bodies.piece_name(body.place, body.hashes[3])

    def get(name):
        gets[name] += 1
        return store.get(name)[:-1] if name == bad and gets[name] <= times else store.get(name)

    assert_whole(read(store._replace(get=get), body.place))
    assert gets.pop(bad) == 1 + times
    assert set(gets.values()) == {1}


def test_a_read_that_fails_goes_on_where_it_was():
    store = islands.memory()
    body, gets = stored(store), Counter()
    cut = failing(store, {3, 6, 7})

    def get(name):
        gets[name] += 1
        return cut.get(name)

    assert_whole(read(store._replace(get=get), body.place))
    assert gets.total() == 1 + len(body.hashes) + 3


@pytest.mark.parametrize("damage", [lambda store, name: store.delete(name), lambda store, name: store.put(name, b"x")])
def test_a_piece_that_stays_missing_or_damaged_is_named_and_the_others_are_kept(damage):
    store = islands.memory()
    body, gets = stored(store), Counter()
    connection = asking(store._replace(get=lambda name: gets.update([name]) or store.get(name)))
    bad = bodies.piece_name(body.place, body.hashes[3])
    good = store.get(bad)
    damage(store, bad)
    with pytest.raises(islands.DamagedError, match=f"piece 3 of the body {body.place} is missing or damaged"):
        unpack_found(body.place, connection.get_body(body.place), ARRAYS)
    store.put(bad, good)
    assert_whole(unpack_found(body.place, connection.get_body(body.place), ARRAYS))
    assert gets.pop(bad) == bodies.TRIES + 1
    assert set(gets.values()) == {1}


def test_a_damaged_index_is_a_damaged_body():
    store = islands.memory()
    body = stored(store)
    store.put(protocol.body_name(body.place), body.stored[:-3] + b'f"]')
    with pytest.raises(islands.DamagedError, match="has another hash"):
        read(store, body.place)


def test_neither_sending_nor_reading_holds_a_second_copy(monkeypatch):
    """Kept parameters are as large as the state: beside them there are pieces alone."""
    monkeypatch.setattr(bodies, "LONGEST_WHOLE", 2**17)
    monkeypatch.setattr(bodies, "PIECE", 2**16)
    arrays = [np.random.default_rng(number).random(2**19, np.float32) for number in range(4)]
    size, store = 4 * 2**21, islands.memory()
    pieces = []
    tracemalloc.start()
    try:
        forgetful = islands.memory()._replace(put=lambda name, body: pieces.append(len(body)))
        keep_anchor(asking(forgetful), ROUND, "digest", (), arrays)
        sent = tracemalloc.get_traced_memory()[1]
        keep_anchor(asking(store), ROUND, "digest", (), arrays)
        place = protocol.parse(protocol.Anchor, "", store.get(protocol.anchor_name(ROUND))).body
        found = asking(store).get_body(place)
        before = tracemalloc.get_traced_memory()[0]
        # The store of this test has the bytes that a bucket would have sent.
        found = [bytes(bytearray(one)) for one in found]
        tracemalloc.reset_peak()
        unpacked = unpack_found(place, found, arrays)
        read = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert sum(pieces) > size
    assert sent < size / 8
    assert read < 1.5 * size
    np.testing.assert_array_equal(unpacked, arrays)


# Runs


@pytest.mark.parametrize(
    ("reducer", "options"),
    [
        ("exact", {}),
        pytest.param("exact", {"overlap": True}, marks=pytest.mark.slow),
        ("exact", {"owners": 3}),
        pytest.param("4 bits with feedback", {}, marks=pytest.mark.slow),
    ],
)
def test_a_run_in_pieces_has_the_bits_of_one_without(reducer, options, monkeypatch):
    tx, found = method(reducer), []
    for longest in (10**6, 100):
        monkeypatch.setattr(bodies, "LONGEST_WHOLE", longest)
        store = written_once()
        runs = train_together(store, tx, ["a", "b"], 3, round_timeout=60, keep_every=1, **options)
        has_pieces = any(store.get(name).startswith(b"jdindex1") for name in store.list("bodies/"))
        assert has_pieces == (longest == 100)
        # With `overlap` a round is taken in the next meeting, and which drifts it has depends on the threads.
        found.append([report.digest for report in runs["a"][1]])
        rounds, params = islands.read(store, tx, begin(tx).params)
        ends = {reports[-1].round: state for state, reports in runs.values()}
        assert rounds in ends or "overlap" in options
        if rounds in ends:
            assert_close(params, global_params(ends[rounds]), tolerance=0)
    assert found[0] == found[1] or "overlap" in options


@pytest.mark.usefixtures("clock")
def test_an_island_that_enters_with_the_bits_of_the_run_reads_none():
    """As all islands that begin together: their parameters may be as large as the memory that is left."""
    store, tx, read = islands.memory(), method(), []
    counted = store._replace(get=lambda name: read.append(name) or store.get(name))
    for name in ("a", "b"):
        with islands.join(counted, tx, name=name, round_timeout=0.05) as island:
            state = island.enter(begin(tx))
            assert_close(state.params, begin(tx).params, tolerance=0)
    assert not [name for name in read if name.startswith("bodies/")]


@pytest.mark.parametrize("change", ["restart_counts", "subtract_counts", "move_counts", "with_examples"])
def test_counting_copies_no_state(change):
    """With fragments each has the moments of the whole model, and a copy for each would be many models."""
    local = method().init(begin(method()).params)
    numbers = {"subtract_counts": [np.int32(1), np.float32(0), np.int32(0), np.float32(0)]}
    changed = getattr(exchange, change)(local, *numbers.get(change, [np.int32(1)]))
    for name in ("anchor", "outer", "inner", "reducer"):
        pairs = zip(*map(jax.tree.leaves, (getattr(local, name), getattr(changed, name))), strict=True)
        assert all(x is y for x, y in pairs)


def test_a_piece_that_is_silent_holds_no_meeting_and_the_upload_goes_on(clock):
    store, silent, puts = islands.memory(), clock.Event(), Counter()
    tx = method(inner=sgd(0.1))

    def put(name, body):
        puts[name] += 1
        if len(puts) == 3 and entered:
            silent.wait()
        store.put(name, body)

    entered = []
    with islands.join(store._replace(put=put), tx, name="a", round_timeout=0.1) as island:
        state = island.enter(begin(tx))
        puts.clear()
        entered.append(True)
        try:
            state, report = island.meet(step_of(tx)(state, GOALS[0]))
            assert report.uploading
            assert report.wait_seconds < 1.1
        finally:
            silent.set()
        wait_for_upload(island)
        island._options = island._options._replace(round_timeout=30)
        _, report = island.meet(state)
        assert report.counted
    # Equal pieces have one name, and are sent once.
    places = [member.body for commit in commits_of(store) for member in commit.members]
    sizes = [len({*bodies.hashes_in(place, store.get(protocol.body_name(place)))}) for place in places]
    assert puts.total() == sum(sizes) + len(sizes)
    assert sum(sizes) < sum(len(bodies.hashes_in(place, store.get(protocol.body_name(place)))) for place in places)


def test_progress_that_an_island_has_left_with_sends_no_more_pieces(clock):
    store, held, puts, tx = islands.memory(), clock.Event(), [], method(inner=sgd(0.1))

    def put(name, body):
        if entered:
            puts.append(name)
            held.wait()
        store.put(name, body)

    entered = []
    with islands.join(store._replace(put=put), tx, name="a", round_timeout=0.1) as island:
        state = island.enter(begin(tx))
        entered.append(True)
        try:
            _, report = island.leave(step_of(tx)(state, GOALS[0]))
        finally:
            held.set()
        assert report.uploading
        wait_for_upload(island)
    assert len(puts) == 1


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("stride", [17, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fragments", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_kill_at_any_call_of_the_store_stops_no_other_island_and_leaves_no_piece(stride, fragments, monkeypatch):
    """Between two pieces too; what the dead one has left goes with its round."""
    monkeypatch.setattr(bodies, "PIECE", 100)
    tx = method(fragments=fragments)
    state, step = begin(tx), step_of(tx)
    options = {"step": step, "state": state, "round_timeout": 0.01, "keep_every": 1}
    for moment in itertools.count(PROBE_CALLS - 1, stride):
        store, was_killed = written_once(), False
        with islands.join(store, tx, name="other", round_timeout=0.01, keep_every=1) as island:
            other = island.enter(state)
            try:
                train(killing(store, moment), tx, "mortal", 2, **options)
            except KilledError:
                was_killed = True
            left = set(store.list("bodies/"))
            for _ in range(2 * protocol.most_rounds(1, fragments)):
                other, report = island.meet(step(other, GOALS[1]))
                island._cleaner.join()
            assert report.counted
            assert not left & set(store.list("bodies/"))
        found, again = train(store, tx, "mortal", 2, **options)
        assert again[-1].counted
        assert_close(islands.read(store, tx, state.params)[1], global_params(found), tolerance=0)
        if not was_killed:
            break
    assert moment > 40


@pytest.mark.usefixtures("clock")
def test_an_island_that_reads_a_body_while_it_is_deleted_goes_on_from_newer_parameters():
    """Of a body that is deleted, pieces may be gone while its index is there."""
    store, indices = islands.memory(), {}
    tx, options = method(inner=sgd(0.1)), {"round_timeout": 0.05, "keep_every": 1}
    step = step_of(tx)
    with (
        islands.join(store, tx, name="slow", **options) as slow,
        islands.join(store, tx, name="fast", **options) as fast,
    ):
        state, other = slow.enter(begin(tx)), fast.enter(begin(tx))
        for _ in range(2 * protocol.most_rounds(1)):
            other, report = fast.meet(step(other, GOALS[1]))
            fast._cleaner.join()
            indices |= {name: store.get(name) for name in store.list("bodies/") if name not in indices}
        (member,) = commits_of(store)[0].members
        name = protocol.body_name(member.body)
        assert store.get(name) is None
        assert bodies.hashes_in(member.body, indices[name])
        store.put(name, indices[name])
        state, report = slow.meet(step(state, GOALS[0]))
        assert report.late
        assert report.round > protocol.most_rounds(1)


def test_requests_of_short_bodies_are_those_of_whole_ones(monkeypatch):
    """The bodies of most runs: one request up, and one down for each other island."""
    monkeypatch.setattr(bodies, "LONGEST_WHOLE", 10_000)
    store, asked = islands.memory(), []

    def around(number, kind, function, arguments):
        if str(arguments[0]).startswith("bodies/"):
            asked.append(kind)
        return function(*arguments)

    train_together(wrap(store, around), method(), ["a", "b"], 2)
    # The first parameters are put by one of them or both, and both see that they are there.
    kinds = Counter(asked)
    assert (kinds["get"], kinds["get_range"]) == (2 * 2, 2)
    assert kinds["put"] - 2 * 2 in (1, 2)
