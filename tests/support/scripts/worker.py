"""One of two real processes, with two devices each: registered reducers against their simulation.

    python worker.py PROCESS PORT FOLDER NAME...

Prints, as JSON, how far this process's part of each state is from the simulated one. Each simulates half of the
reducers, and leaves what comes out for the other one in the folder.
"""

import json
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from failing import report as report_saves
from island_of_processes import report as report_island
from register import CASES
from register_run import State, gradients, params, train_step
from uneven import report as report_uneven

import jaxdist as jd
from jaxdist.processes.cluster import VARIABLES

PROCESSES, LOCAL, STEPS = 2, 2, 2
WORKERS = PROCESSES * LOCAL
ALL, PODS = {"data": WORKERS}, {"pod": PROCESSES, "chip": LOCAL}


def all_at_once(chains, axis):
    """One program of all chains, each with its own state."""

    def step(state, batch):
        return {name: train_step(chains[name], axis)(state[name], batch)[0] for name in state}, {}

    return step


def mine(tree):
    """This process's part of a batch."""
    rows = slice(LOCAL * jax.process_index(), LOCAL * (jax.process_index() + 1))
    return jax.tree.map(lambda x: x[rows], tree)


def numbers(x):
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def distance(state, simulated):
    """The largest difference, relative to the largest value, over the shards that lie here."""
    worst = 0.0
    for leaf, whole in zip(jax.tree.leaves(state), simulated, strict=True):
        whole = whole.astype(np.float64)
        for shard in leaf.addressable_shards:
            wanted = whole[shard.index]
            found = numbers(shard.data).astype(np.float64)
            assert found.shape == wanted.shape, (found.shape, wanted.shape)
            worst = max(
                worst, float(np.abs(found - wanted).max(initial=0)) / max(1.0, float(np.abs(wanted).max(initial=0)))
            )
    return worst


def begin(chains):
    return {name: State(params(), tx.init(params())) for name, tx in chains.items()}


def simulate(chains, axis, workers):
    """The leaves of each state after all steps."""
    run = jd.simulate(all_at_once(chains, axis), workers, axis=axis)
    state = jd.init_state(lambda: begin(chains), workers, axis=axis)
    for number in range(STEPS):
        state, _ = run(state, gradients(number, WORKERS))
    return {name: [numbers(x) for x in jax.tree.leaves(state[name])] for name in chains}


def simulate_half(chains, axis, workers, folder):
    """What `simulate` returns, of which the other process computes half."""
    process = jax.process_index()
    found = simulate(dict(list(chains.items())[process::PROCESSES]), axis, workers)
    here, there = (folder / f"{len(workers)} levels of {one}" for one in (process, 1 - process))
    part = folder / f"part of {process}"
    part.write_bytes(pickle.dumps(found))
    part.rename(here)
    # The first that fails ends both.
    while not there.exists():
        time.sleep(0.01)
    return found | pickle.loads(there.read_bytes())


def compare(chains, axis, mesh, workers, folder):
    run = jd.distribute(all_at_once(chains, axis), mesh, axis=axis)
    state = jd.init_state(lambda: begin(chains), mesh, axis=axis)
    for number in range(STEPS):
        state, _ = run(state, jd.global_batch(mine(gradients(number, WORKERS)), mesh, axis=axis))
    assert jd.runtime.disagreement(state, mesh, axis=axis) == ()
    simulated = simulate_half(chains, axis, workers, folder)
    return {name: distance(state[name], simulated[name]) for name in chains}


def main():
    process, port, folder, names = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:]
    jax.config.update("jax_num_cpu_devices", LOCAL)
    os.environ |= dict(zip(VARIABLES, (f"127.0.0.1:{port}", str(PROCESSES), str(process)), strict=True))
    assert jd.initialize(timeout_seconds=60)
    assert (jax.process_count(), len(jax.devices())) == (PROCESSES, WORKERS)
    levels = {1: {}, 2: {}}
    for name in names:
        case = CASES[name]
        axis = "data" if case.levels == 1 else tuple(PODS)
        levels[case.levels][name] = optax.chain(jd.all_reduce(case.make(), axis=axis), optax.sgd(1.0))
    guarded = jd.skip_nonfinite(optax.chain(jd.all_reduce(jd.exact()), optax.adam(0.1)))
    found: dict[str, Any] = compare({**levels[1], "skip_nonfinite": guarded}, "data", jd.make_mesh(), ALL, folder)
    found |= compare(levels[2], tuple(PODS), jd.make_mesh(PODS), PODS, folder)
    placed = jd.place({"w": jnp.arange(3.0), "e": jd.PerWorker(jnp.ones(2))}, jd.make_mesh())
    assert [shard.data.shape for shard in placed["e"].value.addressable_shards] == [(1, 2)] * LOCAL
    found["uneven"] = report_uneven(jd.make_mesh())
    found["island"] = report_island(jd.make_mesh())
    found["saves"] = report_saves(jd.make_mesh(), folder)
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
