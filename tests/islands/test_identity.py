"""Which run an island belongs to: its number, its description, and what is refused before anything is written."""

import collections
import contextlib
import itertools
import json
import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from island_stores import wrap
from islands_run import (
    GOALS,
    State,
    begin,
    compiled_programs,
    global_params,
    make_method,
    method,
    sgd,
    step_of,
    train,
    wait_for_threads,
)
from jax.sharding import AxisType
from problems import assert_close

import jaxdist as jd
from jaxdist import islands
from jaxdist.islands import identity, protocol, run
from jaxdist.islands.connection import Connection

QSGD = jd.compressors.qsgd


def tx_of(outer=None, reducer=None, **options):
    outer = outer or optax.sgd(0.5, momentum=0.9)
    reducer = reducer or jd.exact()
    return jd.local_steps(optax.sgd(0.1), outer, reducer=reducer, axis=None, **{"sync_period": 4, **options})


def scheduled(*arguments):
    return optax.sgd(optax.piecewise_constant_schedule(*arguments), momentum=0.9)


def rounding(dtype):
    """An outer step whose updates are rounded, as those of a master copy."""
    round_to = optax.stateless(lambda updates, _: jax.tree.map(lambda x: x.astype(dtype).astype(x.dtype), updates))
    return optax.chain(optax.sgd(0.5), round_to)


def read_from(table):
    return optax.sgd(lambda count: jnp.asarray(table)[jnp.minimum(count, 7)])


def other(words):
    return f"outer optimizer: equal shapes, another program .momentum, nesterov, schedule or learning rate.{words}"


# Pairs of methods of equal shapes, or of one message that must say which.
PAIRS = {
    "codes of equal bytes": (
        {"reducer": jd.compressed(QSGD(8))},
        {"reducer": jd.compressed(jd.compressors.nuqsgd(8, bucket=512, norm="max"))},
        r"reducer: compressed\(qsgd\(8\)\) in the run, compressed\(nuqsgd\(8, bucket=512, norm='max'\)\) here",
    ),
    "feedback": (
        {"reducer": jd.compressed(QSGD(8))},
        {"reducer": jd.error_feedback(jd.compressed(QSGD(8)))},
        r"reducer: compressed\(.*\) in the run, error_feedback\(.*\) here",
    ),
    "another payload": (
        {"reducer": jd.exact()},
        {"reducer": jd.compressed(QSGD(4))},
        r"reducer: exact\(\) in the run, compressed\(qsgd\(4\)\) here",
    ),
    "nesterov": ({}, {"outer": optax.sgd(0.5, momentum=0.9, nesterov=True)}, other(";")),
    "momentum": ({}, {"outer": optax.sgd(0.5, momentum=0.8)}, other(r".*the run has 0.9; only this island has 0.8")),
    "rate": ({}, {"outer": optax.sgd(0.25, momentum=0.9)}, other(r".*the run has -0.5; only this island has -0.25")),
    "a schedule that differs later": (
        {"outer": scheduled(0.5, {1000: 0.5})},
        {"outer": scheduled(0.5, {2000: 0.5})},
        other(r".*the run has 1000; only this island has 2000"),
    ),
    "a schedule of equal numbers": (
        {"outer": scheduled(0.5, {1000: 0.25, 2000: 0.125})},
        {"outer": scheduled(0.5, {1000: 0.125, 2000: 0.25})},
        other(";"),
    ),
    "a table that differs later": (
        {"outer": read_from(np.linspace(1, 0, 8, dtype=np.float32))},
        {"outer": read_from(np.linspace(1, 0, 8, dtype=np.float32) ** [1, 1, 1, 1, 1, 1, 2, 1])},
        other(";"),
    ),
    "the rounding of an outer step": ({"outer": rounding(jnp.bfloat16)}, {"outer": rounding(jnp.float16)}, other("")),
    "a rate that the state holds": (
        {"outer": optax.inject_hyperparams(optax.sgd)(0.5)},
        {"outer": optax.inject_hyperparams(optax.sgd)(0.25)},
        r"outer optimizer: '.*learning_rate' begins with another value .*: 0\.5 in the run, 0\.25 here;",
    ),
    "another seed": (
        {"reducer": jd.compressed(QSGD(4), seed=1)},
        {"reducer": jd.compressed(QSGD(4), seed=2)},
        r"reducer: '.*' begins with another value .its seed.: \w+ in the run, \w+ here;",
    ),
    "another state of the outer step": (
        {},
        {"outer": optax.sgd(0.5, momentum=0.9, accumulator_dtype=jnp.bfloat16)},
        r"outer optimizer '.*': float32\[3\] in the run, bfloat16\[3\] here",
    ),
    "a state that is missing": ({}, {"outer": optax.sgd(0.5)}, r"outer optimizer '.*': .* in the run, None here"),
    "sync_period": ({}, {"sync_period": 5}, "sync_period: 4 in the run, 5 here"),
    "merging": ({}, {"merge": "rda"}, "merge: mean in the run, rda here"),
    "merging of a run that has directions": ({"merge": "rda"}, {}, "merge: rda in the run, mean here"),
}


