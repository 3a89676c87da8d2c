"""Memory and bytes of the stages of ZeRO on TPU v5e, by the TPU's own compiler, without a TPU.

    JAX_PLATFORMS=cpu python benchmarks/zero memory --out benchmarks/reports/NAME

Needs libtpu (`pip install 'jax[tpu]'`). Compiles a GPT of 100 million parameters under each stage for 8 chips, and for
each stage the models between which memory runs out, one chip having 15.75 GiB. A program that is in the report already
is not compiled again: delete `memory.json` to begin anew. `memory.png` shows the programs of the GPT of 100 million.
"""

import argparse
import importlib.metadata
import json
import os
import re
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import chart
import jax
import jax.numpy as jnp
from common import write_record
from offloaded import make_offloaded_step
from stages import stage_step

import jaxdist as jd
from jaxdist._cli.models.gpt import GPTConfig
from jaxdist.analysis import pods
from jaxdist.compressors import cast, dynamic_fp8

GPT_100M = GPTConfig(layers=12, width=768, heads=12, context=512, vocabulary=10_240)
TOPOLOGY = "v5e:2x4"
HBM = 15.75 * 2**30
ROUNDED = cast(jnp.bfloat16, rounding="stochastic")
STEPS = {
    "0": lambda config, **k: stage_step(config, 0, **k),
    "1": lambda config, **k: stage_step(config, 1, **k),
    "1 unrolled": lambda config, **k: stage_step(config, 1, unrolled=True, **k),
    "2 unrolled": lambda config, **k: stage_step(config, 2, unrolled=True, **k),
    "3": lambda config, **k: stage_step(config, 3, **k),
    "3 on the host": lambda config, **k: stage_step(config, 3, on_host=True, **k),
    "3 in bfloat16": lambda config, **k: stage_step(config, 3, state_compressor=ROUNDED, **k),
    "3 in 8 bits": lambda config, **k: stage_step(config, 3, state_compressor=dynamic_fp8(block=8), **k),
    "offload": lambda config, master: make_offloaded_step(config),
    "offload parameters too": lambda config, master: make_offloaded_step(config, params_on_host=True),
}


def weigh(name: str, config: GPTConfig, master: bool, topology: str = TOPOLOGY) -> dict:
    mesh = pods.tpu(topology)
    weighed = STEPS[name](config, master=master)
    tokens = jax.ShapeDtypeStruct((mesh.size, config.context + 1), jnp.uint8)
    found = {"stage": name, "master": master, "layers": config.layers, "width": config.width}
    found |= {"parameters": weighed.parameters, "ends": weighed.ends, "chips": mesh.size}
    start = time.perf_counter()
    try:
        plan = pods.plan(jd.distribute(weighed.step, mesh), weighed.make_state, tokens, mesh)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        why = re.sub(r"\s+", " ", str(error))
        used = re.search(r"Used ([\d.]+)G of", why)
        peak = {"peak": int(float(used[1]) * 2**30)} if used else {}
        return found | {"fits": False, "why": why[:300], **peak, "seconds": round(time.perf_counter() - start, 1)}
    kinds: dict[str, float] = {}
    for op in plan.collectives.ops:
        kinds[op.kind] = kinds.get(op.kind, 0) + op.wire_bytes
    return found | {
        "fits": True,
        **plan.memory._asdict(),
        "wire_bytes": plan.collectives.wire_bytes,
        "kinds": kinds,
        "seconds": round(time.perf_counter() - start, 1),
    }


class Report:
    def __init__(self, folder: Path):
        self.folder, path = folder, folder / "memory.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        self.runs = known.get("runs", [])

    def get(self, name: str, config: GPTConfig, master: bool, topology: str = TOPOLOGY) -> dict:
        wanted = (name, config.layers, config.width, master)
        for run in self.runs:
            if (run["stage"], run["layers"], run["width"], run["master"]) == wanted:
                return run
        self.runs.append(weigh(name, config, master, topology))
        versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
        write_record(self.folder, "memory", {"versions": versions, "topology": topology, "runs": self.runs})
        print(json.dumps(self.runs[-1]), flush=True)
        return self.runs[-1]


def wide(width: int, layers: int) -> GPTConfig:
    return GPTConfig(layers=layers, width=width, heads=width // 128, context=512, vocabulary=10_240)


def largest(report: Report, name: str, width: int) -> tuple[float, dict, dict]:
    """The number of layers that fit, from bytes affine in layers, and the compiler's results for that many and more."""

    def config(layers):
        return wide(width, layers)

    few, more = (report.get(name, config(layers), True) for layers in (2, 4))
    slope = (more["peak"] - few["peak"]) / 2
    layers = int(2 + (HBM - few["peak"]) / slope)
    fits = report.get(name, config(layers), True)
    while not fits["fits"]:
        layers -= 1
        fits = report.get(name, config(layers), True)
    return slope, fits, report.get(name, config(layers + 1 + layers // 20), True)


def tables(runs: list[dict]) -> str:
    """The bytes of a parameter on a chip for each program, and the largest models."""
    lines = [
        "| program | parameters | chips | arguments | temporaries | on the host | sent, entries |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for run in runs:
        name = f"{run['stage']}, {'bfloat16 and master' if run['master'] else 'float32'}"
        count, chips = run["parameters"], run["chips"]
        if not run["fits"]:
            lines.append(f"| {name} | {count / 1e6:,.0f} M | {chips} | does not fit | | | |")
            continue
        entry = 2 if run["master"] else 4
        sent = run["wire_bytes"] / (entry * count * (chips - 1) / chips)
        sizes = [run[kind] / count for kind in ("arguments", "temporary", "host_arguments")]
        columns = " | ".join(f"{size:.2f}" for size in sizes)
        lines.append(f"| {name} | {count / 1e6:,.0f} M | {chips} | {columns} | {sent:.2f}Ψ |")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", help="100m:STAGE[:master], wide:STAGE:WIDTH:LAYERS or largest:STAGE:WIDTH")


def main(given: argparse.Namespace) -> None:
    report = Report(given.out)
    for job in given.only or [
        *(f"100m:{name}" for name in ("3", "2 unrolled", "1 unrolled", "1", "0")),
        *(f"100m:{name}:master" for name in (*chart.ROWS, "offload", "offload parameters too")),
        *(f"largest:{name}:2048" for name in ("0", "offload", "offload parameters too", "1", "3")),
    ]:
        kind, name, *rest = job.split(":")
        if kind == "100m":
            report.get(name, GPT_100M, bool(rest))
        elif kind == "wide":
            report.get(name, wide(*map(int, rest)), True)
        else:
            largest(report, name, int(rest[0]))
    print(tables(report.runs))
    rows = chart.find_rows(report.runs, GPT_100M.layers, GPT_100M.width)
    if len(rows) > 1:
        title = "Memory per chip: GPT of 100 M parameters, Adam,\n8 chips of TPU v5e, mixed precision"
        chart.draw(rows, title, given.out / "memory.png")
