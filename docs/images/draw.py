"""Draws the figures of the documentation: `python docs/images/draw.py [NAME ...]`; all of them take about two minutes.

Curves are computed by the library on one CPU device, from fixed seeds; what was measured is read from its report. Needs
matplotlib (`pip install '.[cli]'`).
"""

import json
import re
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import optax
from matplotlib import pyplot as plt
from matplotlib.patches import FancyBboxPatch

import jaxdist as jd
from jaxdist.asynchronous import durations, links, replay, rules

FOLDER = Path(__file__).parent
RACE = FOLDER.parents[1] / "benchmarks" / "reports" / "2026-11-race"
BLUE, ORANGE, GREEN, RED, GRAY, PURPLE = "#3366aa", "#ee8833", "#44aa77", "#cc4455", "#888888", "#885599"
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "svg.hashsalt": "jaxdist",
    "figure.facecolor": "white",
}


def save(figure, name):
    figure.tight_layout()
    figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def least_squares(workers, dim=32, rows=64, spread=1.0):
    """Each worker's data `(x, y)`, whose optima differ by `spread`, and the loss of all workers."""
    keys = jax.random.split(jax.random.key(0), 4)
    scale = jnp.logspace(0, -1, dim)
    x = jax.random.normal(keys[0], (workers, rows, dim)) * scale
    optima = jax.random.normal(keys[1], (dim,)) + spread * jax.random.normal(keys[2], (workers, dim))
    y = jnp.einsum("wrd,wd->wr", x, optima)
    flat_x, flat_y = x.reshape(-1, dim), y.reshape(-1)
    best = jnp.asarray(np.linalg.lstsq(np.asarray(flat_x), np.asarray(flat_y))[0])

    def excess(w):
        residual, least = flat_x @ w - flat_y, flat_x @ best - flat_y
        return jnp.mean(residual**2) - jnp.mean(least**2)

    return x, y, excess


def worker_loss(w, batch):
    x, y = batch
    return jnp.mean((x[0] @ w - y[0]) ** 2)


def train(tx, workers, steps, per_worker=False, spread=1.0, dim=32):
    """The excess loss of the mean model after each step."""
    x, y, excess = least_squares(workers, dim, spread=spread)

    def train_step(state, batch):
        w, opt_state = state
        _, grads = jd.local_value_and_grad(worker_loss)(w, batch)
        updates, opt_state = tx.update(grads, opt_state, w)
        return (optax.apply_updates(w, updates), opt_state), {}

    def make_state():
        w = jnp.zeros(dim)
        return (jd.PerWorker(w) if per_worker else w, tx.init(w))

    step = jd.simulate(train_step, workers)

    def body(state, _):
        state, _ = step(state, (x, y))
        return state, excess(jd.consensus(state[0]))

    return np.asarray(jax.lax.scan(body, jd.init_state(make_state, workers), length=steps)[1])


