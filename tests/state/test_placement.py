"""Marks, and where a state lies: written, placed, moved to another number of workers, made one again."""

from inspect import unwrap
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import TypeCheckError

import jaxdist as jd
from jaxdist.state.marks import INNER, OUTER, bind, map_marked


class State(NamedTuple):
    w: Any
    residual: Any
    moment: Any
    count: Any


def written():
    """A state as one worker means it: agreed, differing, cut, and a key."""
    return State(
        w=jnp.arange(6.0).reshape(2, 3),
        residual=jd.PerWorker({"a": jnp.array([1.0, 2.0]), "n": jnp.int32(5)}),
        moment=jd.Sharded(jnp.arange(10.0).reshape(5, 2), multiple=2),
        count=jax.random.key(3),
    )


def raw(tree):
    """The values, keys as numbers."""
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in jax.tree.leaves(tree)
    ]


def assert_equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(raw(left), raw(right), strict=True):
        np.testing.assert_array_equal(a, b)


def grow(mesh, workers):
    return jd.make_mesh({"data": workers}, devices=mesh.devices.ravel().tolist()[:workers])


# ---- marks


def test_marks_are_pytrees_with_keys():
    tree = {"e": jd.OnHost(jd.PerWorker(jd.Sharded(jnp.zeros(4), axis="chip"), axis="pod", resize="copy"))}
    ((path, leaf),) = jax.tree_util.tree_flatten_with_path(tree)[0]
    assert jax.tree_util.keystr(path) == "['e'].value.value.value"
    assert leaf.shape == (4,)
    back = jax.tree.unflatten(jax.tree.structure(tree), [leaf + 1])["e"].value
    assert (back.axis, back.resize) == ("pod", "copy")
    assert (back.value.axis, back.value.shape, back.value.multiple) == ("chip", (4,), 1)


def test_aux_data_is_part_of_the_structure():
    def structure(mark):
        return jax.tree.structure(mark)

    x = jnp.zeros(4)
    assert structure(jd.PerWorker(x, axis="data")) == structure(jd.PerWorker(x + 1, axis="data"))
    assert structure(jd.PerWorker(x, axis="data")) != structure(jd.PerWorker(x, axis="pod"))
    assert structure(jd.PerWorker(x)) != structure(jd.PerWorker(x, resize="copy"))
    assert structure(jd.Sharded(x)) != structure(jd.Sharded(x, multiple=2))
    assert structure(jd.Sharded(x)) != structure(jd.Sharded(x, shape=(2, 2)))


def test_marks_pass_through_transformations():
    mark = jd.PerWorker({"a": jnp.arange(3.0)}, axis="data")
    out = jax.jit(lambda m: jax.tree.map(lambda x: 2 * x, m))(mark)
    assert (out.axis, out.value["a"].tolist()) == ("data", [0.0, 2.0, 4.0])
    assert jax.grad(lambda m: m.value["a"].sum())(mark).value["a"].tolist() == [1.0, 1.0, 1.0]


def test_mark_errors_name_the_value():
    with pytest.raises((ValueError, TypeCheckError), match="'median'"):  # the type checker, where it is on, comes first
        jd.PerWorker(jnp.zeros(3), resize="median")
    with pytest.raises(ValueError, match="at least 1, got 0"):
        jd.Sharded(jnp.zeros(3), multiple=0)


def test_bind_fills_axes_and_map_marked_sees_them():
    tree = {"a": jd.PerWorker(jd.Sharded(jnp.zeros(4), axis=INNER), axis=OUTER), "b": jd.PerWorker(jnp.zeros(2))}
    bound = bind(tree, ("pod", "chip"))
    seen = map_marked(lambda marks, leaf: [mark.axis for mark in marks], bound)
    assert seen["a"].value.value == [("pod",), ("chip",)]
    assert seen["b"].value == [("pod", "chip")]
    assert bind(bound, "data")["b"].axis == ("pod", "chip")  # bound once, bound for good
    assert bind(tree["b"], None).axis == ()
    with pytest.raises(ValueError, match="two axes"):
        bind(tree, "data")


