"""Turns the records of `race.py` into tables and a chart.

    python benchmarks/race/report.py benchmarks/reports/2026-11-race
    python benchmarks/race/report.py benchmarks/reports/2026-11-race --links benchmarks/reports/2026-11-foundation

Time to the target is the steps to it, at each mode's best learning rate, times the measured step over the link.
Predicted steps are those of `jaxdist.analysis.step_time`, from computation, coding and the compiled step's traffic.
With `--links` the model is held against the records of `benchmarks/links/compare.py` instead.
"""

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# Before the folder of this script, which has a module of the same name.
sys.path.insert(0, str(Path(__file__).parents[1] / "links"))

import report as links_report

from jaxdist._cli.race import step_at
from jaxdist.analysis.cost import Link
from jaxdist.analysis.step_time import Schedule, StepCost, Traffic, step_seconds

PROBLEMS = {"lm": "language model, 4.9 M parameters", "mlp": "classifier, 10.5 M parameters", "tiny": "tiny classifier"}
LABELS = {
    ("jaxdist", "exact"): "jaxdist exact",
    ("jaxdist", "f16"): "jaxdist f16",
    ("jaxdist", "power_sgd"): "jaxdist PowerSGD, rank 4",
    ("jaxdist", "two_shot"): "jaxdist two-shot, 4 bits",
    ("jaxdist", "local"): "jaxdist Local SGD, H=8",
    ("jaxdist", "diloco"): "jaxdist DiLoCo-like, H=8",
    ("jaxdist", "top_k"): "jaxdist top-k 1 %",
    ("torch", "ddp"): "PyTorch DDP",
    ("torch", "f16"): "PyTorch DDP, f16 hook",
    ("torch", "power_sgd"): "PyTorch PowerSGD hook, rank 4",
    ("torch", "local"): "PyTorch post-local SGD, H=8",
}
# Modes whose losses by step are those of another one, up to rounding.
SAME_LOSSES = {("jaxdist", "f16"): ("jaxdist", "exact"), ("torch", "f16"): ("torch", "ddp")}
# The share of a link that is payload: segments of 1448 bytes in frames of 1514. Half a round trip is 35 microseconds.
PAYLOAD, LATENCY = 1448 / 1514, 35e-6
# Two workers: hops of the modes of `links/compare.py`.
HOPS = {"exact": 2.0, "hand_flat": 2.0, "power_sgd": 4.0, "f16": 2.0, "qsgd": 1.0, "top_k": 1.0, "sign": 1.0}
COLORS = {"jaxdist": "#0072B2", "torch": "#D55E00"}


class Row(NamedTuple):
    """One mode of one system over one link."""

    system: str
    mode: str
    step: float  # measured seconds
    predicted: float  # seconds of the model; NaN for the other system
    rate: float  # the best learning rate
    steps: float  # to the target
    spread: tuple[float, float]  # the fewest and the most steps of all seeds
    seeds: int
    run: float  # seconds to the target in a whole run over the link; NaN if there is none
    megabytes: float  # sent by one host in a step, headers included

    @property
    def seconds(self) -> float:
        return self.step * self.steps


def link_of(rate_mbit: float) -> Link:
    return Link(f"{rate_mbit:g} Mbit/s", LATENCY, rate_mbit * 1e6 / 8 * PAYLOAD)


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else []


def step_of(records: list[dict[str, Any]]) -> float:
    """The median over rounds, of all records."""
    rounds = []
    for record in records:
        seconds, period = record["seconds"], record["period"]
        rounds += [statistics.mean(seconds[n : n + period]) for n in range(0, len(seconds), period)]
    return statistics.median(rounds)


def cost_of(records: list[dict[str, Any]], compute: float) -> StepCost:
    coding = statistics.median(record["coding"] for record in records)
    schedule = Schedule(*records[0]["schedule"])
    return StepCost(compute, coding / schedule.period, Traffic(*records[0]["traffic"]), schedule)


def best_steps(records: list[dict[str, Any]], target: float) -> tuple[float, list[float]]:
    """The learning rate with the fewest steps to the target, and these steps for each of its seeds."""
    found: dict[float, list[float]] = {}
    for record in records:
        steps = step_at(np.array(record["steps"]), np.array(record["held_out"]), target)
        found.setdefault(record["rate"], []).append(steps)
    # The first seed, which all rates have, chooses.
    rate = min(found, key=lambda rate: found[rate][0], default=math.nan)
    return rate, found.get(rate, [math.inf])


