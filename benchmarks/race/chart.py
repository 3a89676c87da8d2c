"""The chart of the race: one panel for each link, in each the methods from the fastest to the slowest."""

import math
import textwrap
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

COLORS = {"jaxdist": "#3366aa", "torch": "#b8b8b8"}
NAMES = {"jaxdist": "jaxdist", "torch": "PyTorch and DeepSpeed"}
STYLE = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "figure.facecolor": "white"}


class Bar(NamedTuple):
    """One method over one link."""

    label: str
    system: str
    seconds: float
    spread: tuple[float, float]  # of the seeds
    predicted: float  # seconds; NaN if there is no prediction


def draw(grid: list[list[tuple[str, list[Bar]]]], title: str, baseline: str, path: Path) -> None:
    """Draws rows of panels, each with its link and its bars; `baseline` is the label of DDP."""
    rows, columns = len(grid), len(grid[0])
    most = max(len(bars) for row in grid for _, bars in row)
    with mpl.rc_context(STYLE):
        size = (6.6 * columns, (0.27 * most + 1.0) * rows + 1.0)
        figure, panels = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
        for axes, (link, bars) in zip(panels.flat, (panel for row in grid for panel in row), strict=True):
            draw_panel(axes, link, bars, baseline)
        handles = [Patch(color=color, label=NAMES[system]) for system, color in COLORS.items()]
        handles.append(Line2D([], [], **mark_style(), label="predicted by jaxdist"))
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
        # Of this size 8 letters and more fit into an inch.
        figure.suptitle(textwrap.fill(title, int(8 * size[0])), fontsize=13, fontweight="bold")
        figure.savefig(path, dpi=110)
        plt.close(figure)


def draw_panel(axes: Axes, link: str, bars: list[Bar], baseline: str) -> None:
    for place, bar in enumerate(bars):
        axes.barh(place, bar.seconds, color=COLORS[bar.system], height=0.72)
        axes.plot(bar.spread, [place, place], color="black", linewidth=1)
        if math.isfinite(bar.predicted):
            axes.plot(bar.predicted, place, **mark_style())
        right = max(bar.seconds, bar.spread[1], bar.predicted if math.isfinite(bar.predicted) else 0.0)
        weight = "bold" if place == 0 else "normal"
        axes.annotate(
            f"{bar.seconds:,.0f} s",
            (right, place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontweight=weight,
        )
    axes.set_yticks(range(len(bars)), [bar.label.removeprefix("jaxdist ").removeprefix("PyTorch ") for bar in bars])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.14 * max((max(bar.seconds, bar.spread[1]) for bar in bars), default=1.0))
    axes.set_title(link, loc="left", fontsize=12, fontweight="bold")
    times = [bar.seconds / bars[0].seconds for bar in bars if bar.label == baseline]
    axes.set_title("".join(f"{each:.1f}x faster than DDP" for each in times), loc="right", fontsize=11)


def mark_style() -> dict:
    return {"marker": "o", "markersize": 4.5, "color": "white", "markeredgecolor": "black", "linestyle": "none"}