def compression():
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    c = jd.compressors
    methods = [
        ("int8", c.int8(), BLUE), ("qsgd(8)", jd.qsgd(8), BLUE), ("mxfp4", c.mxfp4(), BLUE),
        ("qsgd(4)", jd.qsgd(4), BLUE), ("qsgd(2)", jd.qsgd(2), BLUE),
        ("scaled_sign", c.scaled_sign(), GREEN), ("drive", c.drive(), GREEN),
        ("top_k(0.1)", jd.top_k(0.1), ORANGE), ("top_k(0.01)", jd.top_k(0.01), ORANGE),
        ("random_k(0.1)", c.random_k(0.1), ORANGE), ("cast(f16)", c.cast(jnp.float16), GRAY),
    ]  # fmt: skip
    x = jax.random.t(jax.random.key(0), 3.0, (1 << 16,))
    for name, compressor, color in methods:
        payload = jax.jit(compressor.compress)(x, jax.random.key(1))
        decoded = jax.jit(lambda payload: compressor.decompress(payload, x))(payload)  # noqa: B023
        error = float(jnp.sum((decoded - x) ** 2) / jnp.sum(x**2))
        bits = 8 * sum(leaf.nbytes for leaf in jax.tree.leaves(payload)) / x.size
        left.plot(bits, error, "o", color=color, ms=5)
        # Most compressors of a few bits are close together: their labels go around them.
        offset, side = {
            "qsgd(4)": ((6, -9), "left"),
            "int8": ((5, -7), "left"),
            "drive": ((4, -12), "left"),
            "scaled_sign": ((0, 6), "center"),
            "top_k(0.1)": ((6, 0), "left"),
            "top_k(0.01)": ((-4, -13), "center"),
        }.get(name, ((5, 3), "left"))
        left.annotate(name, (bits, error), textcoords="offset points", xytext=offset, fontsize=7.5, ha=side)
    left.set(xscale="log", yscale="log", xlabel="bits per entry", ylabel="relative squared error")
    left.set(title="Error of one compression", xlim=(0.2, 64))

    tx = {
        "exact": (jd.exact(), GRAY, "-"),
        "top-k 5 %, no error feedback": (jd.compressed(jd.top_k(0.05)), RED, "-"),
        "top-k 5 %, error feedback": (jd.error_feedback(jd.compressed(jd.top_k(0.05))), BLUE, "-"),
        "sign, no error feedback": (jd.compressed(c.scaled_sign()), RED, "--"),
        "sign, error feedback": (jd.error_feedback(jd.compressed(c.scaled_sign())), BLUE, "--"),
    }
    for label, (reducer, color, style) in tx.items():
        losses = train(optax.chain(jd.all_reduce(reducer), optax.sgd(0.02)), 8, 800)
        right.plot(losses, style, color=color, label=label, lw=1.4)
    right.set(yscale="log", xlabel="step", ylabel="excess loss", title="Training, 8 workers, the same learning rate")
    right.legend(fontsize=7.5)
    save(figure, "compression")


def low_rank():
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
    m, n = 256, 512
    keys = jax.random.split(jax.random.key(0), 2)
    spectrum = jnp.arange(1, m + 1) ** -1.0
    u, v = (np.linalg.qr(jax.random.normal(key, (size, m)))[0] for key, size in zip(keys, (m, n)))
    matrix = {"w": jnp.asarray((u * np.asarray(spectrum)) @ v.T)}
    ranks = [1, 2, 4, 8, 16, 32]

    def errors(rank, steps):
        """The relative error in each of some steps of PowerSGD on one matrix, each starting from the last `Q`."""
        reducer = jd.power_sgd(rank)
        step = jax.jit(lambda state: reducer.reduce(matrix, state, jd.comm.alone()))
        state, found = reducer.init(matrix), []
        for _ in range(steps):
            reduced, state = step(state)
            difference = reduced.mean["w"] - matrix["w"]
            found.append(float(jnp.sum(difference**2) / jnp.sum(matrix["w"] ** 2)))
        return found

    best = [float(jnp.sum(spectrum[r:] ** 2) / jnp.sum(spectrum**2)) for r in ranks]
    history = [errors(rank, 8) for rank in ranks]
    for step, color in ((1, RED), (2, ORANGE), (8, BLUE)):
        label = "first step, random Q" if step == 1 else f"step {step}, warm start"
        left.plot(ranks, [h[step - 1] for h in history], "o-", color=color, label=label, ms=4)
    left.plot(ranks, best, "k--", lw=1, label="truncated SVD (optimal)")
    left.set(xscale="log", yscale="log", xlabel="rank", ylabel="relative squared error")
    left.set(title=f"Approximation of a {m} × {n} matrix", xticks=ranks, xticklabels=ranks)
    left.minorticks_off()
    left.legend(fontsize=7.5)
    for size, color in ((256, GREEN), (1024, BLUE), (4096, PURPLE)):
        right.plot(
            ranks, [size * size / (r * 2 * size) for r in ranks], "o-", color=color, ms=4, label=f"{size} × {size}"
        )
    right.set(
        xscale="log", yscale="log", xlabel="rank", ylabel="times fewer bytes", title="Compression: m n / (r (m + n))"
    )
    right.set(xticks=ranks, xticklabels=ranks)
    right.minorticks_off()
    right.legend(fontsize=7.5, title="matrix")
    save(figure, "low_rank")


