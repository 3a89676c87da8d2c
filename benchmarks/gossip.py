"""Decentralized methods on data that differ between workers: accuracy against an all-reduce at equal steps.

    python benchmarks/gossip.py --out benchmarks/reports/NAME

Sixteen simulated workers train a convolutional net on handwritten digits; each has its own images, mostly of one to
three digits (a Dirichlet partition of concentration 0.1; `--concentration 0.01` leaves about one digit to each). The
learning rate of each method is the best of `--rates` on a separate seed; the others count. The accuracy is that of the
mean of the workers' models, on held-out images. Rows of methods that are not asked for stay in the folder.
"""

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import digits_network
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxdist as jd
from jaxdist import topology
from jaxdist._cli.models.base import Workload
from jaxdist._cli.models.digits import digits_workload

WORKERS, TUNING_SEED = 16, 100
RATES = (0.025, 0.05, 0.1, 0.2, 0.4, 0.8)
GRAPHS = {
    "ring": topology.ring(WORKERS),
    "exponential": topology.exponential(WORKERS),
    "one-peer exponential": topology.one_peer_exponential(WORKERS),
    "path": topology.path(WORKERS),
}
STATIC, ALL = ("ring", "exponential"), ("ring", "exponential", "one-peer exponential")


class TrainState(NamedTuple):
    params: Any
    opt_state: Any
    rate: Any


class Entry(NamedTuple):
    """A method of `gossip`, or `None` for an all-reduce; inner momentum, the graphs to try, the kind of gradients."""

    method: Callable[[], Any] | None
    momentum: float = 0.0
    graphs: tuple[str, ...] = ALL
    gradients: Callable[[Any, Any], Any] = lambda loss, graph: jd.local_value_and_grad(loss)
    nesterov: bool = False


def quasi_global() -> Any:
    return jd.decentralized.quasi_global_momentum(nesterov=True)


def of_the_neighborhood(loss: Any, graph: Any) -> Any:
    return jd.decentralized.neighborhood_value_and_grad(loss, graph, data_share=1.0)


def sharp_of_the_neighborhood(loss: Any, graph: Any) -> Any:
    return jd.decentralized.neighborhood_value_and_grad(loss, graph, data_share=1.0, radius=0.05)


def choco_4_bits() -> Any:
    return jd.decentralized.choco(jd.qsgd(4), step_size=0.5)


def compressed_quasi_global() -> Any:
    return jd.decentralized.quasi_global_momentum(nesterov=True, method=choco_4_bits())


def sharp(loss: Any, graph: Any) -> Any:
    return jd.decentralized.sharpness_aware(jd.local_value_and_grad(loss), radius=0.05)


METHODS = {
    "all-reduce": Entry(None, graphs=("all",)),
    "all-reduce, momentum": Entry(None, momentum=0.9, graphs=("all",)),
    "D-PSGD": Entry(jd.decentralized.d_psgd),
    "D-PSGD, combine then adapt": Entry(lambda: jd.decentralized.d_psgd(order="combine_then_adapt")),
    "D-PSGD, local momentum": Entry(jd.decentralized.d_psgd, momentum=0.9),
    "D-PSGD, local Nesterov": Entry(jd.decentralized.d_psgd, momentum=0.9, graphs=("ring",), nesterov=True),
    "SGP": Entry(jd.decentralized.sgp),
    "D2": Entry(jd.decentralized.d2, graphs=("ring",)),
    "gradient tracking": Entry(jd.decentralized.gradient_tracking, graphs=STATIC),
    "quasi-global momentum": Entry(quasi_global),
    "Q-SADDLe": Entry(quasi_global, graphs=("ring",), gradients=sharp),
    "NGC": Entry(quasi_global, graphs=("ring",), gradients=of_the_neighborhood),
    "N-SADDLe": Entry(quasi_global, graphs=("ring",), gradients=sharp_of_the_neighborhood),
    "quasi-global momentum, 4 bits": Entry(compressed_quasi_global, graphs=("ring",)),
    "Q-SADDLe, 4 bits": Entry(compressed_quasi_global, graphs=("ring",), gradients=sharp),
    "N-SADDLe, 4 bits": Entry(compressed_quasi_global, graphs=("ring",), gradients=sharp_of_the_neighborhood),
    "CGA": Entry(
        jd.decentralized.d_psgd,
        graphs=("ring",),
        gradients=lambda *given: jd.decentralized.cross_value_and_grad(*given),
    ),
    "RelaySGD": Entry(jd.decentralized.relay_sgd, graphs=("path",)),
    "CHOCO, top 10 %": Entry(lambda: jd.decentralized.choco(jd.top_k(0.1), step_size=0.2), graphs=("ring",)),
    "CHOCO, 4 bits": Entry(choco_4_bits, graphs=("ring",)),
    "CHOCO, 4 bits, local Nesterov": Entry(choco_4_bits, momentum=0.9, graphs=("ring",), nesterov=True),
    "DCD, 8 bits": Entry(lambda: jd.decentralized.dcd_psgd(jd.qsgd(8)), graphs=("ring",)),
    "ECD, 8 bits": Entry(lambda: jd.decentralized.ecd_psgd(jd.qsgd(8)), graphs=("ring",)),
}


