from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import packing as reference

from jaxdist.compressors import packing
from jaxdist.compressors.packing import (
    bytes_of_codes,
    from_words,
    pack,
    pack_on_host,
    to_words,
    unpack,
    unpack_on_host,
)


def narrowest(bits):
    return np.uint8 if bits <= 8 else np.uint16 if bits <= 16 else np.uint32


@pytest.mark.sampled(3)
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 31, 32])
def test_round_trip_of_any_width_and_length(bits):
    sizes = (0, 1, 21, 1024, 1061)
    several = [np.random.default_rng(size).integers(0, 2**bits, size).astype(narrowest(bits)) for size in sizes]
    several[1][0] = 2**bits - 1
    packed = jax.jit(lambda several: [pack(codes, bits) for codes in several])(several)
    unpacked = jax.jit(lambda packed: [unpack(words, bits, size) for words, size in zip(packed, sizes)])(packed)
    for codes, words, back in zip(several, packed, unpacked):
        assert (words.dtype, back.dtype) == (jnp.uint8, codes.dtype)
        assert words.shape == (bytes_of_codes(codes.size, bits),) == (-(-codes.size * bits // 8),)
        np.testing.assert_array_equal(words, reference.pack(codes, bits))
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


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_first_codes_of_more_that_were_packed(bits):
    """Codecs pack whole 32-bit words, and read the codes that there are."""
    codes = np.random.default_rng(0).integers(0, 2**bits, 1024).astype(np.uint8)
    for packed, size in ((32, 21), (1024, 1003)):
        words = jax.jit(pack, static_argnums=1)(codes[:packed], bits)
        np.testing.assert_array_equal(jax.jit(unpack, static_argnums=(1, 2))(words, bits, size), codes[:size])
        np.testing.assert_array_equal(unpack_on_host(np.asarray(words), bits, size), codes[:size])


def test_few_codes_are_planes_of_their_bytes():
    assert pack(jnp.array([1, 0, 0, 0, 0, 0, 0, 1, 1], jnp.uint8), 1).tolist() == [0b00010001, 0b1000]
    assert pack(jnp.array([1, 2, 3, 0, 1], jnp.uint8), 2).tolist() == [0b00011101, 0b0010]
    assert pack(jnp.array([1, 15, 7, 8], jnp.uint8), 4).tolist() == [113, 143]
    # Of odd widths first all lowest bits, then all second ones, and so on.
    assert pack(jnp.array([5, 4095], jnp.uint16), 12).tolist() == [171, 87, 170]


def test_runs_of_codes_are_planes_of_fields():
    codes = np.zeros(2 * 1024, np.uint8)
    # 5 bits: four in two planes of 512 bytes, then one in eight of 128.
    codes[1024 + 512], codes[1024 + 3 * 128 + 7] = 0b01001, 0b10000
    words = np.asarray(pack(jnp.asarray(codes), 5))
    assert {int(i): int(words[i]) for i in np.flatnonzero(words)} == {640: 0b10010000, 640 + 512 + 7: 0b1000}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("bits", [1, 3, 4, 7, 8, 12, 16, 31])
def test_words_on_the_host_are_the_same(bits):
    for size in (0, 3, 1061):
        codes = np.random.default_rng(size).integers(0, 2**bits, size).astype(narrowest(bits))
        words = pack_on_host(codes, bits)
        np.testing.assert_array_equal(words, reference.pack(codes, bits))
        np.testing.assert_array_equal(unpack_on_host(words, bits, size), codes)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 12, 16, 31])
def test_programs_of_all_backends_have_the_same_order(bits):
    """The form of TPUs, and those of other backends, also run on a CPU."""
    codes = np.random.default_rng(0).integers(0, 2**bits, (2, 1024)).astype(narrowest(bits))
    expected = np.stack([pack_on_host(row, bits) for row in codes])
    for form in (
        partial(packing._pack_lanes, bits),
        partial(packing._pack_fields, bits, packing._join_planes),
        partial(packing._pack_fields, bits, packing._join_slices),
    ):
        np.testing.assert_array_equal(jax.jit(form)(codes), expected)
    for form in (
        partial(packing._unpack_lanes, bits),
        partial(packing._unpack_fields, bits, packing._split_planes),
        partial(packing._unpack_rows, bits),
    ):
        np.testing.assert_array_equal(jax.jit(form)(expected), codes)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("bits", [1, 4, 5])
def test_long_arrays_are_packed_apart_on_cpus(bits):
    """In a branch of their own, under `vmap` too."""
    codes = np.random.default_rng(0).integers(0, 2**bits, (2, packing.SMALL + 1030)).astype(np.uint8)
    words = jax.jit(jax.vmap(lambda x: pack(x, bits)))(codes)
    np.testing.assert_array_equal(words[1], pack_on_host(codes[1], bits))
    np.testing.assert_array_equal(jax.jit(jax.vmap(lambda x: unpack(x, bits, codes.shape[1])))(words), codes)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [7, 1024, 32 * 1024 + 1020, 40 * 1024, 40 * 1024 + 300])
def test_signs_are_packed_like_their_bits(size):
    """Also where the last run is not whole, or made whole by padding."""
    x = np.random.default_rng(size).normal(size=size).astype(np.float32)
    x[::5] = 0.0
    np.testing.assert_array_equal(jax.jit(packing.pack_signs)(x), pack_on_host((x >= 0).astype(np.uint8), 1))


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
