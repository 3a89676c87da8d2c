"""Rules on real processes with a slow worker, and with one that is killed: loss over wall time.

    python benchmarks/asynchronous processes --out benchmarks/reports/NAME

Three workers, one of which sleeps until its gradients take five times longer; a convolutional net on digits.
For each rule the rate of two that is faster on the virtual clock is taken. Then a worker of three equal ones is killed
with SIGKILL, while they train softmax regression.
"""

import argparse
import json
import os
import signal
import statistics
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import write_record

from jaxdist._cli.commands.replay import make_task
from jaxdist._cli.models.digits import Digits, splits
from jaxdist._cli.spellings import parse
from jaxdist.asynchronous import ray_engine, replay
from jaxdist.asynchronous.durations import constant

RULES = ("bsp", "asgd", "ssp:3", "ad_psgd")
RATES = (0.1, 0.3)
WORKERS, FACTOR, TARGET, PERSIST = 3, 5.0, 0.5, 2


def make_rule(name: str, rate: float) -> Any:
    return parse.parse_rule(name, parse.parse_optimizer(f"sgd:{rate}"))


def best_rate(name: str, task: replay.Task) -> float:
    """The rate with which the target is reached soonest in virtual time; a gradient takes 1 s, or 5 s."""
    law = constant([FACTOR, *[1.0] * (WORKERS - 1)])
    settings = {"durations": law, "workers": WORKERS, "evaluate_every": 5.0, "seconds": 150.0, "target": 0.8 * TARGET}
    found = {rate: replay.time_to_target(replay.run(make_rule(name, rate), task, **settings), TARGET) for rate in RATES}
    return min(found, key=lambda rate: found[rate])


class Killer:
    """Kills a worker once, when so many gradients were counted."""

    def __init__(self, worker: int, gradients: int):
        self.worker, self.gradients, self.done = worker, gradients, False

    def __call__(self, status: ray_engine.Status) -> None:
        if status.gradients >= self.gradients and not self.done:
            os.kill(status.processes[self.worker], signal.SIGKILL)
            self.done = True


def ahead(run: replay.Result) -> int:
    """By how many gradients the workers were apart at most."""
    completed = np.cumsum(np.eye(WORKERS, dtype=int)[run.trace.gradients.worker], axis=0)
    return int((completed.max(1) - completed.min(1)).max())


def regression() -> replay.Task:
    """Softmax regression: convex, so that losses of runs that differ in the order of gradients can be compared."""
    train, held = splits()

    def loss(model: Any, batch: Digits) -> Any:
        logits = batch.images.reshape(-1, 64) @ model["kernel"] + model["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).mean()

    def own_batch(seed: int, worker: int, job: int) -> Digits:
        chosen = np.random.default_rng((seed, worker, job)).choice(len(train.labels), 128)
        return Digits(train.images[chosen], train.labels[chosen])

    model = {"kernel": jnp.zeros((64, 10)), "bias": jnp.zeros(10)}
    return replay.Task(model, loss, own_batch, jax.jit(lambda model: loss(model, held)))


def with_slow_one(rates: dict[str, float], tasks: list[replay.Task]) -> list[dict[str, Any]]:
    """Seconds to the target with a slow worker."""
    rows = []
    for name in RULES:
        runs = []
        for seed, task in enumerate(tasks):
            settings = {
                "slow": {0: FACTOR},
                "seed": seed,
                "evaluate_every": 0.25,
                "seconds": 60,
                "target": 0.8 * TARGET,
            }
            runs.append(ray_engine.run(make_rule(name, rates[name]), task, workers=WORKERS, **settings))
        seconds = [replay.time_to_target(run, TARGET) for run in runs]
        row = {"rule": name, "rate": rates[name], "seconds": [round(one, 2) for one in seconds]}
        row |= {"median": round(statistics.median(seconds), 2), "most ahead": max(map(ahead, runs))}
        speeds = [len(run.trace.gradients) / run.seconds for run in runs]
        row |= {"gradients a second": round(statistics.median(speeds), 1)}
        row |= {"computing": np.mean([run.computing for run in runs], 0).round(2).tolist()}
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def with_a_death(seeds: int, gradients: int) -> list[dict[str, Any]]:
    """Losses after so many gradients, with and without a worker that is killed on the way."""
    rows, task = [], regression()
    for name in RULES:
        losses: dict[str, list[float]] = {"undisturbed": [], "killed": []}
        gone = []
        for seed in range(seeds):
            assert task.evaluate is not None
            for kind, progress in (("undisturbed", None), ("killed", Killer(1, gradients // 4))):
                settings = {"workers": WORKERS, "gradients": gradients, "seed": seed, "progress": progress}
                run = ray_engine.run(make_rule(name, 0.1), task, **settings)
                losses[kind].append(float(task.evaluate(run.params)))
                gone += [float(run.down[1] * run.seconds)] if progress else []
        medians = {kind: statistics.median(found) for kind, found in losses.items()}
        row = {"rule": name} | {kind: [round(loss, 4) for loss in found] for kind, found in losses.items()}
        row |= {"ratio": round(medians["killed"] / medians["undisturbed"], 3), "gone for": [round(x, 1) for x in gone]}
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="the folder of the report")
    parser.add_argument("--only", choices=("slow", "deaths"), help="measure that anew, and keep the rest")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--model", default="convnet:16")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--gradients", type=int, default=1200, help="how long the runs with a death are")


def main(given: argparse.Namespace) -> None:
    workload = parse.parse_workload("digits", given.model)
    sizes = {"batch": given.batch, "workers": WORKERS}
    *tasks, other = [make_task(workload, seed=seed, **sizes) for seed in range(given.seeds + 1)]
    file = given.out / "processes.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    found["settings"] = {"model": given.model, "factor": FACTOR, "target": TARGET, "cores": os.cpu_count()} | sizes
    if given.only != "deaths":
        rates = {name: best_rate(name, other) for name in RULES}
        found["slow"] = with_slow_one(rates, tasks)
    if given.only != "slow":
        found["deaths"] = with_a_death(given.seeds, given.gradients)
    write_record(given.out, "processes", found)