def local_updates():
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    centers = np.array([[-1.0, 0.2], [0.9, 1.1], [0.6, -1.2], [-0.7, -0.9]])
    curvature = np.array([[1.0, 0.25], [0.3, 1.0], [1.0, 0.5], [0.4, 0.9]])
    models, anchor, period, rate = np.tile([2.6, 2.4], (4, 1)), np.array([2.6, 2.4]), 8, 0.12
    colors = (BLUE, ORANGE, GREEN, PURPLE)
    for _ in range(5):
        paths = [models.copy()]
        for _ in range(period):
            models = models - rate * curvature * (models - centers)
            paths.append(models.copy())
        paths = np.stack(paths)
        for worker, color in enumerate(colors):
            left.plot(*paths[:, worker].T, ".-", color=color, ms=3, lw=1)
        mean = models.mean(0)
        left.plot(*np.stack([anchor, mean]).T, "k:", lw=1)
        left.plot(*anchor, "ko", ms=5)
        anchor, models = mean, np.tile(mean, (4, 1))
    left.plot(*anchor, "ko", ms=5, label="global parameters")
    for worker, color in enumerate(colors):
        left.plot(*centers[worker], "x", color=color, label="optimum of a worker" if worker == 0 else None)
    left.set(title="Four workers, H = 8", xlabel="parameter 1", ylabel="parameter 2")
    left.legend(fontsize=7.5, loc="upper left")
    for period, color in ((1, GRAY), (4, GREEN), (16, BLUE), (64, RED)):
        tx = jd.local_sgd.local_sgd(optax.sgd(0.05), sync_period=period)
        losses = train(tx, 8, 640, per_worker=True)
        # One synchronization sends the model once, like one synchronous step.
        right.plot(
            np.arange(period, 641, period) / period, losses[period - 1 :: period], color=color, label=f"H = {period}"
        )
    right.set(
        xscale="log", yscale="log", xlabel="synchronizations (bytes, in units of the model)", ylabel="excess loss"
    )
    right.set(title="Local SGD, 8 workers with different data, 640 steps")
    right.legend(fontsize=7.5)
    save(figure, "local_updates")


def decentralized():
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), gridspec_kw={"width_ratios": [1.15, 1]})
    workers = 16
    angle = 2 * np.pi * np.arange(8) / 8
    graphs = {"ring": jd.topology.ring(8), "exponential": jd.topology.exponential(8)}
    one_peer = jd.topology.matrix(jd.topology.one_peer_exponential(8), 0)
    drawn = [(name, jd.topology.matrix(graph, 0)) for name, graph in graphs.items()] + [
        ("one-peer exponential, step 0", one_peer)
    ]
    for number, (name, weights) in enumerate(drawn):
        points = np.stack([np.cos(angle) + 2.9 * number, np.sin(angle)], 1)
        for i, j in zip(*np.nonzero(np.asarray(weights))):
            if i != j:
                left.annotate(
                    "",
                    points[i],
                    points[j],
                    arrowprops={"arrowstyle": "->", "color": BLUE, "lw": 0.8, "shrinkA": 4, "shrinkB": 4},
                )
        left.plot(*points.T, "ko", ms=5)
        left.text(2.9 * number, -1.5, name.replace(", ", ",\n"), ha="center", va="top", fontsize=8)
    left.set(xlim=(-1.3, 7.1), ylim=(-2.3, 1.4), aspect="equal", title="Graphs over 8 workers")
    left.axis("off")
    start = np.random.default_rng(0).normal(size=(workers, 64))
    start -= start.mean(0)
    for name, graph, color in (
        ("ring, 2 models per step", jd.topology.ring(workers), RED),
        ("torus, 4", jd.topology.torus(workers), ORANGE),
        ("exponential, 4", jd.topology.exponential(workers), GREEN),
        ("one-peer exponential, 1", jd.topology.one_peer_exponential(workers), BLUE),
    ):
        models, error = start, [1.0]
        for step in range(20):
            models = np.asarray(jd.topology.matrix(graph, step)) @ models
            error.append(max(np.linalg.norm(models) / np.linalg.norm(start), 1e-9))
        right.plot(error, color=color, label=name)
    right.set(
        yscale="log", ylim=(1e-6, 2), xlabel="gossip step", ylabel="consensus error", title="Mixing of 16 workers"
    )
    right.legend(fontsize=7.5)
    save(figure, "decentralized")


