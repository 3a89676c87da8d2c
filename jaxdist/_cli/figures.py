"""What all figures and tables share: colors, empty panels, axes of bytes, labels, and the file."""

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter
from rich.console import Console
from rich.table import Table

# Okabe and Ito's palette, safe for all kinds of color vision; black is the first run: the baseline.
COLORS = ("#000000", "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C6D31")
GREY = "#6E6E6E"
MARKERS = "osD^vPX*"
NAME_WIDTH = 20  # letters of a name on a line, where a terminal has no room for all of it
PADDING = 2  # spaces of a column in a table
MARGIN = 1.2  # inches of a figure above and below its panels
SUFFIXES = (".png", ".pdf", ".svg")
VECTOR = {".pdf": "CreationDate", ".svg": "Date"}  # the name of the date among the metadata


def color_of(number: int) -> str:
    """The color of a run; 0 is the baseline. Colors repeat after the palette."""
    return COLORS[number % len(COLORS)]


def marker_of(number: int) -> str:
    """The marker of a run in a scatter plot."""
    return MARKERS[number % len(MARKERS)]


def new_figure(title: str, width: float, height: float) -> Figure:
    """An empty figure with a small grey title at the top left."""
    figure = Figure(figsize=(width, height), layout="constrained")
    if title:
        # Of this size 12 letters and more fit into an inch.
        title = textwrap.fill(title, int(12 * width))
        figure.suptitle(title, x=0.01, ha="left", fontsize=10, color=GREY)
    return figure


def two_panels(title: str) -> tuple[Figure, Sequence[Axes]]:
    """A figure with two empty panels side by side."""
    figure = new_figure(title, 11.5, 4.6)
    panels = list(figure.subplots(1, 2))
    for axes in panels:
        open_axes(axes, grid="y")
    return figure, panels


def open_axes(
    axes: Axes, *, grid: Literal["", "both", "x", "y"] = "", color: str = "#E6E6E6", left: bool = True
) -> None:
    """Removes the frame at the top and the right (and the left, for lanes), and draws a light grid."""
    axes.spines[["top", "right", *([] if left else ["left"])]].set_visible(False)
    if not left:
        axes.tick_params(axis="y", length=0)
    if grid:
        axes.grid(axis=grid, color=color, linewidth=0.8)
        axes.set_axisbelow(True)


def label(axes: Axes, title: str, *, size: int | None = None, **properties: Any) -> None:
    """Writes a title at the left, and sets properties such as `xlabel`."""
    axes.set_title(title, loc="left", fontsize=size)
    axes.set(**properties)


def scale_by_log_bytes(axes: Axes, label: str) -> None:
    """Makes the x axis, of what is already drawn, a logarithmic one of bytes."""
    axes.set_xlabel(label)
    # Without a point, as where all runs diverged, there is nothing to scale by.
    if not np.isfinite(axes.xaxis.get_minpos()):
        return
    axes.set_xscale("log")
    count_bytes(axes.xaxis)
    low, high = axes.get_xlim()
    if high < 100 * low:
        # There may be a single power of ten.
        axes.xaxis.set_minor_locator(LogLocator(subs=(2.0, 5.0)))
        axes.xaxis.set_minor_formatter(EngFormatter(unit="B"))
    else:
        axes.xaxis.set_minor_formatter(NullFormatter())


def count_bytes(axis: Axis) -> None:
    """Labels the ticks of an axis with kB, MB and so on."""
    axis.set_major_formatter(EngFormatter(unit="B"))


def count_seconds(axis: Axis) -> None:
    """Labels the ticks of an axis with plain numbers: 0.1, 10 and so on."""
    axis.set_major_formatter("{x:g}")
    # Between powers of ten too, since an axis spans few of them.
    axis.set_minor_locator(LogLocator(subs=(2.0, 5.0)))
    axis.set_minor_formatter("{x:g}")


