import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.compressors.packing import from_words, pack, packed_size, to_words, unpack


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [0, 1, 3, 8, 21])
def test_round_trip_of_any_length(bits, size):
    codes = np.random.default_rng(size).integers(0, 2**bits, size).astype(np.uint8)
    words = pack(jnp.asarray(codes), bits)
    assert words.dtype == jnp.uint8
    assert words.shape == (packed_size(size, bits),) == (-(-size * bits // 8),)
    np.testing.assert_array_equal(unpack(words, bits, size), codes)


def test_leading_axes_are_packed_apart():
    codes = np.random.default_rng(0).integers(0, 4, (2, 3, 5)).astype(np.uint8)
    words = pack(jnp.asarray(codes), 2)
    assert words.shape == (2, 3, 2)
    np.testing.assert_array_equal(words[1, 2], pack(jnp.asarray(codes[1, 2]), 2))
    np.testing.assert_array_equal(unpack(words, 2, 5), codes)


def test_layout_is_lowest_bits_first():
    assert pack(jnp.array([1, 0, 0, 0, 0, 0, 0, 1, 1], jnp.uint8), 1).tolist() == [129, 1]
    assert pack(jnp.array([1, 2, 3, 0, 1], jnp.uint8), 2).tolist() == [0b00111001, 1]
    assert pack(jnp.array([1, 15, 7, 8], jnp.uint8), 4).tolist() == [241, 135]
    bits = np.random.default_rng(0).integers(0, 2, 77).astype(np.uint8)
    np.testing.assert_array_equal(pack(jnp.asarray(bits), 1), np.packbits(bits, bitorder="little"))


@pytest.mark.parametrize("bits", [0, 3, 16])
def test_other_widths_are_refused(bits):
    with pytest.raises(ValueError, match=f"got {bits}"):
        pack(jnp.zeros(8, jnp.uint8), bits)
    with pytest.raises(ValueError, match=f"got {bits}"):
        unpack(jnp.zeros(8, jnp.uint8), bits, 8)


@pytest.mark.parametrize(
    ("dtype", "word"),
    [
        (jnp.bfloat16, jnp.uint16),
        (jnp.float16, jnp.uint16),
        (jnp.float8_e4m3fn, jnp.uint8),
        (jnp.float8_e5m2, jnp.uint8),
        (jnp.float32, jnp.float32),
    ],
)
def test_words_hold_the_same_bits(dtype, word):
    x = jnp.asarray([[0.0, -1.5], [448.0, 2.0**-9]], dtype)
    words = to_words(x)
    assert words.dtype == word
    assert words.nbytes == x.nbytes
    np.testing.assert_array_equal(np.asarray(from_words(words, dtype)).view(np.uint8), np.asarray(x).view(np.uint8))


def test_inside_jit_and_vmap():
    codes = jnp.asarray(np.random.default_rng(0).integers(0, 16, (3, 7)).astype(np.uint8))
    mapped = jax.jit(jax.vmap(lambda c: unpack(pack(c, 4), 4, 7)))(codes)
    np.testing.assert_array_equal(mapped, codes)
