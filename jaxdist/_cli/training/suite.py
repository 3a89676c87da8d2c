"""What `jaxdist compare --suite compression` trains, and the picture of all of it: loss against bytes, over seeds."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, NullFormatter

from ..plotting.plots import COLOURS, GREY, in_bytes
from ..results import Result

# Family: how its reducers are spelled. `exact` is the baseline and comes first.
COMPRESSION: dict[str, tuple[str, ...]] = {
    "plain": ("exact", "f16", "bf16"),
    "blocks": ("int8", "fp8", "mxfp8", "min_max_uint8", "int4:rounding=stochastic", "ef:mxfp4", "natural"),
    "levels": ("qsgd:8", "qsgd:4", "qsgd:3", "qsgd:2", "nuqsgd:4", "alq:3", "amq:3", "terngrad"),
    "signs": ("sign", "ef:sign", "ef:drive"),
    "sparse": (
        "top_k:0.01",
        "ef:top_k:0.1",
        "ef:top_k:0.01",
        "ef:block_top_k:0.01",
        "ef:top_k:0.02+qsgd:4",
        "ef:random_k:0.05",
        "gspar:0.1",
    ),
    "low rank": (
        "power_sgd:2",
        "ef:power_sgd:1",
        "ef:power_sgd:2",
        "ef:power_sgd:4",
        "ef:power_sgd:2,one_sided=True",
    ),
    "sums": ("two_shot:qsgd:8", "two_shot:qsgd:4", "ef:two_shot:sign", "loco:int4", "intsgd:8", "integer_sum:8"),
    "optimizers": (
        "demo:1e-3",
        "dion:3e-2,rank=4",
        "one_bit_adam:1e-3,freeze_step=50",
        "qadam:1e-3,warmup_steps=50",
    ),
}
MARKERS = "osD^vPX*"


class Spread(NamedTuple):
    """One reducer over several seeds.

    Attributes:
      name: as it was spelled.
      family: of the suite; empty outside one.
      wire_bytes: sent by one worker in one step.
      held_out: each number that the evaluation reports, one value for each seed.
      difference: held-out loss less the baseline's of the same seed, one value for each seed.
      milliseconds: the median step, of all seeds.
    """

    name: str
    family: str
    wire_bytes: float
    held_out: dict[str, np.ndarray]
    difference: np.ndarray
    milliseconds: float


def reducers() -> tuple[str, ...]:
    """All spellings of the suite."""
    return tuple(name for family in COMPRESSION.values() for name in family)


def spread(results: Sequence[Result], baseline: Sequence[Result]) -> Spread:
    """Puts the runs of one reducer together.

    Args:
      results: one for each seed.
      baseline: those of the baseline, seeds in the same order.

    Returns:
      A `Spread`.
    """
    name = results[0].name
    held_out = {key: np.array([result.held_out[key] for result in results]) for key in results[0].held_out}
    other = np.array([result.held_out["loss"] for result in baseline])
    seconds = [record.seconds for result in results for record in result.records]
    return Spread(
        name=name,
        family=next((family for family, names in COMPRESSION.items() if name in names), ""),
        wire_bytes=float(np.mean([result.wire_bytes for result in results])),
        held_out=held_out,
        difference=held_out["loss"] - other,
        milliseconds=1e3 * float(np.median(seconds)),
    )


def front(spreads: Sequence[Spread], key: str = "loss") -> list[Spread]:
    """Those that nothing beats in both bytes and the mean of `key`, from the fewest bytes to the most."""
    best, kept = np.inf, []
    for one in sorted(spreads, key=lambda one: (one.wire_bytes, _cost(one, key))):
        if _cost(one, key) < best:
            best = _cost(one, key)
            kept.append(one)
    return kept


def _cost(one: Spread, key: str) -> float:
    """Lower is better for a loss, higher for everything else; NaN is worst."""
    mean = float(one.held_out[key].mean())
    return np.inf if np.isnan(mean) else mean if key == "loss" else -mean


def draw(spreads: Sequence[Spread], path: str | Path, *, title: str, unit: str) -> Path:
    """Draws held-out loss, and whatever else was measured, against the bytes of a step, and writes a PNG.

    A point is the mean over the seeds, its bar the range. The line joins what nothing else beats in both.

    Args:
      spreads: the reducers; the first is the baseline, whose level is dotted.
      path: where the PNG goes.
      title: a line above all panels.
      unit: what the loss is measured in.

    Returns:
      The path.
    """
    keys = sorted(spreads[0].held_out, key=lambda key: key != "loss")
    rows = max(8.2, 0.235 * len(spreads) + 1.2)
    figure = Figure(figsize=(7.2 * len(keys) + 2.4, rows), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, color=GREY)
    panels = figure.subplots(1, len(keys), squeeze=False)[0]
    for axes, key in zip(panels, keys):
        _panel(axes, spreads, key)
        axes.set_ylabel(f"held-out loss ({unit})" if key == "loss" else f"held-out {key}")
    _legend(panels[-1], spreads)
    figure.savefig(path, dpi=150)
    return Path(path)


def _panel(axes: Axes, spreads: Sequence[Spread], key: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#EEEEEE", linewidth=0.8)
    axes.set_axisbelow(True)
    best = front(spreads, key)
    axes.plot([one.wire_bytes for one in best], [one.held_out[key].mean() for one in best], color=GREY, linewidth=1.0)
    axes.axhline(spreads[0].held_out[key].mean(), color=GREY, linewidth=0.8, linestyle=":")
    for number, one in enumerate(spreads):
        values = one.held_out[key]
        if not np.isfinite(values).all():
            continue
        colour, marker = _look(one, spreads)
        mean = values.mean()
        axes.errorbar(
            one.wire_bytes,
            mean,
            yerr=[[mean - values.min()], [values.max() - mean]],
            color=colour,
            marker=marker,
            markersize=6,
            linewidth=0.9,
        )
        axes.annotate(
            str(number + 1),
            (one.wire_bytes, mean),
            xytext=(5, 4),
            textcoords="offset points",
            fontsize=7.5,
            color=colour,
        )
    _limit(axes, spreads, key)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("sent by one worker in a step")


def _limit(axes: Axes, spreads: Sequence[Spread], key: str) -> None:
    """A reducer that fails leaves the drawing instead of flattening the others."""
    means = np.array([one.held_out[key].mean() for one in spreads])
    finite = means[np.isfinite(means)]
    low, high = np.quantile(finite, [0.0, 0.85]) if key == "loss" else np.quantile(finite, [0.15, 1.0])
    margin = max(0.15 * (high - low), 1e-3)
    axes.set_ylim(low - margin, high + margin)


def _look(one: Spread, spreads: Sequence[Spread]) -> tuple[str, str]:
    families = list(dict.fromkeys(other.family for other in spreads))
    place = families.index(one.family)
    return COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]


def _legend(axes: Axes, spreads: Sequence[Spread]) -> None:
    """Every number of the drawing and what it stands for, in the colour of its family."""
    for number, one in enumerate(spreads):
        colour, _ = _look(one, spreads)
        axes.annotate(
            f"{number + 1:>2}  {one.name}   {in_bytes(one.wire_bytes)}",
            (1.02, 1.0 - number / max(len(spreads), 24)),
            xycoords="axes fraction",
            fontsize=8.5,
            va="top",
            color=colour,
            annotation_clip=False,
        )