# ---- specs, shardings, placing


def test_specs_follow_the_table():
    state = written()._replace(count=jd.OnHost(jd.PerWorker(jnp.zeros(2))))
    found = jd.state.specs(state)
    assert found.w == PartitionSpec()
    assert found.residual.value == {"a": PartitionSpec("data"), "n": PartitionSpec("data")}
    assert found.moment.value == PartitionSpec("data")
    assert found.count.value.value == PartitionSpec("data")
    two = jd.state.specs(jd.PerWorker(jnp.zeros(2)), axis=("pod", "chip"))
    assert two.value == PartitionSpec(("pod", "chip"))
    nested = jd.state.specs(jd.PerWorker(jd.Sharded(jnp.zeros(4), axis="chip"), axis="pod"))
    assert nested.value.value == PartitionSpec("pod", "chip")


def test_shardings_keep_what_is_on_the_host_there(mesh):
    state = {"a": jnp.zeros(2), "b": jd.OnHost({"c": jd.PerWorker(jnp.zeros(2))})}
    found = jd.state.shardings(state, mesh)
    assert found["a"] == NamedSharding(mesh, PartitionSpec())
    assert found["b"].value["c"].value == NamedSharding(mesh, PartitionSpec("data"), memory_kind="pinned_host")
    for placed in (jd.place(state, mesh), jd.init_state(lambda: state, mesh)):
        assert placed["a"].sharding.memory_kind == "device"
        assert placed["b"].value["c"].value.sharding.memory_kind == "pinned_host"
        assert placed["b"].value["c"].value.shape == (8, 2)
        assert jd.resize(placed, grow(mesh, 2))["b"].value["c"].value.sharding.memory_kind == "pinned_host"


@pytest.mark.parametrize("how", ["place", "init_state"])
def test_global_arrays_follow_the_table(mesh, how):
    state = jd.place(written(), mesh) if how == "place" else jd.init_state(written, mesh)
    expected = written()
    np.testing.assert_array_equal(state.w, expected.w)
    np.testing.assert_array_equal(state.residual.value["a"], np.tile(expected.residual.value["a"], (8, 1)))
    assert state.residual.value["n"].tolist() == [5] * 8
    assert (state.residual.axis, state.moment.axis) == (("data",), ("data",))
    assert state.moment.value.shape == (16,)  # 10 elements, 8 workers, multiples of 2
    assert state.moment.value.tolist() == [*range(10), *[0.0] * 6]
    for found, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(jd.state.shardings(expected, mesh))):
        assert found.sharding.is_equivalent_to(wanted, found.ndim)
    shards = state.moment.value.addressable_shards
    assert [shard.data.shape for shard in shards] == [(2,)] * 8


