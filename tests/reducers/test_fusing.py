"""One collective for each bucket, dtype and direction, however many leaves: read from compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from register_run import State

import jaxdist as jd
from jaxdist.wire.buffers import FEW, concatenate, from_byte_planes, fuse, fuse_bytes, split, to_byte_planes
from jaxdist.wire.codec import AT_ONCE, decode_mean

KINDS = [(3,), (), (4, 5), (2, 3, 2), (5, 4), (0, 4)]
LIKE = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in 7 * KINDS]

REDUCE, GATHER, EXCHANGE = ("all-reduce", "float32"), ("all-gather", "uint8"), ("all-to-all", "uint8")
MESSAGES = {
    "exact": (jd.exact, [REDUCE]),
    "top_k": (lambda: jd.error_feedback(jd.compressed(jd.top_k(0.3))), [GATHER]),
    "qsgd": (lambda: jd.compressed(jd.qsgd(4)), [GATHER]),
    "two_shot": (lambda: jd.error_feedback(jd.two_shot(jd.compressors.scaled_sign())), [GATHER, EXCHANGE]),
    "majority_vote": (jd.reducers.majority_vote, [GATHER, EXCHANGE]),
    # The largest magnitude travels as its bits, in whose maximum NaN wins.
    "integer_sum": (jd.reducers.integer_sum, [("all-reduce", "int8"), ("all-reduce", "int32")]),
    "power_sgd": (lambda: jd.error_feedback(jd.power_sgd(1, min_compression_rate=0.0)), [REDUCE, REDUCE]),
    "per_leaf": (
        lambda: jd.reducers.per_leaf(
            lambda path, leaf: len(leaf.shape) % 3,
            {0: jd.two_shot(jd.qsgd(4)), 1: jd.reducers.majority_vote(), 2: jd.compressed(jd.qsgd(4))},
        ),
        [GATHER, GATHER, EXCHANGE],  # round one: codes of matrices and the exchange; round two: both second shots
    ),
    "bucketed": (
        lambda: jd.reducers.bucketed(
            jd.two_shot(jd.compressors.scaled_sign()), bucket_bytes=840, first_bucket_bytes=None
        ),
        2 * [GATHER, EXCHANGE],
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MESSAGES)
def test_forty_leaves_share_their_collectives(mesh, name, compiled):
    """As written, and in the compiled program."""
    make, expected = MESSAGES[name]
    tx = jd.all_reduce(make())

    def step(state, batch):
        means, opt = tx.update(jax.tree.map(lambda x: x[0], batch), state.opt)
        return State(means, opt), {}

    def make_state():
        return State([jnp.zeros(x.shape) for x in LIKE], tx.init(LIKE))

    batch = [jax.ShapeDtypeStruct((8, *x.shape), x.dtype) for x in LIKE]
    state = jax.eval_shape(lambda: jd.init_state(make_state, 8))
    run = jd.distribute(step, mesh)
    if compiled:
        found = jd.analysis.collectives(run.lower(state, batch).compile())
    else:
        found = jd.analysis.logical_collectives(run, state, batch, platform="cpu")
    assert sorted((op.kind, op.dtype) for op in found.ops for _ in range(op.messages)) == sorted(expected)


def test_large_leaves_are_not_copied_into_a_stack():
    """A stack of two is a copy of both, which XLA:CPU makes entry by entry, and again for each layout."""
    reducer = jd.compressed(jd.compressors.scaled_sign())
    x = [jax.ShapeDtypeStruct((2**20,), jnp.float32)] * 2

    def reduce(x):
        return reducer.reduce(x, reducer.init(x), jd.comm.alone())[0]

    assert jax.jit(reduce).lower(x).compile().memory_analysis().temp_size_in_bytes < 2**23


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32, jnp.bfloat16, jnp.int16])
def test_bytes_in_planes_are_those_of_the_numbers(dtype):
    """The form of TPUs, also of several rows."""
    x = jnp.asarray([[1.5, -2.0, 300.0], [0.0, 7.0, 8.0]], dtype)
    words = jax.vmap(to_byte_planes)(x)
    # One row of each byte, from the lowest on.
    np.testing.assert_array_equal(words.reshape(2, -1, 3).swapaxes(1, 2), np.asarray(x)[..., None].view(np.uint8))
    np.testing.assert_array_equal(from_byte_planes(words, dtype=dtype), x)


@pytest.mark.parametrize(("workers", "packs"), [(1, False), (2, True)])
@pytest.mark.parametrize("fuse_arrays", [fuse, fuse_bytes])
def test_worker_alone_packs_nothing(fuse_arrays, workers, packs):
    def gather(*arrays):
        comm = jd.comm.over("data")
        return fuse_arrays(comm, comm.all_gather, arrays)

    arrays = [jnp.ones((workers, 3)), jnp.ones((workers, 2, 2)), jnp.ones((workers, 5), jnp.int8)]
    jaxpr = str(jax.make_jaxpr(jax.vmap(gather, axis_name="data"))(*arrays))
    assert ("concatenate" in jaxpr) == packs
    assert ("bitcast_convert_type" in jaxpr) == (packs and fuse_arrays is fuse_bytes)


@pytest.mark.parametrize(("dtype", "size"), [(jnp.float32, 2**28), (jnp.uint8, 2**31)])
def test_leaves_beyond_32_bits_are_not_written_to_a_place(dtype, size):
    """The place of a write is a 32-bit number: the last leaf would be written over the first."""
    large = jax.ShapeDtypeStruct((2**10, size // 2**10), dtype)
    like = [large] * (2**31 // size) + [jax.ShapeDtypeStruct((8,), dtype)]
    traced = str(jax.make_jaxpr(lambda *leaves: concatenate(leaves))(*like))
    assert "concatenate" in traced
    assert "dynamic_update_slice" not in traced
    assert "dynamic_update_slice" in str(jax.make_jaxpr(lambda *leaves: concatenate(leaves))(like[-1], like[-1]))


@pytest.mark.parametrize(
    ("platform", "workers"), [(name, n) for name in ("tpu", "cpu", "default") for n in (1, 2, 5)] + [("cpu", 13)]
)
def test_means_of_decoded_payloads(mesh, monkeypatch, platform, workers):
    """A TPU adds them to zeros, other backends to the first one: each counts once, in the type of the payloads."""
    monkeypatch.setattr(
        jax.lax, "platform_dependent", lambda *operands, **forms: forms.get(platform, forms["default"])(*operands)
    )
    codes = np.random.default_rng(0).integers(0, 9, (workers, 6)).astype(np.uint8)
    scales = 2.0 ** np.arange(workers, dtype=np.float32)

    def decode(payload):
        codes, scale = payload
        return codes.astype(jnp.float32) * scale

    def add(payload, total):
        return total + decode(payload)

    def means(codes, scales):
        # Each device has payloads of its own.
        scales = scales * jax.lax.axis_index("data")
        return decode_mean(decode, (codes, scales))[None], decode_mean(decode, (codes, scales), add=add)[None]

    run = jax.shard_map(means, mesh=mesh, in_specs=(jax.P(), jax.P()), out_specs=jax.P("data"))
    expected = np.arange(8)[:, None] * (codes * scales[:, None]).mean(0)
    for found in jax.jit(run)(codes, scales):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_few_payloads_are_decoded_at_once_on_cpu_only():
    """XLA:CPU decodes inside a loop several times slower than outside; the programs of others are what they were."""

    def mean(codes):
        return decode_mean(lambda codes: codes.astype(jnp.float32), codes)

    for workers, platform, loops in (
        (AT_ONCE + 1, "cpu", 0),
        (2 * AT_ONCE + 1, "cpu", 1),
        (4, "cuda", 1),
        (4, "tpu", 1),
    ):
        traced = jax.jit(mean).trace(jax.ShapeDtypeStruct((workers, 16), jnp.uint8))
        assert traced.lower(lowering_platforms=(platform,)).as_text().count("stablehlo.while") == loops


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", [1, FEW, FEW + 1, 3 * FEW])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.uint8])
def test_split_is_the_inverse_of_concatenate(number, dtype):
    """Below and above the number of parts from which on XLA:CPU gets another program."""
    sizes = [(7 * i) % 11 for i in range(number)]
    parts = [jnp.arange(3 * size, dtype=jnp.int32).reshape(3, size).astype(dtype) + i for i, size in enumerate(sizes)]
    flat = jax.jit(lambda parts: concatenate([part + 1 for part in parts], rows=True))(parts)
    assert flat.shape == (3, sum(sizes))
    # A remainder, such as padding, is left out.
    longer = jnp.pad(flat, ((0, 0), (0, 5)))
    found = jax.jit(lambda flat: split(flat, sizes))(longer)
    for part, again in zip(parts, found, strict=True):
        np.testing.assert_array_equal(again, part + 1)
