"""Bytes, groups and counts of programs whose communication is known by hand."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax

import jaxdist as jd
from jaxdist import analysis
from jaxdist.analysis import cost
from jaxdist.analysis.base import mesh_groups, permutation_groups

BOTH = ("pod", "data")
ROWS = P(BOTH)
RING = [(i, (i + 1) % 4) for i in range(4)]
EXCHANGE = [(0, 1), (1, 0)]
DATA_GROUPS = ((0, 1, 2, 3), (4, 5, 6, 7))
POD_GROUPS = ((0, 4), (1, 5), (2, 6), (3, 7))
ALL = (tuple(range(8)),)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), BOTH, axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:8])


def sharded(mesh, fn, out=ROWS):
    """The jitted program and its argument: each worker sees a float32 row of 64."""
    step = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=P(BOTH), out_specs=out))
    return step, jax.ShapeDtypeStruct((8, 64), jnp.float32)


def both_counts(mesh, fn, out=ROWS, **options):
    step, x = sharded(mesh, fn, out)
    logical = analysis.logical_collectives(step, x, **options)
    return analysis.collectives(step.lower(x).compile(), **options), logical


def scan_of_six(x):
    return lax.scan(lambda c, _: (c * 0.5 + lax.ppermute(c, "pod", EXCHANGE), None), x, None, length=6)[0]


def nested_loops(x):
    def inner(i, c):
        return c + lax.ppermute(c, "data", RING) * i

    def outer(c, _):
        return lax.fori_loop(2, 5, inner, c) + lax.psum_scatter(jnp.tile(c[0], 2), "pod", tiled=True)[None], None

    return lax.scan(outer, x, None, length=4)[0]


# name: function, out_specs, (kind, dtype, bytes, groups, count, messages) of each operation, wire bytes of one worker
PROGRAMS = {
    "psum_data": (
        lambda x: lax.psum(x, "data"),
        P("pod"),
        [("all-reduce", "float32", 256, DATA_GROUPS, 1, 1)],
        1.5 * 256,
    ),
    "psum_pod": (
        lambda x: lax.psum(x, "pod"),
        P(None, "data"),
        [("all-reduce", "float32", 256, POD_GROUPS, 1, 1)],
        1.0 * 256,
    ),
    "psum_both": (lambda x: lax.psum(x, BOTH), P(), [("all-reduce", "float32", 256, ALL, 1, 1)], 1.75 * 256),
    "psum_three_dtypes": (
        lambda x: lax.psum((x, x.astype(jnp.float16), x[:, :3].astype(jnp.int8)), "data"),
        P("pod"),
        [
            ("all-reduce", "float32", 256, DATA_GROUPS, 1, 1),
            ("all-reduce", "float16", 128, DATA_GROUPS, 1, 1),
            ("all-reduce", "int8", 3, DATA_GROUPS, 1, 1),
        ],
        1.5 * (256 + 128 + 3),
    ),
    "gather_int8": (
        lambda x: lax.all_gather(x.astype(jnp.int8), "data", tiled=True),
        P(BOTH),
        [("all-gather", "int8", 64, DATA_GROUPS, 1, 1)],
        3.0 * 64,
    ),
    "all_to_all_u16": (
        lambda x: lax.all_to_all(x.astype(jnp.uint16).reshape(4, 16), "data", 0, 0),
        P(BOTH),
        [("all-to-all", "uint16", 128, DATA_GROUPS, 1, 1)],
        0.75 * 128,
    ),
    "psum_scatter": (
        lambda x: lax.psum_scatter(x[0], "data", tiled=True),
        P(BOTH),
        [("reduce-scatter", "float32", 256, DATA_GROUPS, 1, 1)],
        0.75 * 256,
    ),
    "ppermute": (
        lambda x: lax.ppermute(x, "data", RING),
        P(BOTH),
        [("collective-permute", "float32", 256, DATA_GROUPS, 1, 1)],
        256.0,
    ),
    "ppermute_half": (  # two of four workers send
        lambda x: lax.ppermute(x, "data", [(0, 1), (1, 0), (2, 2), (3, 3)]),
        P(BOTH),
        [("collective-permute", "float32", 256, ((0, 1), (2,), (3,), (4, 5), (6,), (7,)), 1, 1)],
        128.0,
    ),
    "scan": (scan_of_six, P(BOTH), [("collective-permute", "float32", 256, POD_GROUPS, 6, 6)], 6 * 256.0),
    "nested": (
        nested_loops,
        P(BOTH),
        [
            ("collective-permute", "float32", 256, DATA_GROUPS, 12, 12),
            ("reduce-scatter", "float32", 512, POD_GROUPS, 4, 4),
        ],
        12 * 256.0 + 4 * 0.5 * 512,
    ),
}


def row(op):
    return op.kind, op.dtype, op.bytes, op.replica_groups, op.count, op.messages


def sorted_rows(found):
    return sorted(map(row, found.ops), key=repr)


@pytest.mark.parametrize("name", PROGRAMS)
def test_both_counters_find_the_known_bytes(mesh, name):
    fn, out, expected, wire_bytes = PROGRAMS[name]
    for found in both_counts(mesh, fn, out):
        assert sorted_rows(found) == sorted(expected, key=repr)
        assert found.wire_bytes == wire_bytes
        assert found.warnings == ()
        assert all(op.group_size == max(map(len, op.replica_groups)) for op in found.ops)


@pytest.mark.parametrize("name", ["scan", "nested"])
def test_trip_counts_come_from_the_loop_when_the_compiler_does_not_note_them(mesh, name):
    fn, out, expected, _ = PROGRAMS[name]
    step, x = sharded(mesh, fn, out)
    text = step.lower(x).compile().as_text()
    stripped = re.sub(r"\"known_trip_count\":\{[^}]*\}", "", text)
    assert stripped != text
    assert sorted_rows(analysis.collectives(stripped)) == sorted(expected, key=repr)


def test_bfloat16_is_widened_on_cpu_and_reported(mesh):
    real, logical = both_counts(mesh, lambda x: lax.psum(x.astype(jnp.bfloat16), "data"), P("pod"))
    assert logical.ops[0].dtype == "bfloat16"
    assert real.wire_bytes == 2 * logical.wire_bytes == 1.5 * 256
    assert analysis.upcast_collectives(logical, real) == (
        analysis.WideSum("all-reduce", 1.5 * 128, 1.5 * 256, ("bfloat16",), ("float32",)),
    )
    assert analysis.upcast_collectives(real, logical) == ()


def test_conditional_counts_the_branch_that_is_asked_for(mesh):
    def step(x):
        agreed = lax.psum(jnp.sum(x), BOTH) > 3
        return lax.cond(agreed, lambda x: lax.pcast(lax.pmean(x, BOTH), BOTH, to="varying"), lambda x: x, x)

    test = 1.75 * 4
    for branch, inside in (("max", 1.75 * 256), ("min", 0), ("all", 1.75 * 256)):
        for found in both_counts(mesh, step, branch=branch):
            assert found.wire_bytes == test + inside
            assert len(found.ops) == 1 + bool(inside)
            assert len(found.warnings) == (branch != "all")


def test_while_with_unknown_end_counts_once_and_says_so(mesh):
    def step(x):
        return lax.while_loop(lambda c: lax.pmax(jnp.max(c), BOTH) < 100, lambda c: c + lax.psum(c, "data"), x)

    for found in both_counts(mesh, step):
        assert found.wire_bytes == 1.75 * 4 + 1.5 * 256
        assert "unknown number of times" in found.warnings[0]


def test_platform_dependent_takes_the_largest_branch_or_the_named_platform(mesh):
    def step(x):
        def cheap(x):
            return lax.ppermute(x, "pod", EXCHANGE)

        def dear(x):
            return lax.ppermute(jnp.tile(x, (1, 3)), "pod", EXCHANGE)[:, :64]

        return lax.platform_dependent(x, cpu=cheap, default=dear)

    fn, x = sharded(mesh, step)
    assert analysis.logical_collectives(fn, x).wire_bytes == 3 * 256
    assert analysis.logical_collectives(fn, x, branch="min").wire_bytes == 256
    assert analysis.logical_collectives(fn, x, platform="cpu").wire_bytes == 256
    assert analysis.logical_collectives(fn, x, platform="tpu").wire_bytes == 3 * 256
    assert analysis.collectives(fn.lower(x)).wire_bytes == 256


def test_logical_count_needs_no_devices_and_follows_custom_derivatives():
    @jax.custom_vjp
    def mean(x):
        return lax.pmean(x, "data")

    mean.defvjp(lambda x: (mean(x), None), lambda _, g: (lax.psum(g, "data"),))

    @jax.custom_jvp
    def scaled(x):
        return 2 * lax.all_gather(x, "pod")

    scaled.defjvp(lambda primals, tangents: (scaled(*primals), scaled(*tangents)))

    def loss(x):
        return jnp.sum(scaled(mean(jax.checkpoint(jnp.sin)(x))))

    x = jax.ShapeDtypeStruct((10,), jnp.float32)
    sizes = {"pod": 16, "data": 1024}
    forward = analysis.logical_collectives(loss, x, axis_sizes=sizes)
    assert [(op.kind, op.group_size) for op in forward.ops] == [("all-reduce", 1024), ("all-gather", 16)]
    assert forward.wire_bytes == 40 * (2 * 1023 / 1024 + 15)
    backward = analysis.logical_collectives(jax.grad(loss), x, axis_sizes=sizes)
    assert sum(op.kind == "all-reduce" for op in backward.ops) == 2


def test_logical_count_of_a_closed_jaxpr_of_index_groups_and_of_narrow_types():
    def step(x):
        return lax.all_gather(x.astype(jnp.int4), "data", axis_index_groups=[[0, 2], [1, 3]])

    closed = jax.make_jaxpr(step, axis_env=[("data", 4)])(jnp.ones(9))
    (op,) = analysis.logical_collectives(closed, axis_sizes={"data": 4}).ops
    assert (op.dtype, op.bytes, op.replica_groups, op.wire_bytes) == ("int4", 5, ((0, 2), (1, 3)), 5.0)
    with pytest.raises(ValueError, match="size of axis 'data' is unknown; pass axis_sizes"):
        analysis.logical_collectives(closed)


def test_collectives_that_vmap_turned_into_arithmetic_are_not_counted():
    step = jax.vmap(lambda x: lax.pmean(x, "data"), axis_name="data")
    assert analysis.logical_collectives(step, jnp.ones((4, 3))).ops == ()


def test_a_reduction_over_a_vmap_and_an_axis_sends_what_the_vmap_leaves(mesh):
    def local(x):
        return jax.vmap(lambda row: lax.psum(row, ("row", "data")), axis_name="row", out_axes=None)(x.reshape(4, 16))

    # JAX's check takes no axis of a vmap beside one of the mesh.
    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(BOTH), out_specs=P("pod"), check_vma=False))
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    compiled, logical = analysis.collectives(step.lower(x)), analysis.logical_collectives(step, x)
    assert [(op.bytes, op.wire_bytes) for op in logical.ops] == [(64, 96.0)]
    assert sorted_rows(compiled) == sorted_rows(logical)


def test_automatic_sharding_shows_only_in_the_compiled_program(mesh):
    rows, whole = jax.NamedSharding(mesh, P(BOTH)), jax.NamedSharding(mesh, P())
    step = jax.jit(lambda x: x.sum(axis=0), in_shardings=rows, out_shardings=whole)
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    real, logical = analysis.collectives(step.lower(x)), analysis.logical_collectives(step, x)
    assert sorted_rows(real) == [("all-reduce", "float32", 256, ALL, 1, 1)]
    assert [(grown.kind, grown.logical_bytes) for grown in analysis.upcast_collectives(logical, real)] == [
        ("all-reduce", 0)
    ]


def test_opcodes_counts_every_instruction_and_tells_programs_apart(mesh):
    pmean, x = sharded(mesh, lambda x: lax.pmean(x, BOTH), P())
    by_hand, _ = sharded(mesh, lambda x: lax.psum(x, BOTH) / 8, P())
    other, _ = sharded(mesh, lambda x: lax.psum(x, BOTH), P())
    counted = analysis.opcodes(pmean.lower(x))
    text = pmean.lower(x).compile().as_text()
    assert counted == analysis.opcodes(by_hand.lower(x)) != analysis.opcodes(other.lower(x))
    assert counted["all-reduce"] == 1
    assert sum(counted.values()) == len(re.findall(r"^ +(ROOT )?%\S+ = ", text, re.MULTILINE))


def test_memory_counts_arguments_outputs_and_donation():
    x = jax.ShapeDtypeStruct((1024, 256), jnp.float32)
    size = 1024 * 256 * 4
    fresh = analysis.memory(jax.jit(lambda x: x * 2).lower(x).compile())
    assert (fresh.arguments, fresh.outputs, fresh.aliased, fresh.peak) == (size, size, 0, 2 * size)
    donated = analysis.memory(jax.jit(lambda x: x * 2, donate_argnums=0).lower(x).compile())
    assert (donated.aliased, donated.peak) == (size, size)
    sorting = analysis.memory(jax.jit(lambda x: jnp.sort(x, axis=0)[0]).lower(x).compile())
    assert sorting.temporary >= size
    assert sorting.peak == sorting.arguments + sorting.outputs + sorting.temporary


def test_table_merges_equal_operations_and_ends_with_the_total(mesh):
    def swap_twice(x):
        return lax.ppermute(lax.ppermute(x, "pod", EXCHANGE), "pod", EXCHANGE) + lax.pmean(x, BOTH)

    step, x = sharded(mesh, swap_twice)
    lines = analysis.table(analysis.logical_collectives(step, x)).splitlines()
    assert [line.split() for line in lines[1:3]] == [
        ["collective-permute", "float32", "2", "2", "2", "256", "512"],
        ["all-reduce", "float32", "8", "1", "1", "256", "448"],
    ]
    assert lines[-1].split() == ["one", "worker", "sends", "960"]
    assert analysis.table(analysis.Collectives((), 0.0, ("careful",))).endswith("note: careful")


def test_table_says_which_collectives_are_in_loops(mesh):
    for found in both_counts(mesh, lambda x: nested_loops(x) + lax.pmean(x, BOTH)):
        assert {op.kind: op.loops for op in found.ops} == {
            "collective-permute": (4, 3),
            "reduce-scatter": (4,),
            "all-reduce": (),
        }
        heading, *lines, total = analysis.table(found).splitlines()
        assert heading.endswith("  loops")
        assert {line.split()[0]: line.split()[-1] for line in lines if "all-reduce" not in line} == {
            "collective-permute": "4x3",
            "reduce-scatter": "4",
        }
        assert not total.endswith(" ")


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="branch must be one of max, min, all, got 'mean'"):
        analysis.collectives("HloModule step", branch="mean")
    with pytest.raises(ValueError, match="contains no HLO computation"):
        analysis.collectives("module @jit_step {")


def test_groups_helpers():
    assert permutation_groups([(0, 1), (1, 2), (4, 4), (3, 0)]) == ((0, 1, 2, 3), (4,))
    assert mesh_groups((2, 2), (1, 0)) == ((0, 2, 1, 3),)
    assert mesh_groups((2, 2), (1,), np.array([3, 2, 1, 0])) == ((3, 2), (1, 0))


@pytest.mark.parametrize(
    ("what", "settings", "expected"),
    [
        ("parameters", {"tokens": 1024, "bandwidth": 70e9}, 0.506),
        ("optimizer", {"tokens": 2048, "bandwidth": 1.5e12}, 0.916),
        ("activations", {"width": 2048, "bandwidth": 2e9}, 0.584),
        ("activations", {"width": 8192, "bandwidth": 1e9}, 0.737),
        ("activations", {"width": 2048, "bandwidth": 1e9, "every": 2}, 0.584),
    ],
)
def test_offload_efficiency_is_that_of_the_paper(what, settings, expected):
    assert cost.offload_efficiency(what, flops=70e12, **settings) == pytest.approx(expected, abs=1e-3)


def test_offload_efficiency_names_what_is_missing():
    with pytest.raises(ValueError, match="tokens must be positive for 'optimizer', got None"):
        cost.offload_efficiency("optimizer", width=8, bandwidth=1.0, flops=1.0)
    with pytest.raises(ValueError, match="bandwidth must be positive"):
        cost.offload_efficiency("activations", width=8, bandwidth=0, flops=1.0)
    with pytest.raises(ValueError, match="what must be one of parameters, optimizer, activations, got 'disk'"):
        cost.offload_efficiency("disk", tokens=1, bandwidth=1.0, flops=1.0)


def test_sums_of_narrow_floats_show_what_a_mesh_sends_in_its_own_map():
    """A function of one worker is traced as simulated, where `Comm` adds them in float32."""
    reducer = jd.compressed(jd.compressors.cast(jnp.bfloat16))

    def reduce(x):
        return reducer.reduce(x, reducer.init(x), jd.comm.over("data"))[0].mean

    mesh = jd.make_mesh({"data": 4}, devices=jax.devices()[:4])
    mapped = jax.shard_map(reduce, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())
    simulated = analysis.logical_collectives(reduce, jnp.ones(1024), axis_sizes={"data": 4}, platform="cuda")
    sent = analysis.logical_collectives(mapped, jnp.ones(4096), platform="cuda")
    assert [(op.dtype, op.bytes) for op in simulated.ops] == [("float32", 4096)]
    assert [(op.dtype, op.bytes) for op in sent.ops] == [("bfloat16", 2048)]