def test_init_state_never_runs_the_builder_on_values(mesh):
    """Only shapes and one compiled program with sharded outputs: no leaf lies whole on one device."""
    seen = []

    def build():
        x = jax.random.normal(jax.random.key(0), (64, 64))
        seen.append(isinstance(x, jax.core.Tracer))
        return {"moment": jd.Sharded(x), "residual": jd.PerWorker(x)}

    state = jd.init_state(build, mesh)
    assert all(seen)
    for leaf in jax.tree.leaves(state):
        assert {shard.data.size for shard in leaf.addressable_shards} == {leaf.size // 8}


def test_nested_marks(pods):
    value = jnp.arange(6.0)
    state = jd.place(jd.PerWorker(jd.Sharded(value, axis="chip"), axis="pod"), pods, axis=("pod", "chip"))
    leaf = state.value.value
    assert leaf.shape == (2, 8)
    assert leaf.sharding.spec == PartitionSpec("pod", "chip")
    np.testing.assert_array_equal(leaf, np.tile(np.pad(np.arange(6.0), (0, 2)), (2, 1)))
    np.testing.assert_array_equal(jd.consensus(state), value)
    smaller = jd.resize(state, jd.make_mesh({"pod": 1, "chip": 3}, devices=jax.devices()[:3]), axis=("pod", "chip"))
    np.testing.assert_array_equal(smaller.value.value, np.arange(6.0)[None])


def test_alone_adds_no_worker_dimension(mesh):
    state = jd.place(written(), mesh, axis=None)
    assert_equal(state.residual.value, written().residual.value)
    assert state.moment.value.shape == (5, 2)


@pytest.mark.parametrize("move", [jd.place, jd.resize])
@pytest.mark.parametrize("workers", [1, 8])
def test_donating_a_placed_state_keeps_the_arrays_it_came_from(mesh, move, workers):
    """Also where no byte had to move, and where one array stands for two leaves."""
    here = grow(mesh, workers)
    own, spread = jnp.arange(3.0), jax.device_put(jnp.arange(3.0), NamedSharding(here, PartitionSpec()))
    state = move({"own": own, "twin": own, "spread": spread, "key": jax.random.key(3)}, here)
    donate = jax.jit(lambda x: jax.tree.map(lambda y: y if y.dtype != jnp.float32 else y - 9, x), donate_argnums=0)
    out = donate(state)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert own.tolist() == spread.tolist() == [0.0, 1.0, 2.0]
    assert out["own"].tolist() == out["twin"].tolist() == [-9.0, -8.0, -7.0]


def test_numpy_leaves_can_be_placed(mesh):
    state = jd.place({"w": np.ones(3, np.float32), "e": jd.PerWorker(np.zeros(2, np.float32))}, mesh)
    assert state["e"].value.shape == (8, 2)
    assert state["w"].sharding.is_fully_replicated


def test_wrong_axis(mesh):
    for build in (jd.place, lambda state, mesh: jd.init_state(lambda: state, mesh)):
        with pytest.raises(ValueError, match=r"no axis 'dat'; its axes are \('data',\)"):
            build(jd.PerWorker(jnp.zeros(2), axis="dat"), mesh)


# ---- another number of workers


@pytest.fixture(scope="module")
def eight(mesh):
    """A placed state of which the workers' residuals differ."""
    state = jd.place(written(), mesh)
    rows = jax.random.normal(jax.random.key(1), (8, 2)) * 10 ** jnp.arange(8.0)[:, None]
    rows = jax.device_put(rows, state.residual.value["a"].sharding)
    return state._replace(residual=jd.PerWorker({"a": rows, "n": state.residual.value["n"]}, axis=("data",)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("workers", [4, 2, 1])
def test_resize(mesh, eight, workers):
    small = grow(mesh, workers)
    found = jd.resize(eight, small)
    np.testing.assert_array_equal(found.w, eight.w)
    np.testing.assert_array_equal(*(jax.random.key_data(s.count) for s in (found, eight)))
    length = -(-10 // (2 * workers)) * 2 * workers
    assert found.moment.value.tolist() == [*range(10), *[0.0] * (length - 10)]
    rows, before = np.asarray(found.residual.value["a"]), np.asarray(eight.residual.value["a"])
    assert rows.shape == (workers, 2)
    np.testing.assert_array_max_ulp(rows.mean(0, dtype=np.float64).astype(np.float32), before.mean(0), maxulp=1)
    assert found.residual.value["n"].tolist() == [5] * workers
    for leaf, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(jd.state.shardings(found, small))):
        assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim)
    grown = jd.resize(found, mesh)  # and back
    np.testing.assert_array_equal(grown.moment.value, eight.moment.value)
    mean = np.asarray(grown.residual.value["a"]).mean(0, dtype=np.float64)
    np.testing.assert_allclose(mean, before.mean(0, dtype=np.float64), rtol=2e-7)


def test_resize_to_the_same_number_keeps_every_bit(mesh, eight):
    assert_equal(jd.resize(eight, mesh), eight)


def test_what_is_in_host_memory_is_resized_and_merged(mesh, eight):
    def on_host(state):
        return state._replace(**{name: jd.OnHost(getattr(state, name)) for name in ("w", "residual", "moment")})

    state = jax.tree.map(jax.device_put, on_host(eight), jd.state.shardings(on_host(eight), mesh))
    small = grow(mesh, 2)
    found = jd.resize(state, small)
    assert_equal(found, on_host(jd.resize(eight, small)))
    assert {x.sharding.memory_kind for x in (found.w.value, found.moment.value.value)} == {"pinned_host"}
    assert_equal(jd.place(found, grow(mesh, 1)).w, found.w)
    assert_equal(jd.consensus(state), jd.consensus(eight))


@pytest.mark.parametrize(
    ("rule", "fewer", "more"),
    [("copy", [0.0, 1.0], [0.0, 1.0, 2.0, 0.0, 1.0, 2.0, 0.0, 1.0]), ("zero", [0.0] * 2, [0.0] * 8)],
)
def test_resize_rules(mesh, rule, fewer, more):
    state = jd.PerWorker({"x": jnp.arange(3.0), "key": jax.random.split(jax.random.key(0), 3)}, resize=rule)
    assert jd.resize(state, grow(mesh, 2)).value["x"].tolist() == fewer
    assert jd.resize(state, mesh).value["x"].tolist() == more


def test_half_precision_residuals_are_averaged_in_float32(mesh):
    state = jd.PerWorker(jnp.full((8, 1), 60000.0, jnp.float16))
    assert jd.resize(state, grow(mesh, 2)).value.tolist() == [[60000.0]] * 2


def test_resize_to_more_workers_than_devices(eight):
    found = jd.resize(eight, 16)
    np.testing.assert_array_equal(found.w, eight.w)
    assert found.moment.value.tolist() == [*range(10), *[0.0] * 22]
    mean = np.asarray(eight.residual.value["a"]).mean(0)
    np.testing.assert_array_max_ulp(np.asarray(found.residual.value["a"]), np.tile(mean, (16, 1)), maxulp=1)


@pytest.mark.parametrize("how", ["place", "init_state"])
def test_simulated_workers_get_the_arrays_of_a_mesh(mesh, pods, how):
    def put(state, where, axis="data"):
        return jd.place(state(), where, axis=axis) if how == "place" else jd.init_state(state, where, axis=axis)

    assert_equal(put(written, 8), put(written, mesh))
    two = ("pod", "chip")
    assert_equal(put(written, {"pod": 2, "chip": 4}, two), put(written, pods, two))


# ---- one model to evaluate


def test_consensus(mesh, eight):
    found = jd.consensus(eight._replace(w=jd.OnHost(eight.w)))
    np.testing.assert_array_equal(found.w, written().w)
    np.testing.assert_allclose(found.residual["a"], np.asarray(eight.residual.value["a"]).mean(0), rtol=1e-6)
    assert int(found.residual["n"]) == 5
    np.testing.assert_array_equal(found.moment, written().moment.value)
    alone = jd.consensus(jd.place(written(), mesh, axis=None))
    assert_equal(alone, State(written().w, written().residual.value, written().moment.value, written().count))


def test_numbers_of_workers():
    """Those of NumPy too; without a worker all state would be lost."""
    state = {"e": jd.PerWorker(jnp.zeros(3))}
    assert unwrap(jd.init_state)(lambda: state, np.int64(2))["e"].value.shape == (2, 3)
    with pytest.raises(ValueError, match="the number of workers must be at least 1, got 0"):
        jd.place(state, 0)
    with pytest.raises(ValueError, match="workers along 'data' must be at least 1, got 0"):
        jd.resize({"e": jd.PerWorker(jnp.zeros((2, 3)), axis="data")}, {"data": 0})


def test_the_consensus_of_a_number_that_is_split():
    assert jd.consensus(jd.place({"s": jd.Sharded(jnp.ones(()))}, 2))["s"] == 1.0
    assert jd.consensus({"s": jd.Sharded(jnp.ones(()), axis=())})["s"] == 1.0
