"""Runs of asynchronous rules: loss over time, staleness, and the share of time that workers compute."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from ...asynchronous import replay
from ..training.asynchronous import staleness
from .figures import GREY, color_of, new_figure, open_axes, write

WAITING = "#D9D9D9"


def draw_replays(
    runs: Sequence[tuple[str, replay.Result]], path: str | Path, *, title: str, clock: str = "virtual"
) -> Path:
    """Draws runs on the same clock side by side.

    Args:
      runs: names and results.
      path: the PNG to write.
      title: a line above the panels.
      clock: the kind of clock: `"virtual"` or `"wall"`.

    Returns:
      The path.
    """
    rows = len(runs)
    figure = new_figure(title, 13.5, max(4.6, 1.3 * rows + 1.2))
    grid = figure.add_gridspec(rows, 3, width_ratios=(1.5, 1, 1))
    loss, bins = figure.add_subplot(grid[:, 0]), _staleness_bins(runs)
    evaluated = any(len(run.losses) for _, run in runs)
    for row, (name, run) in enumerate(runs):
        color, last = color_of(row), row == rows - 1
        if evaluated:
            loss.plot(run.times, run.losses, color=color, linewidth=1.8, label=f"{name}   {run.losses[-1]:.3f}")
        else:
            ticks, count = run.trace.steps.tick, len(run.trace.steps)
            seconds = np.concatenate([[0], ticks / run.ticks_per_second, [run.seconds]])
            steps = np.minimum(np.arange(count + 2), count)
            loss.step(seconds, steps, color=color, linewidth=1.8, label=f"{name}   {count:,}", where="post")
        _draw_staleness(figure.add_subplot(grid[row, 1]), run, name, color, bins, last=last)
        _draw_time(figure.add_subplot(grid[row, 2]), run, color, last=last)
    loss.set_xlabel(f"{clock} seconds")
    loss.set_ylabel("held-out loss" if evaluated else "steps of the model")
    loss.set_title(f"loss over {clock} time" if evaluated else f"steps over {clock} time", loc="left")
    loss.grid(axis="y", color="#E6E6E6", linewidth=0.8)
    open_axes(loss)
    loss.legend(frameon=False, labelcolor="linecolor", handlelength=0)
    figure.axes[1].set_title("staleness of gradients used", loc="left")
    figure.axes[2].set_title("computes, waits (grey), gone (hatched)", loc="left")
    return write(figure, path)


def _staleness_bins(runs: Sequence[tuple[str, replay.Result]]) -> list[int]:
    """The starts of the bins, 0, 1, 2, 4, 8, ..., up to the largest staleness of all runs, and one past the last."""
    most = max((int(staleness(name, run.trace).max(initial=0)) for name, run in runs), default=0)
    return [0, *(1 << power for power in range(most.bit_length() + 1))]


def _draw_staleness(axes: Axes, run: replay.Result, name: str, color: str, bins: list[int], *, last: bool) -> None:
    found = staleness(name, run.trace)
    shares = np.histogram(found, bins)[0] / max(len(found), 1)
    axes.bar(np.arange(len(shares)), shares, color=color, width=0.9)
    axes.set_yticks([0, 0.5, 1])
    axes.set_ylim(0, 1)
    open_axes(axes)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    text = f"{name}\nmean {found.mean():.1f}, most {found.max()}" if len(found) else f"{name}\nnone"
    axes.text(1, 0.98, text, transform=axes.transAxes, ha="right", va="top", color=color, fontsize=9)
    # At most nine labels.
    every = 1 + len(shares) // 9
    names = [f"{low}+" if low > 1 else f"{low}" for low in bins[:-1:every]]
    axes.set_xticks(np.arange(0, len(shares), every), names if last else [])
    if last:
        axes.set_xlabel("versions between reading and use")


def _draw_time(axes: Axes, run: replay.Result, color: str, *, last: bool) -> None:
    workers = np.arange(len(run.computing))
    busy = run.computing + run.down
    bar = {"height": 0.85 if len(workers) <= 32 else 1.0}
    axes.barh(workers, run.computing, color=color, **bar)
    axes.barh(workers, run.down, left=run.computing, color="white", edgecolor=GREY, hatch="////", linewidth=0, **bar)
    axes.barh(workers, 1 - busy, left=busy, color=WAITING, **bar)
    axes.set_xlim(0, 1)
    axes.set_ylim(len(workers) - 0.5, -0.5)
    open_axes(axes)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.tick_params(labelbottom=last)
    axes.set_ylabel("worker")
    if last:
        axes.set_xlabel("part of the time")
