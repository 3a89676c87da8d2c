"""How long after a state is in the store a follower has it, over a link: beside the time of its bytes on that link.

    sudo python benchmarks/links follow --out benchmarks/reports/NAME         # namespaces: see `cluster`

A trainer, a store and a follower are hosts of their own; the links of trainer and follower have `--rate-mbit`. Weights
are Gaussian with a deviation of 0.02, in bfloat16 from float32, and each state moves them by a Gaussian step, clipped
at `--step`. The follower has read one state when the next one is put. A row is a state: from the moment at which its
record is in the store until the follower has its arrays, and the seconds of a whole copy on the link.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import cluster
import files
from common import append_rows

PORT = 5000
LEAVES = 8


def connect(address):
    """The store, when its server answers."""
    import jaxdist as jd

    store = jd.islands.SharedStore(*files.connect(address, PORT))
    for _ in range(300):
        with contextlib.suppress(OSError):
            store.list("")
            return store
        time.sleep(0.1)
    raise TimeoutError(f"no store at {address}")


def publish(given):
    """The trainer: a line when a state is in the store, after a line that asks for it."""
    import jax.numpy as jnp
    import numpy as np

    import jaxdist as jd

    rng, size = np.random.default_rng(0), given.words // LEAVES
    params = [rng.normal(scale=0.02, size=size).astype(np.float32) for _ in range(LEAVES)]
    with jd.publish.open(connect(given.address), dtype=jnp.bfloat16, anchor_every=10**6) as out:
        for number in range(given.states):
            input()
            started = time.process_time()
            out.put([jnp.asarray(x) for x in params], step=number)
            out.flush()
            row = {"step": number, "sent": time.time(), "publish_processor_seconds": time.process_time() - started}
            row |= {"bytes": out.newest.patch_bytes or out.newest.anchor_bytes, "is_patch": out.newest.patch != ""}
            print(json.dumps(row), flush=True)
            steps = [np.clip(rng.normal(size=size), -1, 1).astype(np.float32) for _ in params]
            params = [x + np.float32(given.step) * step for x, step in zip(params, steps)]


def follow(given):
    """The follower: a line for each state."""
    import jax
    import jax.numpy as jnp

    import jaxdist as jd

    # A process that starts its devices does so before.
    jax.block_until_ready(jnp.zeros(1))
    like = [jax.ShapeDtypeStruct((given.words // LEAVES,), jnp.bfloat16)] * LEAVES
    states = jd.publish.follow(connect(given.address), like=like, start="oldest", poll=0.005)
    for number in range(given.states):
        started = time.process_time()
        params, step = next(states)
        jax.block_until_ready(params)
        assert step == number
        print(json.dumps({"seen": time.time(), "follow_processor_seconds": time.process_time() - started}), flush=True)


def measure(given):
    """The rows of all states."""
    rows = []
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    here = str(Path(__file__).parent)
    with cluster.hosts(3, given.rate_mbit) as (server, *others), contextlib.ExitStack() as stack:
        # A bucket is no narrower than its users.
        server.set_rate(10 * given.rate_mbit)
        serve = [*server.command, sys.executable, str(Path(here) / "files.py"), server.address, str(PORT)]
        stack.callback(stack.enter_context(subprocess.Popen(serve)).kill)
        jobs = []
        for host, role in zip(others, ("publish", "follow"), strict=True):
            command = [*host.command, sys.executable, here, "follow", "--role", role, "--address", server.address]
            command += ["--words", str(given.words), "--states", str(given.states), "--step", str(given.step)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
            jobs.append(stack.enter_context(subprocess.Popen(command, env=environment, **pipes)))
            stack.callback(jobs[-1].kill)
        trainer, follower = jobs
        for _ in range(given.states):
            trainer.stdin.write("\n")
            row = json.loads(trainer.stdout.readline()) | json.loads(follower.stdout.readline())
            whole = 2 * given.words * 8e-6 / given.rate_mbit
            row |= {"words": given.words, "rate_mbit": given.rate_mbit, "step_size": given.step, "whole_seconds": whole}
            row |= {"link_seconds": 8e-6 * row["bytes"] / given.rate_mbit, "seconds": row["seen"] - row["sent"]}
            rows.append(row | {"load": os.getloadavg()[0]})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate-mbit", type=float, default=100)
    parser.add_argument("--words", type=int, default=20_000_000)
    parser.add_argument("--states", type=int, default=8)
    parser.add_argument("--step", type=float, default=1e-6)
    parser.add_argument("--role", choices=("publish", "follow"), help="what the command starts")
    parser.add_argument("--address")
    parser.add_argument("--out", type=Path)


def main(given: argparse.Namespace) -> None:
    if given.role:
        (publish if given.role == "publish" else follow)(given)
    else:
        append_rows(given.out, "follow", measure(given))
