import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codes import KEY, decoded
from jax.sharding import PartitionSpec as P
from paths import REPOSITORY
from reference import compressors as reference
from register import FLOAT16

from jaxdist import compressors as jc
from jaxdist.testing import assert_compressor_laws
from jaxdist.testing.compressor_laws import MAGNITUDES

X = np.array([3.0, -4.0, 0.0, 12.0], np.float32)

CODES = {
    "identity": jc.identity(),
    "bfloat16": jc.cast(jnp.bfloat16),
    "float16": jc.cast(jnp.float16),
    "e4m3": jc.cast(jnp.float8_e4m3fn),
    "e5m2": jc.cast(jnp.float8_e5m2),
    "top_k": jc.top_k(0.2),
    "random_k": jc.random_k(0.3),
    "random_k unbiased": jc.random_k(0.3, unbiased=True),
    "qsgd 2": jc.qsgd(2, bucket=16),
    "qsgd 4": jc.qsgd(4, bucket=16),
    "qsgd 8 l2": jc.qsgd(8, norm="l2"),
    "qsgd 4 threefry": jc.qsgd(4, noise=jax.random.uniform),
    "scaled_sign": jc.scaled_sign(),
    "scaled qsgd": jc.scaled(jc.qsgd(2, norm="l2")),
}
each_code = pytest.mark.parametrize("code", CODES.values(), ids=CODES)


def payload_bytes(code, size, dtype=jnp.float32):
    payload = jax.eval_shape(code.compress, jax.ShapeDtypeStruct((size,), dtype), KEY)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(payload))


def heavy_tailed(size, seed=0):
    return np.random.default_rng(seed).standard_cauchy(size).astype(np.float32)


# Every code


@pytest.mark.slow
@each_code
def test_laws_for_all_shapes(code):
    options = {
        "magnitudes": FLOAT16 if code is CODES["float16"] else MAGNITUDES,
        "loses_nan": code in (CODES["random_k"], CODES["random_k unbiased"]),
    }
    assert_compressor_laws(code, **options)
    assert_compressor_laws(code, shapes=[(600,)], key=jax.random.key(2), **options)


@pytest.mark.sampled(3)
@each_code
@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 4), (2, 1, 3, 2, 2)])
def test_any_shape_under_strict_promotion(code, shape):
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        x = jax.ShapeDtypeStruct(shape, dtype)
        with jax.numpy_dtype_promotion("strict"):
            out = jax.eval_shape(lambda x, key: code.decompress(code.compress(x, key), x), x, KEY)
        assert (out.shape, out.dtype) == (shape, dtype)


def test_float64():
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).normal(size=21))
        outs = jax.jit(lambda x: {name: code.decompress(code.compress(x, KEY), x) for name, code in CODES.items()})(x)
        for name, out in outs.items():
            assert out.dtype == jnp.float64, name
            assert bool(jnp.isfinite(out).all()), name


EAGER = """
import jax, jax.numpy as jnp
from jaxdist import compressors as jc

x, key = jnp.ones((5, 4), jnp.float32), jax.random.key(0)
for code in (jc.fp8(), jc.dynamic_fp8(), jc.nuqsgd(4)):
    assert jnp.isfinite(code.decompress(code.compress(x, key), x)).all()
"""


