"""Codes of blocks in one kernel: the bits of the plain program, here by the interpreter of Pallas."""

import sys

import chex
import jax
import jax.experimental.pallas
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import xla_bridge

from jaxdist import compressors as jc
from jaxdist.analysis import pods
from jaxdist.compressors import one_pass
from jaxdist.compressors.one_pass import LARGEST_BLOCK, MANY, TILE, _round_half_even, in_one_pass, run_in_kernel
from jaxdist.compressors.packing import RUN

CODES = {
    "int8": (jc.int8(), 256),
    "int8, at random": (jc.int8(rounding="stochastic"), 256),
    "int4": (jc.int4(), 32),
    "fp8": (jc.fp8(), 128),
    "mxfp4, at random": (jc.mxfp4(rounding="stochastic"), 32),
    "mxfp8": (jc.mxfp8(), 32),
    "e3m0": (jc.e3m0(), 256),
    "dynamic_fp8": (jc.dynamic_fp8(), 32),
    "qsgd": (jc.qsgd(4), 512),
    "qsgd, Euclidean": (jc.qsgd(2, norm="l2", bucket=4096), 4096),
    "scaled_sign": (jc.scaled_sign(bucket=1024), 1024),
}

# Their scales are sums.
SUMS = ("qsgd, Euclidean", "scaled_sign")


