"""Gossip on a ring: D-PSGD averages models with neighbors, CHOCO-SGD sends them compressed differences.

    python examples/from_scratch/gossip.py

D-PSGD: Algorithm 1 of Lian, Zhang, Zhang, Hsieh, Zhang, Liu, "Can Decentralized Algorithms Outperform Centralized
Algorithms? A Case Study for Decentralized Parallel Stochastic Gradient Descent", 2017, arXiv:1705.09056. CHOCO-SGD:
Koloskova, Stich, Jaggi, "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed Communication",
2019, arXiv:1902.00340, with the steps in the order of Koloskova, Lin, Stich, Jaggi, "Decentralized Deep Learning with
Arbitrary Communication Compression", 2019, arXiv:1907.09356. Both are written as one worker sees them; `jax.vmap` with
an axis name runs eight workers on one device. Prints for both how far the mean model is from the optimum, and the
models from each other.

Where the papers, this file and the library (`jd.gossip(optax.sgd(0.05), jd.topology.ring(8), method=...)`) differ:

- D-PSGD averages models and adds a step from before the average (`d_psgd(order="combine_then_adapt")`), so that
  messages need not wait for the gradient. The library's default takes the step first: more accurate, and more stable.
- CHOCO-SGD in the first paper compresses before it averages; in the second, here and in the library the average is that
  of the copies which the previous step has left, so that it need not wait for messages.
- The copies: papers and file keep x̂ of each neighbor. The library keeps their weighted sum alone, `Σ_j W_ij (x̂_j -
  x̂_i)`, which takes the same memory for any number of neighbors.
- The copies start at zero in the papers, and at the common model in the library. Here the model starts at zero, too.
- The library's `optax.sgd` may be any optimizer, its ring any graph, and `top_k` any compressor.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

WORKERS, SIZE, RATE, KEPT, GAMMA = 8, 20, 0.05, 4, 0.3  # γ of CHOCO-SGD; that of D-PSGD, and η, are the rate
OPTIMA = jax.random.normal(jax.random.key(0), (WORKERS, SIZE)) + 1  # of each worker's own loss


class ChocoState(NamedTuple):
    x: jax.Array
    copies: jax.Array  # x̂ of this worker and of its two neighbors, [3, size]


def loss_fn(x, batch):
    return 0.5 * jnp.sum(jnp.square(x - batch))  # of examples around this worker's optimum


def from_neighbors(tree):
    """What the two neighbors on the ring send: the one before this worker, then the one after it."""
    pairs = [(i, (i + 1) % WORKERS) for i in range(WORKERS)]
    back = [(j, i) for i, j in pairs]
    return [jax.tree.map(lambda x, p=p: jax.lax.ppermute(x, "workers", p), tree) for p in (pairs, back)]


def d_psgd_step(x, batch):
    gradient = jax.grad(loss_fn)(x, batch)  # ∇F_i(x_k,i; ξ_k,i)
    before, after = from_neighbors(x)
    x_half = (x + before + after) / 3  # x_{k+1/2,i} = Σ_j W_ij x_k,j
    return x_half - RATE * gradient  # x_{k+1,i} = x_{k+1/2,i} - γ ∇F_i(x_k,i; ξ_k,i)


def choco_step(state, batch):
    x, (own, before, after) = state
    x = x - RATE * jax.grad(loss_fn)(x, batch)  # x_i^{t+1/2} = x_i^t - η g_i^t
    x = x + GAMMA * ((before - own) + (after - own)) / 3  # x_i^{t+1} = x_i^{t+1/2} + γ Σ_j w_ij (x̂_j^t - x̂_i^t)
    # q_i = Q(x_i^{t+1} - x̂_i^t), the k largest entries: what is left out stays in the difference, and is sent later.
    _, positions = jax.lax.top_k(jnp.abs(x - own), KEPT)
    message = (x - own)[positions], positions
    # x̂_j^{t+1} = x̂_j^t + q_j, for this worker and for those whose messages arrive.
    copies = [
        copy.at[places].add(values) for copy, (values, places) in zip(state.copies, [message, *from_neighbors(message)])
    ]
    return ChocoState(x, jnp.stack(copies))


def batch_at(step):
    return OPTIMA + 0.1 * jax.random.normal(jax.random.key(step), (WORKERS, SIZE))


def main():
    zeros = jnp.zeros((WORKERS, SIZE))
    states = {
        "D-PSGD": (d_psgd_step, zeros),
        "CHOCO-SGD": (choco_step, ChocoState(zeros, jnp.zeros((WORKERS, 3, SIZE)))),
    }
    for name, (method, state) in states.items():
        run = jax.jit(jax.vmap(method, axis_name="workers"))
        for step in range(400):
            state = run(state, batch_at(step))
        models = state if name == "D-PSGD" else state.x
        mean = models.mean(axis=0)
        error, apart = jnp.linalg.norm(mean - OPTIMA.mean(axis=0)), jnp.linalg.norm(models - mean, axis=1).mean()
        sent = SIZE * 4 if name == "D-PSGD" else KEPT * 8
        print(f"{name:9}: {error:.2f} from the optimum, models {apart:.2f} apart, {sent} bytes to each neighbor")


if __name__ == "__main__":
    main()