def zero():
    figure, axes = plt.subplots(figsize=(9, 3.2))
    workers = 8
    rows = [
        ("data parallel", 4, 4, 8, 0),
        ("ZeRO 1", 4, 4, 8 / workers, 0),
        ("ZeRO 2", 4, 4 / workers, 8 / workers, 0),
        ("ZeRO 3 (+ one layer)", 4 / workers, 4 / workers, 8 / workers, 0),
        ("ZeRO 1, 8-bit state", 4, 4, 2.25 / workers, 0),
        ("ZeRO 3 + offload.host", 4 / workers, 4 / workers, 0, 8 / workers),
    ]
    names = ("parameters", "gradients", "optimizer state", "in host memory")
    for number, (_, *parts) in enumerate(rows):
        offset = 0.0
        for part, color, name in zip(parts, (BLUE, GREEN, ORANGE, "#dddddd"), names):
            axes.barh(number, part, left=offset, color=color, label=name if number == 0 else None, height=0.6)
            offset += part
        device = sum(parts[:3])
        axes.text(
            offset + 0.15,
            number,
            f"{device:.3g} B" + (f" + {parts[3]:g} B on the host" if parts[3] else ""),
            va="center",
            fontsize=8,
        )
    axes.set(
        yticks=range(len(rows)),
        yticklabels=[row[0] for row in rows],
        xlabel="bytes per parameter on each of 8 workers, float32 Adam",
    )
    axes.set(xlim=(0, 18))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.legend(fontsize=8, loc="lower right")
    save(figure, "zero")


def hiding():
    from jaxdist.schedule import merge_layers, profile_of, starting_point, step_timeline, timeline

    forward = [0, *[3e-3] * 12, 4e-3]
    backward = [2 * seconds for seconds in forward]
    profile = profile_of(forward=forward, backward=backward, sizes=[6e6, *[12e6] * 12, 50e6])
    link = {"bandwidth": 1.25e9, "overhead": 1e-4}
    layers = len(forward)
    figure, axes = plt.subplots(figsize=(9, 3.6))
    cases = [
        ("one message after the backward pass", step_timeline(merge_layers(profile, [range(layers)]), **link)),
        ("one message per layer, in the order of the backward pass", step_timeline(profile, **link)),
        ("priority queue across steps", timeline(profile, **starting_point(profile, **link), **link)),
    ]
    starts = np.cumsum([0.0, *backward[::-1]])  # of the backward pass, last layer first
    shades = plt.get_cmap("viridis")(np.linspace(0.1, 0.9, layers))
    for row, (name, plan) in enumerate(cases):
        base = -3 * row
        for start, layer in zip(starts, reversed(range(layers))):
            axes.barh(base, 1e3 * backward[layer], left=1e3 * start, color=shades[layer], edgecolor="white", height=0.8)
        for start, end in plan.forward:
            axes.barh(base, 1e3 * (end - start), left=1e3 * start, color="#bbbbbb", edgecolor="white", height=0.8)
        for message in plan.messages:
            color = GRAY if row == 0 else shades[message.layer]
            axes.barh(
                base - 0.9,
                1e3 * (message.end - message.start),
                left=1e3 * message.start,
                color=color,
                edgecolor="white",
                lw=0.3,
                height=0.8,
            )
        axes.text(0, base + 0.55, f"{name}: {1e3 * plan.makespan:.0f} ms", fontsize=8.5, va="bottom")
        axes.axvline(1e3 * starts[-1], color="k", lw=0.5, ls=":")
    axes.set(
        yticks=[tick for row in range(3) for tick in (-3 * row, -3 * row - 0.9)], yticklabels=["device", "link"] * 3
    )
    axes.set(xlabel="ms from the start of the backward pass; colors are layers, gray is the next forward pass")
    axes.set_ylim(-7.6, 1.3)
    axes.grid(axis="y", visible=False)
    save(figure, "hiding")


