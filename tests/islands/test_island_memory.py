"""What a meeting has in memory beside the training state: at most one fragment, whatever the number of islands."""

import contextlib
import gc
import tracemalloc
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from island_stores import wrap
from islands_run import GOALS, begin, commits_of, global_params, method, step_of, wait_for_upload
from problems import assert_close

import jaxdist as jd
from jaxdist import islands
from jaxdist.islands import island, protocol, run

FRAGMENTS, ENTRIES = 4, 2**18
OTHERS = ("b", "c", "d")
PROGRAMS = {
    run: ["add_member", "take_outer_step", "digest_of"],
    island: ["encode_drift", "measure_drift", "rebase", "rebase_after", "restart_from"],
}
REDUCERS = {"exact": jd.exact, "4 bits": lambda: jd.compressed(jd.qsgd(4))}


@contextlib.contextmanager
def joined(store, tx, **options):
    """Islands of the other names, of which a meeting sends a drift, and takes the round of the last one."""
    with contextlib.ExitStack() as stack:
        options = {"overlap": True, "round_timeout": 30, **options}
        yield {name: stack.enter_context(islands.join(store, tx, name=name, **options)) for name in OTHERS}


def send(others, states):
    """Each sends a drift, and reads nothing ahead, which would be in this process too."""
    for name, other in others.items():
        states[name], _ = other.meet(states[name], examples=1)
        wait_for_upload(other)
        other._outbox._sender.close()
        other._outbox._sender.join()


@contextlib.contextmanager
def sent_by_others(store, own_store, tx, *, round_timeout):
    """An island that has taken a step, and its state, after the others have taken and sent theirs."""
    joining = islands.join(own_store, tx, name="a", round_timeout=round_timeout)
    with joining as own, joined(store, tx) as others:
        state, step = own.enter(begin(tx)), step_of(tx)
        states = {name: step(other.enter(begin(tx)), goal) for (name, other), goal in zip(others.items(), GOALS[1:])}
        send(others, states)
        yield own, step(state, GOALS[0])


def bytes_in_use():
    """Of arrays on devices, and of NumPy and of bytes on the host."""
    return sum(x.nbytes for x in jax.live_arrays()) + tracemalloc.get_traced_memory()[0]


@pytest.mark.parametrize("reducer", ["exact", pytest.param("4 bits", marks=pytest.mark.slow)])
def test_a_meeting_needs_no_more_than_a_fragment_beside_the_state(reducer, tmp_path, monkeypatch):
    """Before and after each program, which has a copy of its own of what NumPy gives it.

    In the second round of each fragment: to compile while memory is traced takes several times as long.
    """
    most = 0

    def observe(function):
        def call(*arguments):
            nonlocal most
            copies = sum(x.nbytes for x in jax.tree.leaves(arguments[1:]) if isinstance(x, np.ndarray))
            before = bytes_in_use() + copies
            result = jax.block_until_ready(function(*arguments))
            most = max(most, before, bytes_in_use())
            return result

        return call

    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    settings = {"sync_period": FRAGMENTS, "fragments": FRAGMENTS, "axis": None}
    tx = jd.local_steps(optax.adam(0.1), outer, reducer=REDUCERS[reducer](), **settings)
    params = [jnp.full(ENTRIES, float(number)) for number in range(FRAGMENTS)]
    store = islands.folder(tmp_path)
    with islands.join(store, tx, name="a", round_timeout=30) as own, joined(store, tx) as others:
        state = own.enter({"params": params, "opt": tx.init(params)})
        states = {name: other.enter({"params": params, "opt": tx.init(params)}) for name, other in others.items()}
        del params
        fragment = sum(x.nbytes for x in jax.tree.leaves(state)) // FRAGMENTS
        for number in range(2 * FRAGMENTS):
            for distance, one in enumerate([state, *states.values()]):
                one["params"] = [x + distance for x in one["params"]]
            send(others, states)
            if number < FRAGMENTS:
                state, _ = own.meet(state, examples=1)
                continue
            gc.collect()
            tracemalloc.start()
            with monkeypatch.context() as patch:
                for module, names in PROGRAMS.items():
                    for name in names:
                        patch.setattr(module, name, observe(getattr(module, name)))
                before = most = bytes_in_use()
                state, report = own.meet(state, examples=1)
            tracemalloc.stop()
            assert (report.counted, report.members) == (True, ("a", *OTHERS))
            assert most - before <= fragment


@pytest.mark.usefixtures("clock")
def test_bodies_that_have_been_added_are_not_read_again_by_a_later_meeting():
    """A meeting ends where the store is out of reach, and the next one goes on with the sum."""
    tx, read, is_away = method(), Counter(), [False]

    def count(number, name, function, arguments):
        if name == "get" and arguments[0].startswith("bodies/"):
            # The first body of another island has come.
            if is_away[0] and read:
                raise ConnectionError("503 SlowDown")
            read[arguments[0]] += 1
        return function(*arguments)

    store = islands.memory()
    with sent_by_others(store, wrap(store, count), tx, round_timeout=0.3) as (own, state):
        read.clear()
        is_away[0] = True
        state, report = own.meet(state)
        assert (report.offline, report.counted) == (True, False)
        is_away[0] = False
        state, report = own.meet(state)
        assert report.counted
        assert [member.name for member in commits_of(store)[0].members] == ["a", *OTHERS]
        # Its own one it has.
        assert sorted(read.values()) == [1] * len(OTHERS)
        assert_close(global_params(state), islands.read(store, tx, begin(tx).params)[1], tolerance=0)


@pytest.mark.parametrize("left_out", OTHERS)
def test_a_commit_of_others_than_were_added_is_added_again(left_out):
    """This island checks the drifts of all, and another one commits those of all but one first."""
    tx, made = method(), []

    def be_faster(number, name, function, arguments):
        if name == "create" and arguments[0].endswith("/commit"):
            commit = protocol.parse(protocol.Commit, *arguments)
            members = tuple(member for member in commit.members if member.name != left_out)
            made.append(store.create(arguments[0], protocol.to_json(commit._replace(by="c", members=members))))
        return function(*arguments)

    store = islands.memory()
    with sent_by_others(store, wrap(store, be_faster), tx, round_timeout=30) as (own, state):
        state, report = own.meet(state)
        assert made == [True]
        assert report.members == tuple(name for name in ("a", *OTHERS) if name != left_out)
        assert_close(global_params(state), islands.read(store, tx, begin(tx).params)[1], tolerance=0)
