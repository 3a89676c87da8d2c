"""Islands that average by owners: the bits of a run without them, fewer bytes, and owners that die."""

from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from island_stores import KilledError, wrap, written_once
from islands_run import (
    GOALS,
    State,
    assert_within_ulps,
    begin,
    commits_of,
    compiled_programs,
    global_params,
    make_method,
    method,
    on_a_mesh,
    outer,
    sgd,
    step_of,
    train,
    train_together,
)
from problems import assert_close
from reference.owners import reduce_by_owners
from virtual_clock import VirtualClock

import jaxdist as jd
from jaxdist import islands
from jaxdist.islands import protocol
from jaxdist.islands.owners import OWNERS_SHARE, PieceLayout, line_for

NAMES = ["a", "b", "c"]
# Their weights: powers of two, so that it makes no difference whether the compiler fuses a product and a sum.
EXAMPLES = {"a": 4, "b": 2, "c": 2}


def digests_of(found):
    return {name: [report.digest for report in reports] for name, (_, reports) in found.items()}


# The mean of a piece


@pytest.mark.parametrize("pieces", [1, 3, 4, 50])
def test_pieces_are_averaged_as_in_the_reference(pieces):
    draws = np.random.default_rng(0)
    shapes = [(12, 5), (), (3,), (0, 2)]
    like = tuple(jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes)
    layout, weights = PieceLayout(pieces, like), [3.0, 0.0, 1.5, 2.0]
    drifts = [[draws.normal(size=x.shape).astype(x.dtype) for x in like] for _ in weights]
    cut = [layout.cut(arrays) for arrays in drifts]
    for arrays, rows in zip(drifts, cut, strict=True):
        assert rows.shape == (pieces, layout.size)
        back = layout.join([row.tobytes() for row in rows])
        assert all((x == y).all() and x.shape == y.shape for x, y in zip(back, arrays, strict=True))
    means = [layout.average([rows[piece].tobytes() for rows in cut], weights) for piece in range(pieces)]
    expected, *_ = reduce_by_owners(
        np.array([np.concatenate([np.ravel(x) for x in arrays]) for arrays in drifts], np.float64), weights, pieces
    )
    found = np.concatenate([np.ravel(x) for x in layout.join(means)])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_a_piece_has_a_part_of_each_dtype_and_half_precision_is_added_in_float32():
    like = (jax.ShapeDtypeStruct((5,), jnp.bfloat16), jax.ShapeDtypeStruct((2,), np.float32))
    layout = PieceLayout(2, like)
    assert layout.size == 2 * 3 + 4 * 1
    # In bfloat16 the sum would stay at 256.
    arrays = [np.full(5, x, jnp.bfloat16) for x in (256.0, *[1.0] * 8)]
    rows = [layout.cut([x, np.arange(2, dtype=np.float32)]) for x in arrays]
    means = [layout.average([row[piece].tobytes() for row in rows], [1.0] * 9) for piece in range(2)]
    mean, other = layout.join(means)
    assert mean.dtype == jnp.bfloat16
    assert mean.tolist() == [float(jnp.bfloat16(264 / 9))] * 5
    assert other.tolist() == [0.0, 1.0]


def commit_of(members, expected):
    found = tuple(protocol.Member(name, f"00000000/{name}", 1.0, None, 1.0, 10) for name in members)
    return protocol.Commit("a", "", found, (), (), (), tuple(expected))


def test_islands_own_pieces_in_turn_and_those_that_leave_own_none():
    commit = commit_of("abcd", "abcx")
    for number in range(4):
        lines = [line_for(piece, 6, number, commit) for piece in range(6)]
        assert Counter(line[0] for line in lines) == {"a": 2, "b": 2, "c": 2}
        assert all(sorted(line) == ["a", "b", "c"] for line in lines)
    # The one that commits a round first owns its last piece.
    assert protocol.is_first_to_commit(line_for(5, 6, 7, commit)[0], "abc", 7)
    assert line_for(0, 1, 0, commit_of("ab", "")) == ["a", "b"]


# Runs


