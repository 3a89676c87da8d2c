"""The time that several processes take to their first step, with and without a compilation cache.

    python benchmarks/overhead compile_cache --out benchmarks/reports/NAME

A GPT with PowerSGD, feedback and AdamW, in processes of one CPU device each, started as by `jaxdist launch`. Seconds
are from the start of the job to the end of the first step, including the start of Python, imports and tracing, which no
cache saves. The first run with a cache finds it empty; of the later ones the median counts.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from common import write_record

RUNS = 3
ALL_PROGRAMS = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
COMPILING = "/jax/core/compile/backend_compile_duration"


def settings(folder: str) -> dict[str, dict[str, str]]:
    """The environment of each way of starting."""
    return {
        "no cache": {},
        "programs of 1 s and more": {"JAX_COMPILATION_CACHE_DIR": f"{folder}/default"},
        "all programs": {"JAX_COMPILATION_CACHE_DIR": f"{folder}/all", **ALL_PROGRAMS},
    }


def first_step(out: Path) -> None:
    """Trains one step in a process of the job and writes the time that it took."""
    import jax
    import optax

    import jaxdist as jd
    from jaxdist._cli.models import gpt

    events: list[str] = []
    compiling: list[float] = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiling.append(seconds) if event == COMPILING else None
    )
    jd.initialize()
    mesh = jd.make_mesh()
    config = gpt.GPTConfig(layers=2)
    tx = optax.chain(jd.all_reduce(jd.error_feedback(jd.power_sgd(rank=4))), optax.adamw(1e-3))

    def make_state():
        params = gpt.init(config, jax.random.key(0))
        return params, tx.init(params)

    def train_step(state, batch):
        params, opt_state = state
        loss, grads = jd.local_value_and_grad(lambda p, b: gpt.loss(config, p, b))(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": jax.lax.pmean(loss, "data")}

    batch = jd.global_batch(jax.numpy.zeros((4, config.context + 1), jax.numpy.uint8), mesh)
    state = jd.init_state(make_state, mesh)
    _, metrics = jd.distribute(train_step, mesh)(state, batch)
    jax.block_until_ready(metrics)
    result = {
        "process": jax.process_index(),
        "seconds": time.time() - float(os.environ["BEGUN"]),
        "compiling_seconds": sum(compiling),
        "programs": len(compiling),
        "from_the_cache": events.count("/jax/compilation_cache/cache_hits"),
        "loss": float(metrics["loss"]),
        "jax": jax.__version__,
    }
    (out / f"{result['process']}.json").write_text(json.dumps(result))


def start(processes: int, given: dict[str, str]) -> list[dict]:
    """Runs the job once and returns the times of its processes."""
    from jaxdist.processes.launch import launch

    own = {"BEGUN": str(time.time()), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, str(Path(__file__).parent), "compile_cache", "--first-step", out]
        launch(command, processes, logs=f"{out}/logs", environment={**os.environ, **own, **given})
        return [json.loads((Path(out) / f"{number}.json").read_text()) for number in range(processes)]


def table(results: list[dict]) -> str:
    """One row for each way of starting."""
    lines = [
        "| processes | kept | first start, s | later, s | of it compiling, first and last process | programs found |",
        "|--:|---|--:|--:|--:|--:|",
    ]
    for one in results:
        first, *later = one["runs"]
        seconds = statistics.median(max(process["seconds"] for process in run) for run in later)
        ends = [(later[-1][which]["compiling_seconds"], later[-1][which]) for which in (0, -1)]
        compiling = " and ".join(f"{value:.1f}" for value, _ in ends)
        found = " and ".join(f"{process['from_the_cache']} of {process['programs']}" for _, process in ends)
        begun = max(process["seconds"] for process in first)
        lines.append(f"| {one['processes']} | {one['cache']} | {begun:.1f} | {seconds:.1f} | {compiling} | {found} |")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--first-step", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path, help="the folder of the report")


def main(given: argparse.Namespace) -> None:
    if given.first_step:
        first_step(given.first_step)
        return
    results = []
    for processes in given.processes:
        with tempfile.TemporaryDirectory() as folder:
            for cache, variables in settings(folder).items():
                runs = [start(processes, variables) for _ in range(RUNS)]
                results.append({"processes": processes, "cache": cache, "runs": runs})
                print(table(results[-1:]).splitlines()[-1], flush=True)
    version = results[0]["runs"][0][0]["jax"]
    write_record(given.out, f"compile_cache_{version}", results)
    print(table(results))
