"""The table and the figure of rules on the virtual clock over several seeds."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.table import Table

from . import figures
from .figures import GREY, color_of, deviation, in_bytes, new_table
from .labels import NO_LABELS
from .sweep import Swept, final_loss, seconds_to, staleness
from .tables import Record, with_deviation

NOTE = (
    "Mean ± standard deviation over the seeds.\n"
    "Staleness: versions between reading a model and using its gradient.\n"
    "Sent: models and gradients of all workers, for each gradient."
)


class _Numbers(NamedTuple):
    """What is shown of a rule, an entry for each seed."""

    seconds: np.ndarray  # to the target; empty without one
    losses: np.ndarray  # at the end
    staleness: np.ndarray  # NaN of a run that has used no gradient
    computing: np.ndarray
    bytes: np.ndarray  # of all workers, for each gradient


def _count(swept: Swept, target: float | None) -> _Numbers:
    runs = swept.runs
    found = [staleness(swept.name, run.trace) for run in runs]
    return _Numbers(
        seconds=np.array([seconds_to(run, target) for run in runs] if target is not None else []),
        losses=np.array([final_loss(run) for run in runs]),
        staleness=np.array([old.mean() if len(old) else np.nan for old in found]),
        computing=np.array([run.computing.mean() for run in runs]),
        bytes=np.array([run.sent.sum() / max(1, len(run.trace.gradients)) for run in runs]),
    )


def sweep_table(swept: Sequence[Swept], target: float | None, labels: Mapping[str, str] = NO_LABELS) -> Table:
    """One row for each rule; the first is the baseline."""
    shown = [labels.get(one.name, one.name) for one in swept]
    rates = swept[0].rate is not None
    judged = ["held-out loss"] if target is None else [f"seconds to {target:g}", f"times sooner than {shown[0]}"]
    headings = [*(["rate"] if rates else []), *judged, "staleness", "computing", "sent a gradient"]
    table = new_table("rule", headings, caption=NOTE)
    numbers = [_count(one, target) for one in swept]
    times = np.concatenate([each.seconds for each in numbers])
    longest = np.max(times[np.isfinite(times)], initial=1e-9)
    for name, one, each in zip(shown, swept, numbers, strict=True):
        cells = [f"{one.rate:g}"] if rates else []
        if target is None:
            cells.append(_spell(each.losses, 4))
        else:
            ratio = _times_sooner(each, numbers[0])
            # Three digits of the largest time.
            digits = 2 - math.floor(math.log10(longest))
            cells += [
                _spell(each.seconds, max(0, digits)),
                f"{ratio:.1f}" if ratio > 0 and math.isfinite(ratio) else "-",
            ]
        old = each.staleness.mean()
        cells += [f"{old:.1f}" if math.isfinite(old) else "-", f"{each.computing.mean():.0%}"]
        table.add_row(name, *cells, in_bytes(float(each.bytes.mean())))
    return table


def _spell(values: np.ndarray, decimals: int) -> str:
    """The mean and the deviation; how many seeds never arrived if some did not."""
    never = np.count_nonzero(~np.isfinite(values))
    return f"never in {never} of {len(values)}" if never else with_deviation(values, f",.{decimals}f")


def _times_sooner(numbers: _Numbers, baseline: _Numbers) -> float:
    """How many times sooner the target is reached, of the means; 0 if it is not always, NaN if neither always is."""
    with np.errstate(invalid="ignore"):
        return float(np.divide(baseline.seconds.mean(), numbers.seconds.mean()))


def sweep_records(swept: Sequence[Swept], target: float | None) -> list[Record]:
    """The numbers of `sweep_table`, for a program."""
    numbers = [_count(one, target) for one in swept]
    records = []
    for one, each in zip(swept, numbers, strict=True):
        record: dict[str, object] = {"rule": one.name, "rate": one.rate, "seeds": len(one.runs), "target": target}
        columns = {"held_out_loss": each.losses, "staleness": each.staleness, "computing": each.computing}
        if target is not None:
            record["times_sooner"] = _times_sooner(each, numbers[0])
            columns = {"seconds_to_target": each.seconds} | columns
        for key, values in (columns | {"bytes_a_gradient": each.bytes}).items():
            std = float(deviation(values)) if len(values) > 1 else math.nan
            record |= {f"{key}_mean": float(values.mean()), f"{key}_std": std}
        records.append(record)
    return records


def draw_sweep(
    swept: Sequence[Swept],
    target: float | None,
    path: str | Path,
    *,
    title: str,
    labels: Mapping[str, str] = NO_LABELS,
) -> Path:
    """Draws the held-out loss over virtual time, and the time to the target or, without one, the loss at the end.

    Lines and points are means over the seeds, bands and bars their standard deviation. A line ends with the first of
    its runs that does.
    """
    figure = figures.new_figure(title, 11.5, max(4.6, 0.45 * len(swept) + 1.6))
    curves, ends = figure.subplots(1, 2, width_ratios=(1.25, 1))
    figures.open_axes(curves, grid="y")
    figures.open_axes(ends, grid="x")
    for number, one in enumerate(swept):
        color = color_of(number)
        length = min(len(run.losses) for run in one.runs)
        rows = np.array([run.losses[:length] for run in one.runs])
        figures.draw_band(curves, one.runs[0].times[:length], rows, color)
        numbers = _count(one, target)
        values = numbers.losses if target is None else numbers.seconds
        if np.isfinite(values).all():
            spread = deviation(values)
            ends.errorbar(values.mean(), number, xerr=spread, fmt="o", color=color, markersize=6, linewidth=0.9)
        else:
            ends.annotate(" never", (0, number), xycoords=("axes fraction", "data"), color=color, va="center")
    if target is not None:
        curves.axhline(target, color=GREY, linewidth=0.8, linestyle=":")
        ends.set_xlim(0, None)
    _limit_losses(curves, swept)
    figures.label(curves, "loss over virtual time", xlabel="virtual seconds", ylabel="held-out loss")
    headline = "held-out loss at the end" if target is None else f"time to a loss of {target:g}"
    figures.label(ends, headline, xlabel="held-out loss" if target is None else "virtual seconds")
    names = [figures.wrap_name(labels.get(one.name, one.name), 26) for one in swept]
    ends.set_yticks(range(len(names)), names)
    for number, tick in enumerate(ends.get_yticklabels()):
        tick.set_color(color_of(number))
    ends.set_ylim(len(names) - 0.5, -0.5)
    return figures.write(figure, path)


def _limit_losses(axes: figures.Axes, swept: Sequence[Swept]) -> None:
    """From the best loss to those at the start; runs that diverge leave the panel."""
    losses = np.concatenate([run.losses for one in swept for run in one.runs])
    starts = np.array([run.losses[0] for one in swept for run in one.runs])
    best, start = np.min(losses[np.isfinite(losses)], initial=np.inf), np.max(starts[np.isfinite(starts)], initial=0)
    if best < start:
        margin = 0.05 * (start - best)
        axes.set_ylim(best - margin, start + margin)
