"""One of two real processes that make one mistake after another.

    python mistaken.py PROCESS BUSY_PORT FREE_PORT FREE_PORT FREE_PORT

Prints, as JSON, for each mistake the error, when this process came to it and when it knew. None may reach a collective:
they all happen in one pair, and the last ends it.
"""

import importlib.metadata
import json
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

import jaxdist as jd
from jaxdist.processes.cluster import VARIABLES

PROCESSES, LOCAL = 2, 2
FOUND: dict[str, dict[str, object]] = {}


def attempt(name, mistake):
    began = time.time()
    try:
        mistake()
        kind, message = "", ""
    except Exception as error:
        kind, message = type(error).__name__, str(error)
    FOUND[name] = {"error": kind, "message": message, "began": began, "ended": time.time()}


def starts(process, busy, *ports):
    def start(port, processes=PROCESSES):
        os.environ |= dict(zip(VARIABLES, (f"127.0.0.1:{port}", str(processes), str(process)), strict=True))
        assert jd.initialize(timeout_seconds=60)

    def other_version():
        true = importlib.metadata.version
        importlib.metadata.version = lambda name: "0.1" if name == "jax" and process else true(name)
        try:
            start(ports[1])
        finally:
            importlib.metadata.version = true

    attempt("number of processes", lambda: start(ports[0], PROCESSES + process))
    attempt("version of jax", other_version)
    attempt("busy port", lambda: start(busy))
    start(ports[2])


def agreements(process, mesh):
    params = {"b": np.zeros(2, np.float32), "w": np.zeros((3, 2), np.float32)}
    other = {
        "tree": {**params, "more": np.zeros(1)},
        "shape": {**params, "w": np.zeros((4, 2), np.float32)},
        "dtype": {**params, "w": jnp.zeros((3, 2), jnp.bfloat16)},
    }
    for name, tree in other.items():
        attempt(name, lambda tree=tree: jd.processes.check_consistency(tree if process else params, mesh=mesh))
    split = jd.make_mesh({"data": 2, "model": 2})
    attempt("mesh", lambda: jd.processes.check_consistency(params, mesh=split if process else mesh))
    attempt("recipe", lambda: jd.processes.check_consistency(params, mesh=mesh, recipe={"batch": 32 + process}))


def steps(process, mesh):
    def run(*, axis="data", over="data", specs=None, rows=8, workers=mesh):
        tx = optax.chain(jd.all_reduce(jd.exact(), axis=over), optax.sgd(0.1))

        def step(state, batch):
            _, gradient = jd.local_value_and_grad(lambda w, x: jnp.mean(x @ w), axis=over)(state["w"], batch)
            updates, opt = tx.update(gradient, state["opt"], state["w"])
            return {"w": state["w"] + updates, "opt": opt, "own": state["own"]}, {}

        def make_state():
            return {"w": jnp.zeros(3), "opt": tx.init(jnp.zeros(3)), "own": jd.PerWorker(jnp.zeros(1))}

        state = jd.init_state(make_state, workers)
        jd.distribute(step, mesh, axis=axis, batch_specs=specs)(state, np.ones((rows, 3), np.float32))

    attempt("axis of distribute", lambda: run(axis="workers"))
    attempt("axis of all_reduce", lambda: run(over="model"))
    attempt("axis of batch_specs", lambda: run(specs=PartitionSpec("batch")))
    attempt("axis of init_state", lambda: jd.init_state(lambda: jd.PerWorker(jnp.zeros(3)), mesh, axis="workers"))
    attempt("axis of place", lambda: jd.place(jd.PerWorker(jnp.zeros(3)), mesh, axis="workers"))
    attempt("rows of all", lambda: run(rows=6))
    attempt("rows of all, with batch_specs", lambda: run(rows=6, specs=PartitionSpec("data")))
    attempt("state of other workers", lambda: run(workers=2))


def batches(process, mesh):
    def put(rows, dtype: type = np.float32, width=3, **options):
        return jd.global_batch({"x": np.zeros((rows, width), dtype)}, mesh, **options)

    attempt("axis of global_batch", lambda: put(4, axis="workers"))
    attempt("rows of a process", lambda: put(3))
    attempt("rows of one process", lambda: put(4 - process))
    attempt("rows of each", lambda: put(4 + 2 * process))
    attempt("width", lambda: put(4, width=3 + process))
    attempt("dtype of a batch", lambda: put(4, np.int32 if process else np.float32))
    assert put(4)["x"].shape == (8, 3)


def main():
    process = int(sys.argv[1])
    jax.config.update("jax_num_cpu_devices", LOCAL)
    starts(process, *sys.argv[2:])
    mesh = jd.make_mesh()
    agreements(process, mesh)
    steps(process, mesh)
    batches(process, mesh)
    print("RESULT " + json.dumps(FOUND), flush=True)
    jd.processes.check_consistency({}, recipe={"seed": process})


if __name__ == "__main__":
    main()
