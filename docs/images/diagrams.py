"""Draws the diagrams of the documentation: `python docs/images/diagrams.py`. Needs matplotlib, but not JAX."""

from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.patches import FancyBboxPatch, Rectangle

FOLDER = Path(__file__).parent
INK, EDGE = "#24292f", "#666666"
# A color for what each worker has of its own, and one for what all have.
WORKERS, SHARED = ("#5b8fd6", "#ee9a4d", "#5dbb8a", "#b98acb"), "#9aa4b2"
QUESTION, ANSWER = "#e8eef7", "#dcefe6"


def save(figure, name):
    figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight", pad_inches=0.08)
    plt.close(figure)


def draw_canvas(width, height, columns, rows):
    """An empty figure of some inches, whose coordinates are columns and rows."""
    figure, axes = plt.subplots(figsize=(width, height))
    axes.axis("off")
    axes.set(xlim=(0, columns), ylim=(rows, 0))
    return figure, axes


def draw_array(axes, x, y, colors):
    """One array as a row of four cells; None leaves a cell empty."""
    for number, color in enumerate(colors):
        look = {"fc": color, "ec": "white"} if color else {"fc": "none", "ec": "#cccccc", "ls": ":"}
        axes.add_patch(Rectangle((x + 0.4 * number, y), 0.4, 0.55, lw=0.9, **look))


def marks():
    """What each of four workers holds of an array of four entries."""
    figure, axes = draw_canvas(9, 3.3, 18, 6.6)
    for number in range(4):
        axes.text(6.6 + 2.3 * number, 0.5, f"worker {number}", ha="center", fontsize=9, color=INK)
    axes.text(17.1, 0.5, "global shape", ha="center", fontsize=9, color=INK)
    rows = [
        ("no mark", "equal on all workers:\nparameters, Adam's moments", [[SHARED] * 4] * 4, "[4]"),
        ("PerWorker", "one array for each worker:\nresiduals, local parameters", [[c] * 4 for c in WORKERS], "[4, 4]"),
        (
            "Sharded",
            "one array, a part on each worker:\nthe optimizer state of ZeRO",
            [[SHARED if cell == worker else None for cell in range(4)] for worker in range(4)],
            "[4]",
        ),
    ]
    for row, (name, what, arrays, shape) in enumerate(rows):
        y = 1.2 + 1.85 * row
        family = None if name == "no mark" else "monospace"
        axes.text(0, y + 0.1, name, fontsize=10, family=family, fontweight="bold", va="center", color=INK)
        axes.text(0, y + 0.85, what, fontsize=8, va="center", color=EDGE, linespacing=1.3)
        for worker, colors in enumerate(arrays):
            draw_array(axes, 5.8 + 2.3 * worker, y, colors)
        axes.text(17.1, y + 0.28, shape, ha="center", va="center", fontsize=10, family="monospace", color=INK)
    save(figure, "marks")


def draw_box(axes, x, y, width, text, color, **font):
    """A box with text; `y` is its middle."""
    axes.add_patch(FancyBboxPatch((x, y - 0.42), width, 0.84, boxstyle="round,pad=0.05", fc=color, ec=EDGE, lw=0.8))
    axes.text(x + width / 2, y, text, ha="center", va="center", color=INK, linespacing=1.3, **font)


def draw_arrow(axes, start, end, label, **where):
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": EDGE, "lw": 1.1})
    axes.text((start[0] + end[0]) / 2, (start[1] + end[1]) / 2, label, fontsize=8, color=EDGE, **where)


