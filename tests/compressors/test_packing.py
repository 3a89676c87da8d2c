import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.compressors.packing import bytes_of_codes, from_words, pack, to_words, unpack


def narrowest(bits):
    return np.uint8 if bits <= 8 else np.uint16 if bits <= 16 else np.uint32


def stream(codes, bits):
    """The layout in words of one bit: lowest bits first."""
    return np.packbits(
        np.array([code >> i & 1 for code in codes.tolist() for i in range(bits)], bool), bitorder="little"
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 31, 32])
def test_round_trip_of_any_width_and_length(bits):
    sizes = (0, 1, 21)
    several = [np.random.default_rng(size).integers(0, 2**bits, size).astype(narrowest(bits)) for size in sizes]
    several[1][0] = 2**bits - 1
    packed = jax.jit(lambda several: [pack(codes, bits) for codes in several])(several)
    unpacked = jax.jit(lambda packed: [unpack(words, bits, size) for words, size in zip(packed, sizes)])(packed)
    for codes, words, back in zip(several, packed, unpacked):
        assert (words.dtype, back.dtype) == (jnp.uint8, codes.dtype)
        assert words.shape == (bytes_of_codes(codes.size, bits),) == (-(-codes.size * bits // 8),)
        np.testing.assert_array_equal(words, stream(codes, bits))
        np.testing.assert_array_equal(back, codes)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2, 3])
def test_leading_axes_are_packed_apart(bits):
    codes = np.random.default_rng(0).integers(0, 2**bits, (2, 3, 5)).astype(narrowest(bits))
    words = pack(jnp.asarray(codes), bits)
    assert words.shape == (2, 3, bytes_of_codes(5, bits))
    np.testing.assert_array_equal(words[1, 2], pack(jnp.asarray(codes[1, 2]), bits))
    np.testing.assert_array_equal(unpack(words, bits, 5), codes)
    assert pack(jnp.zeros((0, 5), codes.dtype), bits).shape == (0, bytes_of_codes(5, bits))
    assert unpack(jnp.zeros((0, 8), jnp.uint8), bits, 5).shape == (0, 5)


def test_layout_is_lowest_bits_first():
    assert pack(jnp.array([1, 0, 0, 0, 0, 0, 0, 1, 1], jnp.uint8), 1).tolist() == [129, 1]
    assert pack(jnp.array([1, 2, 3, 0, 1], jnp.uint8), 2).tolist() == [0b00111001, 1]
    assert pack(jnp.array([1, 15, 7, 8], jnp.uint8), 4).tolist() == [241, 135]
    assert pack(jnp.array([5, 4095], jnp.uint16), 12).tolist() == [5, 240, 255]
    assert pack(jnp.arange(8, dtype=jnp.uint8), 3).tolist() == [0b10001000, 0b11000110, 0b11111010]
    bits = np.random.default_rng(0).integers(0, 2, 77).astype(np.uint8)
    np.testing.assert_array_equal(pack(jnp.asarray(bits), 1), np.packbits(bits, bitorder="little"))


@pytest.mark.parametrize("bits", [0, -1, 33])
def test_other_widths_are_refused(bits):
    with pytest.raises(ValueError, match=f"got {bits}"):
        pack(jnp.zeros(8, jnp.uint8), bits)
    with pytest.raises(ValueError, match=f"got {bits}"):
        unpack(jnp.zeros(8, jnp.uint8), bits, 8)


def test_codes_narrower_than_their_bits_are_refused():
    with pytest.raises(ValueError, match="uint8, got 12"):
        pack(jnp.zeros(8, jnp.uint8), 12)


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
    codes = jnp.asarray(np.random.default_rng(0).integers(0, 8, (3, 7)).astype(np.uint8))
    with jax.numpy_dtype_promotion("strict"):
        wide = pack(codes[0].astype(jnp.uint32), 4)
        mapped = jax.jit(jax.vmap(lambda c: (unpack(pack(c, 4), 4, 7), unpack(pack(c, 3), 3, 7))))(codes)
    np.testing.assert_array_equal(wide, pack(codes[0], 4))
    for unpacked in mapped:
        np.testing.assert_array_equal(unpacked, codes)
