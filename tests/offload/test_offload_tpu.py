"""What the TPU's own compiler says of offloaded state; slow, and only where libtpu is installed."""

import importlib.util
import math
import os

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxdist as jd
from jaxdist import offload
from jaxdist.analysis import pods

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"),
]
LAYERS, WIDTH, TILE = 6, 1024, 2**23
ENTRIES = LAYERS * WIDTH**2


@pytest.fixture(scope="module")
def mesh():
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # another process may be compiling
    return pods.tpu("v5e:2x2")


def memory(tx, mesh):
    def params():
        return {f"layer{i}": jnp.zeros((WIDTH, WIDTH)) for i in range(LAYERS)}

    def loss(params, x):
        for name in sorted(params):
            x = jnp.tanh(x @ params[name])
        return (x**2).mean()

    def step(state, batch):
        _, gradients = jd.local_value_and_grad(loss)(state["params"], batch)
        updates, opt = tx.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {}

    batch = jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)
    found = pods.plan(jd.distribute(step, mesh), lambda: {"params": params(), "opt": tx.init(params())}, batch, mesh)
    return found.memory


@pytest.mark.parametrize("compute", ["host", "device"])
@pytest.mark.parametrize("cut", [False, True])
def test_state_is_in_the_memory_of_the_host(compute, cut, mesh):
    adam = optax.adam(1e-3)
    if cut:
        plain = jd.zero_redundancy(adam)
        there = offload.host(plain, compute=compute, tile_bytes=TILE)
    else:
        plain = optax.chain(jd.all_reduce(jd.exact()), adam)
        there = optax.chain(jd.all_reduce(jd.exact()), offload.host(adam, compute=compute, tile_bytes=TILE))
    state = 8 * ENTRIES // (mesh.size if cut else 1)
    before, after = memory(plain, mesh), memory(there, mesh)
    assert before.host_arguments == 0
    assert after.host_arguments == pytest.approx(state, rel=0.02)
    assert before.arguments - after.arguments == pytest.approx(state, rel=0.02)
    if not cut:  # nor is the state on the device for the time of the step: besides the updates, only portions of it
        besides = 8 if compute == "host" else 4  # the gradients, which cross, are there as long as the updates
        assert after.temporary < before.temporary + besides * ENTRIES + 2 * TILE


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1000, 1024), "float32"), ((1001, 1024), "float32"), ((1000, 1024), "bfloat16"), ((2**20,), "float32")],
)
def test_tiles_are_what_the_compiler_can_move(shape, dtype, mesh):
    """It ends the process at parts of rows that fill no registers, and refuses parts of vectors."""
    tx = optax.chain(jd.all_reduce(jd.exact()), offload.host(optax.adam(1e-3), compute="device", tile_bytes=2**20))

    def params():
        return {"w": jnp.zeros(shape, dtype)}

    def step(state, batch):
        _, gradients = jd.local_value_and_grad(lambda p, x: (p["w"] ** 2).mean() * x.mean())(state["params"], batch)
        updates, opt = tx.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {}

    batch = jax.ShapeDtypeStruct((64, 8), dtype)
    found = pods.plan(jd.distribute(step, mesh), lambda: {"params": params(), "opt": tx.init(params())}, batch, mesh)
    assert found.memory.temporary < 2 * math.prod(shape) * jnp.dtype(dtype).itemsize
