"""Gathering one layer ahead: the same numbers, and one gather less."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import assert_close

import jaxdist as jd
from jaxdist import analysis
from jaxdist.zero import gathered_scan, shard

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


def test_bytes():
    """One gather less in all."""
    mesh = jd.make_mesh({"data": 2}, devices=jax.devices()[:2])
    step = jd.distribute(make(True), mesh)
    shapes = jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)
    found = analysis.pods.plan(step, lambda: state(5), shapes, mesh).collectives
    kinds = [sum(op.count for op in found.ops if op.kind == kind) for kind in ("all-gather", "all-to-all")]
    assert kinds == [5 + 5 - 1, 5]
