"""`jaxdist topology`: a graph over the workers, in numbers and as a picture."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch

from ... import topology
from ...topology.base import Topology, matrices
from ...wire.mixing import is_mean
from ..figures import COLORS, GREY, label, new_figure, open_axes, write
from ..running import path_in
from ..spellings.tables import GRAPHS, find_graph

MOST_PANELS = 4
MOST_WORKERS = 4096


@dataclass(frozen=True)
class TopologyOptions:
    """Shows a graph over the workers, and how fast it mixes.

    Examples:
      jaxdist topology ring --workers 16 --png
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="GRAPH", help=", ".join(GRAPHS))]
    workers: int = 16
    """Number of workers."""
    png: bool = False
    """Draw the graph, and the decay of the consensus error."""
    out: Path = Path("runs/topology")
    """Folder of NAME-WORKERS.png."""


def run_topology(chosen: TopologyOptions) -> None:
    """Prints the properties of a graph, and draws it with `--png`."""
    if chosen.workers > MOST_WORKERS:
        raise ValueError(f"--workers must be at most {MOST_WORKERS}: all pairs have a weight, got {chosen.workers}")
    graph = find_graph(chosen.name)(chosen.workers)
    lines = [f"{graph.name}, {graph.workers} workers"]
    lines += [f"  {name}: {value}" for name, value in _list_properties(graph).items()]
    if chosen.png:
        path = path_in(chosen.out, f"{chosen.name}-{chosen.workers}.png")
        lines.append(f"figure: {draw_topology(graph, path)}")
    print("\n".join(lines))


def _list_properties(graph: Topology) -> dict[str, str]:
    # A round that averages all workers is one all-reduce, which sends 2(W-1)/W models per worker.
    mean, workers = 2 * (graph.workers - 1), graph.workers
    models = [mean if is_mean(r, workers) else sum(len(m.pairs) for m in r.messages) for r in graph.rounds]
    sent = [models[number] for number in graph.order]
    rate = topology.mixing_rate(graph)
    properties = {
        "rounds": str(len(graph.order)),
        "models sent by a worker in a step": f"{np.mean(sent) / graph.workers:.2f}",
        "consensus error after a step": f"{rate:.4f} of it",
        "spectral gap": f"{1 - rate:.4f}",
    }
    if topology.is_symmetric(graph):
        properties["least eigenvalue"] = f"{topology.smallest_eigenvalue(graph):.4f}"
    return properties


def draw_topology(graph: Topology, path: str | Path) -> Path:
    """Draws the graph (its first rounds if it changes) and the decay of the consensus error; returns the path."""
    # A graph that is the same in every step needs one panel.
    shown = graph.order[: 1 if len(set(graph.order)) == 1 else MOST_PANELS]
    figure = new_figure("", 3.6 * len(shown) + 4.6, 4.3)
    panels = figure.subplots(1, len(shown) + 1, width_ratios=[1] * len(shown) + [1.15], squeeze=False)[0]
    gap = topology.spectral_gap(graph)
    more = "" if len(shown) == len(graph.order) or len(shown) == 1 else f" (first {len(shown)} of {len(graph.order)})"
    figure.suptitle(f"{graph.name}, {graph.workers} workers: spectral gap {gap:.4f}{more}", fontsize=12)
    for step, axes in enumerate(panels[:-1]):
        _draw_graph(axes, matrices(graph)[graph.order[step]])
        label(axes, f"step {step}" if len(shown) > 1 else "every step", size=10)
    _draw_consensus_error(panels[-1], graph)
    return write(figure, path)


def _draw_graph(axes: Axes, weights: np.ndarray) -> None:
    """Draws the workers on a circle, with arcs as thick as their weights."""
    workers = len(weights)
    # Clockwise from the top, as on a clock.
    angles = np.pi / 2 - 2 * np.pi * np.arange(workers) / max(workers, 1)
    x, y = np.cos(angles).tolist(), np.sin(angles).tolist()
    crowded = workers > 24
    style: dict[str, Any] = {"color": COLORS[1], "alpha": 0.35 if crowded else 0.75}
    style |= dict.fromkeys(("shrinkA", "shrinkB"), 0 if crowded else 8)
    for i, j in np.ndindex(workers, workers):
        # A link in both directions is drawn once, without a head.
        both_ways = bool(weights[j, i])
        if i == j or not weights[i, j] or (both_ways and j < i):
            continue
        # Shallow arcs, so that no link passes through the workers between its ends.
        arrow = FancyArrowPatch(
            (x[j], y[j]),
            (x[i], y[i]),
            arrowstyle="-" if both_ways else "-|>,head_length=4,head_width=2",
            connectionstyle="arc3,rad=0.08",
            linewidth=0.5 + 2 * float(weights[i, j]),
            **style,
        )
        axes.add_patch(arrow)
    axes.scatter(x, y, s=40 if crowded else 260, color=COLORS[2], zorder=3, edgecolors="white")
    if not crowded:
        for i in range(workers):
            axes.text(x[i], y[i], str(i), ha="center", va="center", fontsize=9, zorder=4)
    axes.set(xlim=(-1.25, 1.25), ylim=(-1.25, 1.25), aspect="equal")
    axes.axis("off")


def _draw_consensus_error(axes: Axes, graph: Topology) -> None:
    """Draws the consensus error of random models beside the rate that theory gives."""
    steps = 40
    rng = np.random.default_rng(0)
    x = rng.standard_normal((graph.workers, 256))
    rounds, errors = matrices(graph), []
    for step in range(steps + 1):
        errors.append(np.linalg.norm(x - x.mean(0)))
        # x ← W x: one round of gossip.
        x = rounds[graph.order[step % len(graph.order)]] @ x
    ratio = np.array(errors) / (errors[0] or 1.0)
    # Errors below 1e-12 are rounding; a logarithmic axis needs them positive.
    axes.semilogy(np.maximum(ratio, 1e-12), color=COLORS[1], linewidth=1.8)
    rate = topology.mixing_rate(graph)
    if rate:
        text = f"factor {rate:.3f} a step"
        line = np.maximum(rate ** np.arange(steps + 1), 1e-12)
        axes.semilogy(line, color=GREY, linewidth=1, linestyle="--")
    else:
        # A rate of zero: one period of the graph gives the mean itself.
        text = "exact after " + ("one step" if len(graph.order) == 1 else f"{len(graph.order)} steps")
    axes.text(0.98, 0.95, text, transform=axes.transAxes, ha="right", va="top", color=GREY, fontsize=9)
    lowest = max(1e-9, min(0.3, ratio[-1] / 2))
    label(axes, "consensus error of random models", size=10, xlabel="step", ylim=(lowest, 1.5))
    open_axes(axes)
