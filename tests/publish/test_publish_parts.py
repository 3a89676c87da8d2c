"""Jobs of several processes publish parts: a state is whole for every follower, whoever is slow, late or killed."""

import json
import logging
import sys
import threading
from contextlib import suppress
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from island_stores import KilledError, killing, wrap, written_once
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from publishing_jobs import Coordination, Job, share_devices

from jaxdist import islands, publish
from jaxdist.publish import group, layout, protocol
from jaxdist.publish.words import describe

FAST = {"poll": 0.005, "timeout": 0.0}
FLAT = Mesh(np.array(jax.devices()), "data")
GRID = Mesh(np.array(jax.devices()).reshape(2, 4), ("outer", "inner"))
SPECS = {
    "rows": NamedSharding(FLAT, PartitionSpec("data")),
    "columns": NamedSharding(FLAT, PartitionSpec(None, "data")),
    "blocks": NamedSharding(GRID, PartitionSpec("inner", "outer")),
    "twice": NamedSharding(GRID, PartitionSpec("inner")),
    "copies": NamedSharding(FLAT, PartitionSpec()),
    "one": None,
}


def place(values, specs=SPECS):
    """Leaves that are cut over all devices, or a few, that all have, and that each process has for itself."""
    return {name: jax.device_put(x, specs[name]) if specs[name] else x for name, x in values.items()}


def make_states(count, seed=0, share=0.03):
    """Values of each leaf in bfloat16, of which a share changes from one state to the next."""
    rng = np.random.default_rng(seed)
    values = {name: jnp.asarray(rng.normal(size=(16, 24)), jnp.bfloat16) for name in SPECS}
    values["one"] = np.asarray(values["one"])
    states = []
    for _ in range(count):
        states.append(values)
        moved = {}
        for name, x in values.items():
            words = np.array(x).view(np.uint16)
            words[rng.random(words.shape) < share] += 1
            moved[name] = words.view(jnp.bfloat16) if name == "one" else jnp.asarray(words.view(jnp.bfloat16))
        values = moved
    return states


def bits_of(params):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(params)]


def read_all(store, start="oldest", like=None):
    like = make_states(1)[0] if like is None else like
    return [(step, bits_of(params)) for params, step in publish.follow(store, like=like, start=start, **FAST)]


@pytest.fixture(params=[2, 4])
def processes(monkeypatch, request):
    share_devices(monkeypatch, request.param)
    return request.param


@pytest.fixture
def two(monkeypatch):
    share_devices(monkeypatch, 2)
    return 2


def publish_all(job, states, first=0):
    for step, values in enumerate(states, first):
        job.put(place(values), step)
        job.call("flush")
    job.call("close")
    return job


@pytest.mark.sampled(3)  # four processes are in the test of dropped states
@pytest.mark.parametrize("where", ["host", "device"])
def test_every_state_of_several_processes_comes_back_bit_for_bit(processes, where):
    store, states, sent = written_once(), make_states(6), [0] * processes

    def counting(number):
        def around(call, name, function, arguments):
            if name == "put" and not arguments[0].startswith("layouts/"):
                sent[number] += len(arguments[1])
            return function(*arguments)

        return wrap(store, around)

    job = publish_all(Job([counting(n) for n in range(processes)], anchor_every=3, compare_on=where), states)
    wanted = [(step, bits_of(values)) for step, values in enumerate(states)]
    assert read_all(store) == wanted
    assert read_all(store, "newest") == wanted[-1:]
    last = job.processes[0].newest
    assert all(process.newest == last for process in job.processes)
    assert (last.number, last.anchor_bytes, len(last.parts)) == (6, 0, processes)
    assert sum(part.patch_bytes for part in last.parts) == last.patch_bytes > 0
    # Each leaf was in two anchors, and in no more; shared among the processes as far as whole shards can be.
    whole = sum(x.nbytes for x in states[0].values())
    anchors = [store.get(name) for name in store.list("anchors/")]
    assert sum(map(len, anchors)) == 2 * (whole + 8 * processes)
    assert max(sent) < 1.5 * min(sent)
    assert len(store.list("layouts/")) == 1
    assert json.loads(store.get("publish.json"))["format"] == protocol.FORMAT_OF_PARTS
    assert publish.status(store).problems == ()


