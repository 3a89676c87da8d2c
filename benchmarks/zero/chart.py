"""The chart of `memory`: bytes per parameter of a chip for replicated Adam and the stages of ZeRO."""

from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt

STYLE = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "figure.facecolor": "white"}
# All in mixed precision: bfloat16 parameters, float32 masters.
ROWS = {
    "0": "replicated",
    "1 unrolled": "ZeRO stage 1",
    "2 unrolled": "ZeRO stage 2",
    "3": "ZeRO stage 3",
    "3 in bfloat16": "stage 3,\nbfloat16 moments",
    "3 in 8 bits": "stage 3,\n8-bit moments",
    "3 on the host": "stage 3,\nstate on the host",
}
PARTS = {
    "arguments": ("parameters and optimizer state", "#3366aa"),
    "temporary": ("gradients, activations and buffers", "#9dbbe0"),
    "host": ("in the host's memory", "#d9d9d9"),
}


def find_rows(runs: list[dict], layers: int, width: int) -> dict[str, dict[str, float]]:
    """Bytes per parameter of a chip by program, of one model; those that were compiled and fit."""
    found = {}
    for name in ROWS:
        for run in runs:
            is_wanted = (run["stage"], run["layers"], run["width"]) == (name, layers, width)
            if is_wanted and run["master"] and run["fits"]:
                host = run["host_arguments"] + run["host_temporary"]
                sizes = {"arguments": run["arguments"], "temporary": run["peak"] - run["arguments"], "host": host}
                found[name] = {part: size / run["parameters"] for part, size in sizes.items()}
    return found


def draw(rows: dict[str, dict[str, float]], title: str, path: Path) -> None:
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.2, 0.55 * len(rows) + 1.9), layout="constrained")
        for place, parts in enumerate(rows.values()):
            left = 0.0
            for part, (_, color) in PARTS.items():
                axes.barh(place, parts[part], left=left, color=color, height=0.7)
                left += parts[part]
            on_chip = parts["arguments"] + parts["temporary"]
            note = f"{on_chip:.1f}" + (f" + {parts['host']:.1f} on the host" if parts["host"] else "")
            axes.annotate(
                note, (left, place), xytext=(6, 0), textcoords="offset points", va="center", fontweight="bold"
            )
        axes.set_yticks(range(len(rows)), [ROWS[name] for name in rows])
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.16 * max(sum(parts.values()) for parts in rows.values()))
        axes.set_xlabel("bytes per parameter on a chip, at most")
        handles = [plt.Rectangle((0, 0), 1, 1, color=color) for _, color in PARTS.values()]
        labels = [label for label, _ in PARTS.values()]
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=10)
        figure.suptitle(title, fontsize=13, fontweight="bold")
        figure.savefig(path, dpi=110)
        plt.close(figure)