@pytest.mark.parametrize(
    "owners", [3, pytest.param(1, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
)
def test_a_run_with_owners_has_the_bits_of_one_without(owners):
    tx = method()
    found = train_together(written_once(), tx, NAMES, 3, owners=owners, examples=EXAMPLES)
    plain = train_together(islands.memory(), tx, NAMES, 3, examples=EXAMPLES)
    assert digests_of(found) == digests_of(plain)
    assert all(report.members == ("a", "b", "c") for _, reports in found.values() for report in reports)


@pytest.mark.slow
def test_any_weights_are_those_of_a_mesh():
    inner, examples = sgd(0.1), {"a": 3, "b": 1, "c": 5}
    found = train_together(islands.memory(), method(inner=inner, sync_period=1), NAMES, 2, owners=4, examples=examples)
    assert len({tuple(digests) for digests in digests_of(found).values()}) == 1
    meshed = on_a_mesh(jd.local_steps(inner, outer(), sync_period=1), 2, examples=[3.0, 1.0, 5.0])
    assert_within_ulps(global_params(found["a"][0]), meshed, 4)


@pytest.mark.slow
def test_reducers_of_two_messages_are_averaged_by_owners():
    """The second message is of the mean of the first; to rounding, since the mean of products is the product."""
    options = {"inner": sgd(0.1), "sync_period": 2}
    found = train_together(islands.memory(), method("low rank with feedback", **options), NAMES, 3, owners=4)
    assert len({tuple(digests) for digests in digests_of(found).values()}) == 1
    reducer = jd.error_feedback(jd.power_sgd(1, min_compression_rate=0))
    meshed = on_a_mesh(jd.local_steps(options["inner"], outer(), sync_period=2, reducer=reducer), 6)
    assert_within_ulps(global_params(found["a"][0]), meshed, 64)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_fragments_are_those_of_a_run_without_owners(overlap):
    tx, options = method(fragments=2, sync_period=2), {"overlap": overlap, "examples": EXAMPLES}
    found = train_together(islands.memory(), tx, NAMES, 6, owners=3, **options)
    digests = {(report.round, report.digest) for _, reports in found.values() for report in reports}
    assert len(digests) == len({number for number, _ in digests}) > 3
    if not overlap:
        assert digests_of(found) == digests_of(train_together(islands.memory(), tx, NAMES, 6, examples=EXAMPLES))


def run_islands(store, tx, rounds, prepare, *, clock=None, **options):
    """Trains three islands in threads, each changed by `prepare`; returns what they return or raise, by name.

    On a virtual clock, so that it makes no difference how busy the machine is.
    """
    step, clock = step_of(tx), clock or VirtualClock(len(NAMES))
    settings = {"step": step, "begin_with": len(NAMES), "patience": 60, "examples": EXAMPLES, **options}

    def run(number, name):
        try:
            return train(store, tx, name, rounds, goal=number, prepare=partial(prepare, name=name), **settings)
        finally:
            clock.leave()

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(NAMES)) as pool:
        clock.rule(patch)
        jobs = {name: pool.submit(run, number, name) for number, name in enumerate(NAMES)}
        return {name: job.exception() or job.result() for name, job in jobs.items()}


def interfere(island, name, *, who, around):
    """Lets the requests of one island go through `around(kind, function, arguments)`."""
    if name == who:
        store = island._store.store
        island._store.store = wrap(store, lambda number, kind, function, arguments: around(kind, function, arguments))


def test_an_owner_that_dies_costs_a_wait_within_the_round():
    """And no progress of the others, nor its own: its drift is there."""
    tx, timeout, died = method(inner=sgd(0.1)), 4.0, []

    def die(kind, function, arguments):
        if died or (kind == "create" and arguments[0].startswith("means/00000001")):
            died.append(kind)
            raise KilledError
        return function(*arguments)

    store = written_once()
    prepare = partial(interfere, who="c", around=die)
    found = run_islands(store, tx, 2, prepare, owners=3, round_timeout=timeout)
    assert isinstance(found.pop("c"), KilledError)
    plain = train_together(islands.memory(), tx, NAMES, 2, examples=EXAMPLES)
    assert digests_of(found) == {name: digests_of(plain)[name] for name in found}
    for _, reports in found.values():
        assert (reports[-1].members, reports[-1].missing, reports[-1].late) == (("a", "b", "c"), (), False)
        assert OWNERS_SHARE * timeout / 2 <= reports[-1].wait_seconds <= OWNERS_SHARE * timeout + 1
    assert len(store.list("means/00000001/")) == 3


@pytest.mark.slow
def test_a_request_that_hangs_holds_no_meeting():
    """The owner's meeting ends late, the others compute its piece, and the next meeting has the same bits."""
    tx, clock, hung = method(inner=sgd(0.1)), VirtualClock(len(NAMES)), []

    def hang(kind, function, arguments):
        if kind == "get_range" and arguments[0].startswith("bodies/00000001") and not hung:
            hung.append(kind)
            clock.sleep(4.0)
        return function(*arguments)

    prepare = partial(interfere, who="a", around=hang)
    found = run_islands(written_once(), tx, 4, prepare, clock=clock, owners=3, round_timeout=1.0)
    assert hung
    digests = defaultdict(set)
    for _, reports in found.values():
        for report in reports:
            assert report.wait_seconds <= 2.0
            digests[report.round].add(report.digest)
    assert all(len(one) == 1 for one in digests.values())
    assert not any(report.late for report in found["b"][1][:2])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("when", ["at rest", "on the way"])
def test_a_piece_of_a_mean_that_is_damaged_is_computed_again(when):
    tx, base, reads = method(inner=sgd(0.1)), islands.memory(), Counter()

    def create(name, body):
        is_damaged = when == "at rest" and name == "means/00000000/000001"
        return base.create(name, body[:-1] + b"x" if is_damaged else body)

    def get(name):
        body = base.get(name)
        if name.startswith("means/") and body is not None:
            reads[name] += 1
            return body[:-1] if when == "on the way" and reads[name] == 1 else body
        return body

    found = train_together(base._replace(create=create, get=get), tx, NAMES, 2, owners=3, examples=EXAMPLES)
    plain = train_together(islands.memory(), tx, NAMES, 2, examples=EXAMPLES)
    assert digests_of(found) == digests_of(plain)
    assert all(report.counted for _, reports in found.values() for report in reports)


def spoil(damage, kind, function, arguments):
    """A request of an island whose second drift is damaged on its way; one that is dead asks for no mean of that."""
    name, body = arguments[0], arguments[-1]
    if "dead" in damage and kind == "list" and name == "means/00000001/":
        raise KilledError
    if kind != "put" or not name.startswith("bodies/00000001"):
        return function(*arguments)
    if damage == "gone":
        return None
    # The first of three pieces, of 21 numbers each.
    place = len(body) - 3 * 4 * 21
    altered = body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :]
    return function(name, body[:-1] if damage == "cut" else altered)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("damage", ["altered, and dead", "altered", "cut", "gone"])