def enter(store, tx, name="b", state=None, **options):
    with islands.join(store, tx, name=name, **options) as island:
        return island.enter(begin(tx) if state is None else state)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("pair", PAIRS)
def test_another_method_is_refused_by_name_before_anything_is_written(pair):
    store, (first, second, message) = islands.memory(), PAIRS[pair]
    enter(store, tx_of(**first), "a")
    names = store.list("")
    with pytest.raises(islands.RunMismatchError, match=message):
        enter(store, tx_of(**second))
    assert store.list("") == names
    # The same method, made once more, is no other.
    enter(store, tx_of(**first))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"w": jnp.zeros((12, 6)), "b": jnp.ones(3)}, r"parameters 'w': float32\[12, 5\] in the run, float32\[12, 6\]"),
        ({"v": jnp.zeros((12, 5)), "b": jnp.ones(3)}, r"parameters 'v': None in the run"),
        (
            {"w": jnp.zeros((12, 5), jnp.bfloat16), "b": jnp.ones(3)},
            r"dtypes 'w': float32\[12, 5\] in the run, bfloat16",
        ),
    ],
)
def test_another_model_is_refused_by_the_name_of_the_leaf(params, message):
    store, tx = islands.memory(), method()
    enter(store, tx, "a")
    names = store.list("")
    with pytest.raises(islands.RunMismatchError, match=message):
        enter(store, tx, state=State(params, tx.init(params)))
    assert store.list("") == names


def test_leaves_of_one_name_are_told_apart():
    """`value` is what marks add to a path, and also the head of an actor and critic."""
    store, tx, params = islands.memory(), method(), {"w": jnp.ones(3), "value": {"w": jnp.ones(3)}}
    enter(store, tx, "a", State(params, tx.init(params)))
    other = params | {"value": {"w": jnp.ones(3, jnp.bfloat16)}}
    with pytest.raises(
        islands.RunMismatchError, match=r"""dtypes "\['value'\]\['w'\]": float32\[3\] in the run, bfloat16"""
    ):
        enter(store, tx, state=State(other, tx.init(other)))


FirstW = collections.namedtuple("FirstW", "w b")
FirstB = collections.namedtuple("FirstB", "b w")


def test_leaves_in_another_order_are_refused():
    """Their names and shapes are the same, and so are the programs and messages: drifts would be those of others."""
    store, tx, leaves = islands.memory(), method(), {"w": jnp.ones(3), "b": jnp.zeros(3)}
    first, second = FirstW(**leaves), FirstB(**leaves)
    enter(store, tx, "a", State(first, tx.init(first)))
    names = store.list("")
    for refused in (
        lambda: enter(store, tx, state=State(second, tx.init(second))),
        lambda: islands.read(store, tx, second),
    ):
        with pytest.raises(
            islands.RunMismatchError,
            match=r"leaves are in another order: w \[3\], b \[3\] in the run, b \[3\], w",
        ):
            refused()
    assert store.list("") == names
    enter(store, tx, "c", State(first, tx.init(first)))


