"""Time to a loss over given links: which of several methods reaches it first."""

import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.table import Table
from rich.text import Text

from ..analysis.cost import Link
from ..analysis.measured import measure_link
from ..analysis.step_time import StepCost, network_seconds, step_seconds
from . import figures
from .figures import GREY, color_of, in_bytes, in_rate, new_table
from .results import RunResult, read_log
from .spellings import parse
from .tables import Record

MEASURED = "measured"
CAPTION = (
    "Compute and coding: medians measured on one device of this machine, with the other workers' payloads simulated.\n"
    "Hops: latencies that a step waits for. Step and seconds: predicted from these and the bytes of the compiled step."
)
EVALUATIONS = 20  # of the held-out loss in a run


class Curve(NamedTuple):
    """The held-out losses of a method by step."""

    steps: np.ndarray  # the steps of the evaluations, the end of the run last
    losses: np.ndarray  # [seeds, evaluations]

    def steps_to(self, target: float) -> np.ndarray:
        """The steps to a loss, for each seed; infinite if it is not reached."""
        return np.array([step_at(self.steps, losses, target) for losses in self.losses])


class Entrant(NamedTuple):
    """A method in the race: its held-out losses, and the cost of a step."""

    name: str  # the spelling
    cost: StepCost
    curve: Curve


class Finish(NamedTuple):
    """The predicted time of one method over one link."""

    name: str
    link: Link
    cost: StepCost
    network: float  # seconds in a step that the link is busy
    step: float  # seconds of a step
    steps: np.ndarray  # steps to the target, for each seed; infinite if it is not reached

    @property
    def seconds(self) -> float:
        """Seconds to the target, as the mean over the seeds; infinite if one of them does not reach it."""
        return self.step * float(self.steps.mean())


def parse_links(given: Sequence[Sequence[str]], mesh: jax.sharding.Mesh, *, axis: str) -> list[Link]:
    """Makes the links that `--link` spells; `measured` times those between the devices of the mesh."""
    spelled = [text for group in given for text in group]
    # Every spelling is parsed before anything is measured.
    links = {text: parse.parse_link(text) for text in spelled if text != MEASURED}
    if spelled and mesh.size < 2:
        raise ValueError("--link needs at least two workers (--devices), got 1: one worker sends nothing")
    if MEASURED in spelled:
        links[MEASURED] = measure_link(mesh, axis=axis)
    return [links[text] for text in dict.fromkeys(spelled)]


def enter(name: str, cost: StepCost, finished: Sequence[RunResult]) -> Entrant:
    """Collects the held-out losses of a method's runs, one for each seed."""
    last = len(finished[0].records)
    steps = [evaluation.step for evaluation in finished[0].evaluations if evaluation.step < last]
    losses = [
        [*(each.held_out["loss"] for each in result.evaluations if each.step < last), result.held_out["loss"]]
        for result in finished
    ]
    return Entrant(name, cost, Curve(np.array([*steps, last]), np.array(losses)))


def read_curves(path: Path) -> tuple[dict[str, Any], dict[str, Curve]]:
    """Reads the settings and each method's held-out losses from the log of `jaxdist compare --link`."""
    runs: dict[str, list[dict[int, float]]] = {}
    started = finished = 0
    try:
        lines = read_log(path)
        settings = lines[0]
        for line in lines:
            if line["kind"] == "run":
                _check_settings(line, settings)
                started += 1
                runs.setdefault(line["reducer"], []).append({})
            elif line["kind"] in ("evaluation", "summary"):
                loss = line["held_out"]["loss"]
                finished += line["kind"] == "summary"
                # JSON has no number for the loss of a run that diverged.
                step = line["step" if line["kind"] == "evaluation" else "steps"]
                runs[line["reducer"]][-1][step] = math.nan if loss is None else loss
        if finished < started or not started:
            raise ValueError(f"{started} runs were started and {finished} finished")
        curves = {
            name: Curve(np.array(list(seeds[0])), np.array([list(seed.values()) for seed in seeds]))
            for name, seeds in runs.items()
        }
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is not the log of a finished jaxdist compare: {error}") from error
    short = [name for name, curve in curves.items() if len(curve.steps) < 2]
    if short:
        raise ValueError(f"{path} has no losses of {', '.join(short)} on the way: write it with jaxdist compare --link")
    return settings, curves