@pytest.mark.slow
def test_float64_without_jit():
    """XLA:CPU, optimizing, ends the process at an `or` of int32 and a constant that x64 makes int64."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, "-c", EAGER], env=environment, check=True)


def test_traced_once():
    traces = 0

    def round_trip(x, key):
        nonlocal traces
        traces += 1
        return [code.decompress(code.compress(x, key), x) for code in (CODES["qsgd 4"], CODES["random_k"])]

    compiled = jax.jit(round_trip)
    for seed in range(3):
        compiled(jnp.full(9, float(seed)), jax.random.key(seed))
    assert traces == 1


def test_types_under_shard_map(mesh):
    def one_worker(x, key):
        own = jax.random.fold_in(key, jax.lax.axis_index("data"))
        return [code.decompress(code.compress(x, k), x) for code in CODES.values() for k in (key, own)]

    mapped = jax.shard_map(one_worker, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    for out in jax.eval_shape(mapped, jax.ShapeDtypeStruct((40,), jnp.float32), KEY):
        assert out.shape == (40,)


@pytest.mark.parametrize("kind", ["identity", "bfloat16", "top_k", "qsgd 4", "scaled_sign", "random_k"])
def test_nonfinite_entries_stay_visible_or_local(kind):
    x = np.array([1.0, np.inf, -2.0, np.nan], np.float32)
    out = decoded(CODES[kind], x)
    assert out.shape == (4,)


# Bytes


def test_bytes_on_the_wire():
    assert payload_bytes(jc.identity(), 1000) == 4000
    assert payload_bytes(jc.cast(jnp.bfloat16), 1000) == 2000
    assert payload_bytes(jc.cast(jnp.float8_e4m3fn), 1000) == 1004
    assert payload_bytes(jc.top_k(0.01), 100_000) == 1000 * 4 + 750 + (1000 + (99_000 >> 6)) // 8 + 1
    assert payload_bytes(jc.top_k(0.01), 10_000) == 100 * 4 + 75 + (100 + (9900 >> 6)) // 8 + 1
    assert payload_bytes(jc.top_k(0.01), 10_000, jnp.bfloat16) == 100 * 2 + 75 + 32
    assert payload_bytes(jc.top_k(0.5), 1000) == 500 * 4 + 125  # a bitmap
    assert payload_bytes(jc.top_k(2**-16), 2**16) == 4 + 2  # a plain index
    assert payload_bytes(jc.random_k(0.1), 10_000) == 1000 * 4 + 16
    assert payload_bytes(jc.scaled_sign(), 1001) == 126 + 4
    assert payload_bytes(jc.qsgd(4), 5) == 3 + 4
    assert payload_bytes(jc.qsgd(4), 25_557_032) == 25_557_032 // 2 + 4 * 49_917
    for bits in (2, 3, 4, 8):
        assert payload_bytes(jc.qsgd(bits, bucket=256), 10_240) == 10_240 * bits // 8 + 4 * 40
    assert payload_bytes(jc.qsgd(2, bucket=512), 1025) == 4 * 65 + 4 * 3


# identity and cast


def test_cast_rounds_to_nearest_and_saturates():
    x = np.array([1.0 + 2.0**-9, 65519.0, 1e6, -3.4e38, 6e-5], np.float32)
    half = decoded(jc.cast(jnp.float16), x)
    np.testing.assert_array_equal(half[1:4], [65504, 65504, -65504])
    short = decoded(jc.cast(jnp.bfloat16), x)
    np.testing.assert_array_equal(short[:1], [1.0])
    assert np.isfinite(short).all()
    for dtype in (jnp.bfloat16, jnp.float16):
        assert decoded(jc.cast(dtype), np.array([np.inf, -np.inf], np.float32)).tolist() == [np.inf, -np.inf]
        assert np.isfinite(decoded(jc.cast(dtype), np.full(3, np.finfo(np.float32).max))).all()


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
def test_cast_to_8_bits_contracts_at_any_magnitude(dtype, magnitude):
    code = jc.cast(dtype)
    for x in (heavy_tailed(4096), np.exp(np.random.default_rng(0).uniform(-30, 0, 4096))):
        x = (magnitude * x / np.abs(x).max()).astype(np.float32)
        assert reference.relative_error(decoded(code, x) / magnitude, x / magnitude) <= 1 - code.contraction(x.shape)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_cast_to_8_bits_is_finite_for_finite_input(dtype):
    largest = np.finfo(np.float32).max
    for x in ([largest, -largest, 1.0], [1e-45, 0.0, -1e-45], [1e-38, 0.0, 1e-40]):
        assert np.isfinite(decoded(jc.cast(dtype), np.array(x, np.float32))).all(), x
    x = jnp.asarray([65504.0, 1.0], jnp.float16)
    assert np.isfinite(decoded(jc.cast(dtype), x)).all()
    assert np.isnan(decoded(jc.cast(dtype), np.array([np.inf, 1.0], np.float32))).any()


def test_cast_refuses_other_dtypes():
    with pytest.raises(ValueError, match="got int8"):
        jc.cast(jnp.int8)
    with pytest.raises(ValueError, match="got float32"):
        jc.cast(jnp.float32)


# top_k and random_k


@pytest.mark.parametrize("density", [0.01, 0.3, 1.0])
def test_top_k_is_the_reference(density):
    x = np.round(heavy_tailed(500), 1)  # with ties
    np.testing.assert_array_equal(decoded(jc.top_k(density), x), reference.top_k(x, max(1, round(density * 500))))


def test_top_k_oracles():
    assert reference.relative_error(decoded(jc.top_k(0.25), X), X) == pytest.approx(0.147929, abs=1e-6)
    assert reference.relative_error(decoded(jc.top_k(0.5), X), X) == pytest.approx(0.053254, abs=1e-6)
    assert decoded(jc.top_k(0.5), np.ones(4, np.float32)).tolist() == [1, 1, 0, 0]
    assert jc.top_k(0.01).contraction((1000,)) == 0.01


def test_top_k_reaches_the_last_of_65536_entries():
    x = np.zeros(2**16, np.float32)
    x[-1] = 5.0
    np.testing.assert_array_equal(decoded(jc.top_k(2**-16), x), x)


@pytest.mark.parametrize("density", [0.0, -0.1, 1.5])
def test_density_is_checked(density):
    for factory in (jc.top_k, jc.random_k):
        with pytest.raises(ValueError, match=f"got {density}"):
            factory(density)


@pytest.mark.parametrize(("density", "variance"), [(0.25, 3.0), (0.5, 1.0)])
def test_random_k_variance_is_exact(density, variance):
    code = jc.random_k(density, unbiased=True)
    assert code.variance((4,)) == variance
    keys = jax.random.split(KEY, 20_000)
    out = np.asarray(jax.jit(jax.vmap(lambda key: code.decompress(code.compress(jnp.asarray(X), key), X)))(keys))
    errors = ((out - X) ** 2).sum(1)
    assert abs(errors.mean() - variance * 169) < 5 * errors.std() / np.sqrt(20_000) + 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("workers", [3, 100])
def test_random_k_survives_the_average(workers):
    code = jc.random_k(0.2)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(workers, 50)), jnp.float32)
    payloads = jax.vmap(code.compress, in_axes=(0, None))(x, KEY)
    average = jax.tree.map(lambda leaf: leaf.sum(0) * jnp.float32(1 / workers), payloads)
    mean = code.decompress(average, x[0])
    assert int((mean != 0).sum()) == 10
    np.testing.assert_allclose(mean, jnp.where(mean != 0, x.mean(0), 0.0), atol=1e-6)


# qsgd


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("norm", ["max", "l2"])
def test_qsgd_is_the_reference(bits, norm):
    x = np.random.default_rng(bits).normal(size=(3, 100)).astype(np.float32)
    x[1] = 0.0
    uniforms = np.asarray(jc.uniform_hash(KEY, (3, 100)), np.float64)
    out = decoded(jc.qsgd(bits, bucket=100, norm=norm), x)
    for row, values, noise in zip(out, x, uniforms):
        np.testing.assert_allclose(row, reference.qsgd(values, 2 ** (bits - 1) - 1, noise, norm)[0], rtol=1e-5)


def test_reference_variance_oracles():
    assert reference.qsgd(X, 4, 0.5, "l2")[1] == pytest.approx(4.875)
    assert reference.qsgd(X, 4, 0.5, "max")[1] == pytest.approx(2.0)
    assert reference.qsgd(X, 1, 0.5, "max")[1] == pytest.approx(59.0)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("norm", ["max", "l2"])
def test_qsgd_variance_is_exact(bits, norm):
    code, levels = jc.qsgd(bits, norm=norm), 2 ** (bits - 1) - 1
    keys = jax.random.split(KEY, 50_000)
    out = np.asarray(jax.jit(jax.vmap(lambda key: code.decompress(code.compress(jnp.asarray(X), key), X)))(keys))
    errors = ((out - X) ** 2).sum(1)
    assert abs(errors.mean() - reference.qsgd(X, levels, 0.5, norm)[1]) < 5 * errors.std() / np.sqrt(50_000)
    assert (np.abs(out.mean(0) - X) <= 5 * out.std(0) / np.sqrt(50_000) + 1e-5).all()


@pytest.mark.parametrize("levels", [1, 7, 127])
@pytest.mark.parametrize("size", [1, 2, 4, 9, 100, 512, 8192])
def test_qsgd_variance_bounds_are_never_broken_and_attained(levels, size):
    bits = {1: 2, 7: 4, 127: 8}[levels]
    rng = np.random.default_rng(size)
    one_hot = np.eye(1, size)[0]
    curvature = (math.sqrt(levels**2 + size - 1) - levels) / max(size - 1, 1)
    worst_max = np.where(one_hot == 1, 1.0, curvature)
    inputs = [rng.normal(size=size), np.ones(size), one_hot, rng.standard_cauchy(size), rng.random(size), worst_max]
    for norm in ("max", "l2"):
        omega = jc.qsgd(bits, bucket=8192, norm=norm).variance((size,))
        ratios = [reference.qsgd(x, levels, 0.5, norm)[1] / (x**2).sum() for x in inputs]
        assert max(ratios) <= omega * (1 + 1e-9) + 1e-12
        if norm == "max" or math.sqrt(size) >= 2 * levels:
            assert max(ratios) >= omega * (1 - 1e-9)
    assert jc.qsgd(bits, bucket=8192).variance((size,)) <= (size - 1) / (4 * levels**2) + 1e-12


@pytest.mark.parametrize("norm", ["max", "l2"])
def test_qsgd_symmetries(norm):
    code = jc.qsgd(4, bucket=64, norm=norm)
    x = heavy_tailed(200)
    out = decoded(code, x)
    for factor in (0.25, 2.0**40, 2.0**-60):
        np.testing.assert_array_equal(decoded(code, factor * x), factor * out)
    np.testing.assert_array_equal(decoded(code, -x), -out)
    np.testing.assert_array_equal(decoded(code, np.append(x, np.zeros(100, np.float32)))[:200], out)
    assert not np.signbit(out[out == 0]).any()


def test_qsgd_keeps_what_is_on_a_level():
    levels = np.array([-7, -3, 0, 0, 1, 2, 5, 7], np.float32)
    code = jc.qsgd(4, bucket=8)
    np.testing.assert_allclose(decoded(code, np.tile(levels, (50, 1))), np.tile(levels, (50, 1)), rtol=1e-6)
    one_hot = np.zeros(700, np.float32)
    one_hot[[3, 600]] = [-2.5, 1.25]
    for norm in ("max", "l2"):
        np.testing.assert_array_equal(decoded(jc.qsgd(2, norm=norm), one_hot), one_hot)


def test_qsgd_extreme_magnitudes():
    for factor in (1e-30, 1e30):
        x = (factor * np.random.default_rng(0).normal(size=100)).astype(np.float32)
        for norm in ("max", "l2"):
            assert reference.relative_error(decoded(jc.qsgd(8, norm=norm), x) / factor, x / factor) < 0.01
    x = jnp.asarray(60_000 * np.random.default_rng(0).uniform(-1, 1, 600), jnp.float16)
    assert np.isfinite(decoded(jc.qsgd(8, norm="l2"), x)).all()


def test_qsgd_contains_a_nan_in_its_bucket():
    x = np.ones(64, np.float32)
    x[3] = np.nan
    out = decoded(jc.qsgd(4, bucket=32), x)
    assert np.isnan(out[:32]).any()
    np.testing.assert_array_equal(out[32:], 1.0)


def test_qsgd_checks_its_arguments():
    with pytest.raises(ValueError, match="got 5"):
        jc.qsgd(5)
    with pytest.raises(ValueError, match="got 0"):
        jc.qsgd(4, bucket=0)


# scaled_sign


def test_scaled_sign_oracles():
    out = decoded(jc.scaled_sign(), X)
    np.testing.assert_array_equal(out, reference.scaled_sign(X))
    assert ((out - X) ** 2).sum() == 78.75
    assert reference.relative_error(out, X) == pytest.approx(1 - 0.534024, abs=1e-6)
    one_hot = np.eye(1, 100, dtype=np.float32)[0]
    assert reference.relative_error(decoded(jc.scaled_sign(), one_hot), one_hot) == pytest.approx(0.99)
    gaussian = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    assert reference.relative_error(decoded(jc.scaled_sign(), gaussian), gaussian) == pytest.approx(0.3634, abs=5e-3)


def test_scaled_sign_of_zero_is_plus():
    out = decoded(jc.scaled_sign(), np.array([0.0, -0.0, -2.0], np.float32))
    assert (out[:2] > 0).all()
    assert out[2] < 0


# The laws themselves: each catches the code that breaks it


def flawed(code=jc.identity(), **fields):  # noqa: B008
    return code._replace(**({"variance": None, "contraction": None} | fields))


BROKEN = {
    "round trip keeps shape and dtype": flawed(decompress=lambda payload, like: payload.reshape(-1)),
    "decompress follows `like`": flawed(decompress=lambda payload, like: payload),
    "zeros decode to finite values": flawed(compress=lambda x, key: x / jnp.sqrt(jnp.vdot(x, x))),
    "unbiased": flawed(jc.top_k(0.5), variance=lambda shape: 1.0),
    "variance": flawed(jc.qsgd(2), variance=lambda shape: 0.1),
    "contraction": flawed(jc.scaled_sign(), contraction=lambda shape: 0.9),
    "what is not finite decodes to what is not": flawed(compress=lambda x, key: jnp.where(jnp.isnan(x), 0, x)),
    "summable": flawed(
        compress=lambda x, key: jnp.where(x > 0, x / 2, x),
        decompress=lambda payload, like: jnp.where(payload > 0, 2 * payload, payload).astype(like.dtype),
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("law", BROKEN)
def test_broken_laws_are_named(law):
    dtype = jnp.bfloat16 if law == "decompress follows `like`" else jnp.float32
    with pytest.raises(AssertionError, match=f"law '{law}' broken for shape"):
        assert_compressor_laws(BROKEN[law], shapes=[(4, 5)], dtypes=[dtype])
