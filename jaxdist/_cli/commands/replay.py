"""`jaxdist replay`: asynchronous methods on a virtual clock."""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter
from rich.console import Console
from rich.progress import TaskProgressColumn
from rich.table import Table

from ...asynchronous import replay
from ...asynchronous.replay.base import TICKS
from ..figures import GREY, color_of, describe, in_bytes, label, new_figure, new_table, open_axes, print_table, write
from ..models.base import Workload
from ..models.digits import Digits, equal_parts, splits
from ..running import File, Number, Text, check_positive, check_seed, new_console, new_progress, path_in, print_paths
from ..spellings import parse
from ..spellings.grammar import parse_call

EVALUATIONS = 60
LONGEST = 9.2e9  # seconds: the nanoseconds of a trace are 64-bit integers
WAITING = "#D9D9D9"
NOTE = "Staleness: versions between reading a model and using its gradient.\nSent: models and gradients of all workers."


@dataclass(frozen=True)
class ReplayOptions:
    """Runs asynchronous methods on a virtual clock: real gradients, simulated time.

    Examples:
      jaxdist replay --rule bsp asgd ringmaster:3 --workers 64 --slow 4x
      jaxdist replay --rule asgd --gradient ef:top_k:0.01 --link 100mbit,20ms
    """

    rule: Annotated[tuple[str, ...], tyro.conf.arg(metavar="STR...")] = ("bsp", "asgd", "ringmaster:8")
    """One or several to compare: jaxdist reducers lists them."""
    workers: int = 8
    """Number of workers."""
    seconds: float = 120.0
    """Duration in virtual time."""
    law: str = "exponential:1"
    """Seconds that gradients take: constant:1, exponential:1, shifted_exponential:0.5,0.5, lognormal:1,0.3."""
    slow: Text = None
    """Worker 0 is slower, as in 4x."""
    random_slow: Text = None
    """Each gradient is slower with some probability, as in 6x,0.1."""
    failures: Text = None
    """Mean seconds until a worker fails and until it is back, as in 100,5."""
    recorded: File = None
    """Instead of --law, a JSON file of measured seconds of gradients, with a list for each worker."""
    link: Text = None
    """Bandwidth and latency of the links, as in 100mbit,20ms. By default messages take no time."""
    optimizer: str = "sgd:0.05"
    """Any optax optimizer; it runs on the server or, for bsp, on every worker."""
    gradient: Text = None
    """The code of gradients on the wire, as in qsgd:4 or ef:top_k:0.01."""
    workload: Literal["text", "digits"] = "digits"
    """As for jaxdist train."""
    model: Text = None
    """As for jaxdist train; the default is convnet:8 for digits."""
    batch: int = 32
    """Examples in a gradient."""
    skew: Number = None
    """For digits, different labels for each worker: 0.1 is one to three each, 100 nearly the same for all."""
    seed: int = 0
    """Draws parameters, batches and durations: equal seeds give every rule the same."""
    target: Number = None
    """Report when the held-out loss first reaches this value in three evaluations in a row."""
    timing_only: bool = False
    """Train no model; only simulate times and bytes."""
    events: File = None
    """A file for all events, one JSON object per line."""
    out: Path = Path("runs/replay")
    """Folder of replay.png."""


