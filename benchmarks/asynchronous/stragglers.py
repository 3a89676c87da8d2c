"""Time to a loss when workers are uneven: every rule on the same clusters, each at its own best rate.

    python benchmarks/asynchronous stragglers --jobs 2 --out benchmarks/reports/NAME

Eight or sixteen workers on a virtual clock. A gradient takes 5 ms (lognormal), and one worker is six times slower for
good, or each gradient is six times slower with probability 1/n, or neither. Messages have their real sizes. The
learning rate of a rule in a scene is the best of its rates on a separate seed; the others count.

Where all draw from the same data, a convolutional net of 5 thousand parameters learns handwritten digits until it is
good enough. Where data differ (a Dirichlet partition of concentration 0.1), the model is softmax regression on sixteen
pixels, which cannot fit all images, so that it matters whose images count how much; runs go on for a fixed time, and
what counts is the loss then, also on the images of the slow worker alone.

Where links bind (an all-reduce takes as long as a gradient, or seven times as long), the rules are those that send
less, send later or wait for neighbors only; a code follows a rule after a slash. The model is as large, but a
perceptron, whose gradients cost this machine a twentieth.
"""

import argparse
import concurrent.futures
import functools
import json
import math
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")  # runs side by side, not threads of one

import digits_network
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdist._cli import sweep
from jaxdist._cli.commands.replay import make_task
from jaxdist._cli.models.digits import Digits, equal_parts, splits
from jaxdist._cli.spellings import parse
from jaxdist.asynchronous import Rule, durations, links, replay

BATCH, GRADIENT, SPREAD, FACTOR = 16, 5e-3, 0.2, 6
GRID, TARGET = 1e-2, 0.2
HORIZON, FIXED = 6.0, 3.0
RATES = (1.6, 0.8, 0.4, 0.2, 0.1, 0.05, 0.025, 0.0125, 0.00625)
TUNING_SEED = 100
PIECES = {"task_allocation": 4}  # gradients of a quarter of the images, which take a quarter of the time
DRAWN = "16, one slow"
FAST, SLOW = (1e-5, 1.25e9), (5e-5, 1.25e8)  # seconds and bytes a second: 10 and 1 Gbit/s
# An all-reduce of 22 kB among 16 workers takes 5 and 35 ms over 100 and 10 Mbit/s.
EQUAL, BINDING = (5e-5, 1.25e7), (5e-5, 1.25e6)


# As for `jaxdist replay`; {n} is the number of workers, {m} that of the pieces of a step, {rate} the learning rate.
METHODS = (
    "bsp",
    "pipe_sgd",
    "backup_workers:1",
    "task_allocation:{m}",
    "ssp:4",
    "asgd",
    "ringmaster:{n}",
    "rennala:{n}",
    "ringleader",
    "dude",
    "d_psgd:hypercube",
    "ad_psgd:hypercube",
    "hop:hypercube,tokens=8,backup=1,skip=8",
    "prague:4",
)
LINK_METHODS = (
    "bsp",
    "bsp/qsgd:4",
    "bsp/ef:top_k:0.01",
    "pipe_sgd",
    "pipe_sgd/qsgd:4",
    "pipe_sgd/ef:top_k:0.01",
    "delay_by_one",
    "d_psgd:ring",
    "d_psgd:relabeled-ring",
    "d_psgd:ring,order=combine_then_adapt",
    "ad_psgd:ring",
    "local_sgd:sync_period=16",
    "lasgd:sync_period=16",
    "palsgd:learning_rate={rate},sync_period=16,probability=0",
    "palsgd:learning_rate={rate},sync_period=16",
)


class Scene(NamedTuple):
    """A cluster, its data and the rules that are compared on it."""

    workers: int
    slow: str
    link: tuple[float, float] = FAST
    skew: float | None = None
    methods: tuple[str, ...] = METHODS
    hidden: int | None = None  # of a perceptron in place of the convolutional net
    rates: tuple[float, ...] = RATES


SCENES = {
    "16, even": Scene(16, "none"),
    "16, one slow": Scene(16, "one"),
    "16, random": Scene(16, "random"),
    "16, one slow, 1 Gbit/s": Scene(16, "one", SLOW),
    "8, one slow": Scene(8, "one"),
    "8, random": Scene(8, "random"),
    "8, one slow, data differ": Scene(8, "one", skew=0.1),
    "16, even, 100 Mbit/s": Scene(16, "none", EQUAL, methods=LINK_METHODS, hidden=73, rates=(3.2, *RATES)),
    "16, even, 10 Mbit/s": Scene(16, "none", BINDING, methods=LINK_METHODS, hidden=73, rates=(3.2, *RATES)),
}


