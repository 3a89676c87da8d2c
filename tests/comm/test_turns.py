"""More than two workers on CPU exchange long rows of codes in turns: the same bits, bytes and types as otherwise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from real_processes import LIMIT
from two_processes import run_two_processes

import jaxdist as jd
from jaxdist import analysis
from jaxdist.comm import count_sent, over, total_bytes
from jaxdist.comm.pair import LEAST_BYTES


def exchange(workers, axes=("data",), shape=None):
    mesh = jd.make_mesh(shape or {"data": workers}, devices=jax.devices()[:workers])
    run = lambda x: over(axes).all_to_all(x[0])[None]  # noqa: E731
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P(axes), out_specs=P(axes)))


@pytest.mark.parametrize("dtype", ["uint8", "int32"])
@pytest.mark.parametrize("workers", [3, 4, 8])
def test_every_bit_arrives(workers, dtype):
    words = np.random.default_rng(0).integers(0, 256, (workers, workers, LEAST_BYTES), np.uint8).view(dtype)
    assert np.array_equal(exchange(workers)(words), np.swapaxes(words, 0, 1))


@pytest.mark.parametrize("axes", [("pod", "chip"), ("chip", "pod")])
def test_workers_along_two_axes_are_numbered_in_the_order_of_the_axes(axes):
    """`lax.ppermute` numbers them in the order of the mesh."""
    rows = np.random.default_rng(0).integers(0, 256, (6, 6, LEAST_BYTES), np.uint8)
    assert np.array_equal(exchange(6, axes, {"pod": 2, "chip": 3})(rows), np.swapaxes(rows, 0, 1))


@pytest.mark.parametrize("size", [LEAST_BYTES, LEAST_BYTES + 1])
@pytest.mark.parametrize("workers", [3, 4])
def test_bytes_are_those_of_an_all_to_all(workers, size):
    ledger = []
    mesh = jd.make_mesh({"data": workers}, devices=jax.devices()[:workers])
    run = lambda x: count_sent(over("data"), ledger).all_to_all(x[0])[None]  # noqa: E731
    step = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    traced = step.trace(jax.ShapeDtypeStruct((workers, workers, size), jnp.uint8))
    found = analysis.collectives(traced.lower().compile())
    assert found.wire_bytes == total_bytes(ledger) == (workers - 1) * size
    assert "all-to-all" not in {op.kind for op in found.ops}
    # Only on CPU.
    for platform in ("tpu", "cuda"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert text.count("all_to_all") == 1
        assert "collective_permute" not in text


@pytest.mark.parametrize(("workers", "size", "dtype"), [(4, LEAST_BYTES - 8, "uint8"), (4, LEAST_BYTES, "float32")])
def test_short_rows_and_gradients_are_exchanged_at_once(workers, size, dtype):
    compiled = exchange(workers).lower(jax.ShapeDtypeStruct((workers, workers, size), dtype)).compile()
    assert {op.kind for op in analysis.collectives(compiled).ops} == {"all-to-all"}


@pytest.mark.slow
def test_long_rows_arrive_between_processes(tmp_path):
    """`lax.psum_scatter` of rows of 8 MiB does not deliver them there, and does between devices of a process."""
    found = run_two_processes("exchanges.py", tmp_path, str(9 * 2**20), timeout=LIMIT, count=4)
    assert found == [[True, True]] * 4
