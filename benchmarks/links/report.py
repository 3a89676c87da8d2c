"""Turns the records of `compare.py` into tables and a plot.

    python benchmarks/links report benchmarks/reports/NAME       # again, from links.json

Only medians are compared: of a mode's steps in one repetition (exposed: less that of the steps without communication
between them), then over the repetitions.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

TITLES = {"lm": "language model, 4.9 M parameters", "mlp": "classifier, 10.5 M parameters"}
LABELS = {
    ("torch", "none"): "PyTorch, no communication",
    ("torch", "plain"): "PyTorch DDP",
    ("torch", "bucket"): "PyTorch DDP, 5 MiB buckets",
    ("torch", "f16"): "PyTorch DDP, f16 hook",
    ("torch", "power_sgd"): "PyTorch DDP, PowerSGD hook, rank 4 (one bucket)",
    ("jaxdist", "none"): "JAX, no communication (`jit`, one device)",
    ("jaxdist", "exact"): "jaxdist `exact()`",
    ("jaxdist", "f16"): "jaxdist `compressed(cast(float16))`",
    ("jaxdist", "power_sgd"): "jaxdist `error_feedback(power_sgd(rank=4))`",
    ("jaxdist", "qsgd"): "jaxdist `compressed(qsgd(4))`",
    ("jaxdist", "two_shot"): "jaxdist `two_shot(qsgd(4))`",
    ("jaxdist", "top_k"): "jaxdist `error_feedback(compressed(top_k(0.01)))`",
    ("jaxdist", "sign"): "jaxdist `error_feedback(compressed(scaled_sign()))`",
    ("jaxdist", "two_shot_sign"): "jaxdist `error_feedback(two_shot(scaled_sign()))`",
    ("jaxdist", "allreduce"): "`bagua.gradient_allreduce`",
    ("jaxdist", "bytegrad"): "`bagua.bytegrad`",
    ("jaxdist", "qadam"): "`bagua.qadam`, 8 bits",
    ("jaxdist", "qadam_1bit"): "`bagua.qadam`, 1 bit, error feedback",
    ("jaxdist", "decentralized"): '`bagua.decentralized`, `"all"`',
    ("jaxdist", "shift_one"): '`bagua.decentralized`, `"shift_one"`',
    ("jaxdist", "low_precision"): "`bagua.low_precision_decentralized`",
    ("jaxdist", "async"): "`bagua.async_model_average(sync_period=8)`",
    ("jaxdist", "async_clock"): "an average every 0.5 s by a second thread",
    ("jaxdist", "hand_flat"): "plain JAX, one `pmean`",
    ("jaxdist", "hand_leaf"): "plain JAX, a `pmean` for each leaf",
}
# (what is held against what, in exposed communication, and the most that it may be)
TARGETS = [
    (("jaxdist", "exact"), ("torch", "plain"), 1.15),
    (("jaxdist", "power_sgd"), ("torch", "power_sgd"), 1.0),
]
FASTER = 5.0


def summarize(records: list[dict[str, Any]]) -> dict[tuple, dict[tuple, dict[str, float]]]:
    """`{(link, problem): {(system, mode): figures}}`, times in milliseconds; a link is its hosts and its rate."""
    settings: dict[tuple, dict[tuple, dict[int, dict]]] = {}
    for record in records:
        if record["repetition"] >= 0:
            link = f"{record['link']}, {record.get('hosts', 2)} hosts, {record['rate_mbit']}"
            modes = settings.setdefault((link, record["problem"]), {})
            modes.setdefault((record["system"], record["mode"]), {})[record["repetition"]] = record
    return {setting: _figures(modes) for setting, modes in settings.items()}


def _figures(modes: dict[tuple, dict[int, dict]]) -> dict[tuple, dict[str, float]]:
    found = {}
    for system in dict.fromkeys(system for system, _ in modes):
        everything = [record for mode in modes if mode[0] == system for record in modes[mode].values()]
        found[system, "none"] = _figure(everything, "alone_")
        found |= {mode: _figure(list(modes[mode].values()), "") for mode in modes if mode[0] == system}
    return found


def _figure(records: list[dict[str, Any]], kind: str) -> dict[str, float]:
    steps, alone = (
        [1e3 * statistics.median(record[key]) for record in records] for key in (f"{kind}seconds", "alone_seconds")
    )
    exposed = [step - least for step, least in zip(steps, alone, strict=True)]
    return {
        "step": statistics.median(steps),
        "least": min(steps),
        "most": max(steps),
        "alone": statistics.median(alone),
        "exposed": statistics.median(exposed),
        "exposed_least": min(exposed),
        "exposed_most": max(exposed),
        "bytes": 0.0 if kind else statistics.median(record["bytes"] for record in records),
        "cpu": 1e3 * statistics.median(record[f"{kind}cpu_seconds"] for record in records),
        "more_cpu": 1e3 * statistics.median(record["cpu_seconds"] - record["alone_cpu_seconds"] for record in records),
        "load": statistics.median(record["load"] for record in records),
        "rate_mbit": records[0]["rate_mbit"] or 0,
        "hosts": records[0].get("hosts", 2),
    }


def table(figures: dict[tuple, dict[str, float]]) -> str:
    rate = next(iter(figures.values()))["rate_mbit"]
    ddp = figures.get(("torch", "plain"))
    head = ["", "step ms", "(least-most)", "exposed ms", "(least-most)", "sent MB", "limit ms", "more CPU ms"]
    # The second column is the most that a method can have which sends these bytes without overlap.
    head += ["x DDP", "x DDP at its limit"] if ddp else []
    lines = ["| " + " | ".join(head) + " |", "|---|" + "--:|" * (len(head) - 1)]
    for mode, one in figures.items():
        cells = [
            LABELS[mode],
            f"{one['step']:.0f}",
            f"{one['least']:.0f}-{one['most']:.0f}",
            "" if mode[1] == "none" else f"{one['exposed']:.0f}",
            "" if mode[1] == "none" else f"{one['exposed_least']:.0f}-{one['exposed_most']:.0f}",
            f"{one['bytes'] / 1e6:.2f}",
            f"{one['bytes'] * 8e-3 / rate:.0f}" if rate else "",
            "" if mode[1] == "none" else f"{one['more_cpu']:.0f}",
        ]
        if ddp:
            limit = one["alone"] + (one["bytes"] * 8e-3 / rate if rate else 0)
            cells += [f"{ddp['step'] / one['step']:.2f}", f"{ddp['step'] / limit:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdicts(figures: dict[tuple, dict[str, float]]) -> list[str]:
    """The targets, and whether they were met."""
    lines = []
    for ours, theirs, most in TARGETS:
        if ours in figures and theirs in figures:
            ratio = figures[ours]["exposed"] / figures[theirs]["exposed"]
            word = "met" if ratio <= most else "**missed**"
            lines.append(f"{ours[1]}: exposed {ratio:.2f}x that of {LABELS[theirs]} (target {most:g}x): {word}")
    if ("jaxdist", "exact") in figures and ("jaxdist", "power_sgd") in figures:
        exact, low_rank = figures["jaxdist", "exact"], figures["jaxdist", "power_sgd"]
        bound, reached = exact["step"] / exact["alone"], exact["step"] / low_rank["step"]
        line = f"power_sgd: step {reached:.1f}x faster than `exact()`; no method can exceed {bound:.1f}x here"
        if bound >= FASTER:
            line += f" (target {FASTER:g}x): {'met' if reached >= FASTER else '**missed**'}"
        lines.append(line)
    return lines


def plot(settings: dict[tuple, dict[tuple, dict[str, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    problems = list(dict.fromkeys(problem for _, problem in settings))
    links = list(dict.fromkeys(link for link, _ in settings))
    most = max(len(figures) for figures in settings.values())
    size = (7 * len(problems), (0.34 * most + 1) * len(links))
    figure, axes = plt.subplots(len(links), len(problems), figsize=size, squeeze=False, layout="constrained")
    for row, link in enumerate(links):
        for column, problem in enumerate(problems):
            if (link, problem) not in settings:
                axes[row][column].remove()
                continue
            _bars(axes[row][column], settings[link, problem], link, problem, column == 0)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _bars(axis: Any, figures: dict[tuple, dict[str, float]], link: str, problem: str, named: bool) -> None:
    modes = list(figures)[::-1]
    compute = [figures[mode]["alone"] for mode in modes]
    steps = [figures[mode]["step"] for mode in modes]
    ranges = [[figures[mode][end] for mode in modes] for end in ("least", "most")]
    around = [[s - low for s, low in zip(steps, ranges[0])], [high - s for s, high in zip(steps, ranges[1])]]
    colors = ["#c44e52" if mode[0] == "torch" else "#8c8c8c" if "hand" in mode[1] else "#4c72b0" for mode in modes]
    axis.barh(range(len(modes)), steps, color=colors, xerr=around, error_kw={"elinewidth": 0.8, "ecolor": "#222222"})
    axis.barh(range(len(modes)), [min(pair) for pair in zip(steps, compute)], color="white", alpha=0.55)
    axis.set_yticks(range(len(modes)), [LABELS[mode].replace("`", "") for mode in modes] if named else [])
    axis.set_xlim(0, max(ranges[1]) * 1.12)
    for place, (step, high) in enumerate(zip(steps, ranges[1])):
        axis.text(high + max(ranges[1]) * 0.01, place, f"{step:.0f}", va="center", fontsize=8)
    rate = figures[modes[0]]["rate_mbit"]
    axis.set_title(f"{TITLES[problem]}, {f'{rate:g} Mbit/s' if rate else 'loopback'}", fontsize=10)
    axis.set_xlabel(f"ms a step, {figures[modes[0]]['hosts']} processes (pale: without communication)", fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)


def write(folder: Path) -> None:
    """Writes `links.md` and `links.png` beside `links.json`."""
    settings = summarize(json.loads((folder / "links.json").read_text())["records"])
    parts = []
    for (_, problem), figures in settings.items():
        load = statistics.median(one["load"] for one in figures.values())
        rate = next(iter(figures.values()))["rate_mbit"]
        hosts = next(iter(figures.values()))["hosts"]
        place = f"{hosts} namespaces, {rate:g} Mbit/s" if rate else "loopback"
        parts.append(f"### {TITLES[problem][0].upper()}{TITLES[problem][1:]}, {place}\n\n{table(figures)}\n")
        parts.append("\n".join(f"- {line}" for line in verdicts(figures)))
        parts.append(f"\nLoad average meanwhile: {load:.1f}.\n")
    (folder / "links.md").write_text("\n".join(parts))
    plot(settings, folder / "links.png")
    print("\n".join(parts))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="where `links.json` is")


def main(given: argparse.Namespace) -> None:
    write(given.folder)
