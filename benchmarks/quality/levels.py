"""Codes with fixed and with adapted levels on real data: accuracy, loss, and how far the mean gradient is off.

    python benchmarks/quality levels --out benchmarks/reports/NAME

Four simulated workers train a small convolutional network on scikit-learn's digits by SGD with momentum. All gradients
span buckets over the whole network. Every method starts from the same parameters and sees the same batches, for each
of the seeds; nothing else differs. `error` is `|mean - exact mean|² / |exact mean|²` of the reduction, averaged over
the steps: what quantization adds to the gradient's own noise.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdist as jd
from jaxdist._cli.models.digits import digits_workload

WORKERS = 4


class State(NamedTuple):
    params: Any
    reducer: Any
    optimizer: Any


def methods(bits: int, bucket: int, every: int) -> dict[str, Callable[[], jd.reducers.Reducer]]:
    """In capitals: the names of the papers."""
    rounding = {"bits": bits, "bucket": bucket}
    when = {"update_steps": (every // 5,), "every": every}

    def make_fixed(code):
        return lambda: jd.reducers.bucketed(jd.compressed(code), bucket_bytes=1 << 40, first_bucket_bytes=None)

    def alq(**options):
        return lambda: jd.reducers.alq(**rounding, **when, **options)

    def amq(**options):
        return lambda: jd.reducers.amq(**rounding, **when, **options)

    without_zero = jd.compressors.with_levels(np.linspace(-1, 1, 2**bits), **rounding, norm="max", zero_level=False)
    paper = {"norm": "l2", "block": bucket}
    blocks = {"norm": "l2"}
    return {
        "exact mean": jd.exact,
        "alq": alq(),
        "alq, L2 norm": alq(norm="l2"),
        "alq, coordinate": alq(solver="coordinate"),
        "ALQ with blocks": alq(solver="coordinate", **blocks),
        "ALQ-N with blocks": alq(solver="coordinate", norm_power=0, **blocks),
        "ALQ of the paper": alq(solver="coordinate", **paper),
        "ALQ-N of the paper": alq(solver="coordinate", norm_power=0, **paper),
        "amq": amq(),
        "AMQ with blocks": amq(**blocks),
        "AMQ-N with blocks": amq(norm_power=0, **blocks),
        "AMQ of the paper": amq(**paper),
        "QSGDinf": make_fixed(jd.qsgd(bits, bucket=bucket)),
        "QSGDinf without zero": make_fixed(without_zero),
        "QSGD": make_fixed(jd.qsgd(bits, bucket=bucket, norm="l2")),
        "TernGrad without clipping (2 bits)": make_fixed(jd.qsgd(2, bucket=bucket)),
        "NUQSGD": make_fixed(jd.compressors.nuqsgd(bits, bucket=bucket)),
        "NUQSGD without zero": make_fixed(jd.compressors.nuqsgd(bits, bucket=bucket, zero_level=False)),
    }


def square(tree: Any) -> Any:
    return sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree))


def program(
    workload: Any, reducer: jd.reducers.Reducer, optimizer: optax.GradientTransformation
) -> tuple[Callable, Callable]:
    """`make_state(seed)` and the compiled step."""

    def make_state(seed):
        params = workload.init(jax.random.key(seed))
        return jd.init_state(lambda: State(params, reducer.init(params), optimizer.init(params)), WORKERS)

    def step(state, batch):
        loss, gradients = jd.local_value_and_grad(workload.loss)(state.params, batch)
        comm = jd.comm.over("data")
        reduced, kept = reducer.reduce(gradients, state.reducer, comm)
        exact = comm.mean(gradients)
        error = square(jax.tree.map(jnp.subtract, reduced.mean, exact)) / square(exact)
        updates, optimizer_state = optimizer.update(reduced.mean, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(params, kept, optimizer_state), {"loss": comm.mean(loss), "error": error}

    return make_state, jd.simulate(step, WORKERS)


def measure(name: str, reducer: jd.reducers.Reducer, workload: Any, given: argparse.Namespace) -> dict[str, Any]:
    start = time.perf_counter()
    make_state, step = program(workload, reducer, optax.sgd(given.rate, momentum=0.9))
    evaluate = jax.jit(workload.metrics)
    runs = []
    for seed in range(given.seeds):
        state, losses, errors = make_state(seed), [], []
        for number in range(given.steps):
            state, metrics = step(state, workload.batch(seed, number, given.batch))
            losses.append(metrics["loss"])
            errors.append(metrics["error"])
        found = [evaluate(state.params, batch) for batch in workload.held_out(360)]
        held_out = jax.tree.map(lambda *values: float(np.mean(values)), *found)
        runs.append(
            {
                "accuracy": held_out["accuracy"],
                "loss": held_out["loss"],
                "training_loss": float(np.mean([float(loss) for loss in losses[-given.steps // 5 :]])),
                "error": float(np.mean([float(error) for error in errors])),
            }
        )
    levels = np.asarray(state.reducer.levels).tolist() if hasattr(state.reducer, "levels") else None
    return {"method": name, "runs": runs, "levels": levels, "seconds": time.perf_counter() - start}


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| method | held-out accuracy | held-out loss | training loss | error |", "|---|--:|--:|--:|--:|"]
    for row in rows:
        values = {key: np.array([run[key] for run in row["runs"]]) for key in row["runs"][0]}
        accuracy = 100 * values["accuracy"]
        cells = [
            f"{accuracy.mean():.1f} % ({accuracy.min():.1f} to {accuracy.max():.1f})",
            f"{values['loss'].mean():.3f}",
            f"{values['training_loss'].mean():.3f}",
            f"{values['error'].mean():.3g}",
        ]
        lines.append(f"| {row['method']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bits", type=int, default=3)
    parser.add_argument("--bucket", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64, help="images in a step, all workers together")
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--width", type=int, default=16, help="of the network, which has about 80 width² parameters")
    parser.add_argument("--every", type=int, default=25, help="steps between fits of the levels")
    parser.add_argument("--out", type=Path, help="the folder of the report")


def main(given: argparse.Namespace) -> None:
    workload = digits_workload(given.width)
    rows = []
    for name, make in methods(given.bits, given.bucket, given.every).items():
        rows.append(measure(name, make(), workload, given))
        print(table(rows[-1:]).splitlines()[-1], f"{rows[-1]['seconds']:.0f} s", flush=True)
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        settings = {key: value for key, value in vars(given).items() if key != "out"} | {"workers": WORKERS}
        found = {"settings": settings, "methods": rows, "jax": jax.__version__}
        # What diverged has no numbers.
        (given.out / "quality_levels.json").write_text(json.dumps(found, indent=1).replace("NaN", "null") + "\n")
        (given.out / "quality_levels.md").write_text(table(rows) + "\n")