def _check_settings(run: dict[str, Any], first: dict[str, Any]) -> None:
    """Raises ValueError if two runs of a log differ in more than the method and the seed."""
    for key in ("optimizer", "workload", "model", "batch", "steps", "workers"):
        if run[key] != first[key]:
            raise ValueError(f"its runs differ in {key}: {first[key]!r} and {run[key]!r}, as those of --suite local do")


def common_target(curves: Iterable[Curve]) -> float:
    """The lowest loss that every method reaches with every seed; methods that diverge are left out."""
    lowest = np.array([curve.losses.min(axis=1).max() for curve in curves])
    reached = lowest[np.isfinite(lowest)]
    return float(reached.max()) if reached.size else math.nan


def step_at(steps: np.ndarray, losses: np.ndarray, target: float) -> float:
    """The step at which the loss first reaches a target, on straight lines between the evaluations.

    Examples:
      >>> step_at(np.array([10, 20, 30]), np.array([3.0, 2.0, 1.0]), 1.5)
      25.0
      >>> step_at(np.array([10, 20]), np.array([3.0, 2.0]), 1.5)
      inf
    """
    reached = np.flatnonzero(losses <= target)
    if not reached.size:
        return math.inf
    last = int(reached[0])
    # What happened before the first evaluation, or after one that is not finite, was not seen.
    if last == 0 or not np.isfinite(losses[last - 1]):
        return float(steps[last])
    before, after = float(losses[last - 1]), float(losses[last])
    return float(steps[last - 1] + (steps[last] - steps[last - 1]) * (before - target) / (before - after))


def run_race(entrants: Sequence[Entrant], links: Sequence[Link], target: float) -> list[Finish]:
    """Predicts every method's time to the target over every link."""
    return [
        Finish(
            name=entrant.name,
            link=link,
            cost=entrant.cost,
            network=network_seconds(entrant.cost, link),
            step=step_seconds(entrant.cost, link),
            steps=entrant.curve.steps_to(target),
        )
        for link in links
        for entrant in entrants
    ]


def finish_table(finished: Sequence[Finish], target: float) -> Table:
    """One row for each method, with its step and its time to the target over every link; the first one is bold."""
    links = list(dict.fromkeys(one.link for one in finished))
    headings = ["bytes a step", "hops", "compute ms", "coding ms", f"steps to {target:.4g}"]
    for link in links:
        # With a place to wrap.
        name = link.name.replace(",", ", ")
        headings += [f"{name}\nstep ms", f"{name}\nseconds"]
    table = new_table("method", headings, caption=CAPTION)
    firsts = {one.link: one for one in _first_on_each(finished)}
    for name in dict.fromkeys(one.name for one in finished):
        own = [one for one in finished if one.name == name]
        cost = own[0].cost
        cells = [in_bytes(cost.traffic.wire_bytes), f"{cost.traffic.hops:,.2g}"]
        cells += [f"{1e3 * each:,.1f}" for each in (cost.compute, cost.coding)]
        cells.append(_spell(float(own[0].steps.mean()), ",.0f"))
        seconds = []
        for one in own:
            # A text of its own, since markup would get into the files.
            style = "bold green" if firsts.get(one.link) is one else ""
            seconds.append((f"{1e3 * one.step:,.1f}", Text(_spell(one.seconds, ",.1f"), style=style)))
        table.add_row(name, *cells, *itertools.chain.from_iterable(seconds))
    return table


def _spell(value: float, form: str) -> str:
    return f"{value:{form}}" if math.isfinite(value) else "-"