def test_a_leaf_goes_to_any_sharding_of_the_follower(two):
    store, (values,) = islands.memory(), make_states(1)
    publish_all(Job([store, store]), [values])
    other = Mesh(np.array(jax.devices())[:3], "data")
    for sharding in (None, NamedSharding(other, PartitionSpec()), SPECS["blocks"]):
        like = {name: jax.ShapeDtypeStruct((16, 24), jnp.bfloat16, sharding=sharding) for name in values}
        found, _ = next(publish.follow(store, like=like, **FAST))
        assert bits_of(found) == bits_of(values)
        assert sharding is None or all(x.sharding == sharding for x in found.values())


def test_boxes_cover_each_leaf_once(processes):
    params = place(make_states(1)[0]) | {"scalar": jnp.float32(1), "empty": jnp.zeros((0, 3))}
    leaves = describe(params, None)
    found = layout.lay_out(params, leaves, processes)
    for number, leaf in enumerate(leaves):
        times = np.zeros(leaf.shape, int)
        for box in (box for boxes in found.parts for box in boxes if box.leaf == number):
            times[box.index] += 1
        assert (times == 1).all()
    assert layout.read_layout(found.name, layout.write_layout(found), leaves) == found
    fewer = found._replace(parts=(found.parts[0], *((),) * (processes - 1)))
    body = layout.write_layout(fewer)
    with pytest.raises(publish.PublishDamagedError, match="no layout of these leaves"):
        layout.read_layout(f"layouts/{protocol.hash_of(body)}", body, leaves)
    with pytest.raises(publish.PublishDamagedError, match="other bytes than its hash says"):
        layout.read_layout(found.name, body, leaves)


def play(rng, job, states, count, first):
    """Processes put states in any order, one far ahead of the other; sometimes all flush."""
    done = [0] * len(job.processes)
    while min(done) < count:
        behind = [n for n, number in enumerate(done) if number < count]
        process = int(rng.choice(behind))
        for _ in range(int(rng.integers(1, 5))):
            if done[process] < count:
                step = first + done[process]
                job.processes[process].put(place(states[step]), step=step)
                done[process] += 1
        if len(set(done)) == 1 and rng.random() < 0.3:
            job.call("flush")
    job.call("close")


