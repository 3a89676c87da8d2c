"""`jd.testing.expect` finds what a program sends beyond what a test expects."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import P, lax

import jaxdist as jd
from jaxdist.testing import expect

PARAMS = {"hidden": jax.ShapeDtypeStruct((64, 32), "float32"), "out": jax.ShapeDtypeStruct((32, 8), "float32")}
COUNT = 64 * 32 + 32 * 8
BATCH = jax.ShapeDtypeStruct((128, 64), "float32")
MICRO_BATCHES = 4
BOTH = ("dcn", "data")


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("dcn", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def loss_fn(params, batch):
    return jnp.mean(jnp.square(batch @ params["hidden"] @ params["out"]))


def make_step(*, once=True, dtype=jnp.float16, gather=False, unrolled=False, axes=BOTH):
    """A step that accumulates gradients over micro-batches, and its faults."""

    def average(grads):
        return lax.pmean(jax.tree.map(lambda g: g.astype(dtype), grads), axes)

    def train_step(params, batch):
        def add_one(total, batch):
            loss, grads = jd.local_value_and_grad(loss_fn, axis=axes)(params, batch)
            grads = grads if once else average(grads)
            return jax.tree.map(lambda g, t: t + g.astype(t.dtype), grads, total), loss

        micro = batch.reshape(MICRO_BATCHES, -1, batch.shape[-1])
        total = jax.tree.map(jnp.zeros_like, params)
        total = lax.pcast(total, axes, to="varying") if once else total
        if unrolled:
            for part in micro:
                total, loss = add_one(total, part)
        else:
            total, losses = lax.scan(add_one, total, micro)
            loss = losses.mean()
        total = average(total) if once else total
        # A sharded weight that is gathered, as automatic sharding does where a constraint is missing.
        extra = lax.all_gather(batch, "data").sum() * 0 if gather else 0.0
        return jax.tree.map(lambda p, g: p - g, params, total), lax.pmean(loss + extra, axes)

    return train_step


def shard(mesh, fn, axes=BOTH):
    return jax.shard_map(fn, mesh=mesh, in_specs=(P(), P(axes)), out_specs=P())


def lower(mesh, *, axes=BOTH, **faults):
    return jax.jit(shard(mesh, make_step(axes=axes, **faults), axes)).lower(PARAMS, BATCH)


EXPECTED = {"all_reduce_bytes": 2 * COUNT, "dtype": jnp.float16, "times": 1, "outside_loops": True}


def test_a_sound_program_passes_lowered_compiled_and_as_text(mesh):
    lowered = lower(mesh)
    found = expect(lowered, **EXPECTED)
    # The loss, of four bytes, was not looked at.
    assert [(op.kind, op.bytes, op.dtype) for op in found.ops] == [("all-reduce", 2 * COUNT, "float16")]
    compiled = lowered.compile()
    for program in (compiled, compiled.as_text(), jd.analysis.collectives(compiled)):
        assert expect(program, **EXPECTED) == found


FAULTS = {
    "once_a_micro_batch": (
        {"once": False},
        [
            rf"all-reduce has {4 * 2 * COUNT:,} bytes, expected at most {2 * COUNT:,}",
            "all-reduce runs 4 times, expected at most 1",
            "is inside a loop of 4 iterations",
        ],
    ),
    "unrolled_micro_batches": (
        {"once": False, "unrolled": True},
        # XLA merges them into one, so only their bytes show it.
        [f"all-reduce has {4 * 2 * COUNT:,} bytes"],
    ),
    "float32_on_the_wire": (
        {"dtype": jnp.float32},
        [rf"all-reduce has {4 * COUNT + 4:,} bytes", "in float32 is wider than float16"],
    ),
    "another_gather": ({"gather": True}, ["all-gather of 4,096 bytes in float32 was not expected"]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(mesh, name):
    faults, lines = FAULTS[name]
    with pytest.raises(AssertionError) as raised:
        expect(lower(mesh, **faults), **EXPECTED)
    message = str(raised.value)
    assert all(line in message for line in lines), message
    assert re.search(r"^kind +dtype +workers +times", message, re.MULTILINE)
    assert "one worker sends" in message


@pytest.mark.parametrize(
    ("name", "alone"),
    [
        ("once_a_micro_batch", {"outside_loops": True}),
        ("once_a_micro_batch", {"times": 1}),
        ("unrolled_micro_batches", {"wire_bytes": 2 * 2 * COUNT}),
        ("float32_on_the_wire", {"dtype": "float16"}),
        ("another_gather", {"all_reduce_bytes": 2 * COUNT}),
    ],
)
def test_each_expectation_finds_its_fault_alone(mesh, name, alone):
    expect(lower(mesh), **alone)
    with pytest.raises(AssertionError):
        expect(lower(mesh, **FAULTS[name][0]), **alone)


def test_only_collectives_that_cross_the_axis_are_counted(mesh):
    inside = lower(mesh, once=False, axes=("data",))
    assert expect(inside, wire_bytes=0, mesh=mesh, axis="dcn").ops == ()
    with pytest.raises(AssertionError, match="loop of 4"):
        expect(inside, outside_loops=True, mesh=mesh, axis="data")
    across = lower(mesh)
    expect(across, **EXPECTED, mesh=mesh, axis="dcn")
    with pytest.raises(AssertionError, match=r"one worker sends .* bytes, expected at most 0") as raised:
        expect(across, wire_bytes=0, mesh=mesh, axis=("dcn",))
    assert "float16" in str(raised.value)


def test_kinds_may_be_looked_at_one_by_one(mesh):
    program = lower(mesh, gather=True)
    expect(program, **EXPECTED, allow_others=True)
    expect(program, all_gather_bytes=4096, dtype="float32", allow_others=True)
    expect(program, all_reduce_bytes=2 * COUNT, all_gather_bytes=4096)
    with pytest.raises(AssertionError, match="all-gather has 4,096 bytes, expected at most 1,000"):
        expect(program, all_gather_bytes=1000, allow_others=True)


def test_a_kind_that_is_expected_has_to_occur(mesh):
    """Of a program that no longer averages its gradients, only the loss is left."""
    step = jax.jit(shard(mesh, lambda params, batch: lax.pmean(loss_fn(params, batch), BOTH)))
    with pytest.raises(AssertionError, match="there is no all-reduce of more than 256 bytes, expected 4,096"):
        expect(step.lower(PARAMS, BATCH), all_reduce_bytes=4096)


def test_what_is_written_can_be_checked_where_the_compiler_upcasts(mesh):
    step = shard(mesh, make_step(dtype=jnp.bfloat16))
    expected = EXPECTED | {"dtype": jnp.bfloat16}
    with pytest.raises(AssertionError, match="on CPU, XLA sends bfloat16"):
        expect(jax.jit(step).lower(PARAMS, BATCH), **expected)
    expect(jd.analysis.logical_collectives(step, PARAMS, BATCH), **(expected | {"times": 2}))
    looped = shard(mesh, make_step(once=False))
    with pytest.raises(AssertionError, match="loop of 4"):
        expect(jd.analysis.logical_collectives(looped, PARAMS, BATCH), outside_loops=True)


def test_a_loop_of_unknown_length_is_a_loop(mesh):
    def until_small(x):
        return lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: lax.pmean(x, "data") / 2, x)

    step = jax.shard_map(until_small, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    with pytest.raises(AssertionError, match=r"inside a loop of \? iterations") as raised:
        expect(jax.jit(step).lower(BATCH), outside_loops=True)
    assert "unknown number of times" in str(raised.value)


def test_packed_codes_are_not_wide_floats(mesh):
    """Codes of four bits are sent as words; where integers are expected, floats are wide."""
    tx = jd.all_reduce(jd.compressed(jd.qsgd(bits=4)), axis=BOTH)

    def train_step(params, batch):
        _, grads = jd.local_value_and_grad(loss_fn, axis=BOTH)(params, batch)
        updates, _ = tx.update(grads, tx.init(params), params)
        return optax.apply_updates(params, updates)

    program = jd.analysis.logical_collectives(shard(mesh, train_step), PARAMS, BATCH)
    assert expect(program, dtype=jnp.float16).wire_bytes > 0
    with pytest.raises(AssertionError, match="wider than uint8"):
        expect(lower(mesh), dtype=jnp.uint8)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({}, "nothing is expected"),
        ({"all_reduce_bytes": -1}, "all_reduce_bytes must be"),
        ({"wire_bytes": float("nan")}, "wire_bytes must be"),
        ({"times": -1}, "times must be at least 0"),
        ({"times": 1, "spare_bytes": -1}, "spare_bytes must be at least 0"),
        ({"times": 1, "axis": "data"}, "mesh and axis go together"),
    ],
)
def test_wrong_expectations(wrong, said):
    with pytest.raises(ValueError, match=said):
        expect(jd.analysis.Collectives((), 0.0, ()), **wrong)


def test_a_mesh_of_another_program(mesh):
    found = jd.analysis.collectives(lower(mesh))
    with pytest.raises(ValueError, match=r"no axis 'model', its axes are dcn, data"):
        expect(found, times=1, mesh=mesh, axis="model")
    smaller = jax.sharding.AbstractMesh((2,), ("data",))
    with pytest.raises(ValueError, match="more than the 2 devices of the mesh"):
        expect(found, times=1, mesh=smaller, axis="data")