def test_a_run_that_does_not_say_in_which_order_its_leaves_are_is_joined():
    store, tx, params = islands.memory(), method(), FirstW(jnp.ones(3), jnp.zeros(3))
    enter(store, tx, "a", State(params, tx.init(params)))
    edit_description(store, lambda run: run.pop("order"))
    enter(store, tx, "b", State(params, tx.init(params)))


def test_who_only_reads_may_have_parameters_of_another_dtype():
    store, tx, params = islands.memory(), method(), {"w": jnp.zeros((12, 5), jnp.bfloat16), "b": jnp.ones(3)}
    enter(store, tx, "a", State(params, tx.init(params)))
    assert islands.read(store, tx, begin(tx).params)[0] == 0


def test_another_format_of_the_store_is_refused(monkeypatch):
    store, tx = islands.memory(), method()
    enter(store, tx, "a")
    names, number = store.list(""), protocol.FORMAT
    monkeypatch.setattr(protocol, "FORMAT", number + 1)
    with pytest.raises(islands.RunMismatchError, match=f"format: {number} in the run, {number + 1} here; use the vers"):
        enter(store, tx)
    assert store.list("") == names


def edit_description(store, change):
    """Rewrites the description of a run in its store."""
    name = identity.method_name(json.loads(store.get("run.json"))["id"])
    described = json.loads(store.get(name))
    change(described)
    store.delete(name)
    assert store.create(name, json.dumps(described).encode())


def test_a_run_that_does_not_say_how_it_merges_takes_means():
    store = islands.memory()
    enter(store, tx_of(), "a")

    def drop(description):
        assert description.pop("merge") == "mean"

    edit_description(store, drop)
    enter(store, tx_of())
    with pytest.raises(islands.RunMismatchError, match="merge: mean in the run, rda here"):
        enter(store, tx_of(merge="rda"))


def test_equal_programs_with_other_bits_are_told_by_that():
    store, tx = islands.memory(), method()
    enter(store, tx, "a")
    edit_description(store, lambda run: run["programs"]["outer optimizer"].update(result="0" * 32))
    with pytest.raises(islands.RunMismatchError, match="the same program, which gives other bits here: another type"):
        enter(store, tx)


def test_another_version_of_jax_may_spell_programs_in_another_way_if_their_results_are_equal():
    store, tx = islands.memory(), method()
    enter(store, tx, "a")
    edit_description(store, lambda run: run["programs"]["reducer"].update(program="other"))
    with pytest.raises(islands.RunMismatchError, match="reducer: equal shapes, another program"):
        enter(store, tx)
    edit_description(store, lambda run: run["versions"].update(jax="0.0"))
    enter(store, tx)


@pytest.mark.sampled(13)
@pytest.mark.parametrize(("explicit", "inside"), [(True, False), (True, True), (False, False), (False, True)])
def test_an_island_of_four_devices_joins_the_run_of_one(explicit, inside):
    """Its parameters are sharded, over a mesh whose axes the compiler uses, or one whose axes are part of types."""
    store, tx = islands.memory(), make_method("4 bits with feedback", inner=sgd(0.1))
    step = step_of(tx)
    first, reports = train(store, tx, "a", 2, step=step, keep_every=1)
    kind = AxisType.Explicit if explicit else AxisType.Auto
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,), devices=jax.devices()[:4])

    def place(x):
        cut = jax.sharding.PartitionSpec("data") if x.shape == (12, 5) else jax.sharding.PartitionSpec()
        return jax.device_put(x, jax.sharding.NamedSharding(mesh, cut))

    around = jax.set_mesh(mesh) if inside else contextlib.nullcontext()
    with around, islands.join(store, tx, name="b", round_timeout=30) as island:
        state = island.enter(jax.tree.map(place, begin(tx)))
        assert island._replay.digest == reports[-1].digest
        assert_close(global_params(state), global_params(first), tolerance=0)
        for _ in range(2):
            state = step(state, place(GOALS[1]))
            with compiled_programs() as compiled:
                state, report = island.meet(state)
            assert report.counted
            assert compiled == []
        assert state.params["w"].sharding.is_equivalent_to(place(state.params["w"]).sharding, 2)