def asynchronous():
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    seconds = np.array([1.0, 1.1, 1.3, 4.0])
    for row, (name, barrier) in enumerate((("synchronous", True), ("asynchronous", False))):
        for worker, duration in enumerate(seconds):
            position = -(worker + 5.5 * row)
            clock = 0.0
            while clock < 12:
                left.barh(
                    position,
                    min(duration, 12 - clock),
                    left=clock,
                    color=RED if worker == 3 else BLUE,
                    edgecolor="white",
                    height=0.8,
                )
                if barrier:
                    left.barh(position, seconds.max() - duration, left=clock + duration, color="#dddddd", height=0.8)
                clock += seconds.max() if barrier else duration
        left.text(0, -5.5 * row + 0.6, name, fontsize=9)
    ticks = [-(worker + 5.5 * row) for row in range(2) for worker in range(4)]
    left.set(
        yticks=ticks, yticklabels=[f"worker {w}" for w in range(4)] * 2, xlabel="seconds; gray is waiting", xlim=(0, 12)
    )
    left.set_ylim(-9.2, 1.4)
    left.grid(axis="y", visible=False)
    left.set_title("Gradients computed in 12 s")
    goals = jnp.arange(8.0)
    task = replay.Task(
        params=jnp.asarray(10.0),
        loss=lambda x, goal: 0.5 * (x - goal) ** 2,
        batch=lambda seed, worker, job: goals[worker],
        evaluate=lambda x: (x - goals.mean()) ** 2,
    )
    cluster = {
        "workers": 8,
        "durations": durations.one_slow(durations.lognormal(5e-3, 0.2), worker=0, factor=6),
        "links": links.alpha_beta(1e-5, 1.25e9, nic=True),
    }
    for rule, color in (
        (rules.bsp(optax.sgd(0.1)), GRAY),
        (rules.asgd(optax.sgd(0.005)), RED),
        (rules.ringleader(optax.sgd(0.02)), GREEN),
        (rules.dude(optax.sgd(0.01)), BLUE),
    ):
        run = replay.run(rule, task, seconds=1.5, evaluate_every=0.01, **cluster)
        right.plot(run.times, np.maximum(run.losses, 1e-7), color=color, label=rule.name, lw=1.3)
    right.set(
        yscale="log", ylim=(1e-6, 100), xlabel="seconds on the virtual clock", ylabel="distance to the optimum, squared"
    )
    right.set_title("8 workers with different data, one 6 times slower")
    right.legend(fontsize=8)
    save(figure, "asynchronous")


