"""Muon on four workers: the products that each worker computes, what it sends, and the time of the optimizer's step.

    python benchmarks/zero owners --out benchmarks/reports/NAME

Three programs of the same values: every worker computes all matrices after an all-reduce; the shards of ZeRO gathered
and then multiplied by all; and each matrix multiplied by its owner alone, as `zero_redundancy` does. Their steps are
timed in turns, in one process of four CPU devices: the devices share its cores, so the time is that of all products.
"""

import argparse
import os
import re
import statistics
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from common import write_record

import jaxdist as jd
from jaxdist.zero import owners

WORKERS = 4
MUON = optax.contrib.muon(1e-2)
PROGRAMS = {
    "all_reduce": optax.chain(jd.all_reduce(jd.exact()), MUON),
    "gathered": jd.zero_redundancy(MUON),
    "owners": jd.zero_redundancy(MUON),
}


class Program(NamedTuple):
    step: Any
    state: Any
    found: dict[str, Any]


def compile_program(name: str, count: int, size: int, mesh: Any) -> Program:
    tx = PROGRAMS[name]
    params = {f"w{i}": jax.random.normal(jax.random.key(i), (size, size)) for i in range(count)}

    def step(state, batch):
        # Cheap, and different for each worker: the optimizer is what is timed.
        gradients = jax.tree.map(lambda p: jnp.sin(p) + p * batch.mean(), state["params"])
        updates, opt = tx.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {}

    state = jd.place({"params": params, "opt": tx.init(params)}, mesh)
    lowered = jd.distribute(step, mesh, donate=False).lower(state, jnp.arange(float(WORKERS)))
    start = time.perf_counter()
    compiled = lowered.compile()
    found = {
        "matrices": count,
        "size": size,
        "program": name,
        "products": count_products(compiled.as_text()),
        "gigaflops": compiled.cost_analysis()["flops"] / 1e9,
        "sent": jd.analysis.collectives(compiled).wire_bytes,
        "temporary": jd.analysis.memory(compiled).temporary,
        "compile_seconds": time.perf_counter() - start,
    }
    return Program(compiled, state, found)


def count_products(text: str) -> int:
    """The products of matrices in a compiled program, batched ones counted one by one."""
    shapes = re.findall(r"= \w+\[([\d,]+)\]\S* dot\(", text)
    return sum(prod(map(int, shape.split(",")[:-2])) for shape in shapes)


def time_in_turns(programs: Sequence[Program], rounds: int) -> list[float]:
    """The median time of each step in seconds."""
    times: list[list[float]] = [[] for _ in programs]
    batch = jnp.arange(float(WORKERS))
    for number in range(rounds + 1):
        for program, taken in zip(programs, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(program.step(program.state, batch))
            # The first round warms up.
            taken += [time.perf_counter() - start] if number else []
    return [statistics.median(taken) for taken in times]


def measure(count: int, size: int, rounds: int) -> list[dict[str, Any]]:
    mesh = jd.make_mesh({"data": WORKERS}, devices=jax.devices()[:WORKERS])
    programs = []
    for name in PROGRAMS:
        with mock.patch.object(owners, "PRODUCTS", frozenset() if name == "gathered" else owners.PRODUCTS):
            programs.append(compile_program(name, count, size, mesh))
    times = time_in_turns(programs, rounds)
    return [program.found | {"seconds": taken} for program, taken in zip(programs, times, strict=True)]


def make_table(rows: Sequence[dict[str, Any]]) -> str:
    head = "| matrices | program | products a worker | GFLOP a worker | sent, MB | temporaries, MB | step, ms |"
    lines = [head, "|---|---|--:|--:|--:|--:|--:|"]
    lines += [
        f"| {row['matrices']} of {row['size']}x{row['size']} | {row['program']} | {row['products']} "
        f"| {row['gigaflops']:.2f} | {row['sent'] / 1e6:.2f} | {row['temporary'] / 1e6:.1f} "
        f"| {1e3 * row['seconds']:.0f} |"
        for row in rows
    ]
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--matrices", type=int, nargs="+", default=[8, 9])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path)


def main(given: argparse.Namespace) -> None:
    jd.runtime.use_cpu_devices(WORKERS)
    rows = [row for size in given.sizes for count in given.matrices for row in measure(count, size, given.rounds)]
    table = make_table(rows)
    print(table)
    write_record(given.out, "owners", {"workers": WORKERS, "rounds": given.rounds, "runs": rows})