@pytest.mark.parametrize("cut", [("data", None), (None, "data")])
@pytest.mark.parametrize(
    "options",
    [
        {"reducer": jd.error_feedback(jd.power_sgd(2))},
        {"merge": "rda"},
        {"outer": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.5, momentum=0.9))},
    ],
    ids=["power_sgd", "rda", "clipping"],
)
def test_an_island_whose_mesh_cuts_sums_in_another_way_computes_the_same(options, cut):
    """Products of what it sends, lengths and norms are sums over entries that lie on several devices."""
    store, tx, drawn = islands.memory(), tx_of(**options), np.random.default_rng(0).normal(size=(64, 96))
    goal = drawn.astype(np.float32)

    @jax.jit
    def step(state):
        gradient = {"w": state.params["w"] - goal}
        updates, opt = tx.update(gradient, state.opt, state.params, sync=())
        return State(optax.apply_updates(state.params, updates), opt)

    def meet(name, sharding, rounds):
        params = {"w": jax.device_put(jnp.zeros((64, 96)), sharding)}
        with islands.join(store, tx, name=name, round_timeout=30, keep_every=100) as island:
            # The state of the optimizer is where JAX has put it.
            state = island.enter(State(params, tx.init(params)))
            digests = [island._replay.digest]
            for _ in range(rounds):
                state, report = island.meet(step(state))
                assert report.counted
                digests.append(report.digest)
        assert state.params["w"].sharding.is_equivalent_to(params["w"].sharding, 2)
        return digests

    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    on_one = meet("a", jax.devices()[0], 3)
    # It computes the three rounds from what is in the store.
    on_four = meet("b", jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*cut)), 1)
    assert on_four[0] == on_one[-1]
    assert meet("c", jax.devices()[0], 0) == on_four[1:]


# Which run it is


def test_an_island_says_which_run_it_is_in_and_where(caplog, tmp_path):
    caplog.set_level(logging.INFO, logger="jaxdist.islands")
    tx, folder = method(), tmp_path / "run"
    with islands.join(folder, tx, name="a", keep_every=2) as island:
        assert (island.run, island.round) == ("", 0)
        state = island.enter(begin(tx))
        number = island.run
        assert len(number) == 32
        for _ in range(3):
            state, _ = island.meet(state)
        assert island.round == 3
    assert f"a has opened run {number} in {folder}" in caplog.text
    caplog.clear()
    with islands.join(folder, tx, name="b", begin=False) as island:
        island.enter(begin(tx))
        assert (island.run, island.round) == (number, 3)
    assert "opened" not in caplog.text
    assert (
        f"b is in run {number} in {folder} at round 3: the kept global parameters of round 2 and the 1" in caplog.text
    )
    assert "b keeps global parameters every 2 rounds, as its run does, and not every 20" in caplog.text
    assert islands.status(folder).run == number


def test_a_run_that_must_be_there_is_not_opened(tmp_path):
    tx, folder = method(), tmp_path / "run"
    with pytest.raises(islands.RunMissingError, match=rf"no run of islands in {folder}.*mount its disk"):
        enter(folder, tx, begin=False)
    assert not folder.exists()
    for ask in (lambda: islands.status(folder), lambda: islands.read(folder, tx, begin(tx).params)):
        with pytest.raises(islands.RunMissingError, match=f"no run of islands in {folder}"):
            ask()
    # As where it vanishes between `join` and `enter`.
    store = islands.memory()
    with islands.join(folder, tx, name="a") as island:
        island.enter(begin(tx))
    with islands.join(folder, tx, name="b", begin=False) as island:
        island._store.store = store
        with pytest.raises(islands.RunMissingError):
            island.enter(begin(tx))
    assert store.list("") == []