def reducers():
    """Questions from top to bottom; the first one that is answered with yes decides."""
    decisions = [
        ("Do all devices share one fast link?", "exact()"),
        ("Is the latency high,\nor the link very slow?", "local_sgd.diloco(inner, sync_period=H)"),
        (
            "Are links fast inside pods,\nand slow between them?",
            "hierarchical(inner=exact(),\nouter=one of these)",
        ),
        ("Are 2 times fewer bytes enough?", "compressed(compressors.cast(jnp.bfloat16))"),
        ("Are 4 to 8 times fewer enough?", "two_shot(qsgd(8)) or two_shot(qsgd(4))"),
        ("Are most parameters in matrices?", "error_feedback(power_sgd(4))"),
        ("Are there more than a few workers?", "error_feedback(two_shot(scaled_sign()))"),
    ]
    figure, axes = draw_canvas(8.2, 6.2, 16.4, 12.4)
    for row, (question, answer) in enumerate(decisions):
        y = 0.7 + 1.5 * row
        draw_box(axes, 0.1, y, 6.6, question, QUESTION, fontsize=9)
        draw_box(axes, 8.2, y, 8.0, answer, ANSWER, fontsize=8.5, family="monospace")
        draw_arrow(axes, (6.8, y), (8.1, y), "yes\n", ha="center", va="center")
        draw_arrow(axes, (3.4, y + 0.5), (3.4, y + 1.02), "  no", ha="left", va="center")
    last = "error_feedback(compressed(top_k(0.01)))"
    draw_box(axes, 0.1, 0.7 + 1.5 * len(decisions), 8.0, last, ANSWER, fontsize=8.5, family="monospace")
    save(figure, "reducers")


def draw_lane(axes, y, name, color):
    axes.add_patch(Rectangle((0, y - 0.75), 18, 1.5, fc=color, ec="none"))
    axes.text(0.15, y, name, fontsize=9, fontweight="bold", va="center", color=INK, linespacing=1.3)


def optimizer_step():
    """Where the operations of `adam` with clipping run: on shards, and beside a state in host memory."""
    figure, axes = draw_canvas(9, 3.9, 18, 7.8)
    for y, name, color in (
        (1.2, "all workers", "#f3f4f6"),
        (3.6, "device", "#e8eef7"),
        (6.0, "host, beside\nthe state", "#dcefe6"),
    ):
        draw_lane(axes, y, name, color)
    small = {"fontsize": 8}
    mono = {"fontsize": 8, "family": "monospace"}
    draw_box(axes, 2.9, 1.2, 2.7, "reduce-scatter\nof gradients", "white", **small)
    draw_box(axes, 6.6, 1.2, 2.5, "sum of the\nsquared norms", "white", **small)
    draw_box(axes, 15.1, 1.2, 2.6, "all-gather\nof updates", "white", **small)
    draw_box(axes, 2.9, 3.6, 2.7, "g, |g|² of\nthe shard", "white", **small)
    draw_box(axes, 7.0, 3.6, 3.1, "g / max(1, |g|)", "white", **mono)
    draw_box(axes, 15.1, 3.6, 2.6, "x += u\n(all of x)", "white", **mono)
    draw_box(axes, 6.6, 6.0, 3.9, "m = β₁m + (1-β₁)g\nv = β₂v + (1-β₂)g²", "white", **mono)
    draw_box(axes, 11.6, 6.0, 3.3, "u = -η m̂ / (√v̂+ε)", "white", **mono)
    draw_arrow(axes, (4.2, 1.7), (4.2, 3.1), "  g", ha="left", va="center")
    draw_arrow(axes, (5.7, 3.4), (7.2, 1.7), "", ha="left", va="center")
    draw_arrow(axes, (8.0, 1.7), (8.3, 3.1), "  |g|²", ha="left", va="center")
    draw_arrow(axes, (8.5, 4.1), (8.5, 5.5), "  g, in its own dtype", ha="left", va="center")
    draw_arrow(axes, (10.6, 6.0), (11.5, 6.0), "", ha="center", va="center")
    draw_arrow(axes, (16.4, 1.7), (16.4, 3.1), "", ha="left", va="center")
    draw_arrow(axes, (13.2, 5.5), (15.2, 1.7), "u of the shard  ", ha="right", va="center")
    save(figure, "optimizer_step")


if __name__ == "__main__":
    with mpl.rc_context({"svg.hashsalt": "jaxdist", "figure.facecolor": "white"}):
        for draw in (marks, reducers, optimizer_step):
            draw()
            print(FOLDER / f"{draw.__name__}.svg")