def finish_records(finished: Sequence[Finish], target: float) -> list[Record]:
    """The numbers of `finish_table`, for a program: a record for each link and method."""
    return [
        {
            "link": one.link.name,
            "latency": float(one.link.latency),
            "bandwidth": float(one.link.bandwidth),
            "name": one.name,
            "wire_bytes_per_step": one.cost.traffic.wire_bytes,
            "hops_per_step": one.cost.traffic.hops,
            "compute_seconds": one.cost.compute,
            "coding_seconds": one.cost.coding,
            "network_seconds": one.network,
            "step_seconds": one.step,
            **one.cost.schedule._asdict(),
            "target": target,
            "steps_to_target": float(one.steps.mean()),
            "steps_to_target_min": float(one.steps.min()),
            "steps_to_target_max": float(one.steps.max()),
            "seconds_to_target": one.seconds,
        }
        for one in finished
    ]


def _first_on_each(finished: Sequence[Finish]) -> list[Finish]:
    """The first method on every link that any method finishes on."""
    links = dict.fromkeys(one.link for one in finished)
    firsts = [min((one for one in finished if one.link == link), key=lambda one: one.seconds) for link in links]
    return [first for first in firsts if math.isfinite(first.seconds)]


def conclude(finished: Sequence[Finish], target: float, baseline: str) -> list[str]:
    """The first method to reach the target on each link, and how long the baseline takes."""
    lines = []
    for first in _first_on_each(finished):
        line = f"{_describe(first.link)}: {first.name} reaches {target:.4g} first, after {first.seconds:,.1f} s"
        (plain,) = (one for one in finished if one.link == first.link and one.name == baseline)
        if first.name != baseline:
            slower = f"after {plain.seconds:,.1f} s" if math.isfinite(plain.seconds) else "not at all"
            line += f" ({baseline}: {slower})"
        lines.append(f"{line}.")
    never = dict.fromkeys(one.name for one in finished if not math.isfinite(one.seconds))
    if never:
        lines.append(f"Not in these steps: {', '.join(never)}.")
    return lines


def _describe(link: Link) -> str:
    return f"{in_rate(link.bandwidth)}, {1e3 * link.latency:,.3g} ms" + (" (measured)" if link.name == MEASURED else "")


def draw_race(
    entrants: Sequence[Entrant], links: Sequence[Link], target: float, path: str | Path, *, title: str, unit: str
) -> Path:
    """Draws the held-out loss against predicted time, with a panel for each link; the first method is black.

    Lines are means over the seeds, bands their standard deviation. A dot is where a line reaches the target.
    """
    columns = min(2, len(links))
    rows = math.ceil(len(links) / columns)
    figure = figures.new_figure(title, 5.2 * columns + 1.2, 3.6 * rows + 0.7)
    panels = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flat)
    for axes, link in zip(panels, links, strict=False):
        figures.open_axes(axes, grid="both")
        for number, entrant in enumerate(entrants):
            (steps, losses), step = entrant.curve, step_seconds(entrant.cost, link)
            figures.draw_band(axes, step * steps, losses, color_of(number), label=entrant.name)
            end = step * step_at(steps, losses.mean(axis=0), target)
            if math.isfinite(end):
                axes.plot(end, target, "o", color=color_of(number), markersize=6)
        axes.axhline(target, color=GREY, linewidth=0.8, linestyle=":")
        # Methods differ by tens of times: on a linear axis all but the slowest would share one place.
        axes.set_xscale("log")
        figures.count_seconds(axes.xaxis)
        figures.label(axes, _describe(link), xlabel="predicted seconds")
        axes.set_ylim(_limits(entrants))
    # Panels that no link fills.
    for axes in panels[len(links) :]:
        axes.set_axis_off()
    figure.supylabel(f"held-out loss ({unit})", fontsize=10)
    figures.add_legend(figure, panels[0])
    return figures.write(figure, path)


def _limits(entrants: Sequence[Entrant]) -> tuple[float, float]:
    """From the best loss to the highest first evaluation; runs that diverge leave the panel."""
    all_losses = [entrant.curve.losses for entrant in entrants]
    best = min((float(np.nanmin(losses)) for losses in all_losses if np.isfinite(losses).any()), default=0.0)
    starts = [float(losses[:, 0].max()) for losses in all_losses if np.isfinite(losses[:, 0]).all()]
    worst = max(starts, default=best + 1.0)
    margin = max(0.05 * (worst - best), 1e-3)
    return best - margin, worst + margin
