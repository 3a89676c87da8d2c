"""The picture of a plan: memory against what there is, and one step's computation and communication over time."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from ...analysis.hlo.simulate_schedule import Span
from ..planning import Planned
from .plots import COLOURS, GREY, in_bytes, write

PARTS = {
    "parameters": COLOURS[1],
    "optimizer state": COLOURS[6],
    "batch": COLOURS[3],
    "temporaries": "#B8B8B8",
}
COMPUTE, HIDDEN, WAITED, OTHER = COLOURS[1], COLOURS[3], COLOURS[4], COLOURS[7]
Piece = tuple[float, float]


def draw_plan(planned: Planned, path: str | Path, *, title: str) -> Path:
    """Draws stacked bars of memory, and the lanes of a step: all of it, and a few percent of it close up.

    Args:
      planned: from `planned.plan`.
      path: where the PNG goes.
      title: a line above.

    Returns:
      The path.
    """
    figure = Figure(figsize=(11.5, 5.0), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, color=GREY)
    if not planned.spans:
        _memory(figure.subplots(), planned)
        return write(figure, path)
    left, right = figure.subfigures(1, 2, width_ratios=(1, 2.6))
    _memory(left.subplots(), planned)
    whole, close = right.subplots(2, 1)
    end = max(span.end for span in planned.spans)
    _lanes(whole, planned.spans, (0.0, end))
    waited = f", {planned.exposed_seconds / planned.seconds:.0%} of it waiting for the network"
    whole.set_title(f"one step at best: {_in_seconds(planned.seconds)}{waited}", loc="left", fontsize=10)
    middle = 0.3 * end
    _lanes(close, planned.spans, (middle, middle + end / 16))
    close.set_title("a sixteenth of it", loc="left", fontsize=10)
    close.set_xlabel("time since the step began")
    return write(figure, path)


def _memory(axes: Axes, planned: Planned) -> None:
    bars = [("device", planned.device_bytes)] + ([("host", planned.host_bytes)] if planned.host_bytes else [])
    tallest = max(planned.chip.memory, *(sum(sizes.values()) for _, sizes in bars))
    for place, (_, sizes) in enumerate(bars):
        bottom = 0.0
        for name, color in PARTS.items():
            size = sizes.get(name, 0.0)
            if size:
                axes.bar(place, size, 0.56, bottom, color=color, label=name if place == 0 else None)
                if size > 0.045 * tallest:
                    dark = color == COLOURS[1]
                    text = f"{name}\n{in_bytes(size)}"
                    axes.text(
                        place, bottom + size / 2, text, ha="center", va="center", fontsize=8, color="w" if dark else "k"
                    )
                bottom += size
    axes.axhline(planned.chip.memory, color=WAITED, linewidth=1.5, linestyle=(0, (4, 2)))
    note = f"{in_bytes(planned.chip.memory)} of a {planned.chip.name}"
    axes.annotate(note, (-0.5, planned.chip.memory), (0, 4), textcoords="offset points", color=WAITED, fontsize=9)
    axes.set_xticks(range(len(bars)), [name for name, _ in bars])
    axes.set_xlim(-0.55, len(bars) - 0.45)
    axes.set_ylim(0, 1.12 * tallest)
    axes.yaxis.set_major_formatter(EngFormatter(unit="B"))
    verdict = "fits" if planned.fits else "does not fit"
    axes.set_title(f"memory: {in_bytes(planned.peak)}, {verdict}", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    small = [name for name, size in planned.device_bytes.items() if 0 < size <= 0.045 * tallest]
    if small:
        sizes = ", ".join(f"{name} {in_bytes(planned.device_bytes[name])}" for name in small)
        axes.set_xlabel(f"too small to see: {sizes}" if len(small) < 3 else sizes, fontsize=7.5, color=GREY, wrap=True)


def _lanes(axes: Axes, spans: Sequence[Span], window: Piece) -> None:
    computing = _merged([(span.start, span.end) for span in spans if span.lane == "compute"])
    lanes = ["compute", *sorted({span.lane for span in spans} - {"compute", "memory"})]
    for row, lane in enumerate(lanes):
        pieces = _within(_merged([(span.start, span.end) for span in spans if span.lane == lane]), window)
        if lane in ("compute", "host"):
            _draw(axes, pieces, row, COMPUTE if lane == "compute" else OTHER)
        else:
            _draw(axes, pieces, row, HIDDEN)
            _draw(axes, _minus(pieces, _within(computing, window)), row, WAITED)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.45, -0.55)
    axes.set_xlim(*window)
    axes.xaxis.set_major_formatter(EngFormatter(unit="s"))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    for place, (text, color) in enumerate((("hidden", HIDDEN), ("waited for", WAITED))):
        where = (1.0 - 0.12 * (1 - place) - 0.005, 1.02)
        axes.text(*where, text, transform=axes.transAxes, ha="right", va="bottom", fontsize=9, color=color)


def _draw(axes: Axes, pieces: Sequence[Piece], row: int, color: str) -> None:
    axes.broken_barh([(start, end - start) for start, end in pieces], (row - 0.36, 0.72), color=color, linewidth=0)


def _merged(pieces: Sequence[Piece]) -> list[Piece]:
    found: list[Piece] = []
    for start, end in sorted(pieces):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _within(pieces: Sequence[Piece], window: Piece) -> list[Piece]:
    low, high = window
    return [(max(start, low), min(end, high)) for start, end in pieces if end > low and start < high]


def _minus(pieces: Sequence[Piece], others: Sequence[Piece]) -> list[Piece]:
    """What of the pieces no other covers; both sorted, neither overlapping itself."""
    found, n = [], 0
    for start, end in pieces:
        while n < len(others) and others[n][1] <= start:
            n += 1
        at, later = start, n
        while later < len(others) and others[later][0] < end:
            if others[later][0] > at:
                found.append((at, others[later][0]))
            at = max(at, others[later][1])
            later += 1
        if at < end:
            found.append((at, end))
    return found


def _in_seconds(seconds: float) -> str:
    return EngFormatter(unit="s", places=0 if seconds >= 1e-3 else 1)(seconds)
