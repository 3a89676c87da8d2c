"""Two workers on CPU exchange long arrays by a sum of words: the same bits, bytes, types and gradients as otherwise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

import jaxdist as jd
from jaxdist import analysis
from jaxdist.comm import count_sent, over, total_bytes
from jaxdist.comm.pair import LEAST_BYTES

SWAP = [(0, 1), (1, 0)]
DTYPES = ["uint8", "int8", "uint16", "int32", "float16", "bfloat16", "float8_e5m2", "float32"]


@pytest.fixture
def pair():
    return jd.make_mesh({"data": 2}, devices=jax.devices()[:2])


def moves(comm, x):
    """Every function that moves an array, of which each worker has two rows."""
    return {
        "gather": comm.all_gather(x[0]),
        "own gather": comm.all_gather(x[0], agreed=False),
        "exchange": comm.all_to_all(x),
        "permute": comm.ppermute(x[1], SWAP),
    }


def on_mesh(mesh, f):
    def run(x):
        return jax.tree.map(lambda leaf: leaf[None], f(x[0]))

    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P("data")))


def random_bits(dtype, size):
    width = jnp.dtype(dtype).itemsize
    words = np.random.default_rng(0).integers(0, 256, (2, 2, size * width), np.uint8)
    x = jnp.asarray(words.view(np.dtype(jnp.dtype(dtype))))
    # XLA:CPU computes with bfloat16 as float32, which makes signaling NaNs quiet.
    return jnp.where(jnp.isnan(x), jnp.ones_like(x), x) if jnp.issubdtype(dtype, jnp.floating) else x


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_bits_arrive(pair, dtype):
    """Infinities and numbers that wrap around too."""
    x = random_bits(dtype, LEAST_BYTES // jnp.dtype(dtype).itemsize)
    found = on_mesh(pair, lambda rows: moves(over("data"), rows))(x)
    first = np.asarray(x[:, 0])
    wanted = {
        "gather": np.stack([first, first]),
        "own gather": np.stack([first, first]),
        "exchange": np.swapaxes(np.asarray(x), 0, 1),
        "permute": np.asarray(x)[::-1, 1],
    }
    for name, out in found.items():
        assert out.dtype == jnp.dtype(dtype)
        assert np.asarray(out).tobytes() == wanted[name].tobytes(), name


@pytest.mark.parametrize(("size", "kinds"), [(LEAST_BYTES, {"all-reduce"}), (LEAST_BYTES - 8, None)])
def test_bytes_are_those_of_the_plain_collectives(pair, size, kinds):
    ledger = []

    def f(rows):
        return moves(count_sent(over("data"), ledger), rows)

    traced = on_mesh(pair, f).trace(jax.ShapeDtypeStruct((2, 2, size), jnp.uint8))
    found = analysis.collectives(traced.lower().compile())
    assert {op.kind for op in found.ops} == (kinds or {"all-gather", "all-to-all", "collective-permute"})
    assert {op.dtype for op in found.ops} == {"uint8"}
    # Two equal gathers merge.
    assert found.wire_bytes == total_bytes(ledger) - size == 3 * size
    # Only on CPU.
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "all_reduce" not in text
    assert text.count("collective_permute") == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_zero_sends_is_not_copied_for_a_sum(pair, dtype):
    """On a fast link the sum takes twice the time, and its words are as much memory once more."""

    def f(x):
        shard = over("data").reduce_scatter_mean(x[0].reshape(2, -1))
        return over("data").all_gather(shard)

    step = jax.jit(jax.shard_map(f, mesh=pair, in_specs=P("data"), out_specs=P()))
    compiled = step.lower(jax.ShapeDtypeStruct((2, 2 * LEAST_BYTES), dtype)).compile()
    assert {op.kind for op in analysis.collectives(compiled).ops} == {"all-to-all", "all-gather"}
    # What arrives of the exchange, its mean, and what is gathered.
    assert compiled.memory_analysis().temp_size_in_bytes <= 5.1 * LEAST_BYTES * jnp.dtype(dtype).itemsize


def test_a_gather_is_typed_as_replicated(pair):
    def f(x):
        return over("data").all_gather(x[0])

    step = jax.jit(jax.shard_map(f, mesh=pair, in_specs=P("data"), out_specs=P()))
    x = jnp.arange(2 * LEAST_BYTES, dtype=jnp.int32).reshape(2, -1)
    np.testing.assert_array_equal(step(x), x)


def test_gradients_are_those_of_the_plain_collectives(pair):
    """A sum of integers has no gradient: that of the plain collective is used, in both modes."""
    x = jax.random.normal(jax.random.key(0), (2, 2, LEAST_BYTES // 4))
    weights = jax.random.normal(jax.random.key(1), (3, LEAST_BYTES // 4))

    def derivatives(rows):
        def weighted(rows):
            comm = over("data")
            return jnp.sum(comm.all_to_all(rows) * weights[:2]) + jnp.sum(comm.ppermute(rows[0], SWAP) * weights[2])

        return jax.grad(weighted)(rows), weighted(rows), jax.jvp(weighted, (rows,), (rows,))[1]

    gradient, value, slope = on_mesh(pair, derivatives)(x)
    # Both rows of worker w are weighted by row w at the workers to which they go, and row 0 once more.
    weights = np.asarray(weights)
    wanted = np.repeat(weights[:2, None], 2, axis=1)
    wanted[:, 0] += weights[2]
    np.testing.assert_allclose(gradient, wanted, rtol=1e-6)
    # A linear function is its own derivative.
    np.testing.assert_allclose(slope, value, rtol=1e-5)
