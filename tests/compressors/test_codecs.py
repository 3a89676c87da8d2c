"""Variable-length codes of payloads: exact, as short as their papers say, and damage has a name."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.variable_length import (
    entropy_bits,
    level_bits,
    nuqsgd_bound,
    omega,
    qsgd_bound,
    read_omega,
    two_part_bits,
)

from jaxdist import compressors as jc
from jaxdist.compressors.codecs import decode_all, encode_all
from jaxdist.compressors.entropy_codes import (
    LANE,
    Reader,
    decode_omega,
    decode_streams,
    decode_symbols,
    encode_omega,
    encode_streams,
    encode_symbols,
    omega_length,
)
from jaxdist.compressors.packing import pack, pack_on_host, unpack_on_host
from jaxdist.compressors.positions import decode_host_positions, encode_host_positions, encode_positions
from jaxdist.compressors.qsgd import QuantizedPayload
from jaxdist.compressors.rounding import whole_words
from jaxdist.compressors.sparse import SparsePayload
from jaxdist.testing import assert_codec_laws

# Of checksum, kind and counts; and at most 20 bits for each lane of Elias's code.
FRAME, LANES = 13, 20 / LANE
rng_of = np.random.default_rng
seeds = st.integers(0, 2**32 - 1)


def quick(**strategies):
    """A property of bytes and NumPy arrays: nothing is compiled, so many examples are cheap."""
    return lambda test: settings(max_examples=25)(given(**strategies)(test))


def levels_payload(codes, norms, bits, bucket):
    """What a compressor with levels sends, padding included."""
    size = len(codes)
    rows = -(-size // min(bucket, max(size, 1)))
    count = min(rows * min(bucket, max(size, 1)), whole_words(size, bits))
    padded = np.append(codes, np.zeros(count - size, np.uint8))
    return QuantizedPayload(pack_on_host(padded, bits), np.resize(np.float32(norms), rows))


def assert_equal_bits(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert (x.shape, x.dtype, x.tobytes()) == (y.shape, y.dtype, y.tobytes())


# Streams


@pytest.mark.parametrize("largest", [2, 60, 700, 10**5, 2**32 - 1])
def test_elias_codes_are_those_of_the_definition(largest):
    values = np.unique(np.geomspace(1, largest, 600).astype(np.int64))
    body, lanes = encode_omega(values), -(-len(values) // LANE)
    bits = "".join(f"{byte:08b}" for byte in body[2 * lanes :])
    assert bits.startswith("".join(omega(int(value)) for value in values))
    place, found = 0, []
    for _ in values:
        number, place = read_omega(bits, place)
        found.append(number)
    assert found == values.tolist()
    assert len(bits) - place < 8 + lanes


@quick(values=st.lists(st.one_of(st.integers(1, 5), st.integers(1, 2**32 - 1)), max_size=40), copies=st.integers(1, 60))
def test_any_positive_integers_come_back(values, copies):
    values = np.array(values * copies, np.int64)
    reader = Reader(encode_omega(values))
    assert decode_omega(reader, len(values)).tolist() == values.tolist()
    reader.finish()


@quick(seed=seeds, size=st.integers(0, 9000), alphabet=st.sampled_from([2, 3, 16, 256]), skew=st.floats(0.001, 5.0))
def test_any_symbols_come_back(seed, size, alphabet, skew):
    shares = rng_of(seed).dirichlet(np.full(alphabet, skew))
    symbols = rng_of(seed).choice(alphabet, size, p=shares).astype(np.uint8)
    reader = Reader(encode_symbols(symbols, alphabet))
    assert (decode_symbols(reader, size, alphabet) == symbols).all()
    reader.finish()


@quick(seed=seeds, sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=5), most=st.sampled_from([16, 512]))
def test_symbols_side_by_side_come_back(seed, sizes, most):
    rng = rng_of(seed)
    vectors = [
        rng.choice(n + 2, size, p=rng.dirichlet(np.ones(n + 2))).astype(np.uint8) for n, size in enumerate(sizes)
    ]
    streams, words = encode_streams(vectors, [int(x.max()) + 1 for x in vectors], most=most)
    for found, wanted in zip(decode_streams(streams, words), vectors, strict=True):
        assert found.tolist() == wanted.tolist()
    # One by one they have the same lanes and words, but for their order.
    alone = [encode_streams([x], [int(x.max()) + 1], most=most) for x in vectors]
    assert [stream.states.tolist() for stream in streams] == [some[0].states.tolist() for some, _ in alone]
    assert sorted(words) == sorted(np.concatenate([own for _, own in alone]))
    with pytest.raises(jc.DamagedCodeError):
        decode_streams(streams, np.append(words, np.uint16(0)))


def test_symbols_of_many_almost_equal_shares_come_back():
    counts = np.where(np.arange(256) < 154, 6360, 6460)  # of 16384, 63.6 and 64.6: all are rounded up
    symbols = np.repeat(np.arange(256, dtype=np.uint8), counts)[::7]
    assert (decode_symbols(Reader(encode_symbols(symbols, 256)), len(symbols), 256) == symbols).all()


@pytest.mark.parametrize(("bits", "entropy"), [(1, 0.7), (3, 2.0), (4, 3.0), (8, 6.0)])
def test_symbols_take_their_entropy(bits, entropy):
    shares = 0.5 ** (np.arange(2**bits) / (2 ** (entropy - 1.5)))
    symbols = rng_of(0).choice(2**bits, 200_000, p=shares / shares.sum()).astype(np.uint8)
    least = entropy_bits(symbols.tolist())
    assert least <= 8 * len(encode_symbols(symbols, 2**bits)) <= 1.015 * least


@pytest.mark.sampled(3)
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8, 12, 20])
def test_host_words_are_those_of_the_device(bits):
    codes = rng_of(bits).integers(0, 2**bits, 77).astype(np.uint32)
    words = pack_on_host(codes, bits)
    np.testing.assert_array_equal(words, pack(jnp.asarray(codes), bits))
    np.testing.assert_array_equal(unpack_on_host(words, bits, 77), codes)


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("count", "size"), [(0, 9), (3, 5), (40, 1000), (1, 10**5), (300, 10**5), (9, 9)])
def test_host_positions_are_those_of_the_device(count, size):
    where = np.sort(rng_of(size).choice(size, count, replace=False))
    words = encode_host_positions(where, size)
    expected = np.asarray(encode_positions(jnp.asarray(where, jnp.int32), size))
    assert_equal_bits([words], [expected])
    assert decode_host_positions(words, count, size).tolist() == where.tolist()


# Payloads


@quick(
    seed=seeds,
    size=st.integers(0, 1500),
    bits=st.sampled_from([2, 3, 4, 8]),
    bucket=st.sampled_from([1, 33, 512, 10**6]),
    code=st.sampled_from(["elias", "entropy"]),
    zeros=st.sampled_from([0.0, 0.6, 0.99, 1.0]),
)
def test_levels_come_back(seed, size, bits, bucket, code, zeros):
    rng, like = rng_of(seed), jax.ShapeDtypeStruct((size,), jnp.float32)
    codes = (rng.integers(0, 2**bits, size) * (rng.random(size) >= zeros)).astype(np.uint8)
    sign_bit = 2 ** (bits - 1)
    payload = levels_payload(codes, [1.5, np.nan, np.inf, 0.0], bits, bucket)
    codec = jc.qsgd(bits, bucket=bucket, code=code).codec
    body = codec.encode(payload, like)
    found = codec.decode(body, like)
    # Zeros have no sign, unless the payload itself is sent.
    unsigned = np.where(codes == sign_bit, 0, codes).astype(np.uint8)
    sent = levels_payload(unsigned, payload.norms, bits, bucket) if body[4] else payload
    assert_equal_bits(found, sent)
    assert len(body) <= payload.codes.nbytes + payload.norms.nbytes + 5


@quick(
    seed=seeds,
    size=st.integers(1, 700),
    density=st.floats(0.01, 1.0),
    code=st.sampled_from(["two_part", "entropy"]),
    dtype=st.sampled_from([np.float32, np.float16, np.float64, jnp.bfloat16]),
)
def test_sparse_entries_come_back(seed, size, density, code, dtype):
    rng, like = rng_of(seed), jax.ShapeDtypeStruct((size,), dtype)
    count = max(1, round(density * size))
    where = np.sort(rng.choice(size, count, replace=False))
    pool = np.array([0.0, -0.0, 0.5, -0.5, 0.5, -0.5, 3.0, np.nan, -np.inf, 1e-3]).astype(dtype)
    values = rng.choice(pool[rng.permutation(10)[: 1 + seed % 10]], count)
    codec = jc.gspar(density, code=code).codec
    payload = SparsePayload(values, encode_host_positions(where, size))
    found = codec.decode(codec.encode(payload, like), like)
    dense = [np.zeros(size, dtype), np.zeros(size, dtype)]
    for out, (kept, words) in zip(dense, (payload, found), strict=True):
        places = decode_host_positions(words, count, size)
        assert (np.diff(places) > 0).all()
        out[places] = kept + np.zeros((), dtype)  # of zeros, one sign
    assert_equal_bits(dense[:1], dense[1:])


each_code = pytest.mark.parametrize(
    "code",
    [
        jc.qsgd(3, bucket=64, code="elias"),
        jc.nuqsgd(4, code="entropy", zero_level=False),
        jc.gspar(0.2, code="two_part"),
        jc.gspar(variance=1.0, code="entropy"),
    ],
    ids=repr,
)


@pytest.mark.sampled(10)
@each_code
def test_codecs_keep_the_laws(code):
    assert_codec_laws(code, shapes=[(), (0, 4), (37,), (20, 100)], dtypes=[jnp.float32, jnp.bfloat16])


@pytest.mark.sampled(10)
@each_code
def test_what_was_compressed_is_decoded(code):
    x = jnp.asarray(rng_of(1).standard_t(2.0, (40, 17)), jnp.float32)
    decode = jax.jit(code.decompress)
    payload = jax.jit(code.compress)(x, jax.random.key(3))
    codec = code.codec
    bodies = encode_all(codec, [jax.tree.map(np.asarray, payload)] * 2, [x, x])
    for found in decode_all(codec, bodies, [x, x]):
        np.testing.assert_array_equal(decode(jax.tree.map(jnp.asarray, found), x), decode(payload, x))
    bits = float(jax.jit(lambda payload: codec.expected_bits(payload, x))(payload))
    body = codec.encode(jax.tree.map(np.asarray, payload), x)
    static = sum(leaf.nbytes for leaf in jax.tree.leaves(payload))
    assert len(body) <= static + 5
    assert abs(len(body) - bits / 8) <= 60 or body[4] == 0


# Lengths


def draw_levels(rng, x, table):
    """The signed index of the level of each entry, with the Euclidean norm."""
    table, ratios = np.asarray(table), np.abs(x) / np.linalg.norm(x)
    low = np.clip(np.searchsorted(table, ratios, side="right") - 1, 0, len(table) - 2)
    up = rng.random(len(x)) < (ratios - table[low]) / (table[low + 1] - table[low])
    return (np.sign(x) * (low + up)).astype(int)


def measure(levels, bits):
    """Bits of the code, by its own estimate, by plain Python and by its bytes; the first is returned."""
    codes = np.where(levels < 0, np.abs(levels) + 2 ** (bits - 1), levels).astype(np.uint8)
    payload = levels_payload(codes, [1.0], bits, len(levels))
    codec, like = jc.qsgd(bits, bucket=len(levels), code="elias").codec, jax.ShapeDtypeStruct(levels.shape, jnp.float32)
    expected = float(codec.expected_bits(QuantizedPayload(*map(jnp.asarray, payload)), like))
    assert expected == level_bits(levels.tolist(), 1)
    body = codec.encode(payload, like)
    lanes = 1 + np.count_nonzero(levels) / LANE
    assert body[4] == 0 or 8 * len(body) <= expected + 8 * FRAME + 2 * lanes * 24
    return expected


INPUTS = {
    "normal": lambda rng, size: rng.standard_normal(size),
    "equal": lambda rng, size: rng.choice([-1.0, 1.0], size),
    "heavy": lambda rng, size: rng.standard_t(2.0, size),
}
each_input = pytest.mark.parametrize("draw", INPUTS.values(), ids=INPUTS)


@each_input
@pytest.mark.parametrize(("bits", "size"), [(2, 4096), (3, 4096)])
def test_a_sparse_vector_takes_what_qsgd_says(draw, bits, size):
    s = 2 ** (bits - 1) - 1
    rng = rng_of(size)
    lengths = [measure(draw_levels(rng, draw(rng, size), np.arange(s + 1) / s), bits) for _ in range(5)]
    assert np.mean(lengths) <= qsgd_bound(size, s)


@each_input
def test_a_dense_vector_takes_what_qsgd_says(draw):
    """With `s = sqrt(d)`: at most 2.8 bits an entry and the norm; where all are equal, 3 (see `qsgd`)."""
    rng, s = rng_of(0), 127
    bits = measure(draw_levels(rng, draw(rng, s * s), np.arange(s + 1) / s), 8)
    assert bits <= (3.0 if draw is INPUTS["equal"] else 2.8) * s * s + 32


@each_input
@pytest.mark.parametrize("bits", [3, 4])
def test_a_vector_takes_what_nuqsgd_says(draw, bits):
    rng, powers = rng_of(bits), 2 ** (bits - 1) - 2
    size, draws = (8192, 20) if bits == 3 else (2**18, 1)
    table = np.append(0.0, 0.5 ** np.arange(powers, -1, -1))
    # The bound is of the mean over the draws; one of equal entries may take more.
    lengths = [level_bits(draw_levels(rng, draw(rng, size), table).tolist(), 1) for _ in range(draws)]
    assert np.mean(lengths) <= nuqsgd_bound(size, powers)


def test_the_entropy_of_levels_is_reached():
    rng, like = rng_of(0), jax.ShapeDtypeStruct((100_000,), jnp.float32)
    codes = np.clip(rng.normal(3.5, 1.2, 100_000).round(), 0, 7).astype(np.uint8)
    codec = jc.with_levels(np.linspace(-1, 1, 8), bits=3, zero_level=False, code="entropy").codec
    payload = levels_payload(codes, [1.0], 3, 8192)
    least = entropy_bits(codes.tolist()) + 32 * 13
    assert float(codec.expected_bits(QuantizedPayload(*map(jnp.asarray, payload)), like)) == pytest.approx(
        least, rel=1e-5
    )
    assert 8 * len(codec.encode(payload, like)) <= 1.015 * least


@pytest.mark.parametrize(("size", "certain", "common"), [(4096, 5, 40), (4096, 5, 1500), (1000, 0, 90), (7, 1, 1)])
def test_two_parts_take_what_the_paper_counts(size, certain, common):
    rng, like = rng_of(size), jax.ShapeDtypeStruct((size,), jnp.float32)
    where = np.sort(rng.choice(size, certain + common + 1, replace=False))
    values = np.append(np.arange(certain) + 2.0, np.append(rng.choice([-0.5, 0.5], common), 0.0))
    payload = SparsePayload(rng.permutation(values).astype(np.float32), encode_host_positions(where, size))
    codec = jc.gspar(len(where) / size, code="two_part").codec
    bits = two_part_bits(size, certain, common)
    assert float(codec.expected_bits(SparsePayload(*map(jnp.asarray, payload)), like)) == bits
    # Two counts, checksum and kind, and four sections of whole bytes.
    body = codec.encode(payload, like)
    assert body[4] == 0 or bits <= 8 * (len(body) - FRAME) <= bits + 32


def test_omega_lengths_inside_jit():
    values = [1, 2, 3, 4, 7, 8, 15, 16, 100, 2**16, 2**31 - 1]
    assert omega_length(jnp.array(values)).tolist() == [len(omega(value)) for value in values]


@pytest.mark.slow
def test_gspar_by_variance_sends_what_the_closed_form_keeps():
    x = jnp.asarray(rng_of(0).standard_t(1.5, 600), jnp.float32)
    code = jc.gspar(variance=0.5, code="two_part")
    keys = jax.random.split(jax.random.key(0), 200)
    kept, found = jax.jit(
        jax.vmap(lambda key: ((p := code.compress(x, key)).values != 0, code.decompress(p, x)), in_axes=0)
    )(keys)
    wanted = np.asarray(jc.closed_form_probabilities(x, 0.5), np.float64)
    counts = np.asarray(kept).sum(1)
    assert np.abs(counts - wanted.sum()).max() <= 1.01  # systematic: the sum rounded down or up
    assert counts.max() < 0.3 * kept.shape[1]  # of what the worst case would take
    found, x64 = np.asarray(found, np.float64), np.asarray(x, np.float64)
    growth = ((found - x64) ** 2).sum(1).mean() / (x64**2).sum()
    assert growth == pytest.approx(0.5, rel=0.1)
    assert growth <= 1.05 * code.variance((600,))
    spread = np.sqrt(x64**2 * (1 / np.where(wanted > 0, wanted, 1) - 1) / len(keys))
    assert (np.abs(found.mean(0) - x64) <= 6 * spread + 1e-5 * np.abs(x64)).all()


# Damage


def an_example(name):
    rng = rng_of(5)
    if name in ("two_part", "entropy of sparse"):
        like = jax.ShapeDtypeStruct((600,), jnp.float32)
        where = np.sort(rng.choice(600, 60, replace=False))
        values = np.append(np.full(50, -0.25), np.arange(1, 11)).astype(np.float32)
        codec = jc.gspar(0.1, code="two_part" if name == "two_part" else "entropy").codec
        return codec, SparsePayload(values, encode_host_positions(where, 600)), like
    like = jax.ShapeDtypeStruct((3000,), jnp.float32)
    sparse = name == "gaps"
    codes = (rng.integers(1, 4, 3000) * (rng.random(3000) < (0.02 if sparse else 0.3))).astype(np.uint8)
    codec = jc.qsgd(4, bucket=3000, code="entropy" if name == "entropy" else "elias").codec
    return codec, levels_payload(codes, [2.0], 4, 3000), like


each_example = pytest.mark.parametrize("name", ["bitmap", "gaps", "entropy", "two_part", "entropy of sparse"])


@pytest.mark.sampled(3)
@each_example
@quick(flip=st.integers(0, 10**6), bit=st.integers(0, 7), cut=st.integers(0, 10**6))
def test_altered_bytes_are_refused(name, flip, bit, cut):
    codec, payload, like = an_example(name)
    body = codec.encode(payload, like)
    assert body[4] != 0
    altered = bytearray(body)
    altered[flip % len(body)] ^= 1 << bit
    for damaged in (bytes(altered), body[: cut % len(body)], body + b"\0", b""):
        with pytest.raises(jc.DamagedCodeError, match="code of"):
            codec.decode(damaged, like)


@pytest.mark.sampled(3)
@each_example
@quick(flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=8))
def test_bytes_of_another_sender_are_a_payload_or_refused(name, flips):
    """With a right checksum: nothing else is raised, and what is decoded has the shapes of a payload."""
    codec, payload, like = an_example(name)
    body = bytearray(codec.encode(payload, like)[4:])
    for place, value in flips:
        body[place % len(body)] = value
    try:
        found = codec.decode(zlib.crc32(body).to_bytes(4, "little") + bytes(body), like)
    except jc.DamagedCodeError:
        return
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in payload]


def test_codes_of_other_compressors_and_shapes_are_refused():
    codec, payload, like = an_example("entropy")
    body = codec.encode(payload, like)
    for other, shape in ((jc.qsgd(4, code="elias"), (3000,)), (jc.qsgd(4, bucket=3000, code="entropy"), (2999,))):
        with pytest.raises(jc.DamagedCodeError):
            other.codec.decode(body, jax.ShapeDtypeStruct(shape, jnp.float32))


@pytest.mark.slow
def test_a_code_of_magnitudes_needs_a_zero_level():
    with pytest.raises(ValueError, match="got zero_level=False; use"):
        jc.nuqsgd(4, zero_level=False, code="elias")
