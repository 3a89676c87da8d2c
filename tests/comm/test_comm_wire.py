"""What a `Comm` sends, read from compiled programs; the ledger that counts it; conditions around collectives."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

import jaxdist as jd
from jaxdist import analysis
from jaxdist._core.compat import varying_axes
from jaxdist.comm import alone, cond, count_sent, nested, over, split_group, total_bytes
from jaxdist.comm.pair import LEAST_BYTES

BOTH = ("pod", "chip")
PARTS = [(0, 6, 3, 1), (2, 4, 7, 5)]
GROUPS = {
    "one axis": ("data", lambda: over("data")),
    "two axes": (BOTH, lambda: over(BOTH)),
    "fast axis": (BOTH, lambda: over(BOTH).inner),
    "nested": (BOTH, lambda: nested(over("chip"), over("pod"))),
    "parts": ("data", lambda: split_group(over("data"), PARTS)),
}


def turned(size):
    return [(i, (i + 1) % size) for i in range(size)]


def over_scatter(x):
    return over("data").reduce_scatter_mean(x)


def compiled(mesh, axes, f, *shapes):
    """A program of which every worker holds a row of each shape and returns whatever `f` gives, as its own."""

    def one(*rows):
        return jax.tree.map(lambda a: a[None], f(*(row[0] for row in rows)))

    step = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=P(axes), out_specs=P(axes)))
    rows = [jax.ShapeDtypeStruct((mesh.size, *shape.shape), shape.dtype) for shape in shapes]
    return step.trace(*rows)


def like(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    ("dtype", "word"), [("bfloat16", "uint16"), ("float8_e4m3fn", "uint8"), ("float8_e5m2", "uint8")]
)
def test_narrow_floats_travel_as_words(mesh, dtype, word):
    def f(x):
        c = over("data")
        return [
            c.mean(x),
            c.all_gather(x),
            c.all_gather(x, agreed=False),
            c.all_to_all(x),
            c.reduce_scatter_mean(x),
            c.ppermute(x, turned(8)),
        ]

    found = analysis.collectives(compiled(mesh, "data", f, like((8, 16), dtype)).lower().compile())
    assert {op.dtype for op in found.ops} == {word}
    itemsize = jnp.dtype(dtype).itemsize
    assert found.wire_bytes <= 128 * itemsize * (2 * 7 / 8 + 7 + 7 + 7 / 8 + 7 / 8 + 1)  # fewer: equal gathers merge


def test_half_precision_means_agree_with_float32(mesh):
    """Divided first, float16 cannot overflow; bfloat16 words are summed in float32."""
    x = jax.random.normal(jax.random.key(0), (8, 5, 3)) * 3e4
    for dtype, tolerance in ((jnp.float16, 2e-3), (jnp.bfloat16, 8e-3)):
        rows = x.astype(dtype)
        f = jax.shard_map(lambda r: over("data").mean(r[0]), mesh=mesh, in_specs=P("data"), out_specs=P())
        simulated = jax.jit(jax.vmap(lambda r: over("data").mean(r), axis_name="data", out_axes=None))
        wanted = np.asarray(rows, np.float32).mean(0)
        for found in (jax.jit(f)(rows), simulated(rows)):
            assert found.dtype == dtype
            np.testing.assert_allclose(np.asarray(found, np.float32), wanted, atol=tolerance * 3e4)


def test_reduce_scatter_by_platform(mesh):
    """All-to-all and a local sum where XLA's own form is wrong (CPU); the real one in a program for a TPU."""
    traced = compiled(mesh, "data", over_scatter, like((8, 16)))
    found = analysis.collectives(traced.lower().compile())
    assert [(op.kind, op.dtype, op.bytes) for op in found.ops] == [("all-to-all", "float32", 512)]
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "reduce_scatter" in text
    assert "all_to_all" not in text


def test_bfloat16_means_are_plain_on_tpu(mesh):
    text = compiled(mesh, "data", lambda x: over("data").mean(x), like((8, 16), jnp.bfloat16))
    text = text.lower(lowering_platforms=("tpu",)).as_text()
    assert "all_reduce" in text
    assert "ui16" not in text


def test_two_workers_gather_rather_than_scatter():
    mesh = jd.make_mesh({"data": 2}, devices=jax.devices()[:2])
    traced = compiled(mesh, "data", lambda x: over("data").mean(x), like((8, 16), jnp.bfloat16))
    assert [op.kind for op in analysis.collectives(traced.lower().compile()).ops] == ["all-gather"]


