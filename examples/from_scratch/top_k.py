"""Top-k with error feedback: a worker sends its k largest entries, and remembers the others for later steps.

    python examples/from_scratch/top_k.py

Mem-SGD, Algorithm 1 of Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", 2018, arXiv:1809.07599, on several
workers that average what they send. `train_step` is written as one worker sees it; `jax.vmap` with an axis name runs
four workers on one device. Prints the loss with and without memory, and the bytes that a worker sends in a step.

Where the paper, this file and the library (`jd.error_feedback(jd.compressed(jd.top_k(0.1)))`) differ:

- The workers: the paper's are threads that write into one shared model whenever they are ready; here and in the library
  all take one step with the mean of what they have sent.
- The rate: paper and file keep `η ∇f` in memory, so that what a high rate left behind is delivered at that rate. The
  library does so `with_learning_rate=True`; by default it keeps gradients, which is the same while the rate is constant
  and lets any optimizer follow.
- Which entries: `jax.lax.top_k` here. The library finds the same ones by counting entries above a threshold, many times
  faster, in each leaf of a model by itself.
- On the wire: a position has 4 bytes here, and in the library as few bits as its gap to the next one needs.
- The paper's weighted average of all models is left out by both.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

WORKERS, SIZE, KEPT = 4, 100, 10
TEACHER = jax.random.normal(jax.random.key(0), (SIZE,))


class State(NamedTuple):
    x: jax.Array
    memory: jax.Array  # m: what this worker has not sent yet
    step: jax.Array


def loss_fn(x, batch):
    inputs, outputs = batch
    return jnp.mean(jnp.square(inputs @ x - outputs))


def rate(step):
    return 0.05 / (1 + step / 200)  # η_t


def top_k(v):
    """The values and the positions of the k entries of largest magnitude."""
    _, positions = jax.lax.top_k(jnp.abs(v), KEPT)
    return v[positions], positions


def train_step(state, batch, feedback=True):
    gradient = jax.grad(loss_fn)(state.x, batch)
    v = state.memory + rate(state.step) * gradient  # m_t + η_t ∇f(x_t)
    values, positions = top_k(v)  # g_t ← comp_k(m_t + η_t ∇f(x_t))
    memory = v.at[positions].set(0)  # m_{t+1} ← m_t + η_t ∇f(x_t) - g_t
    # Workers keep different entries, so sums would be dense: all gather the pairs of value and position.
    all_values, all_positions = jax.lax.all_gather((values, positions), "workers")
    mean = jnp.zeros(SIZE).at[all_positions].add(all_values) / WORKERS
    x = state.x - mean  # x_{t+1} ← x_t - g_t
    return State(x, memory if feedback else jnp.zeros(SIZE), state.step + 1)


def init():
    """The state of all workers: each leaf has a leading axis of workers."""
    state = State(jnp.zeros(SIZE), jnp.zeros(SIZE), jnp.zeros((), jnp.int32))
    return jax.tree.map(lambda x: jnp.stack([x] * WORKERS), state)


def batch_at(step):
    """Inputs of very different scales, and of a different mixture on each worker."""
    scales = jnp.linspace(0.1, 1.5, SIZE) * (1 + 0.5 * jax.random.normal(jax.random.key(1), (WORKERS, 1, SIZE)))
    inputs = scales * jax.random.normal(jax.random.fold_in(jax.random.key(2), step), (WORKERS, 32, SIZE))
    return inputs, inputs @ TEACHER


def main():
    for feedback in (True, False):
        state = init()
        run = jax.jit(jax.vmap(lambda *args, on=feedback: train_step(*args, on), axis_name="workers"))
        for step in range(1000):
            state = run(state, batch_at(step))
        loss = jax.vmap(loss_fn)(state.x, batch_at(1000)).mean()
        print(f"{'with' if feedback else 'without'} memory: loss {loss:.3f}")
    print(f"a worker sends {8 * KEPT} bytes to each other one in a step, in place of {4 * SIZE}")


if __name__ == "__main__":
    main()
