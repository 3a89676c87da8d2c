"""DiLoCo: workers take H steps of AdamW by themselves, then one step of Nesterov momentum along their mean progress.

    python examples/from_scratch/diloco.py

Algorithm 1 of Douillard, Feng, Rusu, Chhaparia, Donchev, Kuncoro, Ranzato, Szlam, Shen, "DiLoCo: Distributed
Low-Communication Training of Language Models", 2023, arXiv:2311.08105. `diloco_round` is written as one worker sees it;
`jax.vmap` with an axis name runs four workers on one device. Prints the loss, and how often the workers communicate.

Where the paper, this file and the library (`jd.local_sgd.diloco(optax.adamw(...), sync_period=H)`) differ:

- The start: the paper's main runs start from a model that was trained synchronously, with an outer momentum of 0.9.
  This file starts from random parameters all the same; the library has `warmup_steps=`, and without it 0.5.
- The loop: paper and file have one function for a round. The library's `update` (`jaxdist/local_sgd/local_steps.py`) is
  called in every step and counts them, so that one program is also that of a step without communication; the drift is
  sent where a round ends.
- What is kept: paper and file keep `θ` beside each worker's `θ_i`, and so does the library, in float32 or better, as
  its *anchor* (`jd.local_sgd.global_params`).
- AdamW's moments stay with their worker in all three; the library can also reset or average them (`buffers=`).
- The mean has equal weights here; the library can weight it by `examples=` and compress what is sent (`reducer=`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

WORKERS, PERIOD, ROUNDS = 4, 20, 15
INNER = optax.adamw(0.01)
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)


class State(NamedTuple):
    theta: dict  # θ: the global parameters
    outer: optax.OptState
    inner: optax.OptState  # of this worker


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean(jnp.square(jnp.tanh(x @ params["hidden"]) @ params["out"] - y))


def inner_step(carry, batch):
    theta_i, inner = carry
    loss, gradient = jax.value_and_grad(loss_fn)(theta_i, batch)  # ∇L = ∇f(x, θ_i)
    updates, inner = INNER.update(gradient, inner, theta_i)
    return (optax.apply_updates(theta_i, updates), inner), loss  # θ_i ← InnerOpt(θ_i, ∇L)


def diloco_round(state, batches):
    """One round t of Algorithm 1; `batches` has a leading axis of H steps."""
    # θ_i(t) ← θ(t-1), then H inner steps on this worker's own data.
    (theta_i, inner), losses = jax.lax.scan(inner_step, (state.theta, state.inner), batches)
    # Δ(t) ← 1/k Σ_i (θ(t-1) - θ_i(t)): all that is sent.
    delta = jax.lax.pmean(jax.tree.map(jnp.subtract, state.theta, theta_i), "workers")
    # θ(t) ← OuterOpt(θ(t-1), Δ(t)): the mean progress, with its sign changed, in the place of a gradient.
    updates, outer = OUTER.update(delta, state.outer, state.theta)
    return State(optax.apply_updates(state.theta, updates), outer, inner), losses.mean()


def init():
    """The state of all workers: each leaf has a leading axis of workers."""
    first, second = jax.random.split(jax.random.key(0))
    theta = {"hidden": jax.random.normal(first, (8, 16)) / 3, "out": jax.random.normal(second, (16, 4)) / 4}
    state = State(theta, OUTER.init(theta), INNER.init(theta))
    return jax.tree.map(lambda x: jnp.stack([x] * WORKERS), state)


def batches_of(number):
    """The batches of a round, `[workers, steps, examples, features]`; each worker's inputs have their own center."""
    x = jax.random.normal(jax.random.fold_in(jax.random.key(1), number), (WORKERS, PERIOD, 32, 8))
    x = x + jax.random.normal(jax.random.key(2), (WORKERS, 1, 1, 8))
    return x, jnp.sin(x[..., :4] + x[..., 4:])


def main():
    state, run = init(), jax.jit(jax.vmap(diloco_round, axis_name="workers"))
    for number in range(ROUNDS):
        state, losses = run(state, batches_of(number))
        if number % 7 == 0:
            print(f"round {number:2}: loss {losses.mean():.3f}")
    print(f"{ROUNDS} messages of the size of the model in {ROUNDS * PERIOD} steps")


if __name__ == "__main__":
    main()