def deviation(values: np.ndarray, axis: int = 0) -> np.ndarray | np.floating[Any]:
    """The standard deviation over seeds, that of a sample; zeros of a single seed."""
    many = values.shape[axis] > 1
    # Runs that diverged have infinite losses.
    with np.errstate(invalid="ignore"):
        return values.std(axis=axis, ddof=1) if many else np.zeros_like(values.mean(axis=axis))


def draw_deviation(axes: Axes, x: float, values: np.ndarray, *, markersize: int = 6, **style: Any) -> None:
    """Draws the mean over seeds as a point and their standard deviation as a bar."""
    axes.errorbar(x, values.mean(), yerr=deviation(values), markersize=markersize, linewidth=0.9, **style)


def draw_band(axes: Axes, x: Any, rows: np.ndarray, color: str, *, label: str | None = None) -> None:
    """Draws the mean of the rows, one for each seed, as a line, and their standard deviation behind it."""
    mean, spread = rows.mean(axis=0), deviation(rows)
    axes.plot(x, mean, color=color, linewidth=1.8, label=label)
    if len(rows) > 1:
        axes.fill_between(x, mean - spread, mean + spread, color=color, alpha=0.18, linewidth=0)


def wrap_name(name: str, width: int) -> str:
    """Breaks the spelling of a method into lines, after commas and slashes if it can; a label at its spaces.

    Examples:
      >>> wrap_name("diloco:H=50,fragments=4/qsgd:4", 26).splitlines()
      ['diloco:H=50,fragments=4/', 'qsgd:4']
    """
    if " " in name:
        return textwrap.fill(name, width, break_on_hyphens=False)
    # A space is where `textwrap` breaks; spellings have none.
    lines = textwrap.wrap(re.sub(r"([,/])", r"\1 ", name), width, break_on_hyphens=False)
    return "\n".join(line.replace(" ", "") for line in lines)


def describe(name: str, more: str, *, width: int, separator: str = "\n") -> str:
    """A method and more about it, with a line of its own for each if there is no room for so many letters on one."""
    line = f"{name}{separator}{more}"
    return line if len(line) <= width else f"{wrap_name(name, width)}\n{more}"