def an_input(size):
    """Entries of very different magnitude, a block of zeros, ties, and some that are not finite."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(size) * 10.0 ** rng.integers(-30, 30, size)).astype(np.float32)
    x[:4096], x[4096:4200] = 0.0, np.round(x[4096:4200])
    x[-3:] = np.nan, np.inf, -np.inf
    return jnp.asarray(x)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "dtype"), [*((name, jnp.float32) for name in CODES), ("int8", jnp.bfloat16)])
def test_bits_are_those_of_the_plain_program(name, dtype):
    """Also where the last tile overlaps the one before."""
    code, block = CODES[name]
    tile = max(TILE, block)
    x, key = an_input(5 * tile + max(block, RUN)).astype(dtype), jax.random.key(3)
    payload = jax.jit(lambda x: run_in_kernel(code.compress, tile, block, x, key, interpret=True))(x)
    expected = jax.jit(code.compress)(x, key)
    if name in SUMS:
        # In another order: the last digits of a norm differ, and so does a code in thousands.
        codes, scales = zip(payload, expected, strict=True)
        assert np.mean(codes[0] != codes[1]) < 1e-3
        np.testing.assert_allclose(*scales, rtol=1e-6)
        return
    jax.tree.map(np.testing.assert_array_equal, payload, expected)


PARTED = {name: code for name, code in CODES.items() if name != "scaled_sign"} | {
    "qsgd, 3 bits": (jc.qsgd(3), 512),
    "nuqsgd": (jc.nuqsgd(4, bucket=512), 512),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", PARTED)
def test_an_array_with_a_part_of_a_block_is_coded_in_two_parts(monkeypatch, name):
    """The bits stay, and no program writes out a padded copy of it, which has four bytes an entry."""
    code, block = PARTED[name]
    size = MANY + block // 2 + 3
    x, key = jnp.roll(an_input(size), -1), jax.random.key(3)

    def run():
        compiled = jax.jit(lambda *args: code.compress(*args)).lower(x, key).compile()
        return compiled.memory_analysis().temp_size_in_bytes, compiled(x, key)

    temporary, parts = run()
    monkeypatch.setattr(one_pass, "MANY", 2 * size)
    with_copy, whole = run()
    assert temporary < with_copy - 3 * size
    chex.assert_trees_all_equal_shapes_and_dtypes(parts, whole)
    if name in SUMS:
        # The last digits of a norm differ, and so does a code in thousands.
        np.testing.assert_allclose(parts[1], whole[1], rtol=1e-6)
        assert np.mean(parts[0] != whole[0]) < 1e-3
    else:
        # The code of NaN may have either sign.
        np.testing.assert_array_equal(*(code.decompress(payload, x) for payload in (parts, whole)))


@pytest.mark.slow
def test_under_vmap():
    code, rows = jc.qsgd(4), jnp.reshape(an_input(4 * TILE), (2, -1))
    keys = jax.random.split(jax.random.key(0), 2)
    payload = jax.vmap(lambda x, key: run_in_kernel(code.compress, TILE, 512, x, key, interpret=True))(rows, keys)
    jax.tree.map(np.testing.assert_array_equal, payload, jax.vmap(code.compress)(rows, keys))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("name", CODES)
def test_kernels_compile_for_gpus(monkeypatch, name):
    """Under `shard_map`; `analysis.pods` needs the CUDA plugin, `pip install '.[gpu-plan]'`."""
    pytest.importorskip("jax_plugins.xla_cuda13")
    mesh, code = pods.gpu("h100:1x1"), CODES[name][0]
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: True)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    def compress(x, words):
        return jax.tree.map(lambda leaf: leaf[None], code.compress(x[0], jax.random.wrap_key_data(words[0])))

    mapped = jax.shard_map(compress, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"))
    like = [jax.ShapeDtypeStruct((1, 2**16), jnp.float32), jax.ShapeDtypeStruct((1, 2), jnp.uint32)]
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, jax.P("data"))) for x in like]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        assert "__gpu$xla.gpu.triton" in jax.jit(mapped).lower(*like).compile().as_text()


def test_what_does_not_fit_is_left_to_xla(monkeypatch):
    """No kernel without a GPU, for arrays with a part of a block, small ones, or blocks that no kernel can have."""

    def has_kernel(block, size):
        compress = in_one_pass(lambda x, key: x.reshape(-1, block)[:, 0] if x.size % block == 0 else x, block)
        return "pallas_call" in str(jax.make_jaxpr(compress)(jnp.zeros(size), jax.random.key(0)))

    assert not has_kernel(256, 2 * TILE)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert has_kernel(256, 2 * TILE)
    assert has_kernel(LARGEST_BLOCK, 2 * LARGEST_BLOCK)
    for block, size in ((256, 2 * TILE + 1), (256, TILE), (96, 96 * TILE), (2 * LARGEST_BLOCK, 4 * LARGEST_BLOCK)):
        assert not has_kernel(block, size), (block, size)
    with monkeypatch.context() as patch:
        patch.setattr(one_pass, "triton_parameters", lambda warps: None)
        assert not has_kernel(256, 2 * TILE)
    with monkeypatch.context() as patch:
        patch.delattr(jax.experimental.pallas, "triton", raising=False)
        patch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
        with pytest.warns(UserWarning, match="read a gradient twice"):
            assert not has_kernel(256, 2 * TILE)
    # On another device of such a process the plain program runs.
    x, key = an_input(2 * TILE), jax.random.key(0)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(jc.int8().compress)(x, key), jc.int8().compress(x, key))


def test_a_trace_does_not_start_the_backend(monkeypatch):
    """Else `jax.distributed.initialize` would come too late, where a program first counts the bytes of its payloads."""

    def start():
        raise AssertionError("jax.default_backend() starts the backend")

    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setattr(jax, "default_backend", start)
    key = jax.eval_shape(lambda: jax.random.key(0))
    codes, _ = jax.eval_shape(jc.int8().compress, jax.ShapeDtypeStruct((2 * TILE,), jnp.float32), key)
    assert codes.shape == (2 * TILE,)


def test_rounding_is_to_the_nearest_even():
    x = np.concatenate([np.arange(-40, 40) / 4, [2.0**23 + 1, -(2.0**30), 1e30, 0.49999997, np.inf]]).astype(np.float32)
    np.testing.assert_array_equal(_round_half_even(jnp.asarray(x)), np.rint(x))
