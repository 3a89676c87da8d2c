"""The drawing of replays: loss over virtual time, staleness, and what workers did with their time."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from ..asynchronous import replay
from .plots import COLOURS, GREY, write

WAITING = "#D9D9D9"


def draw(runs: Sequence[tuple[str, replay.Result]], path: str | Path, *, title: str) -> Path:
    """Draws runs on the virtual clock side by side and writes a PNG.

    Args:
      runs: names and results.
      path: where the PNG goes.
      title: a line above the panels.

    Returns:
      The path.
    """
    rows = len(runs)
    figure = Figure(figsize=(13.5, max(4.6, 1.3 * rows + 1.2)), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, color=GREY)
    grid = figure.add_gridspec(rows, 3, width_ratios=(1.5, 1, 1))
    loss = figure.add_subplot(grid[:, 0])
    for row, (name, run) in enumerate(runs):
        colour = COLOURS[row % len(COLOURS)]
        label = f"{name}   {run.losses[-1]:.3f}" if len(run.losses) else name
        loss.plot(run.times, run.losses, color=colour, linewidth=1.8, label=label)
        _staleness(figure.add_subplot(grid[row, 1]), run, name, colour, last=row == rows - 1)
        _time(figure.add_subplot(grid[row, 2]), run, colour, last=row == rows - 1)
    loss.set_xlabel("virtual seconds")
    loss.set_ylabel("held-out loss")
    loss.set_title("loss over virtual time", loc="left")
    loss.grid(axis="y", color="#E6E6E6", linewidth=0.8)
    loss.spines[["top", "right"]].set_visible(False)
    loss.legend(frameon=False, labelcolor="linecolor", handlelength=0)
    figure.axes[1].set_title("staleness of gradients used", loc="left")
    figure.axes[2].set_title("computes, waits (grey), gone (hatched)", loc="left")
    return write(figure, path)


def _staleness(axes: Axes, run: replay.Result, name: str, colour: str, *, last: bool) -> None:
    found = replay.delays(run.trace)
    most = int(found.max()) if len(found) else 0
    bins = np.linspace(-0.5, most + 0.5, min(most + 1, 60) + 1)
    axes.hist(found, bins=bins, color=colour, weights=np.full(len(found), 1 / max(len(found), 1)))
    axes.set_xlim(-0.5, max(most, 1) + 0.5)
    axes.margins(y=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.text(1, 0.98, name, transform=axes.transAxes, ha="right", va="top", color=colour, fontsize=9)
    if last:
        axes.set_xlabel("versions between reading and use")


def _time(axes: Axes, run: replay.Result, colour: str, *, last: bool) -> None:
    workers = np.arange(len(run.computing))
    gone = run.computing + run.down
    axes.barh(workers, run.computing, color=colour, height=1)
    axes.barh(workers, run.down, left=run.computing, color="white", edgecolor=GREY, hatch="////", height=1, linewidth=0)
    axes.barh(workers, 1 - gone, left=gone, color=WAITING, height=1)
    axes.set_xlim(0, 1)
    axes.set_ylim(len(workers) - 0.5, -0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_ylabel("worker")
    if last:
        axes.set_xlabel("part of the time")
