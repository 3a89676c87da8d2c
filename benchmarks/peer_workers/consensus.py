"""Two problems of BlueFog's tutorial with the rules of `jaxdist.decentralized`, on many draws of their data.

    python benchmarks/peers.py consensus --out benchmarks/reports/NAME

The tutorial shows one draw in two figures, which are the published results:

- section 3.5: eight workers with 20 equations in 5 unknowns each; diffusion (adapt, then combine) at rate 3e-3 stops at
  an error that the graph decides: 2.1e-3 on the ring and 7.6e-4 on the exponential graph.
- section 4.3: a ring of workers with 2,000 equations in 25 unknowns each; exact diffusion at rate 2e-4 has an error of
  1e-10 after about 97 iterations, and of 3e-15 in the end. It does not say how many; eight are assumed, as in 3.5.

Errors are relative, `|x - x*| / |x*|`. Source: github.com/Bluefog-Lib/bluefog-tutorial (a9b3713, 2021), "Sec-3.5" and
"Sec-4.3"; read from the figures.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import write_record

import jaxdist as jd
from jaxdist import topology

STEPS = 200
# Workers, equations of each, unknowns, whether all share one solution, and the rate.
BIAS, EXACT = (8, 20, 5, True, 3e-3), (8, 2000, 25, False, 2e-4)
CASES = (
    ("diffusion, ring", BIAS, topology.ring(8), jd.decentralized.d_psgd, 2.1e-3),
    ("diffusion, exponential", BIAS, topology.exponential(8), jd.decentralized.d_psgd, 7.6e-4),
    ("exact diffusion, ring", EXACT, topology.ring(8), jd.decentralized.d2, 3e-15),
    ("our d2, ring, on the first problem", BIAS, topology.ring(8), jd.decentralized.d2, None),
    ("our gradient tracking, ring, on the first problem", BIAS, topology.ring(8), "tracking", None),
)


def draw(problem: tuple, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Matrices `[w, m, n]`, right sides `[w, m]` and the solution of all equations together, `[n]`."""
    workers, m, n, shared, _ = problem
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((workers, m, n))
    # In the second problem every worker's equations have a solution of their own.
    x = np.broadcast_to(rng.standard_normal(n), (workers, n)) if shared else rng.standard_normal((workers, n))
    b = np.einsum("wmn,wn->wm", a, x) + 0.1 * rng.standard_normal((workers, m))
    return a, b, np.linalg.lstsq(a.reshape(-1, n), b.reshape(-1), rcond=None)[0]


def recursion(problem: tuple, graph: Any, method: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """BlueFog's recursions as its tutorial writes them, in NumPy: the models of all workers at the end."""
    mixing, rate = topology.matrix(graph), problem[-1]
    x = before = np.zeros((problem[0], problem[2]))
    for _ in range(STEPS):
        psi = x - rate * np.einsum("wmn,wm->wn", a, np.einsum("wmn,wn->wm", a, x) - b)
        # Exact diffusion adds the correction x - ψ of the step before.
        x, before = mixing @ (psi + x - before if method == "d2" else psi), psi
    return x


def errors(problem: tuple, graph: Any, method: Any, a: Any, b: Any, solution: Any) -> tuple[Any, Any]:
    """The error of worker 0 after each step, `[draws, steps]`, and the models at the end."""
    tx = jd.gossip(optax.sgd(problem[-1]), graph, method=method)

    def worker(a, b, solution):
        def step(carry, _):
            x, state = carry
            updates, state = tx.update(a.T @ (a @ x - b), state, x)
            x = x + updates
            return (x, state), jnp.linalg.norm(x - solution) / jnp.linalg.norm(solution)

        x = jnp.zeros(problem[2])
        (x, _), found = jax.lax.scan(step, (x, tx.init(x)), length=STEPS)
        return found, x

    workers = jax.vmap(worker, axis_name="data", in_axes=(0, 0, None))
    # One draw after the other: all at once would need memory for hundreds of problems.
    found, models = jax.lax.map(lambda drawn: workers(*drawn), (a, b, solution))
    return found[:, 0], models


def measure(draws: int) -> dict[str, Any]:
    """The error at the end for every rule and graph: median and middle eight tenths of the draws, in float64."""
    jax.config.update("jax_enable_x64", True)
    rows = []
    for name, problem, graph, method, published in CASES:
        made = jd.decentralized.gradient_tracking() if method == "tracking" else method()
        drawn = [np.stack(parts) for parts in zip(*(draw(problem, seed) for seed in range(draws)))]
        found, models = jax.device_get(jax.jit(partial(errors, problem, graph, made))(*drawn))
        row = {"rule": name, "published": published, "draws": draws}
        low, middle, high = np.quantile(found[:, -1], (0.1, 0.5, 0.9)).tolist()
        row |= {"low": low, "median": middle, "high": high}
        reached = (found <= 1e-10).any(1)
        row["steps_to_1e-10"] = float(np.median((found <= 1e-10).argmax(1))) if reached.all() else None
        if published is not None:
            kind = "d2" if method is jd.decentralized.d2 else "d_psgd"
            other = [recursion(problem, graph, kind, a, b) for a, b in zip(*drawn[:2])]
            row["largest_difference"] = float(np.abs(models - np.stack(other)).max())
        rows.append(row)
        print(row, flush=True)
    return {"rows": rows, "steps": STEPS}


def make_table(found: dict[str, Any]) -> str:
    lines = [
        "Two least-squares problems of BlueFog's tutorial (github.com/Bluefog-Lib/bluefog-tutorial, sections 3.5",
        "and 4.3), whose figures show one draw of the data: relative error of worker 0 after",
        f"{found['steps']} steps, float64, on {found['rows'][0]['draws']} draws. *Difference* is the largest between",
        "our models and BlueFog's recursion, as its tutorial writes it, in NumPy on the same draws. BlueFog 0.3.0",
        "builds only with MPI, which this machine has not (`Cannot find MPI command`): its speed is not compared. In",
        "the tutorial's figure exact diffusion needs about 97 steps to 1e-10; it does not say for how many workers;",
        "eight are taken here.",
        "",
        "| rule | BlueFog's figure | ours, median | middle 80 % of draws | difference | steps to 1e-10 |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in found["rows"]:
        published = f"{row['published']:.1e}" if row["published"] else ""
        difference = f"{row['largest_difference']:.0e}" if "largest_difference" in row else ""
        steps = f"{row['steps_to_1e-10']:.0f}" if row["steps_to_1e-10"] is not None else ""
        lines.append(
            f"| {row['rule']} | {published} | {row['median']:.1e} | {row['low']:.1e} to {row['high']:.1e} | "
            f"{difference} | {steps} |"
        )
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--draws", type=int, default=30, help="of the data")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the report")


def main(given: argparse.Namespace) -> None:
    found = measure(given.draws)
    write_record(given.out, "consensus", found, make_table(found))
    print(make_table(found))
