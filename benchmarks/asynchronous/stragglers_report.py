"""Tables and plot from the records of `stragglers`.

python benchmarks/asynchronous stragglers_report benchmarks/reports/NAME
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

BASELINE, SHOWN, DIFFER = "bsp", "16, one slow", "8, one slow, data differ"
MARKS = {"16, even": ("o", "white"), "16, one slow": ("o", "#D55E00"), "16, random": ("D", "#0072B2")}
CURVES = {
    "bsp": "#000000",
    "task_allocation": "#8C6D31",
    "asgd": "#0072B2",
    "ringmaster": "#56B4E9",
    "dude": "#CC79A7",
    "ad_psgd": "#009E73",
    "hop": "#E69F00",
    "prague": "#D55E00",
}
Rows = dict[tuple[str, str], dict[str, Any]]


def kind(rule: str) -> str:
    return rule.partition(":")[0]


def label(rule: str) -> str:
    return f"`{rule.replace('{n}', 'n').replace('{m}', '4n')}`"


def values(row: dict[str, Any], key: str) -> np.ndarray:
    return np.array([np.inf if value is None else value for value in row[key]])


def in_words(row: dict[str, Any] | None, key: str, digits: int = 2) -> str:
    """The median and the quartiles."""
    if row is None:
        return ""
    found = np.percentile(values(row, key), (50, 25, 75), method="nearest")
    middle, low, high = (f"{value:,.{digits}f}" if np.isfinite(value) else "never" for value in found)
    return f"{middle} ({low}-{high})" if low != high else middle


def factor(rows: Rows, scene: str, rule: str) -> float:
    """The speedup over the baseline, by medians."""
    return float(np.median(values(rows[scene, BASELINE], "seconds")) / np.median(values(rows[scene, rule], "seconds")))


def tables(rows: Rows) -> str:
    scenes = list(dict.fromkeys(scene for scene, _ in rows if scene != DIFFER))
    names = list(dict.fromkeys(rule for _, rule in rows))
    lines = ["Seconds to the target, median and quartiles", "", f"| rule | {' | '.join(scenes)} |"]
    lines += ["|---|" + "--:|" * len(scenes)]
    for name in names:
        lines.append(
            f"| {label(name)} | {' | '.join(in_words(rows.get((scene, name)), 'seconds') for scene in scenes)} |"
        )
    lines += ["", "Times sooner than bsp", "", f"| rule | {' | '.join(scenes)} |", "|---|" + "--:|" * len(scenes)]
    for name in names:
        found = [factor(rows, scene, name) if (scene, name) in rows else np.nan for scene in scenes]
        lines.append(f"| {label(name)} | {' | '.join('' if np.isnan(value) else f'{value:.1f}' for value in found)} |")
    heads = ("rate", "thousand samples", "gradients a second", "computing", "staleness", "kB a gradient")
    lines += ["", f"What they do: {SHOWN}", "", f"| rule | {' | '.join(heads)} |", "|---|" + "--:|" * len(heads)]
    for name in names:
        row = rows[SHOWN, name]
        cells = [f"{row['rate']:g}", f"{np.median(values(row, 'samples')) / 1e3:.1f}"]
        cells += [f"{np.median(row['gradients a second']):,.0f}", f"{np.median(row['computing']):.0%}"]
        cells += [f"{np.median(row['staleness']):.1f}", f"{np.median(row['bytes a gradient']) / 1e3:.0f}"]
        lines.append(f"| {label(name)} | {' | '.join(cells)} |")
    heads = ("rate", "loss", "slow worker's loss", "accuracy, %")
    lines += ["", f"Data differ: {DIFFER}", "", f"| rule | {' | '.join(heads)} |", "|---|" + "--:|" * len(heads)]
    for name in names:
        if (DIFFER, name) in rows:
            row = rows[DIFFER, name]
            cells = [f"{row['rate']:g}", in_words(row, "loss", 3), in_words(row, "slow worker's loss", 3)]
            cells += [f"{100 * np.median(row['accuracy']):.1f}"]
            lines.append(f"| {label(name)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: Rows, path: Path) -> None:
    figure, panels = plt.subplots(1, 3, figsize=(15, 5.2), layout="constrained", width_ratios=(1.25, 1, 1))
    names = list(dict.fromkeys(rule for scene, rule in rows if scene in MARKS))
    _factors(panels[0], rows, names)
    for axes, against in zip(panels[1:], ("seconds", "samples")):
        for name in names:
            if kind(name) in CURVES:
                curve = rows[SHOWN, name]["curve"]
                x = np.array(curve[against]) / (1 if against == "seconds" else 1e3)
                axes.plot(x, curve["loss"], color=CURVES[kind(name)], linewidth=1.6, label=kind(name))
        axes.set_ylabel("held-out loss")
        axes.set_ylim(0, 2.5)
        axes.grid(axis="y", color="#E6E6E6")
        axes.spines[["top", "right"]].set_visible(False)
    panels[1].set_title("one of 16 is slow: loss over virtual time", loc="left")
    panels[1].set_xlabel("virtual seconds, until the target is met")
    panels[1].legend(frameon=False, labelcolor="linecolor", handlelength=0)
    panels[2].set_title("loss over samples", loc="left")
    panels[2].set_xlabel("thousand samples computed, of all workers")
    figure.savefig(path, dpi=130)


def _factors(axes: Axes, rows: Rows, names: list[str]) -> None:
    for scene, (mark, color) in MARKS.items():
        found = [factor(rows, scene, name) for name in names]
        label = {"16, even": "equal speeds", "16, one slow": "one 6 times slower", "16, random": "random slowdowns"}
        axes.plot(
            found, range(len(names)), mark, color=color, markeredgecolor="#404040", markersize=8, label=label[scene]
        )
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator([0.25, 0.5, 1, 2, 4, 8]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_yticks(range(len(names)), [kind(name) for name in names])
    axes.invert_yaxis()
    axes.grid(color="#E6E6E6")
    axes.set_axisbelow(True)
    axes.set_xlabel("times sooner at the target than bsp, 16 workers")
    axes.set_title("time to target", loc="left")
    axes.legend(frameon=False, loc="upper right")
    axes.spines[["top", "right"]].set_visible(False)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path)


def main(given: argparse.Namespace) -> None:
    folder = given.folder
    rows = {(row["scene"], row["rule"]): row for row in json.loads((folder / "stragglers.json").read_text())}
    print(tables(rows))
    draw(rows, folder / "stragglers.png")
