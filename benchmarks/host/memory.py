"""The memory of a step on a TPU that is not attached: state on the device or the host, sharded or replicated.

    python benchmarks/host memory --out benchmarks/reports/NAME

It needs `libtpu` (`pip install 'jax[tpu]'`) and no TPU. Every row is compiled by the TPU's own compiler, which says
what it would allocate on one chip and in the memory of its host; nothing runs.
"""

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
# Another process may be compiling too.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
import optax
from common import write_record

import jaxdist as jd
from jaxdist import offload
from jaxdist.analysis import pods

MIB = 2**20


def rows(tile_bytes: int) -> dict:
    adamw, mean = optax.adamw(1e-3), jd.all_reduce(jd.exact())
    options: dict[str, Any] = {"tile_bytes": tile_bytes}
    master = {"master_dtype": jnp.float32}
    return {
        "on the device": (optax.chain(mean, adamw), jnp.float32),
        'host, compute="host"': (optax.chain(mean, offload.host(adamw, **options)), jnp.float32),
        'host, compute="device"': (optax.chain(mean, offload.host(adamw, compute="device", **options)), jnp.float32),
        "bfloat16, host, master": (optax.chain(mean, offload.host(adamw, **master, **options)), jnp.bfloat16),
        "bfloat16, host, master, delayed": (
            optax.chain(mean, offload.host(adamw, delayed=True, **master, **options)),
            jnp.bfloat16,
        ),
        "ZeRO-1": (jd.zero_redundancy(adamw), jnp.float32),
        'ZeRO-1, compute="host"': (offload.host(jd.zero_redundancy(adamw), **options), jnp.float32),
        'ZeRO-1, compute="device"': (
            offload.host(jd.zero_redundancy(adamw), compute="device", **options),
            jnp.float32,
        ),
    }


def plan_step(tx, dtype, mesh, layers: int, width: int):
    def params():
        return {f"layer{i}": jnp.zeros((width, width), dtype) for i in range(layers)}

    def loss(params, x):
        for name in sorted(params):
            x = jnp.tanh(x @ params[name])
        return (x.astype(jnp.float32) ** 2).mean()

    def step(state, batch):
        _, gradients = jd.local_value_and_grad(loss)(state["params"], batch)
        updates, opt = tx.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {}

    batch = jax.ShapeDtypeStruct((16 * mesh.size, width), dtype)
    return pods.plan(jd.distribute(step, mesh), lambda: {"params": params(), "opt": tx.init(params())}, batch, mesh)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--topology", default="v5e:2x2")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--tile-mib", type=int, default=32)
    parser.add_argument("--only", nargs="+", help="the beginnings of names")
    parser.add_argument("--out", type=Path)


def main(given: argparse.Namespace) -> None:
    mesh = pods.tpu(given.topology)
    print(
        "| state | chip: arguments | temporary | host: arguments | temporary | collectives |\n|---|---|---|---|---|---|"
    )
    found = []
    for name, (tx, dtype) in rows(given.tile_mib * MIB).items():
        if given.only and not any(name.startswith(part) for part in given.only):
            continue
        start = time.perf_counter()
        try:
            plan = plan_step(tx, dtype, mesh, given.layers, given.width)
        except jax.errors.JaxRuntimeError as error:
            print(f"| {name} | refused by the compiler: {str(error)[:300]!r} |", flush=True)
            continue
        memory = plan.memory
        kinds = Counter(op.kind for op in plan.collectives.ops)
        print(
            f"| {name} | {memory.arguments / MIB:.1f} | {memory.temporary / MIB:.1f} | "
            f"{memory.host_arguments / MIB:.1f} | {memory.host_temporary / MIB:.1f} | "
            f"{', '.join(f'{n} {kind}' for kind, n in sorted(kinds.items()))} |",
            flush=True,
        )
        record = {"state": name, "layers": given.layers, "width": given.width, "topology": given.topology}
        found.append({**record, "compile_s": round(time.perf_counter() - start, 1), **memory._asdict()})
        if os.environ.get("DUMP"):
            Path(os.environ["DUMP"], name.replace(" ", "_").replace('"', "") + ".txt").write_text(
                plan.compiled.as_text() or ""
            )
    write_record(given.out, "host", found)
    if not found:
        sys.exit("nothing was compiled")