def test_a_body_that_is_damaged_stops_no_round(damage, caplog):
    """One that is cut or gone does not count. One that is altered does: its own island has the piece, if it lives."""
    tx, store = method(inner=sgd(0.1)), islands.memory()
    prepare = partial(interfere, who="c", around=partial(spoil, damage))
    found = run_islands(store, tx, 2, prepare, owners=3, round_timeout=1.0)
    assert len({found[name][1][1].digest for name in "ab"}) == 1
    commit = commits_of(store)[1]
    if damage in ("cut", "gone"):
        assert commit.damaged == ("c",)
        assert [member.name for member in commit.members] == ["a", "b"]
        return
    plain = train_together(islands.memory(), tx, NAMES, 2, examples=EXAMPLES)
    mean, whole = (
        np.concatenate([np.ravel(x) for x in jax.tree.leaves(global_params(one["a"][0]))]) for one in (found, plain)
    )
    assert commit.damaged == ()
    # `b` has three entries, which the goals leave alone, and comes first.
    assert (mean[3:21] != whole[3:21]).all() == ("dead" in damage)
    assert (mean[21:] == whole[21:]).all()
    assert ("is damaged: round 1 does not count it of c" in caplog.text) or "dead" not in damage


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("gone", [False, True], ids=["means", "bodies"])
def test_an_island_that_enters_later_has_the_same_bits(gone):
    """By the means of past rounds, or by their bodies."""
    tx, store = method(inner=sgd(0.1)), islands.memory()
    found = train_together(store, tx, NAMES, 3, owners=4, keep_every=100)
    if gone:
        store.delete_many(store.list("means/00000001/")[1:])
    # What evaluates writes nothing.
    before = store.list("")
    number, params = islands.read(store, tx, begin(tx).params)
    assert store.list("") == before
    assert_close(params, global_params(found["a"][0]), tolerance=0)
    asked = []
    watched = wrap(
        store, lambda number, kind, function, arguments: asked.append((kind, arguments[0])) or function(*arguments)
    )
    with islands.join(watched, tx, name="new", round_timeout=0.2) as new:
        state = new.enter(begin(tx, fill=5.0))
        assert_close(global_params(state), params, tolerance=0)
        assert (new.round, new._replay.run.owners) == (number, 4)
        bodies = [name for kind, name in asked if kind == "get_range"]
        assert len(bodies) == (3 * 3 if gone else 0)
        state, report = new.meet(step_of(tx)(state, GOALS[0]))
        assert report.counted


def test_means_are_deleted_with_their_rounds():
    tx, store = method(inner=sgd(0.1)), islands.memory()
    train(store, tx, "a", 12, owners=2, keep_every=1)
    rounds = [{protocol.number_in(name) for name in store.list(kind)} for kind in ("bodies/", "means/")]
    assert rounds[1] == rounds[0] - {12} == set(range(4, 12))