@pytest.mark.usefixtures("clock")
def test_a_run_that_another_island_opens_meanwhile_is_entered():
    """Between any two requests: its link may be so much faster than this one's."""
    tx, state = method(), begin(method())

    def opened_before(moment, base, seen):
        def around(number, name, function, arguments):
            seen.append(number)
            if number == moment:
                enter(base, tx, "a", state)
            return function(*arguments)

        return wrap(base, around)

    for moment in itertools.count():
        base, seen = islands.memory(), []
        with islands.join(opened_before(moment, base, seen), tx, name="b", patience=5) as island:
            island.enter(state)
            assert island.run == islands.status(base).run
        # What describes the run that it began itself is gone.
        assert len(base.list("methods/")) == 1
        if moment not in seen:
            break
        assert sorted(islands.status(base).sessions) == ["a", "b"]
    assert moment > 10


def test_a_store_that_cannot_be_read_is_told_by_its_probe():
    def refuse(name, *rest):
        raise PermissionError(13, "denied")

    store = islands.memory()._replace(get=refuse, create=refuse)
    with pytest.raises(islands.StoreUnusableError, match="denied"):
        enter(store, method(), begin=False)


def run_alone(path, rounds, name="a", **options):
    tx = method(inner=sgd(0.1))
    return train(path, tx, name, rounds, keep_every=2, **options)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("rounds", [1, 8])
def test_an_island_never_counts_in_a_run_that_is_mounted_in_the_place_of_its_own(tmp_path, rounds):
    """At the same round as its own, and where the rounds that it would read are gone."""
    path, disk, local = tmp_path / "run", tmp_path / "disk", tmp_path / "local"
    run_alone(path, rounds)
    path.rename(disk)
    tx = method(inner=sgd(0.1))
    with islands.join(path, tx, name="a", round_timeout=0.5) as island:
        state = step_of(tx)(island.enter(begin(tx)), GOALS[1])
        state, report = island.meet(state)
        assert report.counted
        path.rename(local)
        disk.rename(path)
        with pytest.raises(islands.RunMismatchError) as found:
            island.meet(state)
    for folder in (path, local):
        assert json.loads((folder / "run.json").read_text())["id"] in str(found.value)
    status = islands.status(path)
    assert (status.round, len(status.rounds)) == (rounds, min(rounds, len(status.rounds)))
    assert run_alone(path, 1, "b")[1][0].counted


@pytest.mark.usefixtures("clock")
def test_a_mount_point_without_its_disk_is_a_store_that_is_away(tmp_path):
    path, disk = tmp_path / "run", tmp_path / "disk"
    tx = method(inner=sgd(0.1))
    with islands.join(path, tx, name="a", round_timeout=5) as island:
        state, _ = island.meet(step_of(tx)(island.enter(begin(tx)), GOALS[0]))
        path.rename(disk)
        path.mkdir()
        state = step_of(tx)(state, GOALS[0])
        moved = state.params
        state, report = island.meet(state)
        assert (report.offline, report.counted) == (True, False)
        assert_close(state.params, moved, tolerance=0)
        assert list(path.iterdir()) == []
        path.rmdir()
        disk.rename(path)
        state, report = island.meet(state)
        assert report.counted


@pytest.mark.usefixtures("clock")
def test_a_description_that_is_removed_ends_no_island_and_opens_no_other_run():
    store, tx = islands.memory(), method(inner=sgd(0.1))
    with islands.join(store, tx, name="a", round_timeout=5) as island:
        state, _ = island.meet(step_of(tx)(island.enter(begin(tx)), GOALS[0]))
        kept = store.get("run.json")
        store.delete("run.json")
        state, report = island.meet(step_of(tx)(state, GOALS[0]))
        assert (report.offline, report.counted) == (True, False)
        with pytest.raises(islands.RunMissingError, match=r"has rounds of a run .*no run.json: restore that file"):
            enter(store, tx)
        assert store.get("run.json") is None
        store.create("run.json", kept)
        state, report = island.meet(state)
        assert report.counted


