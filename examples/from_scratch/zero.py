"""ZeRO-1: each worker keeps and updates the optimizer state of one shard of the model, and all gather the result.

    python examples/from_scratch/zero.py

P_os of Rajbhandari, Rasley, Ruwase, He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2019,
arXiv:1910.02054, around Adam (Kingma, Ba, 2014, arXiv:1412.6980). `train_step` is written as one worker sees it;
`jax.vmap` with an axis name runs four workers on one device. Prints the loss, and the bytes of the moments on a worker.

Where the paper, this file and the library (`jd.zero_redundancy(optax.adam(0.01))`) differ:

- The dtypes: the paper trains in half precision, and the sharded state has parameters in float32 too. Here all is in
  float32; the library has such masters with `master_dtype=jnp.float32`.
- What is gathered: the parameters in paper and file, their updates in the library, which is a transformation in an
  optax chain like any other.
- The shards: this file cuts one vector of all parameters. The library cuts every leaf, which keeps the optimizer's tree
  of moments, and sends the pieces together.
- The optimizer: Adam treats each entry by itself, so that a shard is enough. The library evaluates any optax optimizer
  on shards, and adds what it needs of the rest: norms as sums over the workers, products of whole matrices.

A reduce-scatter and an all-gather together send as much as the all-reduce that they replace.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

WORKERS, RATE, B1, B2, EPS = 4, 0.01, 0.9, 0.999, 1e-8


class Adam(NamedTuple):
    """Of one shard: the moments have 1/W of the entries of the model."""

    count: jax.Array
    m: jax.Array
    v: jax.Array


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean(jnp.square(jnp.tanh(x @ params["hidden"] + params["bias"]) @ params["out"] - y))


def pad(flat):
    """Zeros at the end, until the vector divides into a shard for each worker."""
    return jnp.pad(flat, (0, -flat.size % WORKERS))


def adam(g, state, shard):
    count = state.count + 1
    m = B1 * state.m + (1 - B1) * g  # m_t = β₁ m_{t-1} + (1-β₁) g_t
    v = B2 * state.v + (1 - B2) * g * g  # v_t = β₂ v_{t-1} + (1-β₂) g_t²
    m_hat, v_hat = m / (1 - B1**count), v / (1 - B2**count)
    return shard - RATE * m_hat / (jnp.sqrt(v_hat) + EPS), Adam(count, m, v)


def train_step(params, state, batch):
    loss, gradient = jax.value_and_grad(loss_fn)(params, batch)
    flat, unravel = ravel_pytree(params)
    # Reduce-scatter: worker i receives the mean of shard i of all gradients, and of nothing else.
    g = jax.lax.psum_scatter(pad(ravel_pytree(gradient)[0]), "workers", tiled=True) / WORKERS
    # Each worker updates its own shard of the parameters, with its own shard of the moments.
    shard = pad(flat).reshape(WORKERS, -1)[jax.lax.axis_index("workers")]
    shard, state = adam(g, state, shard)
    # All-gather: every worker has all parameters again.
    gathered = jax.lax.all_gather(shard, "workers", tiled=True)
    return unravel(gathered[: flat.size]), state, loss


def init():
    """Parameters and optimizer state of all workers: each leaf has a leading axis of workers."""
    first, second = jax.random.split(jax.random.key(0))
    params = {
        "hidden": jax.random.normal(first, (8, 15)) / 3,
        "bias": jnp.zeros(15),
        "out": jax.random.normal(second, (15, 5)) / 4,
    }
    shard = jnp.zeros(pad(ravel_pytree(params)[0]).size // WORKERS)
    return jax.tree.map(lambda x: jnp.stack([x] * WORKERS), (params, Adam(jnp.zeros(()), shard, shard)))


def batch_at(step):
    x = jax.random.normal(jax.random.key(step), (WORKERS, 32, 8))
    return x, jnp.sin(x[..., :5] + x[..., 3:])


def main():
    (params, state), run = init(), jax.jit(jax.vmap(train_step, axis_name="workers"))
    for step in range(301):
        params, state, loss = run(params, state, batch_at(step))
        if step % 100 == 0:
            print(f"step {step:3}: loss {loss.mean():.3f}")
    whole = sum(x[0].size for x in jax.tree.leaves(params))
    print(f"moments on a worker: {4 * (state.m[0].size + state.v[0].size):,} bytes in place of {8 * whole:,}")


if __name__ == "__main__":
    main()
