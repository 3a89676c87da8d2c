"""Turns the records of `measure.py` into tables and a chart.

    python benchmarks/race tables benchmarks/reports/2026-11-race
    python benchmarks/race tables benchmarks/reports/2026-11-race --links benchmarks/reports/2026-11-foundation

Time to the target is the steps to it, at each mode's best learning rate, times the measured step over the link.
Predicted steps are those of `jaxdist.analysis.step_time`, from computation, coding and the compiled step's traffic.
`time_to_loss.png` shows the language model, `time_to_loss_lm30.png` a larger one, `time_to_loss_mlp.png` the
classifier.
With `--links` the model is held against the records of `benchmarks/links compare` instead.
"""

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import chart
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "links"))

import report as links_report

from jaxdist._cli.commands import advise
from jaxdist._cli.race import step_at
from jaxdist.analysis.base import Collective, summarize
from jaxdist.analysis.cost import Link
from jaxdist.analysis.step_time import Schedule, StepCost, Traffic, mean_traffic, step_seconds, traffic

PROBLEMS = {
    "lm": "language model of 4.9 M parameters",
    "lm30": "language model of 29.9 M parameters",
    "mlp": "classifier of 10.5 M parameters",
    "tiny": "tiny classifier",
}
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
    ("torch", "zero2"): "DeepSpeed ZeRO, stage 2",
}
# Modes whose losses by step are those of another one, up to rounding (`same_losses.json` has both, over some steps).
SAME_LOSSES = {
    ("jaxdist", "f16"): ("jaxdist", "exact"),
    ("torch", "ddp"): ("jaxdist", "exact"),
    ("torch", "f16"): ("jaxdist", "exact"),
    ("torch", "local"): ("jaxdist", "local"),
    ("torch", "zero2"): ("jaxdist", "exact"),
}
HOSTS = {2: "two", 4: "four"}
# The share of a link that is payload: segments of 1448 bytes in frames of 1514.
PAYLOAD = 1448 / 1514
# Half a round trip over the links of `links/compare.py`, in seconds.
LATENCY = 35e-6
# Two workers: hops of the modes of `links/compare.py`.
HOPS = {"exact": 2.0, "hand_flat": 2.0, "power_sgd": 4.0, "f16": 2.0, "qsgd": 1.0, "top_k": 1.0, "sign": 1.0}


class Setting(NamedTuple):
    """Hosts and their links."""

    hosts: int
    rate_mbit: float
    delay_ms: float  # from host to host

    def __str__(self) -> str:
        rate = f"{self.rate_mbit / 1e3:g} Gbit/s" if self.rate_mbit >= 1e3 else f"{self.rate_mbit:g} Mbit/s"
        return f"{rate}, {self.delay_ms:g} ms each way" if self.delay_ms else rate


class Row(NamedTuple):
    """One mode of one system over one link."""

    system: str
    mode: str
    step: float  # measured seconds, the median of the fastest repetition
    slowest: float  # that of the slowest repetition
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


def link_of(setting: Setting, records: list[dict[str, Any]]) -> Link:
    """The rate as it was asked for, and a hop as `measure_link` found it.

    A hop of gloo is a round trip where a link has a delay. The measured rate is not used: small messages pass a token
    bucket at once.
    """
    latency = min(record["latency"] for record in records if setting_of(record) == setting)
    return Link(str(setting), latency, setting.rate_mbit * 1e6 / 8 * PAYLOAD)


def setting_of(record: dict[str, Any]) -> Setting:
    return Setting(hosts_of(record), record["rate_mbit"], record["delay_ms"])


def hosts_of(record: dict[str, Any]) -> int:
    return record.get("hosts", 2)


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else []


def step_of(record: dict[str, Any]) -> float:
    """The median over the rounds of a repetition."""
    seconds, period = record["seconds"], record["period"]
    return statistics.median(statistics.mean(seconds[n : n + period]) for n in range(0, len(seconds), period))


def fastest(records: list[dict[str, Any]]) -> float:
    """The step of the repetition that other work on the machine disturbed least."""
    return min(map(step_of, records))


def cost_of(records: list[dict[str, Any]], compute: float) -> StepCost:
    coding = min(record["coding"] for record in records)
    schedule, workers = Schedule(*records[0]["schedule"]), hosts_of(records[0])
    # From the collectives of the compiled step once more: the model may have changed since they were read.
    ops = [
        Collective(kind, dtype, size, size, workers, None, (), 1, messages, wire_bytes, "")
        for kind, dtype, size, messages, wire_bytes in records[0]["collectives"]
    ]
    round_end = traffic(summarize(ops, []), workers=workers, gloo=True)
    sent = mean_traffic(round_end, Traffic(0.0, 0.0), 1 / schedule.period)
    return StepCost(compute, coding / schedule.period, sent, schedule)


