import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codes import KEY, X, assert_mean, assert_variance, decoded, draws, relative_error
from reference import blocks as reference

import jaxdist as jd
from jaxdist import compressors as jc

# A code, its grid, its block, and the scale of a block from its largest entry.
NEAREST = {
    "int8": (jc.int8(), "int8", 256, lambda largest: largest / 127),
    "int4": (jc.int4(), "int4", 32, lambda largest: largest / 7),
    "fp8": (jc.fp8(), "e4m3", 128, lambda largest: largest / 448),
    "fp8 e5m2": (jc.fp8(block=48, format="e5m2"), "e5m2", 48, lambda largest: largest / 57344),
    "mxfp8": (jc.mxfp8(), "e4m3", 32, reference.mx_scale(8)),
    "mxfp8 e5m2": (jc.mxfp8(format="e5m2"), "e5m2", 32, reference.mx_scale(15)),
    "mxfp4": (jc.mxfp4(), "e2m1", 32, reference.mx_scale(2)),
    "e3m0": (jc.e3m0(block=64), "e3m0", 64, lambda largest: largest / 16),
}
RANDOM = {
    "int8": jc.int8(rounding="stochastic"),
    "int4": jc.int4(rounding="stochastic"),
    "fp8": jc.fp8(rounding="stochastic"),
    "fp8 e5m2": jc.fp8(block=48, format="e5m2", rounding="stochastic"),
    "mxfp8": jc.mxfp8(rounding="stochastic"),
    "mxfp8 e5m2": jc.mxfp8(format="e5m2", rounding="stochastic"),
    "mxfp4": jc.mxfp4(rounding="stochastic"),
    "e3m0": jc.e3m0(block=64, rounding="stochastic"),
}
each_name = pytest.mark.parametrize("name", NEAREST)


@pytest.mark.slow
def test_oracles():
    np.testing.assert_array_equal(decoded(jc.mxfp4(), np.array([0.1, -0.2, 0.9, 3.3], np.float32)), [0, -0.25, 1, 3])
    # Symmetric: with the scale max / 8 and codes from -8 on, the first entry would become 0.875.
    found = decoded(jc.int4(), np.array([1, -1, 0.52, -0.3, 0.06], np.float32))
    np.testing.assert_allclose(found, np.array([7, -7, 4, -2, 0]) / 7, rtol=1e-6)
    payload = jc.int4().compress(jnp.array([7.0, -7.0, 1.0]), KEY)
    # In planes: the first half of the entries in the low bits.
    assert payload.codes.tolist() == [15 | 9 << 4, 1]
    payload = jc.mxfp4().compress(jnp.asarray(X), KEY)
    assert payload.scales.tolist() == [127 + 1]  # 12 = 1.5 · 2^3 and emax = 2


@each_name
def test_nearest_is_the_reference(name):
    code, grid, block, scale_of = NEAREST[name]
    x = np.random.default_rng(0).standard_cauchy(3 * block + 21).astype(np.float32)
    x[:block] = 0.0
    expected = reference.in_blocks(x.astype(np.float64), block, reference.GRIDS[grid], scale_of)
    # Where an entry lies halfway to the last bit of float32, either neighbor is right.
    found = decoded(code, x.reshape(3, -1) if x.size % 3 == 0 else x).reshape(-1)
    close = np.isclose(found, expected, rtol=1e-5, atol=0)
    assert close.mean() > 0.99
    np.testing.assert_array_less(np.abs(found - x)[~close], (np.abs(expected - x) * (1 + 1e-5) + 1e-9)[~close])


@pytest.mark.sampled(3)
@each_name
@pytest.mark.parametrize("magnitude", [1e-20, 1.0, 1e20])
def test_contraction_holds_at_any_magnitude_and_is_attained(name, magnitude):
    code, grid, block, _ = NEAREST[name]
    values = reference.GRIDS[grid]
    factor = np.float32(2.0 ** round(np.log2(magnitude)) / 2.0 ** np.ceil(np.log2(values[-1])))
    halfway, most = (values[:-1] + values[1:]) / 2, values[-1]
    # One large entry among others of one kind. A little less than halfway, so that rounding errors decide nothing.
    tops = [most, *halfway, np.nextafter(np.float32(2 ** np.ceil(np.log2(most))), np.float32(0))]
    rows = np.array(
        [[top] + [other * (1 - 1e-6)] * (block - 1) for top in tops for other in (halfway[0], most, *halfway)]
    )
    rows = rows[(rows[:, 0] >= rows[:, 1])].astype(np.float32)
    found = np.asarray(
        jax.jit(jax.vmap(lambda x: code.decompress(code.compress(x, KEY), x)))(rows * factor), np.float64
    )
    energy = (rows.astype(np.float64) ** 2).sum(1)
    ratios = ((found / factor - rows) ** 2).sum(1) / energy
    allowed = 1 - code.contraction((block,))
    assert ratios.max() <= allowed * (1 + 1e-5) + 1e-9
    assert ratios.max() >= allowed * (1 - 1e-4)
    assert code.variance is None


@each_name
def test_at_random_is_right_on_average(name):
    code = RANDOM[name]
    assert code.contraction is None
    # Among them entries that a scale rounded down would cut off.
    x = np.array([7.9, -7.1, 1.3, 0.1, 0.0, -0.4, 3.0, 0.02], np.float32)
    found = draws(code, x, 4000)
    assert_mean(found, x)
    assert ((found - x) ** 2).sum(1).mean() <= code.variance(x.shape) * float((x**2).sum())


