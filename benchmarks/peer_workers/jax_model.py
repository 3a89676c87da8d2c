"""The network of `worker.Problem` in JAX."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def apply_affine(params: Any, x: jax.Array) -> jax.Array:
    return x @ params["weight"] + params["bias"]


def apply_block(params: Any, x: jax.Array) -> jax.Array:
    normal = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * params["gain"]
    return x + jax.nn.relu(normal @ params["weight"] + params["bias"])


def apply_blocks(blocks: Any, x: jax.Array) -> jax.Array:
    for block in blocks:
        x = apply_block(block, x)
    return x


def compute_loss(params: Any, batch: Any) -> jax.Array:
    x, labels = batch
    scores = apply_affine(params["last"], apply_blocks(params["blocks"], apply_affine(params["first"], x)))
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()