def alone_of(record: dict[str, Any], otherwise: float) -> float:
    """The step without communication, timed before and after a mode."""
    return statistics.median(record["alone_seconds"]) if "alone_seconds" in record else otherwise


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


def rows_of(folder: Path, problem: str, setting: Setting, target: float) -> list[Row]:
    def own(name: str, system: str, mode: str) -> list[dict[str, Any]]:
        wanted = {"problem": problem, "system": system, "mode": mode}
        found = [each for each in read(folder, name) if all(each[key] == value for key, value in wanted.items())]
        return [each for each in found if hosts_of(each) == setting.hosts]

    def over_link(name: str, system: str, mode: str) -> list[dict[str, Any]]:
        return [each for each in own(name, system, mode) if setting_of(each) == setting]

    rows = []
    all_costs = [each for each in read(folder, "costs") if each["problem"] == problem]
    costs = [each for each in all_costs if hosts_of(each) == setting.hosts]
    # Records without such steps of their own: those of a turn of its own, of all links together.
    alone = min(map(step_of, own("steps", "jaxdist", "none")), default=math.nan)
    link = link_of(setting, read(folder, "links"))
    for system, mode in LABELS:
        timed = over_link("steps", system, mode)
        if not timed:
            continue
        predicted = math.nan
        known = [each for each in costs if each["mode"] == mode]
        if system == "jaxdist" and known:
            predicted = step_seconds(cost_of(known, alone_of(min(timed, key=step_of), alone)), link)
        losses = own("losses", system, mode) or own("losses", *SAME_LOSSES.get((system, mode), (system, mode)))
        rate, steps = best_steps(losses, target)
        runs = [run_seconds(run, target) for run in over_link("runs", system, mode) if run["held_out"][-1] <= target]
        rows.append(
            Row(
                system,
                mode,
                fastest(timed),
                max(map(step_of, timed)),
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
        "slowest",
        "predicted ms",
        "error",
        "MB a step",
        "rate",
        f"steps to {target:g}" if math.isfinite(target) else "steps",
        "seconds",
        "from-to",
        "whole run s",
    ]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "--:|" * (len(head) - 1)]
    for row in rows:
        predicted = math.isfinite(row.predicted)
        cells = [LABELS[row.system, row.mode], f"{1e3 * row.step:,.0f}"]
        cells += [f"{1e3 * row.slowest:,.0f}", spell(1e3 * row.predicted)]
        cells += [f"{100 * (row.predicted / row.step - 1):+.0f} %" if predicted else "", f"{row.megabytes:.2f}"]
        cells += [f"{row.rate:g}" if math.isfinite(row.rate) else "", spell(row.steps), spell(row.seconds, ",.2f")]
        spread = [spell(row.step * steps, ",.1f") for steps in row.spread]
        cells += ["-".join(spread) if row.seeds > 1 else "", spell(row.run, ",.1f")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def order(rows: list[Row]) -> str:
    """Whether the model puts the library's own methods in the order in which they were measured.

    Methods that are less than a tenth apart are not counted.
    """
    own = [row for row in rows if math.isfinite(row.predicted)]
    errors = [abs(row.predicted / row.step - 1) for row in own]
    swapped = [
        f"{LABELS[b.system, b.mode]} before {LABELS[a.system, a.mode]}"
        for a in own
        for b in own
        if a.step * weight(a) < 0.9 * b.step * weight(b) and a.predicted * weight(a) > b.predicted * weight(b)
    ]
    said = f"largest error of a step {100 * max(errors, default=math.nan):.0f} %"
    return f"{said}; order " + (f"differs: predicted {'; '.join(swapped)}" if swapped else "as measured")


def choices(rows: list[Row]) -> list[tuple[str, float]]:
    """What `jaxdist advise` takes by the predictions, with the losses and without, and how much later it arrives.

    Later than the first of all methods, as a share.
    """
    own = {
        LABELS[row.system, row.mode]: row for row in rows if math.isfinite(row.predicted) and math.isfinite(row.seconds)
    }
    first = min(row.seconds for row in rows)
    chosen = []
    for known in (True, False) if own else ():
        found = [
            advise.Prediction(
                name,
                wire_bytes=1e6 * row.megabytes,
                coding=0,
                network=0,
                step=row.predicted,
                hidden=0,
                break_even=0,
                seconds=row.predicted * row.steps if known else math.nan,
            )
            for name, row in own.items()
        ]
        name = advise.recommend(found).name
        chosen.append((name, own[name].seconds / first - 1))
    return chosen


def regrets(settings: dict[tuple[str, Setting], list[Row]]) -> str:
    """A row for each link: the first of all methods, and what `jaxdist advise` takes."""
    head = ["", "first of all", "`advise` with losses", "later", "without losses", "later"]
    lines = ["| " + " | ".join(head) + " |", "|---|---|---|--:|---|--:|"]
    for (problem, setting), rows in settings.items():
        if chosen := choices(rows):
            first = min(rows, key=lambda row: row.seconds)
            cells = [f"{problem}, {setting.hosts} hosts, {setting}", LABELS[first.system, first.mode]]
            cells += [cell for name, later in chosen for cell in (name, f"{100 * later:.0f} %")]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def weight(row: Row) -> float:
    """The steps to the target; without losses the steps themselves are put in order."""
    return row.steps if math.isfinite(row.steps) else 1.0


def plot(settings: dict[Setting, list[Row]], title: str, path: Path) -> None:
    def bar(row: Row) -> chart.Bar:
        spread = (row.step * row.spread[0], row.step * row.spread[1])
        return chart.Bar(LABELS[row.system, row.mode], row.system, row.seconds, spread, row.predicted * row.steps)

    panels = {setting: [bar(row) for row in rows if math.isfinite(row.seconds)] for setting, rows in settings.items()}
    rates = sorted({setting.rate_mbit for setting in settings})
    delays = sorted({setting.delay_ms for setting in settings})
    (hosts,) = {setting.hosts for setting in settings}
    grid = [[(str(key := Setting(hosts, rate, delay)), panels.get(key, [])) for delay in delays] for rate in rates]
    chart.draw(grid, title, LABELS["torch", "ddp"], path)


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
        for key in (key for key in figures if link.startswith("shaped") and key[0] == "jaxdist" and key[1] != "none"):
            if key not in found:
                continue
            one, near = figures[key], found[key]
            cost = StepCost(one["alone"] / 1e3, near["exposed"] / 1e3, Traffic(near["bytes"], HOPS[key[1]]))
            predicted = 1e3 * step_seconds(cost, Link("shaped", LATENCY, one["rate_mbit"] * 1e6 / 8 * PAYLOAD))
            cells = [problem, key[1], f"{one['alone']:.0f}", f"{near['exposed']:.0f}", f"{near['bytes'] / 1e6:.2f}"]
            cells += [f"{one['step']:.0f}", f"{predicted:.0f}", f"{100 * (predicted / one['step'] - 1):+.0f} %"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="where the records are")
    parser.add_argument("--links", type=Path, help="a report of `benchmarks/links compare`")


def main(given: argparse.Namespace) -> None:
    folder = given.folder
    if given.links:
        text = check_links(given.links)
        (folder / "model_on_links.md").write_text(f"{text}\n")
        print(text)
        return
    timed = read(folder, "steps")
    # Runs may have gone on to a lower loss than others; all of them passed the highest.
    targets: dict[str, float] = {}
    for record in read(folder, "losses"):
        targets[record["problem"]] = max(record["target"], targets.get(record["problem"], -math.inf))
    parts = []
    everything: dict[tuple[str, Setting], list[Row]] = {}
    for problem, label in PROBLEMS.items():
        # Without losses there is no target, and the tables have the steps alone.
        target = targets.get(problem, math.nan)
        found = sorted({setting_of(record) for record in timed if record["problem"] == problem})
        settings = {setting: rows_of(folder, problem, setting, target) for setting in found}
        everything |= {(problem, setting): rows for setting, rows in settings.items()}
        for setting, rows in settings.items():
            least = ", ".join(f"{name} {seconds}" for name, seconds in alone_by_system(timed, problem, setting).items())
            parts.append(f"### {label[0].upper() + label[1:]}, {HOSTS[setting.hosts]} hosts, {setting}\n")
            parts.append(f"{table(rows, target)}\n\nWithout communication: {least}. Model: {order(rows)}.\n")
        two = {setting: rows for setting, rows in settings.items() if setting.hosts == 2}
        if any(math.isfinite(row.seconds) for rows in two.values() for row in rows):
            title = f"Seconds until a {label} reaches a held-out loss of {target:g}"
            plot(two, title, folder / ("time_to_loss.png" if problem == "lm" else f"time_to_loss_{problem}.png"))
    parts.append(f"### What `jaxdist advise` takes\n\n{regrets(everything)}\n")
    (folder / "race.md").write_text("\n".join(parts))
    print("\n".join(parts))


def alone_by_system(timed: list[dict[str, Any]], problem: str, setting: Setting) -> dict[str, str]:
    """The step without communication, measured beside those over a link: the least and the most of all turns."""
    found = {}
    for system in ("jaxdist", "torch"):
        near = [
            each for each in timed if (each["problem"], each["system"], setting_of(each)) == (problem, system, setting)
        ]
        turns = [1e3 * step_of(each) for each in near if each["mode"] == "none"]
        turns += [1e3 * alone_of(each, math.nan) for each in near if "alone_seconds" in each]
        if turns:
            found[system] = f"{min(turns):.0f}-{max(turns):.0f} ms"
    return found
