"""A step before it runs: memory and lanes of a plan, and the schedule of its messages."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from ...analysis.hlo.simulate_schedule import Span
from ...schedule.profile import Profile
from ...schedule.timeline import Timeline
from ..planning import Planned
from .figures import COLORS, GREY, count_bytes, in_bytes, new_figure, open_axes, write

PARTS = {
    "parameters": COLORS[1],
    "optimizer state": COLORS[6],
    "batch": COLORS[3],
    "temporaries": "#B8B8B8",
}
COMPUTE, HIDDEN, EXPOSED, OTHER = COLORS[1], COLORS[3], COLORS[4], COLORS[7]
Interval = tuple[float, float]


def draw_plan(planned: Planned, path: str | Path, *, title: str) -> Path:
    """Draws memory as stacked bars, and the lanes of a step: all of it, and a sixteenth enlarged.

    Args:
      planned: the plan.
      path: the PNG to write.
      title: a line above the panels.

    Returns:
      The path.
    """
    figure = new_figure(title, 11.5, 5.0)
    if not planned.spans:
        _draw_memory(figure.subplots(), planned)
        return write(figure, path)
    left, right = figure.subfigures(1, 2, width_ratios=(1, 2.6))
    _draw_memory(left.subplots(), planned)
    whole, close = right.subplots(2, 1)
    end = max(span.end for span in planned.spans)
    _draw_lanes(whole, planned.spans, (0.0, end))
    waiting = f", {planned.exposed_seconds / planned.seconds:.0%} of it waiting for the network"
    seconds = EngFormatter(unit="s", places=0 if planned.seconds >= 1e-3 else 1)(planned.seconds)
    whole.set_title(f"one step at best: {seconds}{waiting}", loc="left", fontsize=10)
    middle = 0.3 * end
    _draw_lanes(close, planned.spans, (middle, middle + end / 16))
    close.set_title("a sixteenth of it", loc="left", fontsize=10)
    close.set_xlabel("time since the step began")
    return write(figure, path)


def _draw_memory(axes: Axes, planned: Planned) -> None:
    bars = [("device", planned.device_bytes)] + ([("host", planned.host_bytes)] if planned.host_bytes else [])
    tallest = max(planned.chip.memory, *(sum(sizes.values()) for _, sizes in bars))
    readable = 0.045 * tallest  # parts below this height have no room for text
    for place, (_, sizes) in enumerate(bars):
        bottom = 0.0
        for name, color in PARTS.items():
            size = sizes.get(name, 0.0)
            if not size:
                continue
            axes.bar(place, size, 0.56, bottom, color=color, label=name if place == 0 else None)
            if size > readable:
                style = {"ha": "center", "va": "center", "fontsize": 8, "color": "w" if color == COLORS[1] else "k"}
                axes.text(place, bottom + size / 2, f"{name}\n{in_bytes(size)}", **style)
            bottom += size
    limit = planned.chip.memory
    axes.axhline(limit, color=EXPOSED, linewidth=1.5, linestyle=(0, (4, 2)))
    note = f"{in_bytes(limit)} of a {planned.chip.name}"
    axes.annotate(note, (-0.5, limit), (0, 4), textcoords="offset points", color=EXPOSED, fontsize=9)
    axes.set_xticks(range(len(bars)), [name for name, _ in bars])
    axes.set_xlim(-0.55, len(bars) - 0.45)
    axes.set_ylim(0, 1.12 * tallest)
    count_bytes(axes.yaxis)
    verdict = "fits" if planned.fits else "does not fit"
    axes.set_title(f"memory: {in_bytes(planned.peak)}, {verdict}", loc="left", fontsize=10)
    open_axes(axes)
    small = [name for name, size in planned.device_bytes.items() if 0 < size <= readable]
    if small:
        sizes = ", ".join(f"{name} {in_bytes(planned.device_bytes[name])}" for name in small)
        text = f"too small to see: {sizes}" if len(small) < 3 else sizes
        axes.set_xlabel(text, fontsize=7.5, color=GREY, wrap=True)


def _draw_lanes(axes: Axes, spans: Sequence[Span], window: Interval) -> None:
    """Draws the part of each lane inside the window; of the links' lanes, exposed time in another color."""
    computing = merge_intervals([(span.start, span.end) for span in spans if span.lane == "compute"])
    lanes = ["compute", *sorted({span.lane for span in spans} - {"compute", "memory"})]
    for row, lane in enumerate(lanes):
        busy = _clip(merge_intervals([(span.start, span.end) for span in spans if span.lane == lane]), window)
        if lane in ("compute", "host"):
            layers = [(busy, COMPUTE if lane == "compute" else OTHER)]
        else:
            layers = [(busy, HIDDEN), (subtract_intervals(busy, _clip(computing, window)), EXPOSED)]
        for intervals, color in layers:
            widths = [(start, end - start) for start, end in intervals]
            axes.broken_barh(widths, (row - 0.36, 0.72), color=color, linewidth=0)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.45, -0.55)
    axes.set_xlim(*window)
    axes.xaxis.set_major_formatter(EngFormatter(unit="s"))
    open_axes(axes, left=False)
    for x, text, color in ((0.875, "hidden", HIDDEN), (0.995, "waited for", EXPOSED)):
        axes.text(x, 1.02, text, transform=axes.transAxes, ha="right", va="bottom", fontsize=9, color=color)