@pytest.mark.parametrize("where", ["host", "device"])
@settings(max_examples=2, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(seed=st.integers(0, 2**31))
def test_processes_that_drop_states_by_themselves_agree_on_one(processes, where, seed):
    rng, store, states = np.random.default_rng(seed), written_once(), make_states(12, seed)
    job = Job([store] * processes, anchor_every=4, compare_on=where)
    play(rng, job, states, 12, 0)
    found = read_all(store)
    wanted = [(step, bits_of(values)) for step, values in enumerate(states)]
    assert found[-1] == wanted[-1]
    assert all(one in wanted for one in found)
    assert all(process.skipped == 12 - len(found) for process in job.processes)
    # Nothing that was asked is left but the last question, its answers, what was told after it, and who closed before.
    assert len(job.coordination.texts) <= 3 + 2 * (processes - 1)


def publish_with_kills(seed, processes, count):
    """One process is killed at a request, the job is started again, and goes on."""
    rng, store, states = np.random.default_rng(seed), written_once(), make_states(count, seed)
    wanted = [(step, bits_of(values)) for step, values in enumerate(states)]
    step, kills = 0, 0
    while step < count:
        stores = [store] * processes
        if kills < 8:
            victim = int(rng.integers(processes))
            stores[victim] = killing(store, int(rng.integers(0, 40 if victim == 0 else 12)))
        job = None
        try:
            options = {"compare_on": str(rng.choice(["host", "device"])), "anchor_every": int(rng.integers(1, 5))}
            job = Job(stores, **options)
            for number in range(step, count):
                job.put(place(states[number]), number)
                watched = threading.Thread(target=lambda job=job: ignore(job.call, "flush"))
                watched.start()
                while watched.is_alive():
                    watched.join(0.005)
                    if any(process._error for process in job.processes):
                        raise KilledError
                step = number + 1
            job.call("close")
        except KilledError:
            kills += 1
            if job is not None:
                job.kill()
        found = read_all(store)
        assert all(one in wanted for one in found)
        assert [step for step, _ in found] == sorted(step for step, _ in found)
        # What was flushed is there, and at most one state besides.
        assert (not found and step == 0) or found[-1][0] in (step - 1, step)
    assert read_all(store, "newest") == wanted[-1:]
    return kills


def ignore(function, *arguments):
    try:
        function(*arguments)
    except BaseException:
        return


@settings(max_examples=2, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(seed=st.integers(0, 2**31))
def test_kills_of_one_process_at_any_request(two, seed):
    publish_with_kills(seed, two, 4)


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(seed=st.integers(0, 2**31))
def test_many_kills_of_one_process_at_any_request(processes, seed):
    publish_with_kills(seed, processes, 12)


def test_a_put_waits_for_no_other_process(two):
    store, states = islands.memory(), make_states(5)
    job = Job([store, store])
    for process in job.processes:
        for step, values in enumerate(states):
            process.put(place(values), step=step)
    job.call("close")
    assert read_all(store)[-1] == (4, bits_of(states[4]))


def test_a_state_after_which_none_comes_is_sent_without_a_flush(two, monkeypatch):
    monkeypatch.setattr(sys.modules["jaxdist.publish.publisher"], "ASK_AGAIN", 0.01)
    store, states = islands.memory(), make_states(5)
    job = Job([store, store])
    # The first one is dropped in one process before it is in the other.
    for process in job.processes[::-1]:
        for step, values in enumerate(states):
            process.put(place(values), step=step)
    for process in job.processes:
        with process._changed:
            assert process._changed.wait_for(lambda own=process: own.newest and own.newest.step == 4, 60)
    job.call("close")


def test_jobs_of_other_sizes_and_meshes_go_on(monkeypatch):
    """Of 2, 1, 4 and 4 processes; the last one changes its shardings. Each begins with an anchor of every part."""
    store, states, first = written_once(), make_states(8), 0
    monkeypatch.setattr(layout, "process_of", lambda device: 0)
    like = states[0]
    following = publish.follow(store, like=like, start="oldest", **FAST)
    for processes in (2, 1, 4, 4):
        share_devices(monkeypatch, processes)
        job = Job([store] * processes)
        for step in (first, first + 1):
            specs = SPECS if first < 6 else SPECS | {"rows": SPECS["columns"]}
            job.put(place(states[step], SPECS if step < 7 else specs), step)
            job.call("flush")
            params, number = next(following)
            assert (number, bits_of(params)) == (step, bits_of(states[step]))
        assert job.processes[0].newest.session == first // 2 + 1
        job.call("close")
        first += 2
    records = [protocol.read_publication(name, store.get(name)) for name in store.list("commits/")]
    assert [len(one.parts) for one in records] == [2, 2, 0, 0, 4, 4, 4, 4]
    assert [bool(protocol.anchors_of(one)) for one in records] == [True, False, True, False, True, False, True, True]
    assert [one.patch_bytes > 0 for one in records] == [False, True, False, True, False, True, False, False]
    assert read_all(store) == [(step, bits_of(values)) for step, values in enumerate(states)]


@pytest.mark.parametrize("harm", ["altered", "missing"])
@pytest.mark.parametrize("kind", ["patches/00000003", "layouts/"])
def test_a_part_that_is_damaged_is_skipped_to_the_next_anchor(two, caplog, kind, harm):
    store, states = islands.memory(), make_states(6)
    publish_all(Job([store, store], anchor_every=4), states)
    name = store.list(kind)[-1]
    body = store.get(name)
    store.delete(name)
    if harm == "altered":
        store.put(name, body[:20] + b"9" + body[21:])
    with caplog.at_level(logging.WARNING, "jaxdist.publish"):
        found = read_all(store)
    assert name in caplog.text
    seen = [0, 1, 4, 5] if kind.startswith("patches") else []
    assert found == [(step, bits_of(states[step])) for step in seen]
    problems = publish.status(store).problems
    assert (f"{name} is missing" in problems) == (harm == "missing")


def test_old_states_of_several_processes_are_deleted(two):
    store, states = islands.memory(), make_states(8)
    publish_all(Job([store, store], anchor_every=3, keep=2), states)
    assert store.list("commits/")[0] == "commits/00000004"
    assert {name[8:16] for name in store.list("anchors/")} == {"00000004", "00000007"}
    (gone,) = store.list("anchors/00000007")[:1]
    store.delete(gone)
    # Half an anchor is none that followers could begin with.
    assert publish.clean_up(store, keep=1) == 0
    assert [step for step, _ in read_all(store)] == [3, 4, 5, 6, 7]


def test_an_error_of_one_process_is_raised_in_all(two):
    store, (values,) = islands.memory(), make_states(1)

    def refuse(number, name, function, arguments):
        if name == "put":
            raise PermissionError("403")
        return function(*arguments)

    for stores in ([store, wrap(store, refuse)], [wrap(store, refuse), store]):
        job = Job(stores)
        job.put(place(values), 0)
        for process in job.processes:
            with pytest.raises(publish.PublishOfflineError, match="403"):
                process.flush()
        assert read_all(store) == []


def test_of_two_jobs_the_older_one_is_refused_in_all_processes(two):
    store, states = islands.memory(), make_states(3)
    first = Job([store, store])
    first.put(place(states[0]), 0)
    first.call("flush")
    publish_all(Job([store, store]), states[1:2], 1)
    first.put(place(states[2]), 2)
    for process in first.processes:
        with pytest.raises(publish.SecondPublisherError, match="number 1"):
            process.flush()
    assert [step for step, _ in read_all(store)] == [0, 1]


def test_a_last_record_of_the_older_job_is_gone_on_from(two):
    """The older one creates its record after the newer one has found the end of the chain."""
    store, states, second = written_once(), make_states(3), None

    def around(number, name, function, arguments):
        nonlocal second
        if name == "create" and arguments[0] == "commits/00000002" and second is None:
            second = Job([wrap(store, wait_for_the_older), store])
            second.put(place(states[2]), 2)
            assert found_the_end.wait(60)
        return function(*arguments)

    found_the_end, is_created = threading.Event(), threading.Event()

    def wait_for_the_older(number, name, function, arguments):
        if name == "create" and arguments[0] == "commits/00000002":
            found_the_end.set()
            assert is_created.wait(60)
        return function(*arguments)

    first = Job([wrap(store, around), store])
    for step in (0, 1):
        first.put(place(states[step]), step)
        first.call("flush")
    is_created.set()
    second.call("close")
    newest = second.processes[1].newest
    assert (newest.number, newest.patch_bytes, bool(protocol.anchors_of(newest))) == (3, 0, True)
    assert read_all(store) == [(step, bits_of(values)) for step, values in enumerate(states)]


def test_what_processes_do_differently_is_an_error(two):
    (values,) = make_states(1)
    specs = SPECS | {"rows": SPECS["columns"]}
    for other, message in (((values, SPECS, 1), "process 1 puts step 1"), ((values, specs, 0), "other shardings")):
        store = islands.memory()
        job = Job([store, store])
        job.processes[0].put(place(values), step=0)
        job.processes[1].put(place(*other[:2]), step=other[2])
        with pytest.raises(publish.PublishError, match=message):
            job.processes[0].flush()
        with pytest.raises(publish.PublishError, match=message):
            job.processes[1].flush()
        assert store.list("commits/") == []
    # One flushes, and the other one has put more by then.
    job = Job([store, store])
    first, resume = job.processes[0], job.processes[0]._resume

    def resume_later():
        with first._changed:
            assert first._changed.wait_for(lambda: first._is_flushing, 60)
        resume()

    first._resume = resume_later
    for step in (0, 1, 2):
        job.processes[1].put(place(values), step=step)
    first.put(place(values), step=0)
    with pytest.raises(publish.PublishError, match="flush and close in all of them"):
        job.processes[0].flush()
    job.kill()


def test_a_process_that_was_closed_early_is_named(two):
    store, (values,) = islands.memory(), make_states(1)
    job = Job([store, store])
    with suppress(ZeroDivisionError), job.processes[1]:
        job.processes[1].put(place(values), step=0)
        raise ZeroDivisionError
    job.processes[0].put(place(values), step=0)
    with pytest.raises(publish.PublishError, match=r"process 1 has ended: .* closed"):
        job.processes[0].flush()


def test_a_leaf_of_one_other_process_is_refused(two):
    half = NamedSharding(Mesh(np.array(jax.devices())[4:], "data"), PartitionSpec("data"))
    job = Job([islands.memory()] * 2)
    with pytest.raises(ValueError, match="`w` is on no device of process 0"):
        job.processes[0].put({"w": jax.device_put(jnp.zeros(8), half)}, step=0)


def test_a_process_that_is_late_is_named(two, monkeypatch, caplog):
    monkeypatch.setattr(publish.group, "LATE", 0)
    store, (values,) = islands.memory(), make_states(1)
    job = Job([store, store])
    with caplog.at_level(logging.WARNING, "jaxdist.publish"):
        job.processes[0].put(place(values), step=0)
        while "waiting for processes [1]" not in caplog.text:
            assert job.processes[0]._error is None
    job.processes[1].put(place(values), step=0)
    job.call("close")


def follow_in_threads(stores, like, **options):
    """What each process of a job that follows sees."""
    coordination, found = Coordination(), [[] for _ in stores]

    def follow(number):
        for params, step in iterators[number]:
            found[number].append((step, bits_of(params)))

    iterators = []
    for number, store in enumerate(stores):
        own = group.Group(coordination, "publish/0", number, len(stores))
        with mock.patch.object(sys.modules["jaxdist.publish.follower"], "alone", lambda own=own: own):
            iterators.append(publish.follow(store, like=like, **(FAST | options)))
    threads = [threading.Thread(target=follow, args=(number,)) for number in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("start", ["newest", "oldest"])
def test_processes_that_follow_together_see_the_same_states(two, start):
    store, states = islands.memory(), make_states(9)
    publish_all(Job([store, store], anchor_every=3), states)
    (gone, _) = store.list("patches/00000002")
    # One of them does not get a patch, and goes on with the next anchor: all do.
    partly = wrap(store, lambda number, name, function, arguments: None if gone in arguments else function(*arguments))
    wanted = [(step, bits_of(values)) for step, values in enumerate(states)]
    found = follow_in_threads([store, partly, store], states[0], start=start)
    assert found == [wanted[:1] + wanted[3:] if start == "oldest" else wanted[-1:]] * 3


def test_an_error_of_one_that_follows_is_raised_in_all(two):
    store, (values,) = islands.memory(), make_states(1)
    publish_all(Job([store, store]), [values])
    coordination = Coordination()
    for other, like in ((0, {"w": jnp.zeros(3)}), (1, values)):
        own = group.Group(coordination, "publish/0", other, 2)
        with mock.patch.object(sys.modules["jaxdist.publish.follower"], "alone", lambda own=own: own):
            following = publish.follow(store, like=like, **FAST)
        with pytest.raises(publish.PublishMismatchError, match="holds other parameters"):
            next(following)


def test_the_records_of_one_process_do_not_speak_of_parts():
    store = islands.memory()
    with publish.open(store) as out:
        out.put(make_states(1)[0], step=0)
    (name,) = store.list("commits/")
    fields = {"number", "step", "session", "time", "previous", "digest", "check"}
    assert json.loads(store.get(name)).keys() == fields | {"patch", "patch_bytes", "anchor", "anchor_bytes"}
    assert json.loads(store.get("publish.json"))["format"] == 2


def test_another_format_is_named_with_a_cure():
    store = islands.memory()
    store.put("publish.json", b'{"format":1,"id":"a","leaves":[]}')
    with pytest.raises(publish.PublishMismatchError, match=r"has format 1, this version .* publish to an empty place"):
        publish.open(store)
    # A later one may describe its leaves in another way.
    store.put("publish.json", b'{"format":4,"leaves":{"w":"float32[3]"}}')
    with pytest.raises(publish.PublishMismatchError, match="has format 4"):
        publish.open(store)
