"""A trainer publishes its weights; an evaluator and a rollout worker follow it over a folder or a bucket.

    python examples/follow_weights.py train --store /tmp/policy       # in one terminal; or s3://bucket/policy
    python examples/follow_weights.py evaluate --store /tmp/policy    # in a second: every published state
    python examples/follow_weights.py rollout --store /tmp/policy     # in a third: always the newest state

Start them in any order, and kill and restart any. Without arguments the script runs all three by itself. It prints
the accuracy of the states that the followers see, and what a patch takes beside a whole copy.
"""

import argparse
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

STEPS, EVERY = 200, 10
IMAGES, LABELS = load_digits(return_X_y=True)
IMAGES, TEST = (IMAGES / 16).astype(np.float32), np.arange(len(LABELS)) % 5 == 0


def init_params():
    return {"hidden": jax.random.normal(jax.random.key(0), (64, 512)) / 8, "out": jnp.zeros((512, 10))}


@jax.jit
def predict(params, images):
    hidden = jax.nn.relu(images.astype(params["hidden"].dtype) @ params["hidden"])
    return (hidden @ params["out"]).astype(jnp.float32)


def loss_fn(params, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(predict(params, images), labels).mean()


def accuracy(params):
    return float((predict(params, IMAGES[TEST]).argmax(-1) == LABELS[TEST]).mean())


def train(store):
    tx, rng, params = optax.adamw(optax.cosine_decay_schedule(1e-3, STEPS)), np.random.default_rng(0), init_params()
    images, labels, opt_state = IMAGES[~TEST], LABELS[~TEST], tx.init(params)

    @jax.jit
    def step(params, opt_state, images, labels):
        updates, opt_state = tx.update(jax.grad(loss_fn)(params, images, labels), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    # The trainer computes in float32; followers get bfloat16.
    with jd.publish.open(store, dtype=jnp.bfloat16, anchor_every=10) as out:
        for number in range(STEPS + 1):
            if number % EVERY == 0:
                out.put(params, step=number)  # a copy to the host; a thread does the rest
            rows = rng.integers(0, len(labels), 64)
            params, opt_state = step(params, opt_state, images[rows], labels[rows])
            time.sleep(0.01)  # as if the model were larger


def follow(store, role):
    # Each state, or the newest one whenever this process is ready for it.
    start = "oldest" if role == "evaluate" else "newest"
    for params, step in jd.publish.follow(store, like=init_params(), start=start, poll=0.05, timeout=60):
        print(f"{role}: step {step}, accuracy {accuracy(params):.3f}", flush=True)
        time.sleep(0.5 if role == "rollout" else 0)
        if step == STEPS:
            return


def show():
    with tempfile.TemporaryDirectory() as store:
        roles = ("evaluate", "rollout", "train")
        jobs = [subprocess.Popen([sys.executable, __file__, role, "--store", store]) for role in roles]
        assert [job.wait() for job in jobs] == [0, 0, 0]
        found = jd.publish.status(store, last=1)
        share = found.publications[0].patch_bytes / found.whole_bytes
        print(f"the last patch has {share:.1%} of the bytes of a whole copy")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("role", nargs="?", choices=("train", "evaluate", "rollout"))
    parser.add_argument("--store")
    given = parser.parse_args()
    show() if given.role is None else train(given.store) if given.role == "train" else follow(given.store, given.role)