@pytest.mark.parametrize("name", ["int4", "mxfp4", "mxfp8"])
def test_variance_is_attained(name):
    """One entry as small as the largest may be, among those with the most noise for their size."""
    code, grid = RANDOM[name], reference.GRIDS[NEAREST[name][1]]
    block, most = 32, grid[-1]
    omega = code.variance((block,))
    low, high = grid[:-1], grid[1:]
    worst = np.clip((low + high) / (2 * (1 + omega)), low, high)
    gains = (worst - low) * (high - worst) - omega * worst**2
    lowest = most if name == "int4" else most / 2 * (1 + 1e-6)
    tops = np.append(worst[worst >= lowest], lowest)
    top_gains = np.append(gains[worst >= lowest], -omega * lowest**2)
    x = np.full(block, worst[gains.argmax()], np.float32)
    x[0] = tops[top_gains.argmax()]
    assert_variance(draws(code, x, 4000), x, omega * float((x.astype(np.float64) ** 2).sum()))


@each_name
def test_symmetries(name):
    code = NEAREST[name][0]
    x = np.random.default_rng(1).standard_normal(200).astype(np.float32)
    out = decoded(code, x)
    for factor in (0.25, 2.0**40, 2.0**-60):
        np.testing.assert_array_equal(decoded(code, factor * x), factor * out)
    np.testing.assert_array_equal(decoded(code, -x), -out)
    np.testing.assert_allclose(decoded(code, out.astype(np.float32)), out, rtol=1e-6)
    if not name.startswith("mx"):
        assert np.abs(out).max() == pytest.approx(np.abs(x).max(), rel=1e-6)


@pytest.mark.sampled(3)
@each_name
@pytest.mark.parametrize("codes", [NEAREST, RANDOM], ids=["nearest", "stochastic"])
def test_nonfinite_blocks_stay_visible_and_alone(name, codes):
    code = codes[name][0] if codes is NEAREST else codes[name]
    block = NEAREST[name][2]
    x = np.ones((4, block), np.float32)
    x[0, 3], x[1, 0], x[2, 5] = np.nan, np.inf, -np.inf
    out = decoded(code, x)
    for row in out[:3]:
        assert not np.isfinite(row).all()
    np.testing.assert_allclose(out[3], 1.0, rtol=1e-6)


@pytest.mark.sampled(3)
@each_name
@pytest.mark.parametrize("codes", [NEAREST, RANDOM], ids=["nearest", "stochastic"])
def test_finite_entries_stay_finite(name, codes):
    code = codes[name][0] if codes is NEAREST else codes[name]
    largest = np.finfo(np.float32).max
    x = np.array(
        [[largest, -largest, 1.0], [1e-45, 0.0, -1e-45], [1e-38, 0.0, 1e-40], [1e-36, -1e-37, 0.0]], np.float32
    )
    found = np.asarray(jax.jit(jax.vmap(lambda x: code.decompress(code.compress(x, KEY), x)))(x))
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[0, :2], x[0, :2], rtol=0.26)
    half = jnp.asarray([65504.0, -65504.0, 1.0], jnp.float16)
    assert np.isfinite(decoded(code, half)).all()


def test_feedback_is_the_reference_over_20_steps():
    """Four workers, 4-bit floats to nearest, error feedback around them."""
    x = np.random.default_rng(0).standard_normal((20, 4, 70)).astype(np.float32)
    reducer = jd.error_feedback(jd.compressed(jc.mxfp4()))

    def one_worker(rows):
        def step(state, row):
            reduced, state = reducer.reduce(row, state, jd.comm.over("data"))
            return state, reduced.mean

        return jax.lax.scan(step, reducer.init(rows[0]), rows)[1]

    means = jax.jit(jax.vmap(one_worker, in_axes=1, out_axes=1, axis_name="data"))(x)
    residual = np.zeros((4, 70))
    for step, mean in zip(x.astype(np.float64), np.asarray(means)[:, 0]):
        corrected = step + residual
        sent = np.array(
            [reference.in_blocks(row, 32, reference.GRIDS["e2m1"], reference.mx_scale(2)) for row in corrected]
        )
        residual = corrected - sent
        np.testing.assert_allclose(mean, sent.mean(0), atol=1e-5)


def test_codes_of_little_variance_are_not_shrunk_inside_feedback():
    for code in (jc.int4(), jc.int4(rounding="stochastic")):
        reducer = jd.error_feedback(jd.compressed(code))
        _, state = jax.jit(lambda x, reducer=reducer: reducer.reduce(x, reducer.init(x), jd.comm.alone()))(X)
        own = X - np.asarray(state.residual.value)
        assert own[3] == pytest.approx(12, rel=1e-6)


def test_arguments_are_checked():
    for make in (jc.int8, jc.int4, jc.fp8):
        with pytest.raises(ValueError, match="block must be at least 1, got 0"):
            make(block=0)


def test_gaussian_losses_are_as_stated():
    x = np.random.default_rng(0).standard_normal(2**16).astype(np.float32)
    stated = {"int8": 5e-5, "int4": 0.009, "fp8": 7e-4, "mxfp4": 0.013, "e3m0": 0.038}
    for name, loss in stated.items():
        assert relative_error(decoded(NEAREST[name][0], x), x) == pytest.approx(loss, rel=0.1)
