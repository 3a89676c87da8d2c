"""What `jaxdist compare --suite local` trains: every method that talks every `H` steps, and the picture of it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, NullFormatter

from ..models.base import Workload
from ..plotting.plots import COLOURS, GREY, label_ends, panels, write
from ..results import Result
from ..spellings.methods import parse_method
from .suite import Spread, spread
from .train import Run, prepare

PERIODS = (1, 8, 32, 128)
# How a method is called: (how it is spelled, where H goes; the shortest H that it can have). The baseline comes first.
METHODS: dict[str, tuple[str, int]] = {
    "exact": ("exact", 0),
    "Local SGD": ("local_sgd:H={H}", 1),
    "SlowMo": ("slowmo:H={H},momentum=0.5,buffers=maintain", 1),
    "DiLoCo": ("diloco:H={H},learning_rate=0.4", 1),
    "streaming DiLoCo": ("streaming_diloco:H={H},fragments=4,delay=1,merge_alpha=0.5", 4),
    "DiLoCo, 4 bits": ("diloco:H={H},learning_rate=0.4/two_shot:qsgd:4", 1),
    "SparseLoCo": ("sparse_loco:H={H}", 1),
}
MARKERS = "osD^vPX*"


class Cell(NamedTuple):
    """One method at one `H`.

    Attributes:
      method: a key of `METHODS`.
      period: `H`; 0 for the baseline.
      spread: the numbers over the seeds.
      steps: those of the evaluations on the way.
      losses: held-out loss at each of them, mean over the seeds.
      units: tokens or images in a step.
    """

    method: str
    period: int
    spread: Spread
    steps: np.ndarray
    losses: np.ndarray
    units: int


def check(periods: Sequence[int], workers: Sequence[int], seeds: int) -> None:
    """Raises for numbers that make no comparison."""
    if not periods or min(periods) < 1:
        raise ValueError(f"--periods needs positive numbers, got {tuple(periods)}")
    if not workers or min(workers) < 1:
        raise ValueError(f"--workers needs positive numbers, got {tuple(workers)}")
    if seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {seeds}")


def evaluate_every(steps: int, periods: Sequence[int]) -> int:
    """About an eighth of the run: after whole rounds of the `H` that is drawn, where the run has a few of them."""
    shown = _shown(sorted(periods))
    return max(shown, steps // 8 // shown * shown) if steps >= 4 * shown else max(1, steps // 8)


def spellings(periods: Sequence[int]) -> list[tuple[str, int, str]]:
    """Method, `H` and spelling of all runs.

    Example:
      >>> from jaxdist._cli.training.sweep import spellings
      >>> spellings([8])[:2]
      [('exact', 0, 'exact'), ('Local SGD', 8, 'local_sgd:H=8')]
    """
    found = []
    for method, (template, least) in METHODS.items():
        some = [period for period in sorted(periods) if period >= least] if least else [0]
        found += [(method, period, template.format(H=period)) for period in some]
    return found


def runs(
    workload: Workload, optimizer: str, periods: Sequence[int], **settings: Any
) -> Iterator[tuple[str, int, str, Run]]:
    """Prepares one run after the other; each method is compiled once for all `H`, where its fragments are one.

    Args:
      workload: what to train.
      optimizer: of each worker, as it is spelled.
      periods: the values of `H`.
      **settings: `mesh`, `batch_size`, `seed` of `prepare`.

    Yields:
      `(method, H, spelling, Run)`.
    """
    shared: tuple[str, Run] | None = None
    for method, period, spelling in spellings(periods):
        if shared and shared[0] == method and shared[1].with_period:
            run = shared[1].with_period(period)
        else:
            several = "fragments" in spelling
            made = parse_method(spelling, optimizer)
            run = prepare(workload, **made._asdict(), any_period=bool(period) and not several, **settings)
            shared = (method, run)
        yield method, period, spelling, run


def cell(method: str, period: int, results: Sequence[Result], baseline: Cell | None, run: Run) -> Cell:
    """Puts the runs of one method at one `H` together, one for each seed."""
    found = spread(results, results)
    if baseline is not None:
        found = found._replace(difference=found.held_out["loss"] - baseline.spread.held_out["loss"])
    losses = np.array([[one.held_out["loss"] for one in result.evaluations] for result in results])
    steps = np.array([one.step for one in results[0].evaluations])
    return Cell(method, period, found, steps, losses.mean(axis=0), run.units_per_step)


def draw(cells: Sequence[Cell], path: str | Path, *, title: str, unit: str, counted: str) -> Path:
    """Draws held-out loss against all bytes that a worker sent, and against tokens at one `H`, and writes a PNG.

    Args:
      cells: the baseline first.
      path: where the PNG goes.
      title: a line above both panels.
      unit: what the loss is measured in.
      counted: what the steps are made of, `"tokens"` or `"images"`.

    Returns:
      The path.
    """
    figure, (by_bytes, by_tokens) = panels(title)
    methods = list(dict.fromkeys(one.method for one in cells))
    colours = dict(zip(methods, [COLOURS[n % len(COLOURS)] for n in range(len(methods))], strict=True))
    periods = sorted({one.period for one in cells if one.period})
    markers = {0: "*"} | {period: MARKERS[n % len(MARKERS)] for n, period in enumerate(periods)}
    limits = _limits(cells)
    for method in methods:
        own = [one for one in cells if one.method == method]
        sent = [_total(one) for one in own]
        means = [one.spread.held_out["loss"].mean() for one in own]
        by_bytes.plot(sent, means, color=colours[method], linewidth=1.2)
        for one, x, mean in zip(own, sent, means, strict=True):
            losses = one.spread.held_out["loss"]
            by_bytes.errorbar(
                x,
                mean,
                yerr=[[mean - losses.min()], [losses.max() - mean]],
                color=colours[method],
                marker=markers[one.period],
                markersize=10 if one.period == 0 else 6,
                linewidth=0.9,
            )
    by_bytes.axhline(cells[0].spread.held_out["loss"].mean(), color=GREY, linewidth=0.8, linestyle=":")
    by_bytes.set_xscale("log")
    by_bytes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    by_bytes.xaxis.set_minor_formatter(NullFormatter())
    by_bytes.set_xlabel("sent by each worker in the whole run")
    by_bytes.set_ylabel(f"held-out loss ({unit})")
    by_bytes.set_title("loss against bytes", loc="left")
    _legend_of_periods(by_bytes, markers)
    _against_tokens(by_tokens, cells, _shown(periods), colours, counted)
    for axes in (by_bytes, by_tokens):
        axes.set_ylim(limits)
    ends = [(one.losses[-1], one.method, colours[one.method]) for one in cells if one.period in (0, _shown(periods))]
    label_ends(by_tokens, ends)
    return write(figure, path)


def _shown(periods: Sequence[int]) -> int:
    """The `H` of the curves: 32, or the one in the middle."""
    return 32 if 32 in periods else periods[len(periods) // 2]


def _total(one: Cell) -> float:
    return one.spread.wire_bytes * one.steps[-1]


def _against_tokens(axes: Axes, cells: Sequence[Cell], period: int, colours: dict[str, str], counted: str) -> None:
    for one in cells:
        if one.period in (0, period):
            axes.plot(one.steps * one.units, one.losses, color=colours[one.method], linewidth=1.8)
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.set_xlabel(f"{counted}, all workers together")
    axes.set_title(f"loss against {counted}, H = {period}", loc="left")
    axes.tick_params(labelleft=False)


def _legend_of_periods(axes: Axes, markers: dict[int, str]) -> None:
    names = {period: f"H = {period}" if period else "every step, gradients" for period in markers}
    handles = [
        Line2D([], [], color=GREY, marker=marker, linestyle="", label=names[period])
        for period, marker in markers.items()
    ]
    axes.legend(handles=handles, framealpha=0.9, edgecolor="none", fontsize=8, labelcolor=GREY)


def _limits(cells: Sequence[Cell]) -> tuple[float, float]:
    """Down to the best loss, up to the ends of nine in ten; what is worse leaves the drawing."""
    ends = np.array([one.spread.held_out["loss"].mean() for one in cells])
    ends = ends[np.isfinite(ends)]
    starts = cells[0].losses[np.isfinite(cells[0].losses)]
    low, high = ends.min(), max(np.quantile(ends, 0.9), starts.max(initial=-np.inf))
    margin = max(0.06 * (high - low), 1e-3)
    return low - margin, high + margin