def architecture():
    figure, axes = plt.subplots(figsize=(9, 5.2))
    axes.axis("off")
    axes.set(xlim=(0, 18), ylim=(-0.2, 10.4))

    def box(x, y, width, height, text, color, size=8.5, bold=False):
        axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.06", fc=color, ec="#555555", lw=0.8))
        axes.text(
            x + width / 2,
            y + height / 2,
            text,
            ha="center",
            va="center",
            fontsize=size,
            fontweight="bold" if bold else None,
        )

    def arrow(x0, y0, x1, y1, label=None):
        axes.annotate("", (x1, y1), (x0, y0), arrowprops={"arrowstyle": "-|>", "color": "#444444", "lw": 1.1})
        if label:
            axes.text((x0 + x1) / 2, (y0 + y1) / 2 + 0.12, label, ha="center", va="bottom", fontsize=8)

    pale = {"step": "#e8eef7", "chain": "#e6f2ea", "comm": "#fbeedd", "run": "#eeeeee"}
    box(0.2, 8.2, 3.0, 1.3, "loss function", pale["step"])
    box(4.6, 8.2, 3.8, 1.3, "local_value_and_grad", pale["step"])
    box(14.2, 8.2, 3.5, 1.3, "optax.apply_updates\nnew parameters", pale["step"])
    arrow(3.3, 8.85, 4.5, 8.85)
    axes.text(0.2, 9.85, "train_step: the step of one worker, a pure function", fontsize=9.5, fontweight="bold")
    axes.add_patch(
        FancyBboxPatch((0.2, 2.55), 17.5, 4.75, boxstyle="round,pad=0.06", fc="none", ec="#999999", lw=0.8, ls="--")
    )
    axes.text(
        0.45,
        6.85,
        "optax chain: one of these four, with any optax transformation before, inside or after it",
        fontsize=9,
    )
    columns = [
        ("all_reduce(reducer)", "mean gradient"),
        ("local_steps(inner, outer)", "mean parameter change,\nevery H steps"),
        ("gossip(inner, topology)", "mixture of the\nneighbors' parameters"),
        ("zero_redundancy(inner)", "gradient shards,\nthen updates"),
    ]
    for number, (name, what) in enumerate(columns):
        x = 0.45 + 4.35 * number
        box(x, 5.35, 4.0, 1.1, name, pale["chain"], bold=True)
        axes.text(x + 2.0, 5.2, what, ha="center", va="top", fontsize=8)
    box(
        0.45,
        2.75,
        10.2,
        1.15,
        "reducer: the trees of all workers → one mean\n"
        "(exact, compressed, two_shot, power_sgd, error_feedback, hierarchical, ...)",
        pale["comm"],
        8,
    )
    box(
        11.1,
        2.75,
        6.35,
        1.15,
        "compressor: one array ↔ payload\n(qsgd, top_k, int8, scaled_sign, ...)",
        pale["comm"],
        8,
    )
    for number in range(4):
        x = 2.45 + 4.35 * number
        arrow(x, 4.45, x, 4.0)
    arrow(6.5, 8.1, 6.5, 7.4, None)
    axes.text(6.7, 7.75, "gradient of this worker", fontsize=8, va="center")
    arrow(15.95, 7.4, 15.95, 8.1)
    axes.text(15.75, 7.75, "updates", fontsize=8, va="center", ha="right")
    box(
        0.2,
        1.2,
        17.5,
        0.8,
        "Comm: the only calls of jax.lax collectives (mean, all_gather, all_to_all, reduce_scatter_mean, ppermute)",
        pale["comm"],
        8.5,
    )
    arrow(5.5, 2.65, 5.5, 2.1)
    arrow(14.2, 2.65, 14.2, 2.1)
    box(0.2, 0.05, 8.5, 0.8, "distribute(step, mesh) = jit(shard_map(step))", pale["run"])
    box(9.2, 0.05, 8.5, 0.8, "simulate(step, workers) = jit(vmap(step))", pale["run"])
    save(figure, "architecture")


def race(problem, link):
    """The methods of a race and their seconds to the loss, the first first, from the tables of its report."""
    table = (RACE / "race.md").read_text().split(f"### {problem}, {link}\n")[1].split("###")[0]
    head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if "|" in line)
    return [(row[0], float(row[head.index("seconds")])) for row in rows]


def home():
    """The step and the race, narrow enough for a phone; once for light and once for dark pages."""
    times = race("Language model of 4.9 M parameters, two hosts", "100 Mbit/s")
    light = {
        "ink": "#24292f",
        "edge": "#8a94a3",
        "fill": "#eef2f8",
        "strong": "#dcefe6",
        "bar": BLUE,
        "best": "#2f9e6e",
    }
    dark = {
        "ink": "#e2e4e9",
        "edge": "#7b8494",
        "fill": "#2b3040",
        "strong": "#1f4437",
        "bar": "#6f9bd8",
        "best": "#57c898",
    }
    for name, colors in (("home", light), ("home_dark", dark)):
        with mpl.rc_context({"text.color": colors["ink"], "xtick.color": colors["ink"], "ytick.color": colors["ink"]}):
            figure = draw_home(colors, [each for each in times if each[0] in SHOWN])
            figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None}, transparent=True)
            plt.close(figure)


# Of the methods of the race, those of the home page: ours, and what PyTorch and DeepSpeed have.
SHOWN = (
    *("jaxdist PowerSGD, rank 4", "PyTorch PowerSGD hook, rank 4", "jaxdist Local SGD, H=8"),
    *("jaxdist two-shot, 4 bits", "PyTorch DDP, f16 hook", "PyTorch DDP", "jaxdist exact", "DeepSpeed ZeRO, stage 2"),
)


