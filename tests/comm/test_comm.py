"""Every function of a `Comm`: the same numbers on a mesh, under vmap and in numpy; how results are typed; errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType

import jaxdist as jd
from jaxdist._core.compat import varying_axes
from jaxdist.comm import alone, count_sent, nested, over, split_group

BOTH = ("pod", "chip")
PARTS = [(0, 6, 3, 1), (2, 4, 7, 5)]
FAST, SLOW = [(0, 1, 2, 3), (4, 5, 6, 7)], [(0, 4), (1, 5), (2, 6), (3, 7)]
EVERYBODY = [tuple(range(8))]
# name: the axes that are bound, the group, its members by worker number
GROUPS = {
    "one axis": (("data",), lambda: over("data"), EVERYBODY),
    "two axes": (BOTH, lambda: count_sent(over(BOTH), []), EVERYBODY),
    "fast axis": (BOTH, lambda: over(BOTH).inner, FAST),
    "slow axis": (BOTH, lambda: over(BOTH).outer, SLOW),
    "nested": (BOTH, lambda: nested(over("chip"), over("pod")), EVERYBODY),
    "parts": (("data",), lambda: split_group(over("data"), PARTS), PARTS),
    "parts of two axes": (BOTH, lambda: split_group(over(BOTH), PARTS), PARTS),
    "alone": (("data",), alone, [(i,) for i in range(8)]),
}
AGREED = ("mean", "sum", "max", "scalar mean", "all_gather")
OTHER = ("all_gather, differing", "all_to_all", "reduce_scatter_mean", "ppermute", "varying", "index")


def turned(size):
    """A permutation that is neither the identity nor its own inverse (from three workers on)."""
    return [(i, (i + 1) % size) for i in range(size)]


def results(comm, x, permutes):
    """What one worker gets; `x` is a tree of `[size, ...]` arrays."""
    first = x["real"]
    return {
        "mean": comm.mean(first),
        "sum": comm.sum(x),
        "max": comm.max(x),
        "scalar mean": comm.mean(first[0, 0]),
        "all_gather": comm.all_gather(x),
        "all_gather, differing": comm.all_gather(x, agreed=False),
        "all_to_all": comm.all_to_all(x),
        "reduce_scatter_mean": comm.reduce_scatter_mean(first),
        "ppermute": comm.ppermute(x, turned(comm.size)) if permutes else x,
        "varying": comm.varying(x),
        "index": comm.index,
    }


def expected(groups, x, permutes):
    """The same for all workers at once, by loops in numpy: `[8, ...]`."""
    out: dict[str, list] = {name: [None] * 8 for name in (*AGREED, *OTHER)}
    for members in groups:
        mine = jax.tree.map(lambda a, m=members: a[list(m)], x)
        for place, worker in enumerate(members):
            row = jax.tree.map(lambda a, p=place: a[p], mine)
            out["mean"][worker] = mine["real"].mean(0)
            out["sum"][worker] = jax.tree.map(lambda a: a.sum(0, dtype=a.dtype), mine)
            out["max"][worker] = jax.tree.map(lambda a: a.max(0), mine)
            out["scalar mean"][worker] = mine["real"][:, 0, 0].mean()
            out["all_gather"][worker] = out["all_gather, differing"][worker] = mine
            out["all_to_all"][worker] = jax.tree.map(lambda a, p=place: a[:, p], mine)
            out["reduce_scatter_mean"][worker] = mine["real"][:, place].mean(0)
            out["ppermute"][worker] = jax.tree.map(lambda a, p=place: a[p - 1], mine) if permutes else row
            out["varying"][worker] = row
            out["index"][worker] = np.int32(place)
    return {name: jax.tree.map(lambda *rows: np.stack(rows), *rows) for name, rows in out.items()}


@functools.cache
def run(name):
    """(on a mesh, under vmap, in numpy, the axes each result is typed to vary over); small integers: sums are exact."""
    axes, make, groups = GROUPS[name]
    size, permutes = len(groups[0]), "nested" not in name
    rng = np.random.default_rng(len(name))
    x = {
        "real": rng.integers(-40, 40, (8, size, 3)).astype(np.float32),
        "whole": rng.integers(-40, 40, (8, size, 2)).astype(np.int32),
    }
    types = {}

    def one(x):
        out = results(make(), jax.tree.map(lambda a: a[0], x), permutes)
        types.update({k: set.union(*(set(varying_axes(leaf)) for leaf in jax.tree.leaves(v))) for k, v in out.items()})
        return jax.tree.map(lambda a: a[None], out)

    mesh = jd.make_mesh({"data": 8} if axes == ("data",) else {"pod": 2, "chip": 4})
    on_mesh = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=P(axes), out_specs=P(axes)))(x)
    types = dict(types)
    sizes = [mesh.shape[axis] for axis in axes]
    mapped = lambda x: results(make(), x, permutes)  # noqa: E731
    for axis in reversed(axes):
        mapped = jax.vmap(mapped, axis_name=axis)
    simulated = jax.jit(mapped)(jax.tree.map(lambda a: a.reshape(*sizes, *a.shape[1:]), x))
    simulated = jax.tree.map(lambda a: a.reshape(8, *a.shape[len(axes) :]), simulated)
    return on_mesh, simulated, expected(groups, x, permutes), types


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", GROUPS)
def test_mesh_simulation_and_numpy_agree(name):
    on_mesh, simulated, wanted, _ = run(name)
    for kind, found in (("mesh", on_mesh), ("vmap", simulated)):
        for what, value in wanted.items():
            jax.tree.map(
                lambda a, b, w=f"{kind}: {what}": np.testing.assert_array_equal(a, b, err_msg=w), found[what], value
            )


@pytest.mark.parametrize(
    ("name", "axes"),
    [("one axis", {"data"}), ("two axes", set(BOTH)), ("fast axis", {"chip"}), ("nested", set(BOTH))],
)
def test_results_are_typed(name, axes):
    types = run(name)[3]
    for what in AGREED:
        assert not types[what] & axes, what
    for what in OTHER:
        assert types[what] >= axes, what


def test_parts_are_typed_as_differing():
    assert all(axes == {"data"} for axes in run("parts")[3].values())


def test_groups_must_be_a_partition_into_equal_parts():
    def use(groups):
        return jax.vmap(lambda x: split_group(over("data"), groups).mean(x), axis_name="data")(jnp.ones(4))

    for wrong in ([(0, 1, 2), (3,)], [(0, 1), (1, 2)], [(0, 1)], []):
        with pytest.raises(ValueError, match="parts of one size"):
            use(wrong)


def test_who_is_no_destination_gets_zeros(mesh):
    def shift(x):
        return over("data").ppermute(x, [(0, 1), (1, 2), (6, 3)])

    x = jnp.arange(1.0, 9.0)[:, None]
    expected = [[0.0], [1.0], [2.0], [7.0], [0.0], [0.0], [0.0], [0.0]]
    assert jax.vmap(shift, axis_name="data")(x).tolist() == expected
    on_mesh = jax.jit(jax.shard_map(shift, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    assert on_mesh(x).tolist() == expected
    assert alone().ppermute(jnp.ones(2), []).tolist() == [0.0, 0.0]


def test_permutations_send_one_message_each():
    for wrong in ([(0, 1), (0, 2)], [(0, 1), (1, 1), (2, 2), (3, 3)], [(0, 1), (1, 2), (2, 3), (3, 4)]):
        with pytest.raises(ValueError, match="of 4 workers each sends at most once"):
            jax.vmap(lambda x, w=wrong: over("data").ppermute(x, w), axis_name="data")(jnp.ones(4))
    with pytest.raises(ValueError, match="of 1 workers each sends at most once"):
        alone().ppermute(jnp.ones(2), [(0, 1)])
    with pytest.raises(ValueError, match=r"inner or \.outer"):
        nested(alone(), alone()).ppermute(jnp.ones(2), [(0, 0)])


def test_reduce_scatter_needs_a_row_for_each_worker():
    with pytest.raises(ValueError, match=r"each of the 4 workers, got shape \(3,\)"):
        jax.vmap(lambda x: over("data").reduce_scatter_mean(x), axis_name="data")(jnp.ones((4, 3)))


def test_an_unbound_axis_is_named():
    with pytest.raises(ValueError, match=r"axis 'data' is not bound here: run the step with distribute"):
        over("data")
    with pytest.raises(ValueError, match=r"\('pod', 'data'\) is not bound"):
        jax.vmap(lambda x: over(("pod", "data")).mean(x), axis_name="data")(jnp.ones(4))
    assert over(None).size == over(()).size == 1


# A row for each worker, a column for each case.
EXTREMES = np.full((8, 5), -np.inf, np.float32)
EXTREMES[:3] = [
    [1.0, np.nan, -np.inf, -0.0, 5e4],
    [np.inf, 2.0, -1.0, 0.0, -5e4],
    [-np.nan, 7.0, 3.0, -0.0, 1.0],
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e5m2"])
@pytest.mark.parametrize("name", ["one axis", "nested", "parts"])
def test_nan_wins_every_maximum(name, dtype):
    """And 0 is larger than -0; whichever worker has it, on a mesh and in simulation. `lax.pmax` may lose NaN."""
    axes, make, groups = GROUPS[name]
    mesh = jd.make_mesh({"data": 8} if axes == ("data",) else {"pod": 2, "chip": 4})

    def one(x):
        return make().varying(make().max(x))

    place = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=P(axes), out_specs=P(axes)))
    simulate = jax.jit(functools.reduce(lambda f, axis: jax.vmap(f, axis_name=axis), reversed(axes), one))
    sizes = [mesh.shape[axis] for axis in axes]
    for turn in range(8):
        rows = jnp.asarray(np.roll(EXTREMES, turn, 0)).astype(dtype)
        on_mesh, simulated = place(rows), simulate(rows.reshape(*sizes, -1)).reshape(rows.shape)
        assert on_mesh.dtype == simulated.dtype == jnp.dtype(dtype)
        for found in (on_mesh, simulated):
            for members in groups:
                wide = np.asarray(rows.astype(jnp.float32))[list(members)]
                wanted = wide.max(0)
                wanted[3] = 0.0 if not np.signbit(wide[:, 3]).all() else -0.0
                got = np.asarray(found.astype(jnp.float32))[list(members)]
                np.testing.assert_array_equal(got, np.broadcast_to(wanted, got.shape))
                assert (np.signbit(got[:, 3]) == np.signbit(wanted[3])).all()


@pytest.mark.parametrize(
    ("dtype", "functions", "message"),
    [
        ("complex64", ("max",), "numbers with an order, got complex64"),
        ("float8_e4m3fnuz", ("max",), "does not know the order of float8_e4m3fnuz"),
        ("float8_e8m0fnu", ("sum", "mean", "reduce_scatter_mean"), "cannot add float8_e8m0fnu, which has no zero"),
        ("float8_e8m0fnu", ("ppermute",), "cannot send float8_e8m0fnu, which has no zero"),
        ("float4_e2m1fn", ("sum", "max", "all_gather", "all_to_all", "ppermute"), "cannot send float4_e2m1fn"),
        ("int2", ("sum", "max", "all_gather", "all_to_all", "ppermute"), "cannot send int2"),
        ("int32", ("reduce_scatter_mean",), "needs floats, got int32"),
        ("key<fry>", ("sum", "mean"), "cannot add random keys"),
        ("key<fry>", ("max",), "numbers with an order, got key<fry>"),
    ],
)
def test_dtypes_that_cannot_be_sent_are_named(mesh, dtype, functions, message):
    keys = dtype.startswith("key")
    x = jax.random.split(jax.random.key(0), (8, 8)) if keys else jax.ShapeDtypeStruct((8, 8), dtype)
    for name in functions:

        def one(x, name=name):
            options = ([(0, 1)],) if name == "ppermute" else ()
            return getattr(over("data"), name)(x, *options)

        with pytest.raises(TypeError, match=message):
            jax.eval_shape(jax.vmap(one, axis_name="data"), x)
        with pytest.raises(TypeError, match=message):
            jax.eval_shape(jax.shard_map(lambda x, f=one: f(x[0]), mesh=mesh, in_specs=P("data"), out_specs=P()), x)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_a_further_axis_of_the_mesh_may_be_of_either_kind(kind):
    """The sum of a reduce-scatter, and its gradient, beside an axis that is not mapped."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    x = np.arange(4 * 4 * 6, dtype=np.float32).reshape(4, 4, 6)

    def one(x):
        return over("data").reduce_scatter_mean(x[0])[None]

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(one, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        placed = jax.device_put(x, jax.NamedSharding(mesh, P("data")))
        found = jax.jit(mapped)(placed)
        gradient = jax.jit(jax.grad(lambda x: jnp.sum(mapped(x) ** 2)))(placed)
    np.testing.assert_allclose(found, x.mean(0), rtol=1e-6)
    np.testing.assert_allclose(gradient, np.broadcast_to(x.mean(0) / 2, x.shape), rtol=1e-6)


def test_complex_numbers_keys_and_narrow_numbers_are_added_and_sent(mesh):
    """Small integers have means that do not wrap around, and 8-bit floats are added in float32."""
    z = np.random.default_rng(0).normal(size=(8, 8, 2)).astype(np.complex64) * (1 - 2j)
    narrow = jnp.full((8, 3), 1.0, jnp.float8_e4m3fn).at[0].set(16)
    keys = jax.random.split(jax.random.key(0), 8)
    small = jnp.full((8, 2), 100, jnp.int8)

    def one(z, narrow, key, small):
        comm = over("data")
        sums = comm.sum((z, narrow)), comm.mean((z, narrow, small))
        moved = comm.all_to_all(z), comm.reduce_scatter_mean(z), comm.ppermute(z, turned(8))
        return comm.varying((*sums, moved, jax.random.key_data(comm.all_gather(key))))

    def on_mesh(*rows):
        return jax.tree.map(lambda a: a[None], one(*(row[0] for row in rows)))

    place = jax.shard_map(on_mesh, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    for f in (place, jax.vmap(one, axis_name="data")):
        (sum_z, sum_narrow), (mean_z, mean_narrow, mean_small), moved, gathered = jax.jit(f)(z, narrow, keys, small)
        for found, wanted in ((sum_z, z.sum(0)), (mean_z, z.mean(0))):
            np.testing.assert_allclose(found, np.broadcast_to(wanted, z.shape), rtol=1e-4, atol=1e-4)
        for found, wanted in zip(moved, (np.swapaxes(z, 0, 1), z.mean(0), np.roll(z, 1, 0)), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
        # 23 and 2.875 are halfway between two numbers of this format, and go to the even ones.
        assert np.asarray(sum_narrow, np.float32).tolist() == [[24.0] * 3] * 8
        assert np.asarray(mean_narrow, np.float32).tolist() == [[3.0] * 3] * 8
        assert mean_small.tolist() == [[100.0] * 2] * 8
        np.testing.assert_array_equal(gathered[3], jax.random.key_data(keys))


EXTREMES_OF = {
    "float16": [60000, 50000, 40000, 60000],
    "float8_e5m2": [49152, 40960, 40960, 49152],
    "int8": [127, 126, 127, 124],
    "int32": [2**31 - 1, 2**31 - 64, 2**31 - 1, 2**31 - 128],
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("size", [1, 5000])
@pytest.mark.parametrize("dtype", EXTREMES_OF)
def test_means_of_parts_do_not_overflow(dtype, size):
    """As those of a whole group: nor does what is added change its dtype."""
    x = jnp.asarray(EXTREMES_OF[dtype]).astype(dtype)

    def one(x):
        whole, parts, only = over("data"), split_group(over("data"), [(0, 2, 1, 3)]), alone()
        x = jnp.full(size, x)
        twice = nested(split_group(whole, [(0, 1), (2, 3)]), split_group(whole, [(0, 2), (1, 3)]))
        means = [group.mean(x) for group in (whole, parts, twice)]
        scattered = [
            group.reduce_scatter_mean(jnp.broadcast_to(x, (4, size)))
            for group in (whole, parts, twice)
            if jnp.issubdtype(x.dtype, jnp.floating)
        ]
        return [y.astype(jnp.float32) for y in (*means, *scattered)], (whole.sum(x), parts.sum(x)), only.mean(x)

    means, (wanted, found), only = jax.jit(jax.vmap(one, axis_name="data"))(x)
    for mean in means:
        np.testing.assert_allclose(mean, np.full((4, size), np.asarray(x, np.float64).mean()), rtol=0.1)
    assert found.dtype == wanted.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))
    assert only.dtype == over_dtype(x.dtype)


def over_dtype(dtype):
    """That of a mean: integers have one in float32."""
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.float32