def run_seconds(run: dict[str, Any], target: float) -> float:
    """Seconds to the target in a whole run, on straight lines between its evaluations."""
    reached = step_at(np.array(run["steps"]), np.array(run["held_out"]), target)
    return float(np.interp(reached, run["steps"], run["seconds"]))


def rows_of(folder: Path, problem: str, rate_mbit: float, target: float) -> list[Row]:
    def own(name: str, system: str, mode: str) -> list[dict[str, Any]]:
        wanted = {"problem": problem, "system": system, "mode": mode}
        return [each for each in read(folder, name) if all(each[key] == value for key, value in wanted.items())]

    def over_link(name: str, system: str, mode: str) -> list[dict[str, Any]]:
        return [each for each in own(name, system, mode) if each["rate_mbit"] == rate_mbit]

    rows = []
    costs = [each for each in read(folder, "costs") if each["problem"] == problem]
    # Without communication no link matters: all measurements of it together.
    alone = own("steps", "jaxdist", "none")
    for system, mode in LABELS:
        timed = over_link("steps", system, mode)
        if not timed:
            continue
        predicted = math.nan
        known = [each for each in costs if each["mode"] == mode]
        if system == "jaxdist" and known and alone:
            predicted = step_seconds(cost_of(known, step_of(alone)), link_of(rate_mbit))
        losses = own("losses", system, mode) or own("losses", *SAME_LOSSES.get((system, mode), (system, mode)))
        rate, steps = best_steps(losses, target)
        runs = [run_seconds(run, target) for run in over_link("runs", system, mode) if run["held_out"][-1] <= target]
        rows.append(
            Row(
                system,
                mode,
                step_of(timed),
                predicted,
                rate,
                statistics.mean(steps),
                (min(steps), max(steps)),
                len(steps),
                statistics.median(runs) if runs else math.nan,
                statistics.median(each["bytes"] for each in timed) / 1e6,
            )
        )
    return sorted(rows, key=lambda row: (not math.isfinite(row.seconds), row.seconds, row.step))


def spell(value: float, form: str = ",.0f") -> str:
    return f"{value:{form}}" if math.isfinite(value) else ""