class Problem(NamedTuple):
    """A task that starts from `init(key)`, held-out accuracy, and the loss on the slow worker's images."""

    task: replay.Task
    init: Callable[[Any], Any]
    accuracy: Callable[[Any], Any]
    own: Callable[[Any], Any]


def by_rate() -> optax.GradientTransformation:
    """SGD whose rate is stored with the model, so that one program serves all rates."""

    def update(updates, state, params=None):
        assert params is not None
        steps = jax.tree.map(lambda g: -params["rate"] * g, updates["model"])
        return {"model": steps, "rate": jnp.zeros(())}, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


@functools.cache
def problem_of(workers: int, skew: float | None, hidden: int | None, size: int = BATCH) -> Problem:
    if hidden is not None:
        return perceptron(hidden, size)
    return network(workers, size) if skew is None else regression(workers, skew, size)


def perceptron(hidden: int, size: int) -> Problem:
    """One hidden layer, on all digits."""
    train, held = splits()

    def loss(model: Any, batch: Digits) -> Any:
        return digits_network.losses(model, batch.images.reshape(-1, 64), batch.labels).mean()

    def draw_batch(seed: int, worker: int, job: int) -> Digits:
        chosen = np.random.default_rng((seed, worker, job)).integers(0, len(train.labels), size)
        return Digits(train.images[chosen], train.labels[chosen])

    accuracy = jax.jit(lambda model: digits_network.accuracy(model, held.images.reshape(-1, 64), held.labels))
    task = replay.Task(None, loss, draw_batch, jax.jit(lambda model: loss(model, held)))
    init = functools.partial(digits_network.network, hidden=hidden)
    return Problem(beside_a_rate(task), init, accuracy, lambda model: math.nan)


def network(workers: int, size: int) -> Problem:
    """A convolutional net on all digits."""
    workload = parse.parse_workload("digits", "convnet:8")
    plain = make_task(workload, batch=size, seed=0, workers=workers)
    _, held = splits()
    accuracy = jax.jit(lambda model: workload.metrics(model, held)["accuracy"])
    return Problem(beside_a_rate(plain), workload.init, accuracy, lambda model: math.nan)


def regression(workers: int, skew: float, size: int) -> Problem:
    """Softmax regression on images of four by four pixels, of which each worker has its own."""
    train, held = splits()
    parts = equal_parts(train.labels, workers, concentration=skew)
    mine = Digits(train.images[parts[0]], train.labels[parts[0]])

    def init(key: Any) -> Any:
        return {"kernel": jnp.zeros((16, 10)), "bias": jnp.zeros(10)}

    def logits(model: Any, batch: Digits) -> Any:
        pixels = batch.images.reshape(-1, 4, 2, 4, 2).mean((2, 4)).reshape(-1, 16)
        return 4 * pixels @ model["kernel"] + model["bias"]

    def loss(model: Any, batch: Digits) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(logits(model, batch), batch.labels).mean()

    def own_batch(seed: int, worker: int, job: int) -> Digits:
        chosen = np.random.default_rng((seed, worker, job)).choice(parts[worker], size)
        return Digits(train.images[chosen], train.labels[chosen])

    accuracy = jax.jit(lambda model: (logits(model, held).argmax(-1) == held.labels).mean())
    task = replay.Task(None, loss, own_batch, jax.jit(lambda model: loss(model, held)))
    return Problem(beside_a_rate(task), init, accuracy, jax.jit(lambda model: loss(model, mine)))


def beside_a_rate(task: replay.Task) -> replay.Task:
    """The task of a model under `"model"`, and of anything else beside it."""
    loss, evaluate = task.loss, task.evaluate
    assert evaluate is not None
    return task._replace(
        loss=lambda params, batch: loss(params["model"], batch), evaluate=lambda params: evaluate(params["model"])
    )


def law_of(scene: Scene, pieces: int = 1) -> durations.Durations:
    base = durations.lognormal(GRADIENT / pieces, SPREAD)
    if scene.slow == "one":
        return durations.one_slow(base, worker=0, factor=FACTOR)
    return durations.random_slow(base, factor=FACTOR, probability=1 / scene.workers) if scene.slow == "random" else base


