"""What a step of the language models costs with JAX's own gradient of `x @ w`, and with that of `project`.

    taskset -c 0 python benchmarks/race weight_gradients --out benchmarks/reports/NAME

One process with one thread, as on a host of the race, trains without communication; the two steps take turns.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "links"))

import jaxdist_step  # isort: skip  # sets the threads of this process: JAX reads their number when it is imported

import jax
import jax.numpy as jnp
import optax
from common import write_record
from problems import PROBLEMS, RATES

WAYS = {"x @ w": lambda x, w: x @ w, "project(x, w)": jaxdist_step.project}
OPTIMIZER = optax.adam(RATES["lm"])


def take_step(params, opt_state, batch):
    loss, gradients = jax.value_and_grad(jaxdist_step.language_model_loss)(params, batch)
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def time_problem(name: str, turns: int, steps: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a step, the median and the fastest, and the last loss, for each of `WAYS`."""
    problem, ready = PROBLEMS[name](0), {}
    batch = jax.tree.map(jnp.asarray, problem.batches[0])
    for way, product in WAYS.items():
        jaxdist_step.project = product  # the model looks it up when it is traced
        state = jax.jit(lambda params: (params, OPTIMIZER.init(params)))(problem.params)
        # A function of its own: JAX keeps what it has traced.
        step = jax.jit(lambda params, opt_state, batch: take_step(params, opt_state, batch), donate_argnums=(0, 1))
        ready[way] = step.lower(*state, batch).compile(), state
    times: dict[str, list[float]] = {way: [] for way in ready}
    losses = {}
    for turn in range(turns):
        for way in list(ready)[:: -1 if turn % 2 else 1]:
            compiled, state = ready[way]
            for number in range(steps + 1):
                start = time.perf_counter()
                *state, loss = compiled(*state, batch)
                loss.block_until_ready()
                if number:  # the first reads what the other way has driven out of the cache
                    times[way].append(1e3 * (time.perf_counter() - start))
            ready[way], losses[way] = (compiled, state), float(loss)
    return {
        way: {"median_ms": statistics.median(found), "fastest_ms": min(found), "loss": losses[way]}
        for way, found in times.items()
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--problems", nargs="+", choices=["lm", "lm30"], default=["lm", "lm30"])
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4, help="of each way in a turn")
    parser.add_argument("--out", type=Path, help="the folder of the report")


def main(given: argparse.Namespace) -> None:
    found = {"jax": jax.__version__}
    for name in given.problems:
        found[name] = time_problem(name, given.turns, given.steps)
        for way, row in found[name].items():
            print(name, way, *(f"{key} {value:.4g}" for key, value in row.items()), flush=True)
    write_record(given.out, "weight_gradients", found)
