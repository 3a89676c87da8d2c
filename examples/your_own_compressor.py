"""Write a compressor, test it alone, then train with it.

    python examples/your_own_compressor.py

Ternary gradients: each entry becomes -m, 0 or +m, with m the largest magnitude, so that it is right on average
(Wen et al., "TernGrad", arXiv 1705.07878, 2017, without clipping). Two bits an entry. Prints that
the laws hold, and the loss after training with the exact mean, with ternary gradients, and with error feedback.
"""

import math

import jax
import jax.numpy as jnp
import optax

import jaxdist as jd
from jaxdist.compressors import pack, uniform_hash, unpack
from jaxdist.testing import assert_compressor_laws, assert_reducer_laws


def ternary() -> jd.compressors.Compressor:
    """`C(x) = m sgn(x) b` with `b = 1` with probability `|x| / m`: unbiased, `E|C(x) - x|² <= ω |x|²`."""

    def compress(x, key):
        flat = x.ravel().astype(jnp.float32)
        # XLA:CPU's maximum of thousands of entries loses a NaN.
        largest = jnp.where(jnp.isfinite(flat).all(), jnp.max(jnp.abs(flat), initial=0.0), jnp.nan)
        sent = uniform_hash(key, flat.shape) * largest < jnp.abs(flat)
        codes = sent.astype(jnp.uint8) + (sent & (flat < 0)).astype(jnp.uint8)  # 0: zero, 1: +m, 2: -m
        return pack(codes, 2), largest

    def decompress(payload, like):
        words, largest = payload
        codes = unpack(words, 2, math.prod(like.shape)).astype(jnp.int32)
        signs = (codes & 1) - (codes >> 1)
        return (signs * largest).reshape(like.shape).astype(like.dtype)

    def variance(shape):  # tight: one large entry among small ones
        return (math.sqrt(max(math.prod(shape), 1)) - 1) / 2

    return jd.compressors.Compressor(compress, decompress, variance=variance)


def main():
    # Alone: without mesh, optimizer or other workers.
    # The draw has 24 bits: where the largest entry is below 1e-30, their products with it are too small for float32.
    assert_compressor_laws(ternary(), magnitudes=(1e-30, 3e38))
    assert_reducer_laws(jd.compressed(ternary()))
    print("the laws hold: unbiased, within its variance, fine with empty, scalar and zero arrays, in every dtype")

    # In training, simulated for eight workers on one device. Feedback shrinks an unbiased code: see `scaled`.
    target = jax.random.normal(jax.random.key(1), (100,))

    def loss_fn(w, batch):
        return jnp.mean(jnp.square(batch @ (w - target)))

    for name, reducer in {
        "exact": jd.exact(),
        "ternary": jd.compressed(ternary()),
        "ternary with feedback": jd.error_feedback(jd.compressed(ternary())),
    }.items():
        tx = optax.chain(jd.all_reduce(reducer), optax.sgd(0.03))

        def step(state, batch, tx=tx):
            w, opt_state = state
            loss, grads = jd.local_value_and_grad(loss_fn)(w, batch)
            updates, opt_state = tx.update(grads, opt_state, w)
            return (optax.apply_updates(w, updates), opt_state), jax.lax.pmean(loss, "data")

        run = jd.simulate(step, workers=8)
        state = jd.init_state(lambda tx=tx: (jnp.zeros(100), tx.init(jnp.zeros(100))), 8)
        for key in jax.random.split(jax.random.key(2), 200):
            state, loss = run(state, jax.random.normal(key, (8 * 32, 100)))
        print(f"{name:22s} loss {float(loss):.2e}")


if __name__ == "__main__":
    main()