def clock_of(rule: Rule, scene: Scene, rate: float, seed: int) -> replay.Simulator:
    """A simulator that has not started."""
    pieces = PIECES.get(rule.name, 1)
    problem = problem_of(scene.workers, scene.skew, scene.hidden, BATCH // pieces)
    task = problem.task._replace(params={"model": problem.init(jax.random.key(seed)), "rate": jnp.float32(rate)})
    wires = links.alpha_beta(*scene.link, nic=True)
    settings = {"workers": scene.workers, "durations": law_of(scene, pieces), "links": wires, "seed": seed}
    return replay.simulator(rule, task, evaluate_every=GRID, record_events=False, **settings)


def goal_of(scene: Scene) -> sweep.Goal:
    """The target, or a fixed time where data differ."""
    return sweep.Goal(HORIZON, TARGET) if scene.skew is None else sweep.Goal(FIXED, None)


def rule_of(name: str, scene: Scene, rate: float) -> Rule:
    spelled, _, code = name.partition("/")
    pieces = scene.workers * PIECES.get(name.partition(":")[0], 1)
    return parse.parse_rule(spelled.format(n=scene.workers, m=pieces, rate=rate), by_rate(), code or None)


def tune_rate(name: str, scene: Scene) -> tuple[float, dict[float, float]]:
    """The rate that reaches the target first, or is lowest in the end where data differ."""
    clocks = {rate: clock_of(rule_of(name, scene, rate), scene, rate, TUNING_SEED) for rate in scene.rates}
    return sweep.tune_rate(clocks, goal_of(scene))


def run(name: str, scene: Scene, rate: float, seed: int) -> dict[str, Any]:
    """One run: to the target, or for a fixed time where data differ."""
    rule = rule_of(name, scene, rate)
    result = sweep.run_to_goal(clock_of(rule, scene, rate, seed), goal_of(scene))
    reached, gradients = sweep.seconds_to(result, TARGET), result.trace.gradients
    old = sweep.staleness(name.partition("/")[0], result.trace)
    counted = float((gradients.tick <= reached * result.ticks_per_second).sum()) if np.isfinite(reached) else math.inf
    size = BATCH // PIECES.get(rule.name, 1)
    problem, model = problem_of(scene.workers, scene.skew, scene.hidden, size), result.params["model"]
    return {
        "seconds": reached,
        "samples": size * counted,
        "loss": sweep.final_loss(result),
        "slow worker's loss": float(problem.own(model)),
        "accuracy": float(problem.accuracy(model)),
        "gradients a second": len(gradients) / result.seconds,
        "staleness": float(old.mean()) if len(old) else 0.0,
        "computing": float(result.computing.mean()),
        "bytes a gradient": float(result.sent.sum() / max(1, len(gradients))),
        "curve": {
            "seconds": result.times.round(3).tolist(),
            "samples": (size * np.searchsorted(gradients.tick, result.times * result.ticks_per_second)).tolist(),
            "loss": result.losses.round(3).tolist(),
        },
    }


def measure(name: str, scene_name: str, seeds: int) -> dict[str, Any]:
    """The best rate on the tuning seed, then the seeds that count."""
    scene = SCENES[scene_name]
    rate, tuning = tune_rate(name, scene)
    runs = [run(name, scene, rate, seed) for seed in range(seeds)]
    curve = runs[0].pop("curve")
    row = {"scene": scene_name, "rule": name, "rate": rate, "tuning": tuning}
    row |= {key: [one[key] for one in runs] for key in runs[0]}
    return row | {"curve": curve} if scene_name == DRAWN else row


def plain(value: Any) -> Any:
    """Without what JSON does not know: what never happened is null."""
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [plain(one) for one in value]
    return (round(value, 5) if math.isfinite(value) else None) if isinstance(value, float) else value


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="rules side by side")
    parser.add_argument("--scenes", nargs="*", default=list(SCENES))
    parser.add_argument("--methods", nargs="*", help="of these; default: all of each scene")
    parser.add_argument("--out", type=Path, required=True, help="the folder; rows of what is not asked for stay")


def main(given: argparse.Namespace) -> None:
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / "stragglers.json"
    rows = {(row["scene"], row["rule"]): row for row in (json.loads(file.read_text()) if file.exists() else [])}
    with concurrent.futures.ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as pool:
        # Rule by rule, since a scene's last rule would leave the other processes idle.
        asked = [
            (name, scene)
            for scene in given.scenes
            for name in SCENES[scene].methods
            if given.methods is None or name in given.methods
        ]
        waiting = {pool.submit(measure, name, scene, given.seeds): (name, scene) for name, scene in asked}
        for done in concurrent.futures.as_completed(waiting):
            row = plain(done.result())
            rows[row["scene"], row["rule"]] = row
            print(json.dumps({key: value for key, value in row.items() if key != "curve"}), flush=True)
            order = [(scene, name) for scene in SCENES for name in SCENES[scene].methods]
            text = ",\n".join(json.dumps(rows[key]) for key in order if key in rows)
            file.write_text(f"[\n{text}\n]\n")
