"""A graph over the workers, and how fast it mixes."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch

from ... import topology
from ...topology.base import Topology, matrices
from .figures import COLORS, GREY, new_figure, open_axes, write

MOST_PANELS = 4


def draw_topology(graph: Topology, path: str | Path) -> Path:
    """Draws the graph (its first rounds if it changes) and the decay of the consensus error; returns the path."""
    shown = graph.order[: 1 if len(set(graph.order)) == 1 else MOST_PANELS]
    figure = new_figure("", 3.6 * len(shown) + 4.6, 4.3)
    panels = figure.subplots(1, len(shown) + 1, width_ratios=[1] * len(shown) + [1.15], squeeze=False)[0]
    gap = topology.spectral_gap(graph)
    more = "" if len(shown) == len(graph.order) or len(shown) == 1 else f" (first {len(shown)} of {len(graph.order)})"
    figure.suptitle(f"{graph.name}, {graph.workers} workers: spectral gap {gap:.4f}{more}", fontsize=12)
    for step, axes in enumerate(panels[:-1]):
        _draw_graph(axes, matrices(graph)[graph.order[step]])
        axes.set_title(f"step {step}" if len(shown) > 1 else "every step", loc="left", fontsize=10)
    _draw_consensus_error(panels[-1], graph)
    return write(figure, path)


def _draw_graph(axes: Axes, weights: np.ndarray) -> None:
    """Draws the workers on a circle, with arcs as thick as their weights."""
    workers = len(weights)
    angles = np.pi / 2 - 2 * np.pi * np.arange(workers) / max(workers, 1)
    x, y = np.cos(angles), np.sin(angles)
    crowded = workers > 24
    style = {"color": COLORS[1], "alpha": 0.35 if crowded else 0.75}
    style |= dict.fromkeys(("shrinkA", "shrinkB"), 0 if crowded else 8)
    for i, j in np.ndindex(workers, workers):
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
        x = rounds[graph.order[step % len(graph.order)]] @ x
    ratio = np.array(errors) / (errors[0] or 1.0)
    # Errors below 1e-12 are rounding; a logarithmic axis needs them positive.
    axes.semilogy(np.maximum(ratio, 1e-12), color=COLORS[1], linewidth=1.8)
    rate = topology.mixing_rate(graph)
    if rate:
        label = f"factor {rate:.3f} a step"
        line = np.maximum(rate ** np.arange(steps + 1), 1e-12)
        axes.semilogy(line, color=GREY, linewidth=1, linestyle="--")
    else:
        label = "exact after " + ("one step" if len(graph.order) == 1 else f"{len(graph.order)} steps")
    axes.text(0.98, 0.95, label, transform=axes.transAxes, ha="right", va="top", color=GREY, fontsize=9)
    axes.set_ylim(max(1e-9, min(0.3, ratio[-1] / 2)), 1.5)
    axes.set_xlabel("step")
    axes.set_title("consensus error of random models", loc="left", fontsize=10)
    open_axes(axes)
