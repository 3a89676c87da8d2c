"""The reduce-scatter's form for TPU: its numbers here, its bytes by the TPU's own compiler."""

from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax

import jaxdist as jd
from jaxdist import analysis
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
