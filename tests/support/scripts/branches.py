"""One of two processes with two threads: loops and branches that communicate, beside other collectives.

    python branches.py FOLDER NAME...

Prints, as JSON, how far parameters and metrics are from those of the simulation after some steps.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from problems import TrainState, make_step

import jaxdist as jd

WORKERS, STEPS, WIDTH = 2, 40, 512


def start():
    keys = jax.random.split(jax.random.key(0), 2)
    return [{"w": jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5, "b": jnp.zeros(WIDTH)} for key in keys]


def layer(p, x):
    return x + jnp.tanh(x @ p["w"] + p["b"])


def loss(params, x):
    for p in params:
        x = layer(p, x)
    return jnp.mean(jnp.square(x - 1))


def loss_of_shards(params, x):
    x = jd.zero.gathered_scan(layer, params[1:], jd.zero.gathered(layer)(params[0], x))
    return jnp.mean(jnp.square(x - 1))


def trained(tx, loss=loss):
    return make_step(tx, grad=jd.local_value_and_grad(loss))


def branch_beside_others(state, batch):
    """Of collectives that do not wait for each other XLA starts those behind the branch while those inside it run."""

    def communicate(x):
        for _ in range(3):
            x = 0.9 * x + 0.01 * jnp.tanh(lax.pmean((x.T @ x)[: x.shape[0]], "data"))
        return x

    others = [batch[:, :100]]
    for _ in range(4):
        others.append(lax.psum(jnp.concatenate([others[-1], others[-1][:3]]), "data"))
    x = lax.cond(state.opt < STEPS, communicate, lambda x: x, state.params[0])
    # Enough to do for XLA to use several threads.
    more = [jnp.cumsum(batch[:, :100] * k, 0) for k in range(1, 8)]
    return TrainState([x, *more], state.opt + 1), {"others": others[1:]}


def make_cases():
    """For each name the step and its first state."""
    local, reducers, adam = jd.local_sgd, jd.reducers, optax.adam(1e-3)
    drifting, alike = jd.PerWorker(start()), start()
    regime = reducers.accordion(jd.power_sgd(2), jd.power_sgd(1), epoch_steps=1, interval_steps=1)
    for name, tx, params in (
        ("averaged buffers", local.local_sgd(adam, sync_period=2, buffers="average"), drifting),
        ("streaming", local.streaming_diloco(adam, sync_period=2, fragments=2), drifting),
        ("accordion", optax.chain(jd.all_reduce(jd.error_feedback(regime)), optax.sgd(0.1)), alike),
    ):
        yield name, trained(tx), TrainState(params, tx.init(start()))
    sharded, tx = jd.zero.shard(start() + start()), jd.zero_redundancy(adam)
    yield "gathered_scan", trained(tx, loss_of_shards), TrainState(sharded, tx.init(sharded))
    yield (
        "branch",
        branch_beside_others,
        TrainState(jd.PerWorker([jnp.ones((64, WIDTH)), *[jnp.ones((64, 100))] * 7]), jnp.int32(0)),
    )


def main():
    names = sys.argv[2:]
    assert jd.initialize(timeout_seconds=60)
    mesh, process = jd.make_mesh(), jax.process_index()
    rows = np.random.default_rng(0).normal(size=(64 * WORKERS, WIDTH)).astype(np.float32)
    batch, found = jd.global_batch(rows[64 * process : 64 * (process + 1)], mesh), {}
    for name, step, state in make_cases():
        if name not in names:
            continue
        ends = []
        for place, run, inputs in (
            (mesh, jd.distribute(step, mesh), batch),
            (WORKERS, jd.simulate(step, WORKERS), rows),
        ):
            placed, metrics = jd.place(state, place), None
            for _ in range(STEPS):
                placed, metrics = run(placed, inputs)
            ends.append(jax.tree.leaves((placed.params, metrics)))
        found[name] = 0.0
        for leaf, whole in zip(*ends, strict=True):
            for shard in leaf.addressable_shards:
                difference = np.abs(np.asarray(shard.data) - np.asarray(whole)[shard.index]).max(initial=0)
                found[name] = max(found[name], float(difference))
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
