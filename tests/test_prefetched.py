"""Gathering one layer ahead: the same numbers, one gather less, and two layers whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import assert_close

import jaxdist as jd
from jaxdist import analysis
from jaxdist.parallel import gathered_scan, shard

WIDTH = 24


def layer(p, x, mask, scale):
    """With an argument without gradient and one with."""
    return x + jnp.where(mask[None], jnp.tanh(x @ p["w"] + p["b"][None]), 0) * scale


def start(layers, width=WIDTH):
    rng = np.random.default_rng(0)
    return [
        {"w": jnp.asarray(rng.normal(size=(width, width)) / width**0.5, jnp.float32), "b": jnp.zeros(width)}
        for _ in range(layers)
    ]


def make(prefetch, width=WIDTH):
    mask = jnp.arange(width) % 3 > 0

    def step(state, batch):
        def loss(both, batch):
            layers, scale, shift = both
            # `shift` is closed over.
            x = gathered_scan(
                lambda p, x, mask, scale: layer(p, x, mask, scale) + shift,
                layers,
                batch,
                mask,
                scale,
                prefetch=prefetch,
            )
            return jnp.square(x).mean()

        value, grads = jd.local_value_and_grad(loss)((state["layers"], state["scale"], state["shift"]), batch)
        # The gradients of what is cut are means already.
        means = jax.tree.map(
            lambda g: g if isinstance(g, jd.Sharded) else jax.lax.pmean(g, "data"),
            grads,
            is_leaf=lambda x: isinstance(x, jd.Sharded),
        )
        return dict(zip(("layers", "scale", "shift"), means)), {"loss": jax.lax.pmean(value, "data")}

    return step


def state(layers, width=WIDTH):
    return {"layers": shard(start(layers, width), smallest=30), "scale": jnp.array(0.5), "shift": jnp.array(0.1)}


BATCH = np.random.default_rng(1).normal(size=(8, WIDTH)).astype(np.float32)


@pytest.mark.parametrize("layers", [1, 4])
def test_equals_without(layers):
    found, expected = (jd.simulate(make(prefetch), 2)(jd.place(state(layers), 2), BATCH) for prefetch in (True, False))
    assert_close(found, expected, 1e-6)


def test_bytes_and_memory():
    """One gather less in all; whole layers are two, however many there are."""
    mesh = jd.make_mesh({"data": 2}, devices=jax.devices()[:2])
    width, rows = 128, 8

    def plan(layers):
        step = jd.distribute(make(True, width), mesh)
        shapes = jax.ShapeDtypeStruct((2 * rows, width), jnp.float32)
        return analysis.pods.plan(step, lambda: state(layers, width), shapes, mesh)

    few, many = plan(4), plan(12)
    kinds = [sum(op.count for op in many.collectives.ops if op.kind == kind) for kind in ("all-gather", "all-to-all")]
    # The two leaves go together.
    assert kinds == [12 + 12 - 1, 12]
    entries = 4 * width * width
    # The pieces, their gradients and the activations grow with the layers, and nothing that is whole.
    own = 8 * (entries // 2 + 4 * width + 4 * width * rows)
    assert many.memory.temporary - few.memory.temporary < 3 * own < 8 * entries * 2
    assert few.memory.temporary < 6 * entries + 3 * own
