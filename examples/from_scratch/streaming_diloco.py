"""Streaming DiLoCo: parts of the model are sent in turn, in 4 bits, and merged some steps later.

    python examples/from_scratch/streaming_diloco.py

Algorithm 2 of Douillard, Donchev, Rush, Kale, Charles, Garrett, Teston, Lacey, McIlroy, Shen, Ramé, Szlam, Ranzato,
Barham, "Streaming DiLoCo with Overlapping Communication: Towards a Distributed Free Lunch", 2025, arXiv:2501.18512.
`inner_step`, `send` and `merge` are written as one worker sees them; `jax.vmap` with an axis name runs four workers on
one device. Prints the loss, and the bytes of the longest message. `diloco.py` is the method without streams.

Where the paper, this file and the library (`jd.local_sgd.streaming_diloco`, `reducer=jd.compressed(e3m0())`) differ:

- The overlap: the paper sends while the next τ steps run. This file only merges τ steps later; the library sends at the
  start of the next step, beside the computation of its gradient, and merges at the end of the τ-th.
- The outer step: the paper takes it when the mean has arrived; this file and the library take it at once and hold back
  the merge. Nothing reads the result in between, so that it is the same.
- The scale of the 4-bit floats: the paper states none. This file has one for each matrix, the library for 256 entries.
- Fragments: strided as in the paper, layer l in fragment l mod P; the library also balances them by size.
"""

import jax
import jax.numpy as jnp
import optax

WORKERS, LAYERS, PERIOD, FRAGMENTS, DELAY, ALPHA = 4, 4, 12, 2, 2, 0.5
INNER, OUTER = optax.adamw(0.01), optax.sgd(0.4, momentum=0.9, nesterov=True)
MAGNITUDES = jnp.array([0, 1 / 4, 1 / 2, 1, 2, 4, 8, 16])  # of E3M0: a sign, three bits of exponent, no mantissa


def loss_fn(params, batch):
    x, y = batch
    for layer in params:
        x = x + jnp.tanh(x @ layer)
    return jnp.mean(jnp.square(x - y))


def inner_step(params, inner, batch):
    updates, inner = INNER.update(jax.grad(loss_fn)(params, batch), inner, params)
    return optax.apply_updates(params, updates), inner  # θ_m(t) ← InnerOpt(θ_m(t-1), ∇L)


def mean_in_4_bits(x):
    """The mean of what all workers send, in float32: codes of 4 bits, two in a byte, and a scale."""
    scale = jnp.abs(x).max() / 16
    ratios = jnp.abs(x).reshape(-1, 1) / jnp.where(scale == 0, 1, scale)
    codes = (jnp.argmin(jnp.abs(ratios - MAGNITUDES), axis=1) | ((x.reshape(-1) < 0) << 3)).astype(jnp.uint8)
    packed, scales = jax.lax.all_gather((codes[0::2] | (codes[1::2] << 4), scale), "workers")
    codes = jnp.stack([packed & 15, packed >> 4], axis=2).reshape(WORKERS, -1)
    values = jnp.where(codes >> 3 == 1, -1, 1) * MAGNITUDES[codes & 7] * scales[:, None]
    return values.mean(axis=0).reshape(x.shape)


def send(anchor, outer, params):
    """A round of fragment p, whose `anchor` is θ_p(t-H): what all workers had after its last round."""
    # Δ_p ← mean_m(θ_p(t-H) - θ_m,p(t))
    drift = [mean_in_4_bits(a - x) for a, x in zip(anchor, params)]
    updates, outer = OUTER.update(drift, outer, anchor)
    return optax.apply_updates(anchor, updates), outer  # θ_p ← OuterOpt(θ_p(t-H), Δ_p)


def merge(anchor, params):
    """θ_m,p ← α θ_m,p + (1-α) θ_p: half of what this worker has learned in the last τ steps stays."""
    return [ALPHA * x + (1 - ALPHA) * a for a, x in zip(anchor, params)]


def is_due(t, p):
    """Whether fragment p is sent after step t, counted from 1: every H steps, fragments H/P steps apart."""
    return t > 0 and (t - p * PERIOD // FRAGMENTS) % PERIOD == 0


def train(steps, batch_at):
    """Yields the parameters of all workers after each step; each leaf has a leading axis of workers."""
    params = list(jax.random.normal(jax.random.key(0), (LAYERS, 8, 8)) / 6)
    anchors = [params[p::FRAGMENTS] for p in range(FRAGMENTS)]
    states = params, INNER.init(params), anchors, [OUTER.init(anchor) for anchor in anchors]
    params, inner, anchors, outers = jax.tree.map(lambda x: jnp.stack([x] * WORKERS), states)
    step, send_all, merge_all = (jax.jit(jax.vmap(f, axis_name="workers")) for f in (inner_step, send, merge))
    for t in range(1, steps + 1):
        params, inner = step(params, inner, batch_at(t))
        for p in range(FRAGMENTS):
            if is_due(t, p):
                anchors[p], outers[p] = send_all(anchors[p], outers[p], params[p::FRAGMENTS])
            if is_due(t - DELAY, p):
                params[p::FRAGMENTS] = merge_all(anchors[p], params[p::FRAGMENTS])
        yield list(params)


def batch_at(t):
    x = jax.random.normal(jax.random.key(t), (WORKERS, 32, 8)) + jax.random.normal(jax.random.key(1), (WORKERS, 1, 8))
    return x, x + jnp.sin(jnp.roll(x, 1, axis=-1))


def main():
    for t, params in enumerate(train(240, batch_at), 1):
        if t in (1, 240):
            print(f"step {t:3}: loss {jax.vmap(loss_fn)(params, batch_at(0)).mean():.3f}")
    print(f"no message is longer than {LAYERS // FRAGMENTS * (8 * 8 // 2 + 4)} bytes, of {LAYERS * 8 * 8 * 4}")


if __name__ == "__main__":
    main()
