"""The reduce-scatter's form for TPU: its numbers here, its bytes by the TPU's own compiler."""

from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax

import jaxdist as jd
from jaxdist import analysis
from jaxdist._core.jaxprs import inner_jaxprs
from jaxdist.analysis import pods as there
from jaxdist.comm import over

needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu: pip install 'jax[tpu]'")


def scattered(mesh):
    axes = tuple(mesh.shape)
    return jax.shard_map(
        lambda x: over(axes).reduce_scatter_mean(x[0])[None], mesh=mesh, in_specs=P(axes), out_specs=P(axes)
    )


@pytest.mark.parametrize("axes", [{"data": 8}, {"pod": 2, "chip": 4}, {"z": 2, "y": 2, "x": 2}])
def test_numbers(axes, monkeypatch):
    """In the form for TPU, with pieces that fill no tiles; more than one axis after the other."""
    monkeypatch.setattr(lax, "platform_dependent", lambda *operands, tpu, **_: tpu(*operands))
    x = np.random.default_rng(0).normal(size=(8, 8, 5, 301)).astype(np.float32)
    found = jax.jit(scattered(jd.make_mesh(axes)))(x)
    np.testing.assert_allclose(found, x.mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (jnp.int8, (1, 2048)),
        (jnp.int8, (2, 1024)),
        (jnp.int8, (5, 1, 700)),
        (jnp.bfloat16, (1, 2048)),
        (jnp.float16, (3, 3, 16, 64)),
    ],
)
def test_what_tpus_would_pad_is_sent_as_a_vector(dtype, shape, mesh):
    """With the same results, in the same shapes."""
    ring = [(i, (i + 1) % 8) for i in range(8)]

    def exchange(x):
        comm = over("data")
        return comm.sum(x), comm.all_gather(x), comm.ppermute(x, ring)

    x = np.random.default_rng(0).integers(-8, 8, (8, *shape))
    mapped = jax.shard_map(
        lambda x: exchange(x[0]), mesh=mesh, in_specs=P("data"), out_specs=(P(), P(), P("data")), check_vma=True
    )
    total, rows, moved = jax.jit(mapped)(x.astype(dtype))
    np.testing.assert_array_equal(total.astype(np.int32), x.sum(0))
    np.testing.assert_array_equal(rows.astype(np.int32), x)
    np.testing.assert_array_equal(moved.reshape(x.shape).astype(np.int32), np.roll(x, 1, 0))
    jaxpr = jax.make_jaxpr(mapped)(x.astype(dtype))
    assert {aval.ndim for aval in sent_by(jaxpr)} == {1}


def sent_by(closed):
    """What the collectives of a jaxpr send, at any depth."""
    for equation in closed.eqns:
        if equation.primitive.name.removesuffix("_invariant") in ("psum", "all_gather", "ppermute"):
            yield equation.invars[0].aval
        for inner in inner_jaxprs(equation):
            yield from sent_by(inner.jaxpr)


def test_aligned_and_wide_arrays_keep_their_shape():
    """Flattening them would only cost a pass over memory."""
    for shape, dtype in (((64, 1024), jnp.int8), ((1, 2048), jnp.float32), ((4096, 4), jnp.int8), ((1, 100), jnp.int8)):
        traced = jax.make_jaxpr(
            jax.shard_map(lambda x: over("data").sum(x), mesh=jd.make_mesh(), in_specs=P(), out_specs=P())
        )(jnp.zeros(shape, dtype))
        assert [aval.shape for aval in sent_by(traced)] == [shape]


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:1x2", "v5e:2x2", "v6e:2x4", "tpu7x:2x2x1", "v5e:4x4"])
@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint16, jnp.uint32, jnp.float32, jnp.bfloat16])
def test_a_gather_stays_a_gather(dtype, topology):
    """Of any length and shape, with less than a tile of padding."""
    mesh = there.tpu(topology)
    whole = jax.NamedSharding(mesh, P("data"))
    for shape in ((1,), (5,), (100,), (129,), (640,), (1000,), (1100,), (5000,), (3, 100), (1, 3000), (2, 7, 64)):
        like = jax.ShapeDtypeStruct((mesh.size * shape[0], *shape[1:]), dtype, sharding=whole)
        gather = jax.shard_map(lambda x: over("data").all_gather(x), mesh=mesh, in_specs=P("data"), out_specs=P())
        (op,) = analysis.collectives(jax.jit(gather).lower(like)).ops
        assert op.kind == "all-gather"
        entries = int(np.prod(shape))
        step = 1024 if op.bytes // jnp.dtype(dtype).itemsize >= 1024 else 128
        assert op.bytes <= -(-entries // step) * step * jnp.dtype(dtype).itemsize
        if entries >= 3000:
            assert op.padded_bytes <= 1.03 * op.bytes


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:2x4", "v6e:2x4", "tpu7x:2x2x1"])
@pytest.mark.parametrize("shape", [(65536,), (64, 1024), (3, 3, 64, 64), (2, 30_000), (65537,)])
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.bfloat16, jnp.float16])
def test_a_sum_sends_the_bytes_of_its_entries(dtype, shape, topology):
    """Of what a step computes; of an argument the shape is the caller's."""
    mesh = there.tpu(topology)
    like = jax.ShapeDtypeStruct(
        (mesh.size * shape[0], *shape[1:]), jnp.float32, sharding=jax.NamedSharding(mesh, P("data"))
    )

    def mean(x):
        return over("data").sum(jnp.floor(x * 3).astype(dtype)).astype(jnp.float32)

    found = analysis.collectives(jax.jit(jax.shard_map(mean, mesh=mesh, in_specs=P("data"), out_specs=P())).lower(like))
    nbytes = int(np.prod(shape)) * jnp.dtype(dtype).itemsize
    assert found.padded_wire_bytes <= 1.125 * 2 * (mesh.size - 1) / mesh.size * nbytes


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:2x4", "v6e:2x4", "tpu7x:2x2x1"])
def test_a_reduce_scatter_of_float16_sends_half_of_an_all_reduce(topology):
    """In an all-to-all, and it is added in float32."""
    mesh = there.tpu(topology)
    found = analysis.collectives(jax.jit(scattered(mesh)).lower(jax.ShapeDtypeStruct((8, 8, 65536), jnp.float16)))
    assert {op.kind for op in found.ops} == {"all-to-all"}
    assert found.padded_wire_bytes == 7 * 65536 * 2


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("topology", "axes"),
    [
        ("v5e:2x4", None),
        ("v5e:4x8", None),
        ("v5e:8x16", None),
        ("v5e:4x4", {"y": 4, "x": 4}),
        ("v5p:2x2x2", {"z": 2, "y": 2, "x": 2}),
    ],
)
@pytest.mark.parametrize("tiles", [2, 98, 193, 1543])
def test_stays_a_reduce_scatter(tiles, topology, axes, dtype):
    """Of numbers of tiles that XLA sends as an all-reduce when they are left as they are."""
    mesh = there.tpu(topology, axes)
    entries = tiles * 4096 // jnp.dtype(dtype).itemsize - 7
    shape = jax.ShapeDtypeStruct((mesh.size, mesh.size, entries), dtype)
    found = analysis.collectives(jax.jit(scattered(mesh)).lower(shape))
    assert {op.kind for op in found.ops} == {"reduce-scatter"}
    padding = 1.01 if tiles < 4 else 1.09
    assert found.wire_bytes <= padding * (mesh.size - 1) * entries * jnp.dtype(dtype).itemsize