@pytest.mark.usefixtures("clock")
def test_an_island_that_sleeps_follows_by_means():
    """While others go on; then it is an owner again."""
    tx, store = method(inner=sgd(0.1)), islands.memory()
    step, options = step_of(tx), {"round_timeout": 30, "owners": 2, "grace": 0.0}
    with (
        islands.join(store, tx, name="slow", **options) as slow,
        islands.join(store, tx, name="fast", **options) as fast,
    ):
        states = [slow.enter(begin(tx)), fast.enter(begin(tx))]
        for _ in range(4):
            states[1], _ = fast.meet(step(states[1], GOALS[1]))
        states[0], report = slow.meet(step(states[0], GOALS[0]))
        assert (report.counted, report.late, report.round) == (True, True, 5)
        assert_same_as_run(store, tx, states[0], 5)
        states[1], report = fast.meet(step(states[1], GOALS[1]))
        assert report.counted
        assert_same_as_run(store, tx, states[1], report.round)


def assert_same_as_run(store, tx, state, number):
    """Whether an island has, in every bit, what one who only reads makes of the store."""
    found = islands.read(store, tx, begin(tx).params)
    assert found[0] == number
    assert_close(found[1], global_params(state), tolerance=0)


# Bytes


def check_bytes(store, count, owners, rounds=2):
    """Of each island: it sends its drift and its part of the mean, and receives about twice as much."""
    names = [f"{number:02d}" for number in range(count)]
    tx = jd.local_steps(optax.sgd(0.1), outer(), sync_period=1, axis=None)
    params = {"w": jnp.zeros((owners, 1000))}

    @jax.jit
    def step(state, goal):
        updates, opt = tx.update({"w": state.params["w"] - goal}, state.opt, state.params, sync=())
        return State(optax.apply_updates(state.params, updates), opt)

    def train_one(number):
        with islands.join(store, tx, name=names[number], begin_with=count, round_timeout=600, owners=owners) as island:
            state, reports = island.enter(State(params, tx.init(params))), []
            for _ in range(rounds):
                state, report = island.meet(step(state, 1.0 + number))
                reports.append(report)
            return reports

    with ThreadPoolExecutor(count) as pool:
        reports = [report for found in pool.map(train_one, range(count)) for report in found]
    assert all(len(report.members) == count for report in reports)
    # In the first round it is the turn of all of them to commit, and each reads the last pieces.
    reports = [report for report in reports if report.round > 1]
    payload = 4000 * owners
    _, sent, received = reduce_by_owners(np.zeros((count, 1000 * owners)), np.ones(count), owners)
    records = count * (250 + 40 * owners)
    return reports, payload, 4 * sent[0], 4 * received[0], records


@pytest.mark.parametrize(
    "count", [4, pytest.param(12, marks=pytest.mark.slow), pytest.param(24, marks=pytest.mark.slow)]
)
def test_an_island_receives_two_payloads_whatever_their_number(count, tmp_path):
    store = islands.memory() if count == 4 else islands.folder(tmp_path)
    reports, payload, sent, received, records = check_bytes(store, count, count)
    assert sent == payload * (1 + 1 / count)
    assert received == payload * 2 * (count - 1) / count
    print(count, payload, [(r.sent_bytes, r.received_bytes, r.requests) for r in reports])
    for report in reports:
        assert 0 < report.sent_bytes - sent <= 2048 + records
        assert 0 < report.received_bytes - received <= 2048 + 2 * records


# What is refused


def test_owners_are_refused_where_no_piece_has_a_mean_of_its_own():
    for tx, problem in [
        (method("rounded"), "sends codes, which are no numbers to average: use exact.*owners=0"),
        (method(merge="rda"), "merge='rda' needs their whole lengths"),
    ]:
        store = islands.memory()
        with islands.join(store, tx, name="a", owners=2) as island, pytest.raises(ValueError, match=problem):
            island.enter(begin(tx))
        assert store.list("") == []
    with (
        pytest.raises(ValueError, match="owners must be"),
        islands.join(islands.memory(), method(), name="a", owners=-1),
    ):
        pass


def test_the_island_that_opens_a_run_chooses_the_owners(caplog):
    tx, store = method(inner=sgd(0.1)), islands.memory()
    caplog.set_level("INFO", "jaxdist.islands")
    train(store, tx, "a", 1, owners=2)
    _, reports = train(store, tx, "b", 1)
    assert reports[0].counted
    assert "b takes owners=2, as its run does, and not 0" in caplog.text
    assert len(store.list("means/00000001/")) == 2


@pytest.mark.usefixtures("clock")
@pytest.mark.slow
def test_a_meeting_with_owners_compiles_nothing():
    tx, store = make_method(inner=sgd(0.1)), islands.memory()
    with islands.join(store, tx, name="a", owners=2, round_timeout=0.2) as island:
        state = step_of(tx)(island.enter(begin(tx)), GOALS[0])
        with compiled_programs() as compiled:
            state, report = island.meet(state)
        assert report.counted
        assert compiled == []