def run_replay(chosen: ReplayOptions) -> None:
    """Replays each rule on the same cluster, data and seed; prints a table and draws."""
    for name in ("workers", "batch", "seconds"):
        check_positive(f"--{name}", getattr(chosen, name))
    if chosen.seconds > LONGEST:
        raise ValueError(f"--seconds must be at most {LONGEST:g}, which is 292 years, got {chosen.seconds:g}")
    check_seed(chosen.seed)
    if not chosen.rule:
        raise ValueError("--rule needs at least one name")
    if chosen.target is not None:
        check_positive("--target", chosen.target)
        if chosen.timing_only:
            raise ValueError("--target needs losses: leave out --timing-only")
    optimizer = parse.parse_optimizer(chosen.optimizer)
    made = [(name, parse.parse_rule(name, optimizer, chosen.gradient)) for name in chosen.rule]
    # All options are parsed before the first simulation, so that a wrong one costs no time.
    law = parse.parse_durations(chosen.law, **_slowdowns(chosen), recorded=chosen.recorded)
    # A smaller model than that of `train`: a replay computes every gradient of every worker on one device.
    model = chosen.model or ("convnet:8" if chosen.workload == "digits" else None)
    workload = parse.parse_workload(chosen.workload, model)
    data = {"batch": chosen.batch, "seed": chosen.seed, "workers": chosen.workers, "skew": chosen.skew}
    task = make_task(workload, **data)
    settings = {"workers": chosen.workers, "durations": law, "links": parse.parse_links(chosen.link)}
    settings |= {"seed": chosen.seed, "timing_only": chosen.timing_only}
    if not chosen.timing_only:
        # Rounded down to ticks, so that the last evaluation is at the end or before.
        settings["evaluate_every"] = max(1, int(chosen.seconds * 1e9) // EVALUATIONS) / 1e9
    clocks = [(name, replay.simulator(rule, task, **settings)) for name, rule in made]
    console = new_console()
    finished = []
    # Folders are made and the log is opened first, so that a path that cannot be written fails before the work.
    figure = path_in(chosen.out, "replay.png")
    events = None if chosen.events is None else path_in(chosen.events.parent, chosen.events.name)
    with events.open("w") if events is not None else contextlib.nullcontext() as log:
        for name, clock in clocks:
            result = _simulate(name, clock, chosen.seconds, console)
            finished.append((name, result))
            if log is not None:
                write_events(name, result, log)
    took = spell_durations(chosen)
    title = f"{workload.name}, {chosen.workers} workers, {took}, {chosen.optimizer}, seed {chosen.seed}"
    console.print(f"\n{title}", style="dim", highlight=False)
    print_table(console, rules_table(finished, chosen.target))
    print_paths(console, figure=draw_replays(finished, figure, title=title))
    if chosen.events is not None:
        print_paths(console, events=chosen.events)


def spell_durations(chosen: ReplayOptions) -> str:
    """The seconds of gradients as the options say them.

    Examples:
      >>> spell_durations(ReplayOptions(law="exponential:1", slow="4x"))
      'gradients take exponential:1 s, slow 4x'
    """
    drawn = f"{chosen.law} s" if chosen.recorded is None else f"the seconds of {chosen.recorded.name}"
    others = [f"{name.replace('_', ' ')} {value}" for name, value in _slowdowns(chosen).items() if value]
    return ", ".join([f"gradients take {drawn}", *others])


def _slowdowns(chosen: ReplayOptions) -> dict[str, str | None]:
    return {"slow": chosen.slow, "random_slow": chosen.random_slow, "failures": chosen.failures}


def _simulate(name: str, clock: replay.Simulator, seconds: float, console: Console) -> replay.Result:
    state = clock.init()
    with new_progress(console, TaskProgressColumn, 20) as progress:
        bar = progress.add_task(name, total=EVALUATIONS, now="")
        for piece in range(1, EVALUATIONS + 1):
            state = clock.advance(state, seconds=seconds * piece / EVALUATIONS)
            now = f"{state.tick / TICKS:.0f} s, {len(state.steps) // 3:,} steps"
            now += f", loss {state.losses[-1]:.3f}" if len(state.losses) else ""
            progress.update(bar, completed=piece, now=now)
    return clock.result(state)


def make_task(workload: Workload, *, batch: int, seed: int, workers: int, skew: float | None = None) -> replay.Task:
    """Makes the task of the workers, with batches drawn from (seed, worker, job), evaluated on the held-out data.

    With `skew`, for digits, each worker has its own mixture of labels, with this concentration.
    """

    def draw_alike(seed: int, worker: int, job: int) -> Any:
        # One step number for each pair of job and worker.
        return workload.batch(seed, (job << 24) | worker, batch)

    def draw_own(train: Digits, parts: list[np.ndarray], seed: int, worker: int, job: int) -> Digits:
        # Each worker draws from its own part alone, which makes the data of the workers differ.
        rows = np.random.default_rng((seed, worker, job)).choice(parts[worker], batch)
        return Digits(train.images[rows], train.labels[rows])

    draw_batch = draw_alike
    if skew is not None:
        if workload.name != "digits":
            raise ValueError(f"--skew is for the workload 'digits', got {workload.name!r}")
        train, _ = splits()
        draw_batch = partial(draw_own, train, equal_parts(train.labels, workers, concentration=skew))

    # Held-out batches and the compiled metrics are made once, for all evaluations of all rules.
    held_out = workload.held_out(256)
    metrics = jax.jit(workload.metrics)

    def evaluate(params: Any) -> Any:
        return jnp.mean(jnp.stack([metrics(params, rows)["loss"] for rows in held_out]))

    return replay.Task(workload.init(jax.random.key(seed)), workload.loss, draw_batch, evaluate)


def staleness(name: str, trace: replay.Trace) -> np.ndarray:
    """The staleness of each gradient used: in versions of the model, or for `ad_psgd`, which has none, in gradients."""
    return replay.peer_delays(trace) if parse_call(name)[0] == "ad_psgd" else replay.delays(trace)


def write_events(name: str, run: replay.Result, log: TextIO) -> None:
    """Writes each event as a line of JSON, with the rule's name first."""
    for line in replay.event_lines(run.trace):
        # Spliced as text: the lines are JSON already, and there are many.
        log.write(json.dumps({"rule": name})[:-1] + ", " + line[1:] + "\n")


def rules_table(finished: list[tuple[str, replay.Result]], target: float | None) -> Table:
    """The steps, gradients, staleness and bytes of each rule, and the time until the loss reached the target."""
    headings = ["steps", "gradients", "thrown away", "staleness", "most", "computing", "sent", "held-out loss"]
    headings += [f"to {target:g}"] if target is not None else []
    table = new_table("rule", headings, caption=NOTE, pad_edge=False)
    for name, run in finished:
        gradients = run.trace.gradients
        old = staleness(name, run.trace)
        cells = [f"{len(run.trace.steps):,}", f"{len(gradients):,}", f"{np.sum(~gradients.accepted):,}"]
        # A rule that has used no gradient has no staleness.
        cells += [f"{old.mean():.1f}", f"{np.max(old)}"] if len(old) else ["-", "-"]
        cells += [f"{run.computing.mean():.0%}", in_bytes(float(run.sent.sum()))]
        cells += [f"{run.losses[-1]:.4f}" if len(run.losses) else "-"]
        if target is not None:
            # Three evaluations in a row: a single one below the target may be noise.
            reached = replay.time_to_target(run, target, persist=3)
            cells += [f"{reached:{',.0f' if reached >= 100 else '.3g'}} s" if np.isfinite(reached) else "-"]
        table.add_row(name, *cells)
    return table


def draw_replays(
    runs: Sequence[tuple[str, replay.Result]], path: str | Path, *, title: str, clock: str = "virtual"
) -> Path:
    """Draws runs on the same clock side by side."""
    rows = len(runs)
    figure = new_figure(title, 13.5, max(4.6, 1.3 * rows + 1.2))
    grid = figure.add_gridspec(rows, 3, width_ratios=(1.5, 1, 1))
    # One loss panel for all rules, and for each rule a row with its staleness and its time.
    loss, bins = figure.add_subplot(grid[:, 0]), _staleness_bins(runs)
    evaluated = any(len(run.losses) for _, run in runs)
    for row, (name, run) in enumerate(runs):
        color, last = color_of(row), row == rows - 1
        if evaluated:
            text = describe(name, f"{run.losses[-1]:.3f}", separator="   ", width=40)
            loss.plot(run.times, run.losses, color=color, linewidth=1.8, label=text)
        else:
            ticks, count = run.trace.steps.tick, len(run.trace.steps)
            # From zero steps at time 0 to the last count at the end.
            seconds = np.concatenate([[0], ticks / run.ticks_per_second, [run.seconds]])
            steps = np.minimum(np.arange(count + 2), count)
            text = describe(name, f"{count:,}", separator="   ", width=40)
            loss.step(seconds, steps, color=color, linewidth=1.8, label=text, where="post")
        _draw_staleness(figure.add_subplot(grid[row, 1]), run, name, color, bins, last=last)
        _draw_time(figure.add_subplot(grid[row, 2]), run, color, last=last)
    drawn, ylabel = ("loss", "held-out loss") if evaluated else ("steps", "steps of the model")
    label(loss, f"{drawn} over {clock} time", xlabel=f"{clock} seconds", ylabel=ylabel)
    loss.grid(axis="y", color="#E6E6E6", linewidth=0.8)
    open_axes(loss)
    loss.legend(frameon=False, labelcolor="linecolor", handlelength=0)
    figure.axes[1].set_title("staleness of gradients used", loc="left")
    figure.axes[2].set_title("computes, waits (grey), gone (hatched)", loc="left")
    return write(figure, path)


def _staleness_bins(runs: Sequence[tuple[str, replay.Result]]) -> list[int]:
    """The starts of the bins, 0, 1, 2, 4, 8, ..., up to the largest staleness of all runs, and one past the last."""
    # All runs share the bins, so that their panels can be compared.
    most = max((int(np.max(staleness(name, run.trace), initial=0)) for name, run in runs), default=0)
    return [0, *(1 << power for power in range(most.bit_length() + 1))]


def _draw_staleness(axes: Axes, run: replay.Result, name: str, color: str, bins: list[int], *, last: bool) -> None:
    found = staleness(name, run.trace)
    shares = np.histogram(found, bins)[0] / max(len(found), 1)
    axes.bar(np.arange(len(shares)), shares, color=color, width=0.9)
    axes.set(yticks=[0, 0.5, 1], ylim=(0, 1))
    open_axes(axes)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    text = describe(name, f"mean {found.mean():.1f}, most {np.max(found)}" if len(found) else "none", width=30)
    axes.text(1, 0.98, text, transform=axes.transAxes, ha="right", va="top", color=color, fontsize=9)
    # At most nine labels.
    every = 1 + len(shares) // 9
    names = [f"{low}+" if low > 1 else f"{low}" for low in bins[:-1:every]]
    axes.set_xticks(np.arange(0, len(shares), every), names if last else [])
    if last:
        axes.set_xlabel("versions between reading and use")


def _draw_time(axes: Axes, run: replay.Result, color: str, *, last: bool) -> None:
    workers = np.arange(len(run.computing))
    busy = run.computing + run.down
    # With many workers, gaps between their bars would only blur the picture.
    bar: dict[str, Any] = {"height": 0.85 if len(workers) <= 32 else 1.0}
    axes.barh(workers, run.computing, color=color, **bar)
    axes.barh(workers, run.down, left=run.computing, color="white", edgecolor=GREY, hatch="////", linewidth=0, **bar)
    axes.barh(workers, 1 - busy, left=busy, color=WAITING, **bar)
    axes.set(xlim=(0, 1), ylim=(len(workers) - 0.5, -0.5), ylabel="worker")
    open_axes(axes)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.tick_params(labelbottom=last)
    if last:
        axes.set_xlabel("part of the time")
