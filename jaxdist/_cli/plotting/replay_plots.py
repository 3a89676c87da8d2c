"""The drawing of replays and of runs on processes: loss over time, staleness, what workers did with their time."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from ...asynchronous import replay
from ..spellings.replayed import staleness
from .plots import COLOURS, GREY, write

WAITING = "#D9D9D9"


def draw(runs: Sequence[tuple[str, replay.Result]], path: str | Path, *, title: str, clock: str = "virtual") -> Path:
    """Draws runs on the same clock side by side and writes a PNG.

    Args:
      runs: names and results.
      path: where the PNG goes.
      title: a line above the panels.
      clock: which: virtual, or wall.

    Returns:
      The path.
    """
    rows = len(runs)
    figure = Figure(figsize=(13.5, max(4.6, 1.3 * rows + 1.2)), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, color=GREY)
    grid = figure.add_gridspec(rows, 3, width_ratios=(1.5, 1, 1))
    loss, bins = figure.add_subplot(grid[:, 0]), _bins(runs)
    evaluated = any(len(run.losses) for _, run in runs)
    for row, (name, run) in enumerate(runs):
        color = COLOURS[row % len(COLOURS)]
        if evaluated:
            loss.plot(run.times, run.losses, color=color, linewidth=1.8, label=f"{name}   {run.losses[-1]:.3f}")
        else:
            ticks, count = run.trace.steps.tick, len(run.trace.steps)
            seconds = np.concatenate([[0], ticks / run.ticks_per_second, [run.seconds]])
            steps = np.minimum(np.arange(count + 2), count)
            loss.step(seconds, steps, color=color, linewidth=1.8, label=f"{name}   {count:,}", where="post")
        _staleness(figure.add_subplot(grid[row, 1]), run, name, color, bins, last=row == rows - 1)
        _time(figure.add_subplot(grid[row, 2]), run, color, last=row == rows - 1)
    loss.set_xlabel(f"{clock} seconds")
    loss.set_ylabel("held-out loss" if evaluated else "steps of the model")
    loss.set_title(f"loss over {clock} time" if evaluated else f"steps over {clock} time", loc="left")
    loss.grid(axis="y", color="#E6E6E6", linewidth=0.8)
    loss.spines[["top", "right"]].set_visible(False)
    loss.legend(frameon=False, labelcolor="linecolor", handlelength=0)
    figure.axes[1].set_title("staleness of gradients used", loc="left")
    figure.axes[2].set_title("computes, waits (grey), gone (hatched)", loc="left")
    return write(figure, path)


def _bins(runs: Sequence[tuple[str, replay.Result]]) -> list[int]:
    """Where the bins of staleness begin: 0, 1, 2, 4, 8, ... to the most of all runs, and one past the last."""
    most = max((int(found.max(initial=0)) for found in (staleness(name, run.trace) for name, run in runs)), default=0)
    return [0, *(1 << power for power in range(most.bit_length() + 1))]


def _staleness(axes: Axes, run: replay.Result, name: str, color: str, bins: list[int], *, last: bool) -> None:
    found = staleness(name, run.trace)
    parts = np.histogram(found, bins)[0] / max(len(found), 1)
    axes.bar(np.arange(len(parts)), parts, color=color, width=0.9)
    axes.set_yticks([0, 0.5, 1])
    axes.set_ylim(0, 1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    text = f"{name}\nmean {found.mean():.1f}, most {found.max()}" if len(found) else f"{name}\nnone"
    axes.text(1, 0.98, text, transform=axes.transAxes, ha="right", va="top", color=color, fontsize=9)
    every = 1 + len(parts) // 9
    names = [f"{low}+" if low > 1 else f"{low}" for low in bins[:-1:every]]
    axes.set_xticks(np.arange(0, len(parts), every), names if last else [])
    if last:
        axes.set_xlabel("versions between reading and use")


def _time(axes: Axes, run: replay.Result, color: str, *, last: bool) -> None:
    workers = np.arange(len(run.computing))
    gone = run.computing + run.down
    bar = {"height": 0.85 if len(workers) <= 32 else 1.0}
    axes.barh(workers, run.computing, color=color, **bar)
    axes.barh(workers, run.down, left=run.computing, color="white", edgecolor=GREY, hatch="////", linewidth=0, **bar)
    axes.barh(workers, 1 - gone, left=gone, color=WAITING, **bar)
    axes.set_xlim(0, 1)
    axes.set_ylim(len(workers) - 0.5, -0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.tick_params(labelbottom=last)
    axes.set_ylabel("worker")
    if last:
        axes.set_xlabel("part of the time")