def merge_intervals(intervals: Sequence[Interval]) -> list[Interval]:
    """The union of intervals, sorted and without overlaps."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def subtract_intervals(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The parts of `intervals` that `others` do not cover; both merged."""
    rest, n = [], 0
    for start, end in intervals:
        while n < len(others) and others[n][1] <= start:
            n += 1
        at, later = start, n
        while later < len(others) and others[later][0] < end:
            if others[later][0] > at:
                rest.append((at, others[later][0]))
            at = max(at, others[later][1])
            later += 1
        if at < end:
            rest.append((at, end))
    return rest


def _clip(intervals: Sequence[Interval], window: Interval) -> list[Interval]:
    low, high = window
    return [(max(start, low), min(end, high)) for start, end in intervals if end > low and start < high]


def draw_timelines(profile: Profile, runs: Mapping[str, Timeline], path: str | Path, *, names: Sequence[str]) -> Path:
    """Draws each schedule as two bars, the device's and the link's, with a color for each layer.

    Args:
      profile: the model that is scheduled.
      runs: the schedules by name.
      path: the PNG to write.
      names: the names of the layers.

    Returns:
      The path.
    """
    figure = new_figure("", 11.5, 1.2 + 1.3 * len(runs))
    panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    # From the input, dark, to the output, yellow: the layers that are needed first are dark.
    colors = [colormaps["viridis"](i / max(1, len(names) - 1)) for i in range(len(names))]
    order = sorted(range(len(names)), key=lambda layer: (profile.ready[layer], -layer))
    longest = max(run.makespan for run in runs.values())
    for axes, (name, run) in zip(panels, runs.items(), strict=True):
        before = 0.0
        for layer in order:
            _draw_bar(axes, 1, before, profile.ready[layer], colors[layer])
            before = profile.ready[layer]
        for layer, (start, end) in enumerate(run.forward):
            _draw_bar(axes, 1, start, end, colors[layer])
        for message in run.messages:
            _draw_bar(axes, 0, message.start, message.end, colors[message.layer])
        axes.axvline(1e3 * run.makespan, color=GREY, linewidth=1)
        axes.set_yticks([1, 0], ["device", "link"])
        axes.set_xlim(0, 1.02e3 * longest)
        axes.set_ylim(-0.5, 1.5)
        open_axes(axes, left=False)
        axes.set_title(f"{name}: {1e3 * run.makespan:,.1f} ms", loc="left", fontsize=10)
    panels[-1].set_xlabel("milliseconds from the start of the backward pass to the end of the next forward pass")
    shown = sorted({0, len(names) // 2, len(names) - 1})
    handles = [panels[0].barh(0, 0, color=colors[layer], label=names[layer]) for layer in shown]
    panels[0].legend(handles=handles, loc="lower right", ncols=len(shown), frameon=False, bbox_to_anchor=(1, 1))
    return write(figure, path)


def _draw_bar(axes: Axes, row: int, start: float, end: float, color: Any) -> None:
    # A white hairline separates neighbors.
    axes.barh(row, 1e3 * (end - start), left=1e3 * start, height=0.8, color=color, edgecolor="white", linewidth=0.3)
