"""Two training jobs train one model over a shared folder or a bucket; each may be killed and started again.

    python examples/islands.py --name a --store /tmp/run      # in one terminal
    python examples/islands.py --name b --store /tmp/run      # in another; or s3://bucket/run in both

Kill one (`kill -9`) and start it again: the other waits for it once, for two seconds, and goes on. At SIGTERM a job
sends its progress and leaves. Without --name the script does all of this by itself. Prints rounds and losses.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxdist as jd

# Each job is one worker. Every 20 steps it sends half a byte for each parameter.
REDUCER = jd.error_feedback(jd.compressed(jd.qsgd(4)))
tx = jd.local_sgd.diloco(optax.adam(1e-3), sync_period=20, momentum=0.5, reducer=REDUCER, axis=None)
IMAGES, LABELS = load_digits(return_X_y=True)
IMAGES, TEST = (IMAGES / 16).astype(np.float32), np.arange(len(LABELS)) % 5 == 0


def init_params():
    return {"hidden": jax.random.normal(jax.random.key(0), (64, 128)) / 8, "out": jnp.zeros((128, 10))}


def loss_fn(params, images, labels):
    logits = jax.nn.relu(images @ params["hidden"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train_step(state, images, labels):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], images, labels)
    updates, opt_state = tx.update(grads, state["opt_state"], state["params"], sync=())  # no rounds inside
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


def train(name, store):
    images, labels, rng = IMAGES[~TEST], LABELS[~TEST], np.random.default_rng()
    state = {"params": init_params(), "opt_state": tx.init(init_params())}
    # Compiled before the other job knows of this one, so that it does not wait for the compiler.
    step = jax.jit(train_step).lower(state, images[:32], labels[:32]).compile()
    with jd.islands.join(store, tx, name=name, round_timeout=2) as island:
        state = island.enter(state)
        for number in range(20_000):
            rows = rng.integers(0, len(labels), 32)
            state, loss = step(state, images[rows], labels[rows])
            time.sleep(0.01)  # as if the model were larger
            if jd.processes.preemption_requested(number):
                return island.leave(state)
            if island.due(number):
                state, report = island.meet(state)
                members, wait = " and ".join(report.members), report.wait_seconds
                print(f"{name}: round {report.round} of {members}, loss {loss:.2f}, {wait:.2f} s to meet")


def show():
    """Starts two jobs, kills one, and starts it again."""
    store, jobs = tempfile.mkdtemp(), {}

    def start(name):
        jobs[name] = subprocess.Popen([sys.executable, __file__, "--name", name, "--store", store])

    def await_round_of(*members):
        found = []
        while members not in found:
            time.sleep(0.05)
            assert all(job.poll() is None for job in jobs.values()), "a job has failed"
            if os.path.exists(f"{store}/run.json"):  # a job has opened the run
                found = [one.members for one in jd.islands.status(store, last=1).rounds]

    start("a"), start("b")
    await_round_of("a", "b")
    jobs.pop("b").kill()
    await_round_of("a")
    start("b")
    await_round_of("a", "b")
    for job in jobs.values():
        job.terminate()
        job.wait()
    rounds, params = jd.islands.read(store, tx, init_params())
    print(f"held-out loss after {rounds} rounds: {loss_fn(params, IMAGES[TEST], LABELS[TEST]):.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--name")
    parser.add_argument("--store")
    given = parser.parse_args()
    train(given.name, given.store) if given.name else show()
