"""Islands: jobs that train one model over a shared folder; each may be killed, and the others go on.

    python examples/from_scratch/islands.py

DiLoCo (Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023, arXiv:2311.08105)
between jobs that share nothing but a folder: a round ends when one island has created a file with the names of those
whose progress it has found, and all take the same outer step from the same bytes. Here two threads are the jobs; one
stops, and starts again from nothing. Prints the islands of some rounds, and the error of the model after them.

Where the paper, this file and the library (`jd.islands.join(folder, tx, name=...)`) differ:

- The paper's workers wait for each other. Here and in the library an island waits for those of the last round, at most
  until a timeout; one that comes too late keeps its progress, and sends it in the next round.
- An island that joins reads all rounds since the first; in the library those since the last saved parameters.
- The library also compresses, weights by examples, sends while it trains, checks every byte and deletes what is old.
"""

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

PERIOD, TIMEOUT, SIZE = 10, 1.0, 20
TEACHER = jax.random.normal(jax.random.key(0), (SIZE,))
INNER, OUTER = optax.adam(0.05), optax.sgd(0.7, momentum=0.5, nesterov=True)


def loss_fn(theta, key):
    x = jax.random.normal(key, (32, SIZE))  # this step's examples
    return jnp.mean(jnp.square(jnp.tanh(x @ theta) - jnp.tanh(x @ TEACHER)))


@jax.jit
def inner_step(theta, inner, key):
    updates, inner = INNER.update(jax.grad(loss_fn)(theta, key), inner, theta)
    return optax.apply_updates(theta, updates), inner


def create(path, content):
    """Creates a file, complete or not at all, unless there is one: of several islands the first succeeds."""
    with tempfile.NamedTemporaryFile(dir=path.parent, buffering=0) as draft, suppress(FileExistsError):
        draft.write(content)
        os.link(draft.name, path)


def end_round(folder, number, expected):
    """Waits for the commit of a round, and creates it when all expected islands have sent, or time is up."""
    commit, deadline = folder / f"{number}.commit", time.monotonic() + TIMEOUT
    while not commit.exists():
        found = {path.suffix[1:] for path in folder.glob(f"{number}.drift.*")}
        if expected <= found or time.monotonic() > deadline:
            create(commit, " ".join(sorted(found)).encode())
        time.sleep(0.01)


def train(folder, name, expected, rounds):
    """Yields the members of each round, and the global parameters after it."""
    theta, key = jnp.zeros(SIZE), jax.random.key(ord(name))
    anchor, inner, outer, is_late = theta, INNER.init(theta), OUTER.init(theta), False
    for number in range(rounds):
        commit = folder / f"{number}.commit"
        if not commit.exists():  # else this island is behind, and only follows
            time.sleep(0.05)  # as if the model were larger
            for step in range(0 if is_late else PERIOD):
                theta, inner = inner_step(theta, inner, jax.random.fold_in(key, number * PERIOD + step))
            create(folder / f"{number}.drift.{name}", np.asarray(anchor - theta).tobytes())
            end_round(folder, number, expected)
        # The members of the commit, in its order: the same bits on every island.
        members = commit.read_text().split()
        drifts = [np.frombuffer((folder / f"{number}.drift.{member}").read_bytes(), np.float32) for member in members]
        ahead = anchor - theta
        updates, outer = OUTER.update(np.mean(drifts, axis=0), outer)  # Δ ← mean_m(a - θ_m)
        anchor = anchor + updates  # a ← OuterOpt(a, Δ)
        is_late = name not in members and bool(ahead.any())  # what no round has taken stays ahead of the new anchor
        theta = anchor - ahead if is_late else anchor
        expected = set(members)
        yield members, anchor


def main():
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        start = partial(train, Path(folder), expected={"a", "b"})
        job = pool.submit(list, start("a", rounds=20))
        list(start("b", rounds=5))  # stops after its fifth round, as if it were killed
        time.sleep(1.5)
        list(start("b", rounds=20))
    for number, (members, anchor) in list(enumerate(job.result()))[1::3]:
        print(f"round {number:2} of {' and '.join(members)}: error {jnp.linalg.norm(anchor - TEACHER):.2f}")


if __name__ == "__main__":
    main()