def with_perceptron(workload: Workload, hidden: int) -> Workload:
    """The same data, and a model that costs a twentieth."""

    def metrics(params: Any, batch: Any) -> dict[str, Any]:
        images = batch.images.reshape(-1, 64)
        mean = digits_network.losses(params, images, batch.labels).mean()
        return {"loss": mean, "accuracy": digits_network.accuracy(params, images, batch.labels)}

    init = functools.partial(digits_network.network, hidden=hidden)
    return workload._replace(init=init, loss=lambda params, batch: metrics(params, batch)["loss"], metrics=metrics)


def by_rate(momentum: float, nesterov: bool = False) -> optax.GradientTransformationExtraArgs:
    """SGD whose rate is an argument of the update, so that one program serves all rates."""

    def update(updates, state, params=None, **given):
        del params
        learning_rate = given["learning_rate"]
        state = jax.tree.map(lambda m, g: momentum * m + g, state, updates)
        steps = jax.tree.map(lambda m, g: g + momentum * m, state, updates) if nesterov else state
        return jax.tree.map(lambda m: -learning_rate * m, steps), state

    return optax.GradientTransformationExtraArgs(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def trainer(
    tx: Any, workload: Any, gradient: Any, *, local: bool, steps: int, batch: int
) -> Callable[[int, float], tuple]:
    """`run(seed, rate)`: the accuracy of the mean model, the mean of the models' accuracies, and their distance."""

    def step(state: TrainState, rows: Any) -> tuple[TrainState, dict]:
        gradients = gradient(state.params, rows)[1]
        updates, opt_state = tx.update(gradients, state.opt_state, state.params, learning_rate=state.rate)
        return TrainState(optax.apply_updates(state.params, updates), opt_state, state.rate), {}

    many = jax.jit(jd.simulate(step, workers=WORKERS), donate_argnums=0)
    held = workload.held_out(360)[0]
    accuracy = jax.jit(lambda params: workload.metrics(params, held)["accuracy"])
    each = jax.jit(jax.vmap(lambda params: workload.metrics(params, held)["accuracy"]))

    def run(seed: int, rate: float) -> tuple[float, float, float]:
        params = workload.init(jax.random.key(seed))
        state = TrainState(jd.PerWorker(params) if local else params, tx.init(params), jnp.zeros(()))
        state = jd.place(state, WORKERS)
        for i in range(steps):
            # Down to nothing in the last quarter, as one trains.
            state = state._replace(rate=jnp.float32(rate * min(1.0, 4 * (1 - i / steps))))
            state, _ = many(state, workload.batch(seed, i, batch))
        if not local:
            return float(accuracy(state.params)), float(accuracy(state.params)), 0.0
        mean = float(accuracy(jd.consensus(state.params)))
        apart = float(jd.decentralized.consensus_distance(state.params))
        return mean, float(each(state.params.value).mean()), apart

    return run


def trainer_of(entry: Entry, graph: str, workload: Any, **sizes: int) -> Callable[[int, float], tuple]:
    """The program of a method on a graph, or of an all-reduce."""
    inner = by_rate(entry.momentum, entry.nesterov)
    if entry.method is None:
        tx = optax.chain(jd.all_reduce(jd.exact()), inner)
        return trainer(tx, workload, jd.local_value_and_grad(workload.loss), local=False, **sizes)
    tx = jd.gossip(inner, GRAPHS[graph], method=entry.method())
    return trainer(tx, workload, entry.gradients(workload.loss, GRAPHS[graph]), local=True, **sizes)


def measure(name: str, graph: str, run: Callable[[int, float], tuple], rates: list[float], seeds: int) -> dict:
    tuned = {rate: run(TUNING_SEED, rate)[0] for rate in rates}
    rate = max(tuned, key=lambda rate: (tuned[rate], -rate))
    found = np.array([run(seed, rate) for seed in range(seeds)])
    row = {"method": name, "graph": graph, "rate": rate, "tuning": tuned, "accuracy": found[:, 0].tolist()}
    row |= {"accuracy of each": found[:, 1].tolist(), "distance": found[:, 2].tolist()}
    print(json.dumps(row), flush=True)
    return row


def table(rows: list[dict]) -> str:
    lines = ["| method | graph | rate | mean model | mean of the models | distance |", "|---|---|--:|--:|--:|--:|"]
    for row in rows:
        mean, each = (100 * np.array(row[key]) for key in ("accuracy", "accuracy of each"))
        cells = f"{mean.mean():.1f} ±{(mean.max() - mean.min()) / 2:.1f} | {each.mean():.1f}"
        lines.append(f"| {row['method']} | {row['graph']} | {row['rate']} | {cells} | {np.mean(row['distance']):.2f} |")
    return "\n".join(lines)


def draw(rows: list[dict], path: Path) -> None:
    """One line a method and graph: the range over seeds and its mean."""
    figure, axes = plt.subplots(figsize=(8, 0.32 * len(rows) + 1), layout="constrained")
    colors = {"all": "black", "ring": "#1b6ca8", "exponential": "#d1495b", "one-peer exponential": "#edae49"}
    for at, row in enumerate(reversed(rows)):
        values = 100 * np.array(row["accuracy"])
        color = colors.get(row["graph"], "#5b8c5a")
        axes.plot([values.min(), values.max()], [at, at], color=color, linewidth=2)
        axes.plot([values.mean()], [at], "o", color=color)
    names = [f"{row['method']} ({row['graph']})" if row["graph"] != "all" else row["method"] for row in rows]
    axes.set_yticks(range(len(rows)), reversed(names))
    axes.axvline(100 * np.mean(rows[0]["accuracy"]), color="black", linewidth=0.5, linestyle=":")
    axes.set_xlabel("held-out accuracy of the mean model, %")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=256, help="images in a step, all workers together")
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--hidden", type=int, help="a perceptron with a layer of this width, in place of convolutions")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="*", default=list(RATES))
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--graphs", nargs="*", default=list(GRAPHS))
    parser.add_argument("--concentration", type=float, default=0.1, help="of the Dirichlet partition")
    parser.add_argument("--out", type=Path, help="the folder of the report")
    given = parser.parse_args()
    workload = digits_workload(given.width, workers=WORKERS, concentration=given.concentration)
    if given.hidden:
        workload = with_perceptron(workload, given.hidden)
    sizes = {"steps": given.steps, "batch": given.batch}
    file = given.out / "gossip.json" if given.out else None
    earlier = json.loads(file.read_text()) if file and file.exists() else []
    rows = {(row["method"], row["graph"]): row for row in earlier}
    order = [(name, graph) for name, entry in METHODS.items() for graph in entry.graphs]
    for name, graph in order:
        if name not in given.methods or graph not in ("all", *given.graphs):
            continue
        run = trainer_of(METHODS[name], graph, workload, **sizes)
        rows[name, graph] = measure(name, graph, run, given.rates, given.seeds)
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps([rows[key] for key in order if key in rows], indent=1) + "\n")
    found = [rows[key] for key in order if key in rows]
    print(table(found))
    if given.out:
        (given.out / "gossip.md").write_text(table(found) + "\n")
        draw(found, given.out / "gossip.png")


if __name__ == "__main__":
    main()
