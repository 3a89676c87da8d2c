"""A graph over the workers as a picture, with how fast it mixes."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from ... import topology
from ...topology.base import Topology, matrices
from ...wire.mixing import is_mean
from .plots import COLOURS, GREY, write

MAKE: dict[str, Callable[[int], Topology]] = {
    "ring": topology.ring,
    "directed-ring": lambda workers: topology.ring(workers, directed=True),
    "torus": topology.torus,
    "hypercube": topology.hypercube,
    "complete": topology.complete,
    "exponential": topology.exponential,
    "one-peer-exponential": topology.one_peer_exponential,
    "random-matchings": topology.random_matchings,
    "relabelled-ring": topology.relabelled_ring,
    "matcha-ring": lambda workers: topology.matcha(topology.ring(workers)),
    "matcha-complete": lambda workers: topology.matcha(topology.complete(workers)),
    "shift-one": topology.shift_one,
    "star": topology.star,
    "path": topology.path,
    "binary-tree": topology.binary_tree,
}
MOST_PANELS = 4


def facts(graph: Topology) -> dict[str, str]:
    """What there is to know about a graph, for printing."""
    # The mean of all is one all-reduce, of 2(W-1)/W models.
    models = [
        2 * (graph.workers - 1) if is_mean(one, graph.workers) else sum(len(message.pairs) for message in one.messages)
        for one in graph.rounds
    ]
    sent = [models[which] for which in graph.order]
    rate = topology.mixing_rate(graph)
    out = {
        "rounds": str(len(graph.order)),
        "models sent by a worker in a step": f"{np.mean(sent) / graph.workers:.2f}",
        "consensus error after a step": f"{rate:.4f} of it",
        "spectral gap": f"{1 - rate:.4f}",
    }
    if topology.is_symmetric(graph):
        out["least eigenvalue"] = f"{topology.smallest_eigenvalue(graph):.4f}"
    return out


def draw(graph: Topology, path: str | Path) -> Path:
    """Draws the graph, its first rounds if it changes, and how the consensus error falls, and writes a PNG.

    Args:
      graph: any topology.
      path: where the PNG goes.

    Returns:
      The path.
    """
    shown = graph.order[: 1 if len(set(graph.order)) == 1 else MOST_PANELS]
    figure = Figure(figsize=(3.6 * len(shown) + 4.6, 4.3), layout="constrained")
    panels = figure.subplots(1, len(shown) + 1, width_ratios=[1] * len(shown) + [1.15], squeeze=False)[0]
    gap = topology.spectral_gap(graph)
    more = "" if len(shown) == len(graph.order) or len(shown) == 1 else f" (first {len(shown)} of {len(graph.order)})"
    figure.suptitle(f"{graph.name}, {graph.workers} workers: spectral gap {gap:.4f}{more}", fontsize=12)
    for step, axes in enumerate(panels[:-1]):
        _draw_graph(axes, matrices(graph)[graph.order[step]])
        axes.set_title(f"step {step}" if len(shown) > 1 else "every step", loc="left", fontsize=10)
    _draw_error(panels[-1], graph)
    return write(figure, path)


def _draw_graph(axes: Axes, weights: np.ndarray) -> None:
    workers = len(weights)
    angles = np.pi / 2 - 2 * np.pi * np.arange(workers) / max(workers, 1)
    x, y = np.cos(angles), np.sin(angles)
    crowded = workers > 24
    for i in range(workers):
        for j in range(workers):
            if i == j or not weights[i, j] or (weights[j, i] and j < i):
                continue
            both = bool(weights[j, i])
            # Shallow arcs, so that no link runs through the workers between its ends.
            style = "-" if both else "-|>,head_length=4,head_width=2"
            arrow = FancyArrowPatch(
                (x[j], y[j]),
                (x[i], y[i]),
                arrowstyle=style,
                connectionstyle="arc3,rad=0.08",
                color=COLOURS[1],
                linewidth=0.5 + 2 * float(weights[i, j]),
                alpha=0.35 if crowded else 0.75,
                shrinkA=0 if crowded else 8,
                shrinkB=0 if crowded else 8,
            )
            axes.add_patch(arrow)
    axes.scatter(x, y, s=40 if crowded else 260, color=COLOURS[2], zorder=3, edgecolors="white")
    if not crowded:
        for i in range(workers):
            axes.text(x[i], y[i], str(i), ha="center", va="center", fontsize=9, zorder=4)
    axes.set(xlim=(-1.25, 1.25), ylim=(-1.25, 1.25), aspect="equal")
    axes.axis("off")


def _draw_error(axes: Axes, graph: Topology) -> None:
    """Of a random start, against the rate that theory gives."""
    steps = 40
    rng = np.random.default_rng(0)
    x = rng.standard_normal((graph.workers, 256))
    different, errors = matrices(graph), []
    for step in range(steps + 1):
        errors.append(np.linalg.norm(x - x.mean(0)))
        x = different[graph.order[step % len(graph.order)]] @ x
    ratio = np.array(errors) / (errors[0] or 1.0)
    axes.semilogy(np.maximum(ratio, 1e-12), color=COLOURS[1], linewidth=1.8)
    rate = topology.mixing_rate(graph)
    label = (
        f"factor {rate:.3f} a step"
        if rate
        else "exact after " + ("one step" if len(graph.order) == 1 else f"{len(graph.order)} steps")
    )
    if rate:
        line = np.maximum(rate ** np.arange(steps + 1), 1e-12)
        axes.semilogy(line, color=GREY, linewidth=1, linestyle="--")
    axes.text(0.98, 0.95, label, transform=axes.transAxes, ha="right", va="top", color=GREY, fontsize=9)
    axes.set_ylim(max(1e-9, min(0.3, ratio[-1] / 2)), 1.5)
    axes.set_xlabel("step")
    axes.set_title("consensus error of random models", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
