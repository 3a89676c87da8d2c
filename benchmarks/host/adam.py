"""AdamW on the host's processor: `offload.host` beside PyTorch's fused AdamW, one large leaf and many small ones.

    python benchmarks/host adam --torch-python PYTHON --out benchmarks/reports/NAME

The same number of entries in one leaf and in many. Each system runs in a separate process, and they take turns; the
median of the steps of all turns counts. A step reads gradient, parameter and two moments and writes three of them, 28
bytes an entry; `bound` is the time of that at the bandwidth of `x + 1` in place, in the same turn.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import run_process, write_record

SYSTEMS = ("jaxdist", "optax", "torch")
# Otherwise every step gives its memory back and pays for fresh pages, PyTorch's as much as ours.
KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
BYTES = 28


def times(step: Callable[[], Any], seconds: float) -> list[float]:
    for _ in range(3):
        step()
    found, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(found) < 3:
        start = time.perf_counter()
        step()
        found.append(time.perf_counter() - start)
    return found


def make_jax_steps(entries: int, leaves: int, *, offloaded: bool) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A step of AdamW, and `x + 1` in place."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp
    import optax

    from jaxdist import offload

    tx = optax.adamw(1e-3)
    tx = offload.host(tx) if offloaded else tx
    params = [jnp.full(entries // leaves, 1.0 + i) for i in range(leaves)]
    gradients = [0.01 * x for x in params]
    state = tx.init(params)

    def update(params, state, gradients):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    update = jax.jit(update, donate_argnums=(0, 1))
    copied = jax.jit(lambda params: jax.tree.map(lambda x: x + 1, params), donate_argnums=0)

    def step():
        nonlocal params, state
        params, state = jax.block_until_ready(update(params, state, gradients))

    def copy():
        nonlocal params
        params = jax.block_until_ready(copied(params))

    return step, copy


def make_torch_steps(
    entries: int, leaves: int, make_optimizer: Callable[[list[Any]], Any] | None = None
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The same in PyTorch, by its fused AdamW or another optimizer."""
    import torch  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(os.cpu_count() or 1)
    params = [torch.nn.Parameter(torch.full((entries // leaves,), 1.0 + i)) for i in range(leaves)]
    for x in params:
        x.grad = 0.01 * x.detach()
    if make_optimizer is None:
        optimizer = torch.optim.AdamW(params, lr=1e-3, weight_decay=1e-4, fused=True)
    else:
        optimizer = make_optimizer(params)

    @torch.no_grad()
    def copy():
        for x in params:
            x.add_(1)

    return optimizer.step, copy


def child(system: str, entries: int, leaves: int, seconds: float) -> None:
    if system == "torch":
        step, copy = make_torch_steps(entries, leaves)
    else:
        step, copy = make_jax_steps(entries, leaves, offloaded=system == "jaxdist")
    print(json.dumps({"step": times(step, seconds), "copy": times(copy, seconds / 4)}))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--torch-python", help="without it PyTorch is left out")
    parser.add_argument("--entries", type=int, default=2**26)
    parser.add_argument("--leaves", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each system and turn")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", nargs=2, metavar=("SYSTEM", "LEAVES"), help=argparse.SUPPRESS)


def main(given: argparse.Namespace) -> None:
    if given.child:
        child(given.child[0], given.entries, int(given.child[1]), given.seconds)
        return

    systems = [name for name in SYSTEMS if name != "torch" or given.torch_python]
    found: dict[tuple[str, int], dict[str, list[float]]] = {}
    for _ in range(given.turns):
        for leaves in given.leaves:
            for system in systems:
                python = given.torch_python if system == "torch" else sys.executable
                command = [python, str(Path(__file__).parent), "adam", "--child", system, str(leaves)]
                command += ["--entries", str(given.entries), "--seconds", str(given.seconds)]
                for name, values in run_process(command, KEEP_MEMORY).items():
                    found.setdefault((system, leaves), {"step": [], "copy": []})[name] += values

    rows = []
    print("| system | leaves | step, ms | entries a second | bound, ms | of the bound |\n|---|---|---|---|---|---|")
    for (system, leaves), values in sorted(found.items(), key=lambda item: item[0][1]):
        step, copy = statistics.median(values["step"]), statistics.median(values["copy"])
        bound = BYTES * copy / 8
        rows.append({"system": system, "leaves": leaves, "entries": given.entries, "step_s": step, "copy_s": copy})
        print(
            f"| {system} | {leaves} | {1e3 * step:.0f} | {given.entries / step / 1e9:.2f} G | {1e3 * bound:.0f} | "
            f"{bound / step:.0%} |"
        )
    write_record(given.out, "host_adam", rows)
