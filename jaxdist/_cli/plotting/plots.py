"""The two drawings: one run beside its baseline, and several runs side by side."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, NullFormatter

from ..results import Result, running_mean

# Okabe and Ito's palette, told apart by readers with any kind of color vision; black is the first run: the baseline.
COLOURS = ("#000000", "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C6D31")
GREY = "#6E6E6E"


def draw_compare(results: Sequence[Result], path: str | Path, *, title: str, unit: str = "nats per byte") -> Path:
    """Draws loss against bytes sent (log scale) and loss against steps, and writes a PNG.

    Args:
      results: the runs; the first is drawn in black.
      path: where the PNG goes.
      title: a line above both panels.
      unit: what the loss is measured in.

    Returns:
      The path.
    """
    figure, (by_bytes, by_step) = panels(title)
    ends = []
    for result, color in zip(results, _colors(len(results)), strict=True):
        loss = _smooth(result)
        steps = [record.step for record in result.records]
        bytes_sent = [record.total_wire_bytes for record in result.records]
        if bytes_sent[-1] > 0:
            by_bytes.plot(bytes_sent, loss, color=color, linewidth=1.8)
            by_bytes.plot(bytes_sent[-1], loss[-1], "o", color=color, markersize=6)
        by_step.plot(steps, loss, color=color, linewidth=1.8)
        ends.append((loss[-1], f"{result.name}   {in_bytes(result.wire_bytes)} a step", color))
    by_bytes.set_xscale("log")
    by_bytes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    by_bytes.xaxis.set_minor_formatter(NullFormatter())
    by_bytes.set_xlabel("sent by each worker so far")
    by_bytes.set_ylabel(f"training loss ({unit})")
    by_bytes.set_title("loss against bytes", loc="left")
    by_step.set_xlabel("step")
    by_step.set_title("loss against steps", loc="left")
    by_step.tick_params(labelleft=False)
    _limit(by_bytes, results)
    by_step.set_ylim(by_bytes.get_ylim())
    label_ends(by_step, ends)
    return write(figure, path)


def draw_train(
    result: Result, baseline: Result | None, path: str | Path, *, title: str, unit: str = "nats per byte"
) -> Path:
    """Draws one run's loss and the bytes that it sent, beside the baseline's, and writes a PNG.

    Args:
      result: the run.
      baseline: the same run with plain all-reduce, or None.
      path: where the PNG goes.
      title: a line above both panels.
      unit: what the loss is measured in.

    Returns:
      The path.
    """
    figure, (by_loss, by_bytes) = panels(title)
    runs = [(result, COLOURS[1])] if baseline is None else [(baseline, COLOURS[0]), (result, COLOURS[1])]
    losses, totals = [], []
    for run, color in runs:
        steps = [record.step for record in run.records]
        loss = _smooth(run)
        by_loss.plot(steps, [record.loss for record in run.records], color=color, linewidth=0.6, alpha=0.25)
        by_loss.plot(
            steps, loss, color=color, linewidth=1.8, label=f"{run.name}, held-out loss {run.held_out['loss']:.3f}"
        )
        sent = [record.total_wire_bytes for record in run.records]
        by_bytes.plot(steps, sent, color=color, linewidth=1.8)
        losses.append((loss[-1], run.name, color))
        totals.append((sent[-1], f"{run.name}   {in_bytes(sent[-1])}", color))
    by_loss.legend(frameon=False, labelcolor="linecolor", handlelength=0)
    by_loss.set_xlabel("step")
    by_loss.set_ylabel(f"training loss ({unit})")
    by_loss.set_title("loss", loc="left")
    _limit(by_loss, [run for run, _ in runs])
    by_bytes.yaxis.set_major_formatter(EngFormatter(unit="B"))
    by_bytes.set_ylim(0, None)
    by_bytes.set_xlabel("step")
    by_bytes.set_title("sent by each worker so far", loc="left")
    label_ends(by_bytes, totals)
    return write(figure, path)


def panels(title: str) -> tuple[Figure, Sequence[Axes]]:
    """Two empty panels side by side."""
    figure = Figure(figsize=(11.5, 4.6), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, color=GREY)
    panels = figure.subplots(1, 2)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)
        axes.set_axisbelow(True)
    return figure, panels


def _colors(count: int) -> list[str]:
    return [COLOURS[n % len(COLOURS)] for n in range(count)]


def _smooth(result: Result) -> np.ndarray:
    return running_mean([record.loss for record in result.records], max(1, len(result.records) // 12))


def _limit(axes: Axes, results: Sequence[Result]) -> None:
    """Shows from the best loss to the start; a run that explodes leaves the drawing instead of flattening the rest."""
    losses = np.concatenate([_smooth(result) for result in results])
    starts = np.array([result.records[0].loss for result in results])
    finite, starts = losses[np.isfinite(losses)], starts[np.isfinite(starts)]
    if finite.size and starts.size and starts.max() > finite.min():
        margin = 0.05 * (starts.max() - finite.min())
        axes.set_ylim(finite.min() - margin, starts.max() + margin)


def label_ends(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Writes each name beside the end of its curve, pushed apart so that none covers another."""
    low, high = axes.get_ylim()
    gap = 0.062 * (high - low)
    order = sorted(range(len(ends)), key=lambda n: ends[n][0])
    heights = np.clip([np.nan_to_num(ends[n][0], nan=high, posinf=high) for n in order], low, high)
    for n in range(1, len(heights)):
        heights[n] = max(heights[n], heights[n - 1] + gap)
    overflow = heights[-1] - high
    if overflow > 0:
        heights -= overflow
    for n, height in zip(order, heights, strict=True):
        _, text, color = ends[n]
        axes.annotate(
            text,
            (1.0, height),
            xycoords=("axes fraction", "data"),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=color,
            annotation_clip=False,
        )


def in_bytes(count: float) -> str:
    """A number of bytes as people read it: `158.4 kB`."""
    return EngFormatter(unit="B", places=1 if count >= 1000 else 0)(count)


def write(figure: Figure, path: str | Path) -> Path:
    """Writes the PNG and returns its path."""
    path = Path(path)
    figure.savefig(path, dpi=150)
    return path