def draw_home(colors, times):
    """Draws the chain of a step above the time to a loss of several methods."""
    figure = plt.figure(figsize=(5.2, 6.2))
    # Only the bars leave room on their left, for the names of the methods.
    top, bottom = figure.add_axes([0.01, 0.53, 0.98, 0.47]), figure.add_axes([0.46, 0.01, 0.53, 0.39])
    top.axis("off")
    top.set(xlim=(0, 10), ylim=(0.3, 9.6))
    top.text(0, 9.0, "The step of one worker", fontsize=11, fontweight="bold")
    stages = [
        (7.0, "local_value_and_grad", "this worker's gradient", "fill"),
        (4.6, "all_reduce(reducer)", "the mean over all workers", "strong"),
        (2.2, "clip, then AdamW", "any optax transformations", "fill"),
    ]
    for y, name, result, fill in stages:
        box = FancyBboxPatch((0.1, y - 0.1), 5.0, 1.5, boxstyle="round,pad=0.08", fc=colors[fill], ec=colors["edge"])
        top.add_patch(box)
        top.text(2.6, y + 0.92, name, ha="center", va="center", fontsize=10, fontweight="bold")
        top.text(2.6, y + 0.28, result, ha="center", va="center", fontsize=8.5)
    arrow = {"arrowstyle": "-|>", "color": colors["edge"], "lw": 1.4}
    for start, end in ((6.75, 6.2), (4.35, 3.8), (1.95, 1.3)):
        top.annotate("", (2.6, end), (2.6, start), arrowprops=arrow)
    top.text(2.6, 0.75, "new parameters", ha="center", va="center", fontsize=8.5)
    for number in range(3):
        y = 7.2 - 2.0 * number
        other = FancyBboxPatch((8.1, y), 1.7, 1.0, boxstyle="round,pad=0.08", fc=colors["fill"], ec=colors["edge"])
        top.add_patch(other)
        top.text(8.95, y + 0.5, f"worker {number + 1}", ha="center", va="center", fontsize=8.5)
        top.annotate(
            "", (8.0, y + 0.5), (5.25, 5.3), arrowprops={**arrow, "arrowstyle": "<|-|>", "color": colors["best"]}
        )
    top.text(6.4, 2.5, "the wire: only\npayloads cross it", ha="left", va="center", fontsize=8.5, color=colors["best"])
    bottom.set_facecolor("none")
    for row, (method, seconds) in enumerate(times):
        ours = method.startswith("jaxdist")
        bottom.barh(row, seconds, height=0.66, color=colors["best" if row == 0 else "bar" if ours else "edge"])
        weight = "bold" if row == 0 else "normal"
        bottom.text(seconds + 4, row, f"{seconds:.0f} s", va="center", fontsize=8.5, fontweight=weight)
    bottom.set(xlim=(0, 1.18 * max(seconds for _, seconds in times)), yticks=range(len(times)))
    bottom.set_yticklabels([method for method, _ in times], fontsize=8.5)
    figure.text(0.01, 0.475, "Time to a loss, over 100 Mbit/s", fontsize=11, fontweight="bold")
    what = "a language model of 4.9 million parameters, two hosts, to a loss of 2.6"
    figure.text(0.01, 0.435, what, fontsize=8.5)
    bottom.tick_params(length=0)
    bottom.xaxis.set_visible(False)
    bottom.spines[:].set_visible(False)
    bottom.grid(visible=False)
    bottom.invert_yaxis()
    return figure


def reducers_measured():
    """Bytes and losses of the reducers on the page of measurements, as its report has them, the fewest bytes last."""
    page = (FOLDER.parent / "explanation" / "measurements.md").read_text()
    quoted = set(re.findall(r"^\| \d+ \| .*$", page, re.M))
    report = (RACE.parent / "2026-11-compression" / "suite.md").read_text()
    rows = [[cell.strip(" *`") for cell in line.split("|")[1:-1]] for line in report.splitlines() if line in quoted]
    rows.sort(key=lambda row: float(row[2].split()[0]))
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 5.2), sharey=True, width_ratios=(1, 1.5))
    (exact,) = (float(row[4].split()[0]) for row in rows if row[1] == "exact")
    for place, (_, name, sent, fewer, loss, *_) in enumerate(rows):
        color = next(color for start, color in FAMILIES.items() if re.match(start, name))
        kilobytes = float(sent.split()[0])
        left.barh(place, kilobytes, color=color, height=0.65)
        left.text(kilobytes * 1.08, place, f"{fewer.removesuffix('x')}×", va="center", fontsize=8)
        mean, spread = (float(number) for number in loss.split(" ±"))
        right.plot([mean - spread, mean + spread], [place, place], color=color, lw=3, alpha=0.35, solid_capstyle="butt")
        right.plot(mean, place, "o", color=color, ms=6)
    left.set(xscale="log", xlim=(5, 1500), yticks=range(len(rows)), title="kB that one worker sends in a step")
    left.set_yticklabels([row[1] for row in rows], family="monospace", fontsize=8.5)
    left.set_xticks([10, 100, 1000], ["10", "100", "1000"])
    right.axvline(exact, color=GRAY, lw=1, ls=":")
    right.set(xlim=(0.04, 0.29), title="held-out loss of three seeds; dotted: the mean of exact")
    for axes in (left, right):
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
    save(figure, "reducers_measured")


