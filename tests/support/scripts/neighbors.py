"""One of four real processes that know their neighbors and nobody else.

    python neighbors.py PROCESS PORT

Prints, as JSON, the parameters of this process after a few steps of each method; with `simulate` in place of a port
those of all workers, from one process.
"""

import json
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdist as jd

WORKERS, STEPS = 4, 5
RING = jd.topology.ring(WORKERS)
METHODS = {
    "d_psgd": jd.gossip(optax.sgd(0.1, momentum=0.9), RING),
    "sgp": jd.gossip(
        optax.sgd(0.1),
        jd.topology.digraph(WORKERS, [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)]),
        method=jd.decentralized.sgp(),
    ),
    "one_peer": jd.gossip(optax.adam(0.1), jd.topology.one_peer_exponential(WORKERS)),
    "choco": jd.gossip(optax.sgd(0.1), RING, method=jd.decentralized.choco(jd.top_k(0.25), step_size=0.3)),
    "relay_sgd": jd.gossip(optax.sgd(0.1), jd.topology.path(WORKERS), method=jd.decentralized.relay_sgd()),
}


class State(NamedTuple):
    params: Any
    opt: Any


def train_step(state, batch):
    """All methods in one program, each with a model and a state of its own."""
    params, opt = dict(state.params), dict(state.opt)
    for name, tx in METHODS.items():
        updates, opt[name] = tx.update(params[name] - batch[0], opt[name], params[name])
        params[name] = params[name] + updates
    return State(params, opt), {}


def make_state():
    return State(
        jd.PerWorker({name: jnp.zeros(16) for name in METHODS}),
        {name: tx.init(jnp.zeros(16)) for name, tx in METHODS.items()},
    )


def main():
    targets = np.random.default_rng(0).normal(size=(WORKERS, 16)).astype(np.float32)
    if sys.argv[2] == "simulate":
        state, run = jd.init_state(make_state, WORKERS), jd.simulate(train_step, workers=WORKERS)
        rows = targets
    else:
        process = int(sys.argv[1])
        jax.config.update("jax_num_cpu_devices", 1)
        jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", WORKERS, process, initialization_timeout=120)
        mesh = jd.make_mesh()
        state, run = jd.init_state(make_state, mesh), jd.distribute(train_step, mesh)
        rows = jd.global_batch(targets[process : process + 1], mesh)
    for _ in range(STEPS):
        state, _ = run(state, rows)
    shards = {name: x.addressable_shards for name, x in state.params.value.items()}
    print("RESULT " + json.dumps({name: np.asarray(one[0].data).tolist() for name, one in shards.items()}), flush=True)


if __name__ == "__main__":
    main()
