"""Draws the figure of the README from the report that it quotes: `python docs/images/draw_step_times.py`.

The figures are the medians of `benchmarks/reports/2026-11-foundation`, as in its tables. Needs matplotlib
(`pip install '.[cli]'`).
"""

import json
import runpy
from pathlib import Path

import matplotlib as mpl
from draw import BLUE, GRAY, STYLE, save
from matplotlib import pyplot as plt

FOLDER = Path(__file__).parent
BENCHMARKS = FOLDER.parents[1] / "benchmarks"
REPORT = BENCHMARKS / "reports" / "2026-11-foundation" / "links.json"
# The medians and ranges are those of the report's tables: the same function computes them.
summarize = runpy.run_path(str(BENCHMARKS / "links" / "report.py"))["summarize"]
PANELS = {"lm": "Language model, 4.9 M parameters", "mlp": "Classifier, 10.5 M parameters"}
BARS = {
    ("torch", "plain"): "PyTorch DDP",
    ("jaxdist", "exact"): "jaxdist, exact",
    ("torch", "power_sgd"): "PyTorch DDP,\nPowerSGD hook, rank 4",
    ("jaxdist", "power_sgd"): "jaxdist, PowerSGD, rank 4,\nerror feedback",
}


def draw_panel(axes, figures, title):
    for row, mode in enumerate(BARS):
        figure = figures[mode]
        axes.barh(row, figure["step"], color=BLUE if mode[0] == "jaxdist" else GRAY, height=0.62)
        axes.plot([figure["least"], figure["most"]], [row, row], color="black", lw=1)
        note = f"{figure['step']:.0f} ms, sends {figure['bytes'] / 1e6:.2g} MB"
        axes.text(figure["most"], row, f"  {note}", va="center", fontsize=8.5)
    axes.set(
        title=title,
        xlabel="ms per step, two processes over 100 Mbit/s",
        yticks=range(len(BARS)),
        yticklabels=BARS.values(),
    )
    axes.set_xlim(0, 1.55 * max(figures[mode]["most"] for mode in BARS))
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.set_axisbelow(True)


def step_times():
    settings = summarize(json.loads(REPORT.read_text())["records"])
    figure, panels = plt.subplots(1, 2, figsize=(10, 2.9), sharey=True)
    for axes, (problem, title) in zip(panels, PANELS.items(), strict=True):
        (figures,) = [found for (link, name), found in settings.items() if name == problem and link != "loopback"]
        draw_panel(axes, figures, title)
    # The axis is shared: inverted once, for both.
    panels[0].invert_yaxis()
    save(figure, "step_times")


if __name__ == "__main__":
    with mpl.rc_context(STYLE):
        step_times()
    print(FOLDER / "step_times.svg")
