"""PowerSGD's arithmetic beside PyTorch's: compression, decompression and error feedback of one step, no network.

    python benchmarks/power_sgd.py --torch-python /path/to/python/with/torch --out benchmarks/reports/NAME

Each system runs in a process of its own, and they take turns; the fastest step counts, since noise only ever adds time.
PyTorch does what its communication hook does for one bucket: feedback of the reduced approximation, a normalized `Q`,
Gram-Schmidt up to rank 2 and QR above. jaxdist's mean hides behind a barrier, so that the compiler cannot merge what
differs between several workers: it does the product for the residual that PyTorch's form does without. "paper" is
`own="paper"`, the same arithmetic as PyTorch's.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANKS = {"1024x1024": (1, 4, 32), "4096x1024": (1, 4, 32), "512x4608": (1, 4, 32), "ResNet-18": (1, 2, 4)}
SYSTEMS = ("torch", "jaxdist", "jaxdist paper", "jaxdist one-sided")
THREADS = "2"
# Otherwise every step gives its memory back and pays for fresh pages, PyTorch's as much as ours.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34)}


def shapes_of(case: str) -> list[tuple[int, ...]]:
    """One matrix, or the leaves of the CIFAR ResNet-18 with kernels as [in, out]."""
    if case != "ResNet-18":
        rows, columns = case.split("x")
        return [(int(rows), int(columns))]
    shapes, width = [(27, 64), (64,), (64,)], 64
    for out in (64, 128, 256, 512):
        for _ in range(2):
            shapes += [(9 * width, out), (9 * out, out), *[(out,)] * 4]
            shapes += [(width, out), (out,), (out,)] if width != out else []
            width = out
    return [*shapes, (512, 10), (10,)]


def fastest(step: Callable[[], Any], seconds: float) -> float:
    for _ in range(3):
        step()
    end, best = time.perf_counter() + seconds, float("inf")
    while time.perf_counter() < end:
        start = time.perf_counter()
        out = step()
        best = min(best, time.perf_counter() - start)
        del out
    return best


def time_jaxdist(case: str, rank: int, seconds: float, form: str) -> float:
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import numpy as np

    import jaxdist as jd

    rng = np.random.default_rng(0)
    gradients = [jax.device_put(rng.standard_normal(shape, np.float32)) for shape in shapes_of(case)]
    own = "paper" if form == "paper" else "local"
    one_sided = form == "one-sided"
    reducer = jd.error_feedback(jd.power_sgd(rank, min_compression_rate=0, one_sided=one_sided, own=own))
    comm = jd.comm.alone()._replace(mean=lambda tree: jax.lax.optimization_barrier(tree))

    def step(gradients, state):
        reduced, state = reducer.reduce(gradients, state, comm)
        return reduced.mean, state

    run = jax.jit(step, donate_argnums=1)
    state = reducer.init(gradients)

    def once():
        nonlocal state
        mean, state = jax.block_until_ready(run(gradients, state))
        return mean

    return fastest(once, seconds)


def time_torch(case: str, rank: int, seconds: float) -> float:
    import torch

    torch.set_num_threads(int(THREADS))
    torch.manual_seed(0)
    shapes = shapes_of(case)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    given = torch.randn(sum(sizes))
    error = torch.zeros_like(given)
    ends = list(itertools.accumulate(sizes))
    ranks = [min(rank, *shape) for shape in shapes if len(shape) == 2]
    matrices = [shape for shape in shapes if len(shape) == 2]
    right = [torch.randn(shape[1], r) for shape, r in zip(matrices, ranks)]

    def orthonormal(factor):
        if factor.shape[1] > 2:
            factor.copy_(torch.linalg.qr(factor)[0])
            return
        for i in range(factor.shape[1]):
            column = factor[:, i : i + 1]
            column /= torch.norm(column)
            if i + 1 < factor.shape[1]:
                rest = factor[:, i + 1 :]
                rest -= torch.sum(column * rest, dim=0) * column

    def step():
        bucket = given.clone()  # the hook writes into the gradients
        bucket.add_(error)
        before = bucket.clone()
        parts = [bucket[end - size : end].view(shape) for end, size, shape in zip(ends, sizes, shapes)]
        whole = [part for part in parts if part.dim() == 2]
        rest = torch.cat([part for part in parts if part.dim() < 2]) if len(whole) < len(parts) else None
        left = []
        for matrix, q in zip(whole, right):
            orthonormal(q)
            left.append(matrix @ q)
        for matrix, p, q in zip(whole, left, right):
            orthonormal(p)
            torch.matmul(matrix.t(), p, out=q)
        for matrix, p, q in zip(whole, left, right):
            torch.matmul(p, q.t(), out=matrix)
        torch.sub(before, bucket, out=error)
        return bucket, rest

    return fastest(step, seconds)


def measure(torch_python: str, system: str, case: str, rank: int, seconds: float) -> float:
    python = torch_python if system == "torch" else sys.executable
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    settings = {"PYTHONPATH": path, "OMP_NUM_THREADS": THREADS, **KEEP_MEMORY}
    command = [python, __file__, "--one", system, case, str(rank), "--seconds", str(seconds)]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return float(done.stdout.splitlines()[-1])


def table(rows: list[dict]) -> str:
    lines = [f"| leaves | rank | {' | '.join(SYSTEMS)} | jaxdist / torch |", "|---|--:|" + "--:|" * (len(SYSTEMS) + 1)]
    for row in rows:
        cells = " | ".join(f"{row[system] * 1e3:.2f} ms" for system in SYSTEMS)
        lines.append(f"| {row['case']} | {row['rank']} | {cells} | {row['jaxdist'] / row['torch']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--torch-python", help="a Python that has torch")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long each process repeats the step")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each system")
    parser.add_argument("--out", type=Path, help="the folder of the report")
    given = parser.parse_args()
    if given.one:
        system, case, rank = given.one
        if system == "torch":
            print(time_torch(case, int(rank), given.seconds))
        else:
            print(time_jaxdist(case, int(rank), given.seconds, system.removeprefix("jaxdist").strip()))
        return
    if not given.torch_python:
        parser.error("--torch-python is needed")
    rows = []
    for case, ranks in RANKS.items():
        for rank in ranks:
            row = {"case": case, "rank": rank}
            for _ in range(given.rounds):
                for system in SYSTEMS:
                    seconds = measure(given.torch_python, system, case, rank, given.seconds)
                    row[system] = min(row.get(system, seconds), seconds)
            rows.append(row)
            print(row, flush=True)
    print(table(rows))
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "power_sgd.json").write_text(json.dumps(rows, indent=1) + "\n")
        (given.out / "power_sgd.md").write_text(table(rows) + "\n")


if __name__ == "__main__":
    main()