def table(rows: list[Row], target: float) -> str:
    head = [
        "",
        "step ms",
        "predicted ms",
        "error",
        "MB a step",
        "rate",
        f"steps to {target:g}" if math.isfinite(target) else "steps",
        "seconds",
        "whole run s",
    ]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "--:|" * (len(head) - 1)]
    for row in rows:
        steps = spell(row.steps) + (f" ({row.spread[0]:.0f}-{row.spread[1]:.0f})" if row.seeds > 1 else "")
        cells = [LABELS[row.system, row.mode], f"{1e3 * row.step:,.0f}", spell(1e3 * row.predicted)]
        cells += [spell(100 * (row.predicted / row.step - 1), "+.0f") + (" %" if math.isfinite(row.predicted) else "")]
        cells += [f"{row.megabytes:.2f}", f"{row.rate:g}" if math.isfinite(row.rate) else "", steps]
        cells += [spell(row.seconds, ",.1f"), spell(row.run, ",.1f")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def order(rows: list[Row]) -> str:
    """Whether the model puts the library's own methods in the order in which they were measured."""
    own = [row for row in rows if math.isfinite(row.predicted)]
    errors = [abs(row.predicted / row.step - 1) for row in own]

    def weight(row: Row) -> float:
        # Without losses the steps themselves are put in order.
        return row.steps if math.isfinite(row.steps) else 1.0

    swapped = [
        f"{LABELS[a.system, a.mode]} before {LABELS[b.system, b.mode]}"
        for n, b in enumerate(own)
        for a in own[n + 1 :]
        if a.predicted * weight(a) < b.predicted * weight(b)
    ]
    said = f"largest error of a step {100 * max(errors, default=math.nan):.0f} %"
    return f"{said}; order " + (f"differs: predicted {'; '.join(swapped)}" if swapped else "as measured")


def plot(settings: dict[tuple[str, float], list[Row]], targets: dict[str, float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    problems = list(dict.fromkeys(problem for problem, _ in settings))
    rates = list(dict.fromkeys(rate for _, rate in settings))
    size = (7.4 * len(problems), 3.9 * len(rates))
    figure, panels = plt.subplots(len(rates), len(problems), figsize=size, squeeze=False, layout="constrained")
    for (problem, rate), rows in settings.items():
        axes = panels[rates.index(rate)][problems.index(problem)]
        shown = [row for row in rows if math.isfinite(row.seconds)][::-1]
        axes.barh(range(len(shown)), [row.seconds for row in shown], color=[COLORS[row.system] for row in shown])
        for place, row in enumerate(shown):
            axes.text(row.seconds * 1.04, place, f"{row.seconds:,.0f} s", va="center", fontsize=8)
            if math.isfinite(row.predicted):
                axes.plot(row.predicted * row.steps, place, "o", color="white", markeredgecolor="black", markersize=5)
        axes.set_yticks(range(len(shown)), [LABELS[row.system, row.mode] for row in shown])
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlim(right=1.35 * max((row.seconds for row in shown), default=1.0))
        axes.set_title(f"{PROBLEMS[problem]}, {rate:g} Mbit/s", fontsize=10, loc="left")
        axes.set_xlabel(f"seconds to a held-out loss of {targets[problem]:g} (circles: predicted)", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def check_links(source: Path) -> str:
    """Predicts the steps over a shaped link in an earlier report, from its steps on a quiet loopback.

    Computation is that beside each step. Coding is what a method exposes on loopback, so it has the transfer through
    memory too; bytes are those that loopback counted, which has next to no headers.
    """
    shaped, quiet = (
        links_report.summarize(json.loads((source / name).read_text())["records"])
        for name in ("links.json", "loopback_quiet/links.json")
    )
    lines = [
        "| problem | mode | alone ms | coding ms | MB | step ms | predicted ms | error |",
        "|---|---|" + "--:|" * 6,
    ]
    for (link, problem), figures in shaped.items():
        (found,) = (each for (_, name), each in quiet.items() if name == problem)
        for key in (key for key in figures if link == "shaped" and key[0] == "jaxdist" and key[1] != "none"):
            if key not in found:
                continue
            one, near = figures[key], found[key]
            cost = StepCost(one["alone"] / 1e3, near["exposed"] / 1e3, Traffic(near["bytes"], HOPS[key[1]]))
            predicted = 1e3 * step_seconds(cost, link_of(one["rate_mbit"]))
            cells = [problem, key[1], f"{one['alone']:.0f}", f"{near['exposed']:.0f}", f"{near['bytes'] / 1e6:.2f}"]
            cells += [f"{one['step']:.0f}", f"{predicted:.0f}", f"{100 * (predicted / one['step'] - 1):+.0f} %"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    folder = Path(sys.argv[1])
    if "--links" in sys.argv:
        text = check_links(Path(sys.argv[sys.argv.index("--links") + 1]))
        (folder / "model_on_links.md").write_text(f"{text}\n")
        print(text)
        return
    timed = read(folder, "steps")
    targets = {record["problem"]: record["target"] for record in read(folder, "losses")}
    keys = sorted({(record["problem"], record["rate_mbit"]) for record in timed})
    # Without losses there is no target, and the tables have the steps alone.
    targets = {problem: targets.get(problem, math.nan) for problem, _ in keys}
    settings = {key: rows_of(folder, *key, targets[key[0]]) for key in keys}
    parts = []
    for (problem, rate), rows in settings.items():
        alone = {
            record["system"]: record for record in timed if record["mode"] == "none" and record["problem"] == problem
        }
        least = ", ".join(f"{name} {1e3 * step_of([record]):.0f} ms" for name, record in alone.items())
        parts.append(f"### {PROBLEMS[problem][0].upper() + PROBLEMS[problem][1:]}, two hosts, {rate:g} Mbit/s\n")
        parts.append(f"{table(rows, targets[problem])}\n\nWithout communication: {least}. Model: {order(rows)}.\n")
    (folder / "race.md").write_text("\n".join(parts))
    if any(math.isfinite(row.seconds) for rows in settings.values() for row in rows):
        plot(settings, targets, folder / "time_to_loss.png")
    print("\n".join(parts))


if __name__ == "__main__":
    main()
