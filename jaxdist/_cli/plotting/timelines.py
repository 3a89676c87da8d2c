"""Schedules of messages as a drawing: what the device and the link do, from backward pass to the end of the forward."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.figure import Figure

from ...schedule.profile import Profile
from ...schedule.timeline import Timeline
from .plots import GREY, write


def draw(profile: Profile, runs: Mapping[str, Timeline], path: str | Path, *, names: Sequence[str]) -> Path:
    """Draws each schedule as two bars, the device's and the link's, with a color for each layer, and writes a PNG.

    Args:
      profile: what they are schedules of.
      runs: the schedules by name.
      path: where the PNG goes.
      names: of the layers.

    Returns:
      The path.
    """
    figure = Figure(figsize=(11.5, 1.2 + 1.3 * len(runs)), layout="constrained")
    panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    # From the input, blue, to the output, yellow: what is needed first is dark.
    colors = [colormaps["viridis"](i / max(1, len(names) - 1)) for i in range(len(names))]
    order = sorted(range(len(names)), key=lambda layer: (profile.ready[layer], -layer))
    longest = max(run.makespan for run in runs.values())
    for axes, (name, run) in zip(panels, runs.items(), strict=True):
        before = 0.0
        for layer in order:
            _bar(axes, 1, before, profile.ready[layer], colors[layer])
            before = profile.ready[layer]
        for layer, (start, end) in enumerate(run.forward):
            _bar(axes, 1, start, end, colors[layer])
        for message in run.messages:
            _bar(axes, 0, message.start, message.end, colors[message.layer])
        axes.axvline(1e3 * run.makespan, color=GREY, linewidth=1)
        axes.set_yticks([1, 0], ["device", "link"])
        axes.set_xlim(0, 1.02e3 * longest)
        axes.set_ylim(-0.5, 1.5)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.set_title(f"{name}: {1e3 * run.makespan:,.1f} ms", loc="left", fontsize=10)
    panels[-1].set_xlabel("milliseconds from the start of the backward pass to the end of the next forward pass")
    shown = sorted({0, len(names) // 2, len(names) - 1})
    handles = [panels[0].barh(0, 0, color=colors[layer], label=names[layer]) for layer in shown]
    panels[0].legend(handles=handles, loc="lower right", ncols=len(shown), frameon=False, bbox_to_anchor=(1, 1))
    return write(figure, path)


def _bar(axes, row: int, start: float, end: float, color) -> None:
    # A hairline of the background keeps neighbors apart.
    axes.barh(row, 1e3 * (end - start), left=1e3 * start, height=0.8, color=color, edgecolor="white", linewidth=0.3)
