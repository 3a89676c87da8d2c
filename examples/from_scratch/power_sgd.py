"""PowerSGD with error feedback: the gradient of a matrix is sent as two thin factors, which are plain all-reduces.

    python examples/from_scratch/power_sgd.py

Algorithms 1 and 2 of Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", 2019, arXiv:1905.13727. `train_step` and what it calls are written as one worker sees them; `jax.vmap`
with an axis name runs four workers on one device. Prints the loss, and how many numbers a step sends through
all-reduces.

Where the paper, this file and the library (`jd.error_feedback(jd.power_sgd(rank=2))`) differ:

- The residual: the paper's code subtracts the decoded mean `P̂ Qᵀ` on every worker. This file and the library subtract
  what this worker has contributed to it, `P̂ Q_wᵀ`; with the former (`own="paper"`) residuals grow where data differ.
- The right factor: paper and file multiply by `Q`, the library by an orthonormal basis of its columns, whose products
  do not overflow. The approximation depends on the column space alone, so that it is the same.
- The orthogonalization: Gram-Schmidt in paper and file. The library has Householder reflections, which stay accurate
  where columns are nearly parallel, and recovers from a factor that has become zero.
- The momentum: the paper steps along `Δ' + m`, this file along `m`, as `optax.sgd` does.
- Which leaves: this file compresses the one matrix. The library compresses every leaf where that saves half of the
  numbers, sees a kernel of a convolution as a matrix, and sends stacks of matrices of similar shape in two messages.
- Where: `messages` in `jaxdist/reducers/power_sgd.py` is `compress_and_aggregate`; `error_feedback.py` has `error`. The
  former also has `one_sided=True`, another method, in which a step is half of an iteration.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

WORKERS, RANK, RATE, MOMENTUM = 4, 2, 0.05, 0.9
TEACHER = jax.random.normal(jax.random.key(0), (20, 3)) @ jax.random.normal(jax.random.key(1), (3, 16))


class State(NamedTuple):
    params: dict
    momentum: dict
    error: jax.Array  # e_w: what this worker has not delivered yet
    q: jax.Array  # Q of the previous step: the warm start


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean(jnp.square(x @ params["matrix"] + params["bias"] - y))


def orthogonalize(p):
    """Gram-Schmidt on the columns of `p`."""
    columns = []
    for column in p.T:
        for earlier in columns:
            column = column - (earlier @ column) * earlier
        columns.append(column / jnp.linalg.norm(column))
    return jnp.stack(columns, axis=1)


def compress_and_aggregate(matrix, q):
    """Algorithm 1, from this worker's `M_w [n, m]` and the last `Q [m, r]`, which is the same on all workers."""
    p = jax.lax.pmean(matrix @ q, "workers")  # P ← mean(M_w Q)
    p_hat = orthogonalize(p)  # P̂ ← orthogonalize(P)
    q_w = matrix.T @ p_hat  # Q_w ← M_wᵀ P̂
    return p_hat, jax.lax.pmean(q_w, "workers"), q_w  # Q ← mean(Q_w)


def train_step(state, batch):
    """Algorithm 2."""
    gradient = jax.grad(loss_fn)(state.params, batch)
    delta = gradient["matrix"] + state.error  # Δ_w ← g_w + e_w
    p_hat, q, q_w = compress_and_aggregate(delta, state.q)
    error = delta - p_hat @ q_w.T  # e_w ← Δ_w - decompress(C(Δ_w))
    # Δ' ← decompress(C(Δ)); vectors are small, and sent whole.
    mean = {"matrix": p_hat @ q.T, "bias": jax.lax.pmean(gradient["bias"], "workers")}
    momentum = jax.tree.map(lambda m, d: MOMENTUM * m + d, state.momentum, mean)  # m ← λ m + Δ'
    params = jax.tree.map(lambda x, m: x - RATE * m, state.params, momentum)  # x ← x - γ m
    return State(params, momentum, error, q)


def init():
    """The state of all workers: each leaf has a leading axis of workers."""
    params = {"matrix": jnp.zeros((20, 16)), "bias": jnp.zeros(16)}
    state = State(params, params, params["matrix"], jax.random.normal(jax.random.key(2), (16, RANK)))
    return jax.tree.map(lambda x: jnp.stack([x] * WORKERS), state)


def batch_at(step):
    x = jax.random.normal(jax.random.key(step), (WORKERS, 32, 20))
    return x, x @ TEACHER + 1


def main():
    state, run = init(), jax.jit(jax.vmap(train_step, axis_name="workers"))
    print(f"loss {jax.vmap(loss_fn)(state.params, batch_at(0)).mean():.1f} before training")
    for step in range(300):
        state = run(state, batch_at(step))
    print(f"loss {jax.vmap(loss_fn)(state.params, batch_at(300)).mean():.1e} after 300 steps")
    print(f"a step averages {RANK * (20 + 16) + 16} numbers in place of {20 * 16 + 16}")


if __name__ == "__main__":
    main()