@pytest.mark.usefixtures("clock")
def test_a_description_that_is_replaced_by_that_of_another_run_names_both():
    store, other_store, tx = islands.memory(), islands.memory(), method(inner=sgd(0.1))
    enter(other_store, tx, "a")
    with islands.join(store, tx, name="a", round_timeout=5) as island:
        state, _ = island.meet(island.enter(begin(tx)))
        store.put("run.json", other_store.get("run.json"))
        numbers = island.run, json.loads(other_store.get("run.json"))["id"]
        with pytest.raises(islands.RunMismatchError, match=f"belongs to run {numbers[0]}, and run.json.*{numbers[1]}"):
            island.meet(state)
    assert islands.status(store).round == 1


@pytest.mark.usefixtures("clock")
def test_a_store_that_comes_back_as_another_is_noticed_before_anything_is_sent():
    store, tx, is_away = islands.memory(), method(inner=sgd(0.1)), False

    def call(number, name, function, arguments):
        if is_away:
            raise ConnectionError("no route")
        return function(*arguments)

    other_store = islands.memory()
    run_alone(other_store, 1)
    with islands.join(wrap(store, call), tx, name="a", round_timeout=0.1) as island:
        state, _ = island.meet(island.enter(begin(tx)))
        is_away = True
        state, report = island.meet(step_of(tx)(state, GOALS[0]))
        assert report.offline
        is_away, island._store.store = False, other_store
        names = other_store.list("")
        with pytest.raises(islands.RunMismatchError):
            island.meet(state)
        assert other_store.list("") == names


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("rounds", [3, 7])
def test_a_store_that_is_set_back_is_noticed_before_a_second_run_grows_in_it(rounds):
    """As by a copy of yesterday: what enters goes on from there, and a running island must not go on beside it."""
    store, tx = islands.memory(), method(inner=sgd(0.1))
    step = step_of(tx)
    with islands.join(store, tx, name="a", keep_every=2, round_timeout=30, patience=30) as island:
        state = island.enter(begin(tx))
        for number in range(rounds):
            state, report = island.meet(step(state, GOALS[0]))
            island._cleaner.join()
            assert report.counted
            if number == 1:
                copy = {name: store.get(name) for name in store.list("")}
        store.delete_many(store.list(""))
        for name, body in copy.items():
            store.put(name, body)
        state, report = island.meet(step(state, GOALS[0]))
        assert (report.offline, report.counted, report.round) == (True, False, rounds)
        assert f"rounds/{rounds - 1:08d}/commit" in report.problem
        assert "set back to an earlier state" in report.problem
        _, others = train(store, tx, "b", rounds, keep_every=2, round_timeout=30)
        assert [other.round for other in others] == [*range(3, rounds + 3)]
        with pytest.raises(
            islands.RunMismatchError, match=rf"rounds/{rounds - 1:08d}/commit .* start this island again"
        ):
            island.meet(state)
    assert all(one.members == ("b",) for one in islands.status(store).rounds[2:])


def test_progress_of_another_run_is_never_in_a_commit():
    seen = protocol.Seen(False, frozenset("ab"), frozenset(), frozenset())
    drifts = {
        name: protocol.Drift(1, "body", 8, "base", 1.0, 0.0, 4, None, True, False, run) for name, run in ("ax", "by")
    }
    commit = protocol.make_commit(seen, "ab", drifts, (), "base", "a", "x")
    assert ([member.name for member in commit.members], commit.differing, commit.run) == (["a"], ("b",), "x")


def test_kept_parameters_that_are_gone_are_named_with_the_cure():
    store = islands.memory()
    run_alone(store, 3)
    for name in store.list("anchors/"):
        store.delete(name)
    names = store.list("")
    with pytest.raises(islands.DamagedError, match=r"rounds up to 4, but no anchors/.*restore them from a copy"):
        enter(store, method(inner=sgd(0.1)))
    assert [name for name in store.list("") if "names/" not in name] == [n for n in names if "names/" not in n]


