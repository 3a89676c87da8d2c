"""A small stack of layers, and its training in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdist import offload

WIDTH = 12
STACK = offload.LayerStack(
    embed=lambda p, batch: batch["x"] @ p["w"],
    layer=lambda p, x: x + jnp.tanh(x @ p["w"] + p["b"][None]) @ p["v"],
    head=lambda p, x, batch: jnp.mean((x @ p["w"] - batch["y"]) ** 2),
)


def make_params(count, dtype=np.float32, width=WIDTH):
    def draw(seed, *shape):
        return (np.random.default_rng(seed).normal(size=shape) / np.sqrt(width)).astype(dtype)

    layers = [
        {"w": draw(3 * i, width, width), "b": np.zeros(width, dtype), "v": draw(3 * i + 1, width, width)}
        for i in range(count)
    ]
    return {"embed": {"w": draw(100, 5, width)}, "layers": layers, "head": {"w": draw(101, width, 3)}}


def make_batch(step, dtype=np.float32):
    rng = np.random.default_rng(1000 + step)
    return {"x": rng.normal(size=(8, 5)).astype(dtype), "y": rng.normal(size=(8, 3)).astype(dtype)}


def whole_loss(params, batch, stack=STACK):
    x = stack.embed(params["embed"], batch)
    for layer in params["layers"]:
        x = stack.layer(layer, x)
    return stack.head(params["head"], x, batch)


def plain_steps(tx, params, steps, dtype=np.float32):
    """The same in memory: one gradient of the whole loss, one update of the whole tree."""
    state, losses, every = tx.init(params), [], [params]

    @jax.jit
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(whole_loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    for number in range(steps):
        params, state, loss = step(params, state, make_batch(number, dtype))
        losses.append(float(loss))
        every.append(params)
    return every, state, losses


def difference(x, y):
    return max(
        float(np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)), initial=0.0))
        for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    )
