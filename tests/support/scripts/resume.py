"""One of two real processes that train with DiLoCo and save at the end of every round.

    python resume.py PROCESS PORT FOLDER train|resume

`train` goes on until somebody kills it. `resume` goes on from the last checkpoint in the folder, then does the same
steps from the beginning, and says whether every bit is the same, and whether it is after a stop inside a round.
"""

import json
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from problems import batch, loss, params

import jaxdist as jd
from jaxdist import checkpoint

PERIOD, MORE = 3, 5
tx = jd.local_sgd.diloco(optax.adam(0.05), sync_period=PERIOD, reducer=jd.error_feedback(jd.compressed(jd.top_k(0.25))))


class State(NamedTuple):
    params: Any
    opt: Any


def train_step(state, data):
    _, gradient = jd.local_value_and_grad(loss)(state.params, data)
    updates, opt = tx.update(gradient, state.opt, state.params)
    return State(optax.apply_updates(state.params, updates), opt), {}


def same(left, right):
    """The names of the leaves of which this process's part is not the same in every bit."""
    differ = []
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(left), jax.tree.leaves(right), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        pairs = zip(a.addressable_shards, b.addressable_shards, strict=True)
        if not all(np.asarray(x.data).tobytes() == np.asarray(y.data).tobytes() for x, y in pairs):
            differ.append(jax.tree_util.keystr(path))
    return differ


def main():
    process, port, folder, what = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, process, initialization_timeout=60)
    mesh = jd.make_mesh()
    run = jd.distribute(train_step, mesh)

    def fresh():
        return jd.init_state(lambda: State(jd.PerWorker(params()), tx.init(params())), mesh)

    def train(state, first, last, *, save_at=()):
        for number in range(first, last):
            rows = jax.tree.map(lambda x: x[8 * process : 8 * process + 8], batch(seed=number))
            state, _ = run(state, jd.global_batch(rows, mesh))
            if number + 1 in save_at:
                jax.block_until_ready(state)
                checkpoint.save(folder, state, step=number + 1)
        return state

    if what == "train":
        state = fresh()
        with checkpoint.writing(folder, keep=4) as writer:
            for first in range(0, 3000, PERIOD):
                state = train(state, first, first + PERIOD)
                writer.save(state, first + PERIOD, data={"batches": first + PERIOD})
                time.sleep(0.1)
        return
    stopped = checkpoint.resume(folder, fresh())
    found = stopped.data["batches"]
    last = found + MORE
    resumed = train(stopped.state, found, last)
    through = train(fresh(), 0, last, save_at=(last - 1,))  # that is inside a round
    again = train(checkpoint.restore(folder, fresh(), step=last - 1), last - 1, last)
    residuals = [x for x in jax.tree.leaves(through.opt.reducer) if jnp.issubdtype(x.dtype, jnp.floating)]
    result = {
        "from": found,
        "differ": same(resumed, through),
        "differ_inside": same(again, through),
        "since": np.asarray(through.opt.since).tolist(),
        "rounds": np.asarray(through.opt.rounds).tolist(),
        "residual": float(max(np.abs(x.addressable_data(0)).max() for x in residuals)),
    }
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