def churn():
    """The loss of islands above synchronous training at equal seeds, as the report has it, with and without churn."""
    report = RACE.parent / "2026-11-islands" / "quality.jsonl"
    rows = [json.loads(line) for line in report.read_text().splitlines()]
    synchronous = {row["seed"]: row["loss"] for row in rows if row["condition"] == "synchronous"}
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    for axes, period in zip(panels, (16, 64)):
        for fragments, color in ((1, BLUE), (4, ORANGE)):
            for condition, line in (("undisturbed", "-"), ("churn", "--")):
                chosen = {"condition": condition, "period": period, "fragments": fragments, "timeout": 1.5, "quorum": 1}
                above = defaultdict(list)
                for row in rows:
                    if chosen.items() <= row.items():
                        above[row["islands"]].append(100 * (row["loss"] / synchronous[row["seed"]] - 1))
                label = f"{fragments} fragment{'s' * (fragments > 1)}, {condition}"
                means = [np.mean(above[islands]) for islands in sorted(above)]
                shown = np.minimum(means, 12)
                axes.plot(sorted(above), shown, line, marker="o", ms=4, color=color, label=label)
                for islands, mean in zip(sorted(above), means):
                    if mean > 12:
                        axes.annotate(f"{mean:+.0f} %", (islands, 12), (-6, -3), textcoords="offset points", ha="right")
        axes.set(xscale="log", xticks=[2, 4, 8, 16], ylim=(-2, 12.5), title=f"H = {period}", xlabel="islands")
        axes.set_xticklabels(["2", "4", "8", "16"])
        axes.minorticks_off()
        axes.axhline(0, color=GRAY, lw=1, ls=":")
    panels[0].set_ylabel("held-out loss above\nsynchronous training, %")
    panels[0].legend(fontsize=8)
    save(figure, "churn")


def draw_notebook(name):
    """The figure of a notebook, by the cells of its page."""
    page = (FOLDER.parent / "notebooks" / f"{name.replace('_', '-')}.md").read_text()
    # With the settings of a reader.
    with mpl.rc_context(mpl.rcParamsDefault | {"svg.hashsalt": STYLE["svg.hashsalt"]}):
        cells = {"__name__": "__main__"}
        for code in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
            exec(code, cells)
        save(cells["figure"], name)


# Colors of families, by how the names of their methods begin.
FAMILIES = {
    "exact|f16|int8": GRAY,
    "qsgd|alq": BLUE,
    "two_shot|intsgd": PURPLE,
    "sign|ef:sign|ef:drive": GREEN,
    "ef:top_k|gspar": ORANGE,
    "ef:power_sgd|demo": RED,
}

FIGURES = {
    f.__name__: f
    for f in (
        home,
        reducers_measured,
        churn,
        architecture,
        compression,
        low_rank,
        local_updates,
        decentralized,
        zero,
        hiding,
        asynchronous,
    )
} | {
    name: partial(draw_notebook, name)
    for name in ("first_steps", "choose_a_reducer", "new_compressor", "diloco_and_islands")
}

if __name__ == "__main__":
    jd.runtime.use_cpu_devices(1)
    with mpl.rc_context(STYLE):
        for name in sys.argv[1:] or FIGURES:
            FIGURES[name]()
            print(FOLDER / f"{name}.svg")