def label_ends(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Writes each (height, text, color) at the right edge, moved apart so that no label covers another.

    The figure grows if it has no room for so many.
    """
    low, high = axes.get_ylim()
    # In inches, of the letters below and a space.
    tall = [0.08 + 0.15 * len(text.splitlines()) for _, text, _ in ends]
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.set_figheight(max(figure.get_figheight(), sum(tall) + MARGIN))
    inch = (high - low) / (figure.get_figheight() - MARGIN)
    order = sorted(range(len(ends)), key=lambda n: ends[n][0])
    # A diverged run ends at NaN or infinity: its label goes to the top.
    heights = np.clip([np.nan_to_num(ends[n][0], nan=high, posinf=high) for n in order], low, high)
    # From the lowest label up, each moves until it clears the one below.
    for n in range(1, len(heights)):
        heights[n] = max(heights[n], heights[n - 1] + inch * (tall[order[n]] + tall[order[n - 1]]) / 2)
    overflow = heights[-1] - high
    if overflow > 0:
        # Back down as one block, which keeps the gaps.
        heights -= overflow
    # x in fractions of the panel, y in data: labels stay at the edge, near the ends of their curves.
    place = {"xycoords": ("axes fraction", "data"), "xytext": (8, 0), "textcoords": "offset points", "va": "center"}
    for n, height in zip(order, heights, strict=True):
        _, text, color = ends[n]
        axes.annotate(text, (1.0, height), fontsize=9, color=color, annotation_clip=False, **place)


def add_legend(figure: Figure, axes: Axes) -> None:
    """Adds a legend below all panels, of as many columns as fit side by side, and makes the figure higher by it."""
    handles, names = axes.get_legend_handles_labels()
    names = [wrap_name(name, 40) for name in names]
    style: dict[str, Any] = {"loc": "outside lower center", "frameon": False, "fontsize": 9}
    columns = min(4, len(names))
    legend = figure.legend(handles, names, ncols=columns, **style)
    while columns > 1 and legend.get_window_extent().width > figure.bbox.width:
        legend.remove()
        columns -= 1
        legend = figure.legend(handles, names, ncols=columns, **style)
    figure.set_figheight(figure.get_figheight() + legend.get_window_extent().height / figure.dpi)


def in_bytes(count: int | float) -> str:
    """A readable number of bytes: `158.4 kB`."""
    return EngFormatter(unit="B", places=1 if count >= 1000 else 0)(count)


def in_rate(bandwidth: float) -> str:
    """A readable bandwidth, from bytes per second: `100.0 Mbit/s`."""
    # Links are sold in bits per second, with decimal prefixes.
    bits = 8 * bandwidth
    size, unit = next((each for each in ((1e9, "Gbit"), (1e6, "Mbit")) if bits >= each[0]), (1e3, "kbit"))
    return f"{bits / size:,.1f} {unit}/s"


def write(figure: Figure, path: str | Path) -> Path:
    """Writes the figure in the form of the suffix and returns its path.

    A PDF and an SVG are for a paper, whose caption has the settings: the title is in their metadata alone.
    """
    path = Path(path)
    metadata: dict[str, Any] = {}
    if path.suffix in VECTOR:
        # Without a date, so that equal figures are equal files.
        metadata = {"Title": " ".join(figure.get_suptitle().split()), VECTOR[path.suffix]: None}
        figure.suptitle("")
    # Fonts that publishers take, and text that can be edited and searched.
    with rc_context({"pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "jaxdist"}):
        figure.savefig(path, dpi=150, metadata=metadata)
    return path


def new_table(first: str, numbers: Sequence[str], *, caption: str | None = None, **style: Any) -> Table:
    """A table without rows: a column of names, and columns of numbers aligned to the right."""
    style = {"box": None, "header_style": "bold", "padding": (0, 1)} | style
    table = Table(caption=caption, caption_justify="left", **style)
    table.add_column(first, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right", vertical="bottom")
    return table


def print_table(console: Console, table: Table) -> None:
    """Prints a table of `new_table`, with every number on one line: in a file the table is as wide as it needs.

    On a terminal names and headings wrap, and columns for which there is no room follow below, beside the names again.
    """
    wide = console.options.update(width=10_000)
    needed = console.measure(table, options=wide).maximum
    if not console.is_terminal or needed <= console.width:
        table.width = needed
        console.print(table, crop=False)
        return
    # Headings wrap between words, numbers nowhere.
    widths = [
        max(console.measure(column.header).minimum, *(console.measure(cell).maximum for cell in column.cells))
        for column in table.columns[1:]
    ]
    groups = _group_columns(widths, console.width - NAME_WIDTH - PADDING)
    for number, group in enumerate(groups):
        if number:
            console.print()
        console.print(_take_columns(table, widths, group, last=group is groups[-1]), crop=False)


def _group_columns(widths: Sequence[int], room: int) -> list[list[int]]:
    """The places of the columns side by side, as many as there is room for, and at least one."""
    groups: list[list[int]] = [[]]
    left = room
    for place, width in enumerate(widths):
        if groups[-1] and left < width + PADDING:
            groups.append([])
            left = room
        groups[-1].append(place)
        left -= width + PADDING
    return groups


def _take_columns(table: Table, widths: Sequence[int], group: Sequence[int], *, last: bool) -> Table:
    """The names and a group of the columns of numbers, with the caption below the last group."""
    names, *numbers = table.columns
    headings = [str(numbers[place].header) for place in group]
    taken = new_table(str(names.header), headings, caption=str(table.caption or "") if last else None)
    taken.title, taken.title_justify = table.title if group[0] == 0 else None, table.title_justify
    for column, place in zip(taken.columns[1:], group, strict=True):
        column.width, column.justify = widths[place], numbers[place].justify
    columns = [names, *(numbers[place] for place in group)]
    for row, cells in zip(table.rows, zip(*(column.cells for column in columns))):
        taken.add_row(*cells, style=row.style)
    return taken