def test_the_status_of_a_run_reads_records_alone():
    store, asked = islands.memory(), []

    def call(number, name, function, arguments):
        asked.append((name, arguments[0]))
        return function(*arguments)

    run_alone(store, 3)
    found = islands.status(wrap(store, call))
    assert not [name for kind, name in asked if kind == "get" and name.startswith("bodies/")]
    # Those of a month are too many to list.
    assert ("list", "rounds/") not in asked
    for one in found.rounds:
        name = json.loads(store.get(f"rounds/{one.round:08d}/drift/a"))["body"]
        assert one.sent_bytes == {"a": len(store.get(f"bodies/{name}"))}
        assert one.examples == {"a": 0.0}
    assert found.uploading == ()
    assert [[one.round for one in islands.status(store, last=last).rounds] for last in (0, 2, 9)] == [
        [],
        [1, 2],
        [0, 1, 2],
    ]
    with pytest.raises(ValueError, match="last must be at least 0, got -1"):
        islands.status(store, last=-1)


@pytest.mark.parametrize("ended", [0, 1, 2, 7, 8, 100])
def test_the_open_round_is_found_by_few_requests(ended):
    store, asked = islands.memory(), []

    def call(number, name, function, arguments):
        asked.append(arguments[0])
        return function(*arguments)

    for number in range(ended):
        store.create(protocol.round_name(number, "commit"), b"{}")
    for first in {0, ended // 2, ended}:
        asked.clear()
        assert run.open_round(Connection(wrap(store, call)), first) == ended
        assert len(asked) <= 2 * math.log2(ended - first + 2) + 2


def test_the_status_shows_who_has_not_sent_yet():
    store, tx = islands.memory(), method()
    with islands.join(store, tx, name="a", overlap=True) as a, islands.join(store, tx, name="b") as b:
        state = a.enter(begin(tx))
        b.enter(begin(tx))
        a.meet(state)
        wait_for_threads(a)
        assert islands.status(store).uploading == ("b",)


# What a state brings along


def test_moments_of_a_checkpoint_stay_or_begin_anew_and_schedules_go_on():
    tx = method(inner=optax.adam(optax.linear_schedule(0.05, 0.01, 100)))
    saved, _ = train(islands.memory(), tx, "a", 3)
    store = islands.memory()
    train(store, tx, "a", 2)
    for moments in ("own", "fresh"):
        state = enter(store, tx, moments, saved, moments=moments)
        adam, schedule = state.opt.inner.value
        assert bool(np.any(adam.mu["w"])) == (moments == "own")
        # A checkpoint of another run that is further on does not take its step along.
        assert [int(state.opt.count), int(schedule.count), int(adam.count)] == [8, 8, 12 if moments == "own" else 0]
    with pytest.raises(Exception, match="moments"):
        enter(store, tx, moments="new")


def test_progress_that_is_kept_keeps_its_steps():
    store, tx = islands.memory(), method(inner=optax.sgd(optax.linear_schedule(0.1, 0.01, 100)))
    state, _ = train(store, tx, "a", 2)
    ahead = step_of(tx)(state, GOALS[0])
    entered = enter(store, tx, "a", ahead)
    assert int(entered.opt.count) == 9
    assert_close(entered.params, ahead.params, tolerance=1e-6)


def test_numbers_of_a_message_are_few():
    words = identity._name_numbers([str(n) for n in range(100)], [])
    assert len(words) < 100


def test_runs_in_nested_folders_are_two(tmp_path):
    outside, inside = tmp_path / "run", tmp_path / "run" / "again"
    numbers = set()
    for rounds, folder in ((2, outside), (1, inside), (1, outside)):
        run_alone(folder, rounds)
        numbers.add(islands.status(folder).run)
    assert len(numbers) == 2
    assert [islands.status(folder).round for folder in (outside, inside)] == [3, 1]