@pytest.mark.parametrize("workers", [2, 8])
def test_long_float16_means_are_of_words(workers):
    """Which gloo need not add; of the bytes of an all-reduce, and in float32: 57344 eight times is infinite."""
    mesh = jd.make_mesh({"data": workers}, devices=jax.devices()[:workers])
    rows = np.random.default_rng(0).standard_normal((workers, LEAST_BYTES // 2)).astype(np.float16)
    rows[:, 0] = 57344
    step = jax.jit(jax.shard_map(lambda r: over("data").mean(r[0]), mesh=mesh, in_specs=P("data"), out_specs=P()))
    np.testing.assert_allclose(step(rows), rows.astype(np.float32).mean(0), rtol=1e-3, atol=1e-6)
    found = analysis.collectives(step.lower(rows).compile())
    assert "all-reduce" not in {op.kind for op in found.ops if op.dtype == "float16"}
    assert found.wire_bytes == 2 * (workers - 1) / workers * LEAST_BYTES


@pytest.mark.sampled(9)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("workers", "size"), [(2, LEAST_BYTES), (4, 8), (4, LEAST_BYTES)])
def test_what_travels_as_words_has_the_gradient_of_float32(dtype, workers, size):
    mesh = jd.make_mesh({"data": workers}, devices=jax.devices()[:workers])
    weights = jnp.arange(1.0, workers + 1)[:, None] * jnp.ones((1, size))

    def loss(own, weight):
        c, chunks = over("data"), own.reshape(workers, -1)
        sent = [c.mean(own), c.ppermute(own, turned(workers)), c.all_gather(own).sum(0)]
        sent += [c.all_to_all(chunks).ravel(), jnp.tile(c.reduce_scatter_mean(chunks), workers)]
        return sum(jnp.sum(c.varying(x).astype(jnp.float32) * weight) for x in sent)

    def gradient(own, weight):
        return jax.grad(loss)(own[0], weight[0])[None].astype(jnp.float32)

    step = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    wanted = step(jnp.ones((workers, size)), weights)
    np.testing.assert_allclose(step(jnp.ones((workers, size), dtype), weights), wanted, rtol=2e-2)


def test_gradient_of_a_differing_gather_is_a_reduce_scatter(mesh):
    """Worker v weighs worker w's part by c[v, w]; the gradient of part w is the sum over v."""
    x, c = jax.random.normal(jax.random.key(0), (2, 8, 8))

    def loss(part, weights):
        return jnp.sum(over("data").all_gather(part, agreed=False) * weights)

    def one(part, weights):
        return jax.grad(loss)(part[0], weights[0])[None]

    step = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    simulated = jax.jit(jax.vmap(jax.grad(loss), axis_name="data"))(x[0], c)
    for found in (step(x[0], c), simulated):
        np.testing.assert_allclose(found, np.asarray(c).sum(0), rtol=1e-5, atol=1e-6)
    # The forward gather is not needed here; the backward is an all-to-all, not an all-reduce of everything.
    assert {op.kind for op in analysis.collectives(step.lower(x[0], c).compile()).ops} == {"all-to-all"}


# ---- counting


@pytest.mark.parametrize("name", GROUPS)
def test_ledger_equals_the_compiled_program(mesh, pods, name):
    axes, make = GROUPS[name]
    ledger, size = [], 8 if name in ("one axis", "two axes", "nested") else 4

    def f(a, b, c, d, e, g, h, i):
        comm = count_sent(make(), ledger)
        moved = [] if name == "nested" else [comm.ppermute(h, turned(size))]
        out = [comm.mean(a), comm.sum(b), comm.max(c), comm.all_gather({"d": d, "e": e}), comm.all_to_all(g)]
        return out, moved, comm.reduce_scatter_mean(i), comm.mean(a[0, 0])

    rows = [like((size, 8 * n), jnp.int8 if n == 5 else jnp.float32) for n in range(1, 9)]
    traced = compiled(mesh if axes == "data" else pods, axes, f, *rows)
    found = analysis.collectives(traced.lower().compile())
    assert not found.warnings
    assert total_bytes(ledger) == pytest.approx(found.wire_bytes, rel=1e-9)
    assert total_bytes(ledger) > 1000


def test_a_group_of_one_sends_nothing():
    ledger = []
    comm = count_sent(alone(), ledger)
    x = jnp.ones((1, 3))
    for f in (comm.mean, comm.sum, comm.max, comm.all_gather, comm.all_to_all, comm.reduce_scatter_mean):
        f(x)
    comm.ppermute(x, [(0, 0)])
    assert ledger == []
    assert total_bytes(ledger) == 0.0


MODULE = importlib.import_module("jaxdist.comm.over")  # `jaxdist.comm.over` is the function
ALL = {
    "sum": lambda comm, x: comm.sum(x),
    "max": lambda comm, x: comm.max(x),
    "mean": lambda comm, x: comm.mean(x),
    "all_gather": lambda comm, x: comm.all_gather(x),
    "all_gather, differing": lambda comm, x: comm.all_gather(x, agreed=False),
    "all_to_all": lambda comm, x: comm.all_to_all(x),
    "reduce_scatter_mean": lambda comm, x: comm.reduce_scatter_mean(x),
    "ppermute": lambda comm, x: comm.ppermute(x, [(0, 0)]),
    "ppermute to no worker": lambda comm, x: comm.ppermute(x, []),
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
@pytest.mark.parametrize("name", list(ALL))
def test_one_worker_of_a_mesh_gets_what_a_collective_would_give(monkeypatch, name, dtype):
    mesh = jd.make_mesh({"data": 1}, devices=jax.devices()[:1])
    x = (jnp.arange(6) % 5 - 2).reshape(1, 6).astype(dtype)
    floating = jnp.issubdtype(dtype, jnp.floating)
    if name == "reduce_scatter_mean" and not floating:
        pytest.skip("integers have no mean")
    types = []

    def one(x):
        out = ALL[name](over("data"), x)
        types.append((out.dtype, varying_axes(out)))
        return over("data").varying(out)

    def run():
        step = jax.shard_map(one, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        gradients = [jax.grad(lambda x: (2 * step(x)).sum())(x)] if floating else []
        compiled = jax.jit(step).lower(x).compile()
        return analysis.collectives(compiled), [compiled(x), *gradients]

    collectives, found = run()
    monkeypatch.setattr(MODULE, "_ALONE_ON_MESH", MODULE._ON_MESH)
    assert not (floating and collectives.ops)
    for own, theirs in zip(found, run()[1], strict=True):
        np.testing.assert_array_equal(own, theirs)
    assert len(set(types)) == 1


def test_one_worker_of_a_mesh_copies_nothing():
    """XLA:CPU packs and copies the arrays of an all-reduce even if there is a single worker."""
    mesh = jd.make_mesh({"data": 1}, devices=jax.devices()[:1])
    tree = [like((1024, 1024)), like((1024,))] * 2

    def one(state, gradients):
        mean = jd.exact().reduce(gradients, (), over("data"))[0].mean
        return jax.tree.map(lambda x, g: x - 0.1 * g, state, mean), ()

    compiled = jd.distribute(one, mesh, batch_specs=P()).lower(tree, tree).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20


# ---- conditions


def test_an_agreed_condition_sends_and_counts_one_branch(mesh):
    def f(comm, step, x):
        return cond(step % 2 == 0, lambda c, y: c.mean(y), lambda c, y: y.mean() * jnp.ones(4), comm, x)

    def one(step, x):
        ledger = []
        agreed = over("data").mean(x[0])
        quiet = f(over("data"), step, agreed)
        return quiet, f(count_sent(over("data"), ledger), step, agreed), total_bytes(ledger)

    step = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
    x = jnp.arange(32.0).reshape(8, 4)
    for number, mean, sent in ((0, x.mean(0), 2 * 7 / 8 * 16), (1, jnp.full(4, x.mean()), 0.0)):
        quiet, loud, found = step(jnp.int32(number), x)
        np.testing.assert_allclose(quiet, mean)
        np.testing.assert_allclose(loud, mean)
        assert float(found) == sent


def test_a_condition_that_differs_between_workers_is_refused(mesh):
    def one(x):
        return cond(x[0] > 0, lambda c, y: c.mean(y), lambda c, y: y, over("data"), x)

    with pytest.raises(ValueError, match="must be agreed"):
        jax.jit(jax.shard_map(one, mesh=mesh, in_specs=P("data"), out_specs=P())).lower(jnp.ones(8))
