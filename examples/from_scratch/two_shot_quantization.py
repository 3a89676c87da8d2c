"""A two-shot all-reduce in 4 bits: scatter quantized chunks, average, quantize the means, and gather them.

    python examples/from_scratch/two_shot_quantization.py

The two phases are those of Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", 2021,
arXiv:2107.01499 (without its error compensation); the code is that of Alistarh, Grubic, Li, Tomioka, Vojnovic,
"QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", 2016, arXiv:1610.02132. `train_step`
and what it calls are written as one worker sees them; `jax.vmap` with an axis name runs four workers on one device.
Prints the loss, and the bytes that a worker sends in a step.

Where the papers, this file and the library (`jd.two_shot(jd.qsgd(4))`) differ:

- The norm: QSGD divides a bucket by its Euclidean length, this file and the library by its largest magnitude, which
  wastes no levels. The library has both (`norm="l2"`).
- The code: QSGD has Elias codes of varying length. This file and the library send four bits an entry, since
  collectives send arrays of fixed shape.
- The draws: this file uses `jax.random.uniform`, the library by default a cheaper hash of the position of an entry.
- The bucket: 16 entries here, for a tiny model; 512 in the library.
- The shapes: this file needs a vector that divides evenly; the library joins all leaves of a dtype and pads them.
- The result: the library also returns what this worker has contributed, its own chunks decoded, for error feedback.
- The error of the second quantization is lost here and averages out. With `server_feedback=True` the library keeps it,
  as do BAGUA and 1-bit Adam (arXiv:2102.02888).
"""

import jax
import jax.numpy as jnp

WORKERS, RATE, BUCKET, LEVELS = 4, 1.6, 16, 7  # a sign and 7 levels beside zero: 4 bits
TEACHER = jax.random.normal(jax.random.key(0), (16, 16))


def quantize(x, key):
    """Rounds each bucket at random to `±norm · {0, 1/7, ..., 1}`, so that it is right on average."""
    buckets = x.reshape(-1, BUCKET)
    norms = jnp.abs(buckets).max(axis=1, keepdims=True)
    ratios = jnp.abs(buckets) / jnp.where(norms == 0, 1, norms) * LEVELS  # s |x_i| / norm
    lower = jnp.floor(ratios)  # l
    up = jax.random.uniform(key, ratios.shape) < ratios - lower  # l + 1 with probability s |x_i| / norm - l
    codes = (lower + up).astype(jnp.uint8) | ((buckets < 0).astype(jnp.uint8) << 3)
    pairs = codes.reshape(-1, 2)
    return pairs[:, 0] | (pairs[:, 1] << 4), norms  # two codes in a byte


def dequantize(payload):
    packed, norms = payload
    codes = jnp.stack([packed & 15, packed >> 4], axis=1).reshape(-1, BUCKET)
    signs = jnp.where(codes >> 3 == 1, -1.0, 1.0)
    return (norms * signs * (codes & LEVELS).astype(jnp.float32) / LEVELS).reshape(-1)


def two_shot(x, key):
    """The mean of all workers' vectors `x`."""
    # First shot: chunk j of every worker goes to worker j, which decodes and averages what arrives.
    chunks = x.reshape(WORKERS, -1)
    payloads = jax.vmap(quantize)(chunks, jax.random.split(jax.random.fold_in(key, 0), WORKERS))
    arrived = jax.lax.all_to_all(payloads, "workers", split_axis=0, concat_axis=0)
    mean = jax.vmap(dequantize)(arrived).mean(axis=0)
    # Second shot: each mean is quantized once, and all workers decode the same bytes.
    gathered = jax.lax.all_gather(quantize(mean, jax.random.fold_in(key, 1)), "workers")
    return jax.vmap(dequantize)(gathered).reshape(x.shape)


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean(jnp.square(x @ params - y))


def train_step(params, batch, step):
    gradient = jax.grad(loss_fn)(params, batch)
    # Different draws in each step and on each worker.
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), step), jax.lax.axis_index("workers"))
    return params - RATE * two_shot(gradient.reshape(-1), key).reshape(params.shape)


def batch_at(step):
    x = jax.random.normal(jax.random.key(step), (WORKERS, 32, 16))
    return x, x @ TEACHER


def main():
    params = jnp.zeros((WORKERS, 16, 16))
    run = jax.jit(jax.vmap(train_step, in_axes=(0, 0, None), axis_name="workers"))
    print(f"loss {jax.vmap(loss_fn)(params, batch_at(0)).mean():.1f} before training")
    for step in range(100):
        params = run(params, batch_at(step), step)
    print(f"loss {jax.vmap(loss_fn)(params, batch_at(100)).mean():.1e} after 100 steps")
    chunk = 256 // WORKERS
    coded = 2 * (WORKERS - 1) * (chunk // 2 + 4 * chunk // BUCKET)
    print(f"a worker sends {coded} bytes in a step; a plain all-reduce {2 * (WORKERS - 1) * 4 * chunk}")


if __name__ == "__main__":
    main()
