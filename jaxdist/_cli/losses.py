"""Figures of the loss against the bytes sent."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter

from . import figures
from .figures import COLORS, GREY, color_of, in_bytes, marker_of
from .results import RunResult, running_mean
from .training.suites import Cell, SeedSpread, pareto_front, shown_period


def draw_compare(
    methods: Sequence[Sequence[RunResult]], path: str | Path, *, title: str, unit: str = "nats per byte"
) -> Path:
    """Draws the training loss of several methods against bytes sent and against steps; the first one is black.

    Each method has a run for every seed: a line is their mean, and the band around it their standard deviation.
    """
    figure, (by_bytes, by_step) = figures.two_panels(title)
    ends = []
    for number, seeds in enumerate(methods):
        color, losses = color_of(number), np.array([_smooth(result) for result in seeds])
        # Seeds may differ in bytes too, where the data decide what is sent.
        sent = np.mean([[record.total_wire_bytes for record in result.records] for result in seeds], axis=0)
        loss, steps = losses.mean(axis=0), [record.step for record in seeds[0].records]
        # A single worker sends nothing, which a logarithmic axis cannot show.
        if sent[-1] > 0:
            figures.draw_band(by_bytes, sent, losses, color)
            by_bytes.plot(sent[-1], loss[-1], "o", color=color, markersize=6)
        figures.draw_band(by_step, steps, losses, color)
        per_step = float(np.mean([result.wire_bytes for result in seeds]))
        text = figures.describe(seeds[0].name, f"{in_bytes(per_step)} a step", separator="   ", width=54)
        ends.append((loss[-1], text, color))
    figures.scale_by_log_bytes(by_bytes, "sent by each worker so far")
    figures.label(by_bytes, "loss against bytes", ylabel=f"training loss ({unit})")
    figures.label(by_step, "loss against steps", xlabel="step")
    by_step.tick_params(labelleft=False)
    _limit_to_start(by_bytes, [result for seeds in methods for result in seeds])
    # One scale for both panels: the right one has no labels of its own.
    by_step.set_ylim(by_bytes.get_ylim())
    figures.label_ends(by_step, ends)
    return figures.write(figure, path)


def draw_train(
    result: RunResult, baseline: RunResult | None, path: str | Path, *, title: str, unit: str = "nats per byte"
) -> Path:
    """Draws the loss of one run and the bytes that it sent, beside its baseline; arguments as for `draw_compare`."""
    figure, (by_loss, by_bytes) = figures.two_panels(title)
    runs = [(result, COLORS[1])] if baseline is None else [(baseline, COLORS[0]), (result, COLORS[1])]
    ends = []
    for run, color in runs:
        steps = [record.step for record in run.records]
        # Single losses as a faint background of their running mean.
        by_loss.plot(steps, [record.loss for record in run.records], color=color, linewidth=0.6, alpha=0.25)
        label = figures.describe(run.name, f"held-out loss {run.held_out['loss']:.3f}", separator=", ", width=36)
        by_loss.plot(steps, _smooth(run), color=color, linewidth=1.8, label=label)
        sent = [record.total_wire_bytes for record in run.records]
        by_bytes.plot(steps, sent, color=color, linewidth=1.8)
        ends.append((sent[-1], figures.describe(run.name, in_bytes(sent[-1]), separator="   ", width=36), color))
    by_loss.legend(frameon=False, labelcolor="linecolor", handlelength=0)
    figures.label(by_loss, "loss", xlabel="step", ylabel=f"training loss ({unit})")
    _limit_to_start(by_loss, [run for run, _ in runs])
    figures.count_bytes(by_bytes.yaxis)
    figures.label(by_bytes, "sent by each worker so far", xlabel="step", ylim=(0, None))
    figures.label_ends(by_bytes, ends)
    return figures.write(figure, path)


def _smooth(result: RunResult) -> np.ndarray:
    return running_mean([record.loss for record in result.records], max(1, len(result.records) // 12))


def _limit_to_start(axes: Axes, results: Sequence[RunResult]) -> None:
    """Shows losses from the best to those at the start; runs that diverge leave the panel instead of flattening it."""
    losses = np.concatenate([_smooth(result) for result in results])
    starts = np.array([result.records[0].loss for result in results])
    finite, starts = losses[np.isfinite(losses)], starts[np.isfinite(starts)]
    if finite.size and starts.size and starts.max() > finite.min():
        margin = 0.05 * (starts.max() - finite.min())
        axes.set_ylim(finite.min() - margin, starts.max() + margin)


def draw_seeds(spreads: Sequence[SeedSpread], path: str | Path, *, title: str, unit: str) -> Path:
    """Draws the held-out loss, and every other metric, against the bytes of a step.

    A point is the mean over the seeds, its bar the standard deviation. A line joins the reducers on the Pareto front.
    """
    # The loss comes first: every workload has one.
    keys = sorted(spreads[0].held_out, key=lambda key: key != "loss")
    height = max(8.2, 0.235 * len(spreads) + 1.2)
    figure = figures.new_figure(title, 7.2 * len(keys) + 2.4, height)
    panels = figure.subplots(1, len(keys), squeeze=False)[0]
    families = list(dict.fromkeys(spread.family for spread in spreads))
    for axes, key in zip(panels, keys):
        _draw_metric(axes, spreads, key, families)
        axes.set_ylabel(f"held-out loss ({unit})" if key == "loss" else f"held-out {key}")
    _number_reducers(panels[-1], spreads, families)
    return figures.write(figure, path)


def _draw_metric(axes: Axes, spreads: Sequence[SeedSpread], key: str, families: list[str]) -> None:
    figures.open_axes(axes, grid="both", color="#EEEEEE")
    best = pareto_front(spreads, key)
    sizes, means = [spread.wire_bytes for spread in best], [spread.held_out[key].mean() for spread in best]
    axes.plot(sizes, means, color=GREY, linewidth=1.0)
    # A dotted line at the baseline separates better reducers from worse ones.
    axes.axhline(spreads[0].held_out[key].mean(), color=GREY, linewidth=0.8, linestyle=":")
    for number, spread in enumerate(spreads):
        values, family = spread.held_out[key], families.index(spread.family)
        # A diverged run has no place on the axis.
        if not np.isfinite(values).all():
            continue
        figures.draw_deviation(axes, spread.wire_bytes, values, color=color_of(family), marker=marker_of(family))
        at = {"xytext": (5, 4), "textcoords": "offset points", "fontsize": 7.5, "color": color_of(family)}
        axes.annotate(str(number + 1), (spread.wire_bytes, values.mean()), **at)
    # A reducer that fails leaves the panel instead of flattening the others: show the best 85 percent.
    means = np.array([spread.held_out[key].mean() for spread in spreads])
    finite = means[np.isfinite(means)]
    if finite.size:
        low, high = np.quantile(finite, [0.0, 0.85] if key == "loss" else [0.15, 1.0])
        margin = max(0.15 * (high - low), 1e-3)
        axes.set_ylim(low - margin, high + margin)
    figures.scale_by_log_bytes(axes, "sent by one worker in a step")


def _number_reducers(axes: Axes, spreads: Sequence[SeedSpread], families: list[str]) -> None:
    """Lists the number and the name of each reducer at the right, in the color of its family."""
    for number, spread in enumerate(spreads):
        color = color_of(families.index(spread.family))
        text = f"{number + 1:>2}  {spread.name}   {in_bytes(spread.wire_bytes)}"
        place = (1.02, 1.0 - number / max(len(spreads), 24))
        axes.annotate(text, place, xycoords="axes fraction", fontsize=8.5, va="top", color=color, annotation_clip=False)


def draw_periods(cells: Sequence[Cell], path: str | Path, *, title: str, unit: str, counted: str) -> Path:
    """Draws the held-out loss against all bytes that a worker sent, and against tokens for one `H`."""
    figure, (by_bytes, by_tokens) = figures.two_panels(title)
    colors = {method: color_of(n) for n, method in enumerate(dict.fromkeys(cell.method for cell in cells))}
    periods = sorted({cell.period for cell in cells if cell.period})
    # Color is the method, shape the period: the baseline, without a period, is a star.
    markers = {0: "*"} | {period: marker_of(n) for n, period in enumerate(periods)}
    for method, color in colors.items():
        own = [cell for cell in cells if cell.method == method]
        sent = [cell.spread.wire_bytes * cell.steps[-1] for cell in own]
        losses = [cell.spread.held_out["loss"] for cell in own]
        by_bytes.plot(sent, [values.mean() for values in losses], color=color, linewidth=1.2)
        for cell, total, values in zip(own, sent, losses, strict=True):
            style = {"color": color, "marker": markers[cell.period], "markersize": 6 if cell.period else 10}
            figures.draw_deviation(by_bytes, total, values, **style)
    by_bytes.axhline(cells[0].spread.held_out["loss"].mean(), color=GREY, linewidth=0.8, linestyle=":")
    figures.scale_by_log_bytes(by_bytes, "sent by each worker in the whole run")
    figures.label(by_bytes, "loss against bytes", ylabel=f"held-out loss ({unit})")
    names = {period: f"H = {period}" if period else "every step, gradients" for period in markers}
    handles = [Line2D([], [], color=GREY, marker=markers[n], linestyle="", label=names[n]) for n in markers]
    by_bytes.legend(handles=handles, framealpha=0.9, edgecolor="none", fontsize=8, labelcolor=GREY)

    period = shown_period(periods)
    curves = [cell for cell in cells if cell.period in (0, period)]
    for cell in curves:
        by_tokens.plot(cell.steps * cell.units, cell.losses, color=colors[cell.method], linewidth=1.8)
    by_tokens.xaxis.set_major_formatter(EngFormatter())
    figures.label(by_tokens, f"loss against {counted}, H = {period}", xlabel=f"{counted}, all workers together")
    by_tokens.tick_params(labelleft=False)
    if limits := _limits_of_ends(cells):
        for axes in (by_bytes, by_tokens):
            axes.set_ylim(limits)
    figures.label_ends(by_tokens, [(cell.losses[-1], cell.method, colors[cell.method]) for cell in curves])
    return figures.write(figure, path)


def _limits_of_ends(cells: Sequence[Cell]) -> tuple[float, float] | None:
    """From the best loss to the ends of nine in ten; worse runs leave the panel. None if all diverge."""
    ends = np.array([cell.spread.held_out["loss"].mean() for cell in cells])
    # Diverged runs must not set the limits.
    ends = ends[np.isfinite(ends)]
    if not ends.size:
        return None
    starts = cells[0].losses[np.isfinite(cells[0].losses)]
    low, high = ends.min(), max(np.quantile(ends, 0.9), starts.max(initial=-np.inf))
    margin = max(0.06 * (high - low), 1e-3)
    return low - margin, high + margin
