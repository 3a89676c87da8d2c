"""What each process of a job sends and needs to publish weights that are split over all: bytes, memory and seconds.

    python benchmarks/codecs weight_parts --processes 2 --out benchmarks/reports/NAME

Float32 weights, Gaussian with a deviation of 0.02, are cut over all processes, published in bfloat16 to a folder that
is removed, and moved by Gaussian steps, clipped at `--step`. A row is a process: the bytes that it has put as anchors
and as patches, by a counter around its store; its largest resident memory beyond what it had before the first state, in
copies of the published bytes; the longest `put`, and the median from a `put` until the state is in the store. With
another `--checkout` of the library the processes import that one, for a comparison.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, append_rows, memory_of

LEAVES = 8


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--words", type=int, default=80_000_000)
    parser.add_argument("--states", type=int, default=4)
    parser.add_argument("--step", type=float, default=1e-6)
    parser.add_argument("--compare-on", choices=("host", "device"), default="host")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="the library that the processes import")
    parser.add_argument("--url", help="what the launcher gives its processes")
    parser.add_argument("--out", type=Path)


def main(given: argparse.Namespace) -> None:
    if given.url:
        publish(given)
        return
    arguments = [
        f"--{name.replace('_', '-')}={getattr(given, name)}" for name in ("words", "states", "step", "compare_on")
    ]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "jaxdist.processes.launch",
            "-n",
            str(given.processes),
            "--logs",
            f"{folder}/logs",
        ]
        command += [str(Path(__file__).with_name("__main__.py")), "weight_parts", f"--url={folder}/policy", *arguments]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(given.checkout.resolve())}
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        texts = [Path(f"{folder}/logs/{number}.log").read_text() for number in range(given.processes)]
    rows = [json.loads(text.split("ROW ")[1].splitlines()[0]) for text in texts]
    for row in rows:
        print(json.dumps(row), flush=True)
    append_rows(given.out, "parts", rows)


def publish(given: argparse.Namespace) -> None:
    """One process."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jaxdist as jd

    jd.runtime.use_cpu_devices(1)
    jd.processes.initialize()
    mesh = jd.make_mesh()
    sharding, size = jax.NamedSharding(mesh, jax.P("data")), given.words // LEAVES
    store, sent = jd.islands.folder(given.url), {"patches": 0, "anchors": 0}

    def put(name, body):
        kind = name.partition("/")[0]
        sent[kind] = sent.get(kind, 0) + len(body)
        store.put(name, body)

    @jax.jit
    def make(key):
        return [0.02 * jax.random.normal(own, (size,)) for own in jax.random.split(key, LEAVES)]

    @jax.jit
    def move(params, key):
        keys = jax.random.split(key, LEAVES)
        return [x + given.step * jnp.clip(jax.random.normal(own, x.shape), -1, 1) for x, own in zip(params, keys)]

    def on_all(function):
        return jax.jit(function, out_shardings=[sharding] * LEAVES)

    params = jax.block_until_ready(on_all(make)(jax.random.key(0)))
    later = on_all(move)
    jax.block_until_ready(later(params, jax.random.key(1)))
    Path("/proc/self/clear_refs").write_text("5")
    before, puts, seconds = memory_of("self", "VmRSS"), [], []
    with jd.publish.open(store._replace(put=put), dtype=jnp.bfloat16, compare_on=given.compare_on) as out:
        for number in range(given.states):
            began = time.monotonic()
            out.put(params, step=number)
            puts.append(time.monotonic() - began)
            out.flush()
            seconds.append(time.monotonic() - began)
            if number + 1 < given.states:
                params = jax.block_until_ready(later(params, jax.random.key(number + 1)))
    whole = 2 * LEAVES * size
    row = {
        "processes": jax.process_count(),
        "process": jax.process_index(),
        "compare_on": given.compare_on,
        "whole_bytes": whole,
        "states": given.states,
        "step": given.step,
        "anchor_bytes": sent["anchors"],
        "patch_bytes": sent["patches"],
        "peak_copies": round((memory_of("self", "VmHWM") - before) / whole, 3),
        "longest_put": round(max(puts), 4),
        "seconds": round(float(np.median(seconds[1:])), 4),
        "jax": jax.__version__,
        "load": os.getloadavg()[0],
    }
    print("ROW", json.dumps(row), flush=True)
