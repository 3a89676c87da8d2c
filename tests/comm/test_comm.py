"""Every function of a `Comm`: the same numbers on a mesh, under vmap and in numpy; how results are typed; errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

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
