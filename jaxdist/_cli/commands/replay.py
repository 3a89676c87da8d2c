"""`jaxdist replay`: asynchronous methods on a virtual clock."""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
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
from rich.progress import MofNCompleteColumn, TaskProgressColumn
from rich.table import Table

from ...asynchronous import replay
from ...asynchronous.replay.base import TICKS
from .. import sweep, tables
from ..figures import GREY, color_of, describe, in_bytes, label, new_figure, new_table, open_axes, print_table, write
from ..labels import NO_LABELS, Labels, parse_labels
from ..models.base import Workload
from ..models.digits import Digits, equal_parts, splits
from ..running import (
    File,
    Number,
    Text,
    check_figure,
    check_positive,
    check_seed,
    figure_path,
    new_console,
    new_progress,
    path_in,
    print_paths,
)
from ..spellings import parse
from ..spellings.tables import replace_rate
from ..sweep_tables import draw_sweep, sweep_records, sweep_table

LONGEST = 9.2e9  # seconds: the nanoseconds of a trace are 64-bit integers
WAITING = "#D9D9D9"
NOTE = "Staleness: versions between reading a model and using its gradient.\nSent: models and gradients of all workers."


@dataclass(frozen=True)
class ReplayOptions:
    """Runs asynchronous methods on a virtual clock: real gradients, simulated time.

    Examples:
      jaxdist replay --rule bsp asgd ringmaster:3 --workers 64 --slow 4x
      jaxdist replay --rule asgd --gradient ef:top_k:0.01 --link 100mbit,20ms
      jaxdist replay --rule bsp asgd --target 0.3 --seeds 3 --rates 0.2 0.1 0.05 --table t.tex
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
    nic: bool = False
    """With --link: a worker, and the server, sends and receives one message at a time."""
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
    seeds: int = 1
    """Repeats everything with this many seeds, counted from --seed. With --target a run ends there."""
    rates: Annotated[tuple[float, ...], tyro.conf.arg(metavar="FLOAT...", help_behavior_hint="")] = ()
    """Learning rates instead of that of --optimizer: each rule takes the best, found on one more seed."""
    evaluations: int = 60
    """How often the held-out loss is evaluated."""
    target: Number = None
    """Report when the held-out loss first reaches this value in three evaluations in a row."""
    timing_only: bool = False
    """Train no model; only simulate times and bytes."""
    events: File = None
    """A file for all events, one JSON object per line."""
    table: File = None
    """Write the table to this file too: .csv with all numbers, .md or .tex."""
    figure: File = None
    """Write the figure to this file: .png, .pdf or .svg. Default: replay.png in --out."""
    label: Labels = ()
    """Names in figures and tables, as in asgd=Hogwild."""
    out: Path = Path("runs/replay")
    """Folder of replay.png."""


def run_replay(chosen: ReplayOptions) -> None:
    """Replays each rule on the same cluster, data and seeds; prints a table and draws."""
    _check(chosen)
    labels = parse_labels(chosen.label, chosen.rule)
    # Without --rates the optimizer has the only one.
    spelled = {rate: replace_rate(chosen.optimizer, rate) for rate in chosen.rates} or {None: chosen.optimizer}
    optimizers = {rate: parse.parse_optimizer(text) for rate, text in spelled.items()}
    made = {
        name: {rate: parse.parse_rule(name, optimizer, chosen.gradient) for rate, optimizer in optimizers.items()}
        for name in chosen.rule
    }
    # All options are parsed before the first simulation, so that a wrong one costs no time.
    law = parse.parse_durations(chosen.law, **_slowdowns(chosen), recorded=chosen.recorded)
    # A smaller model than that of `train`: a replay computes every gradient of every worker on one device.
    model = chosen.model or ("convnet:8" if chosen.workload == "digits" else None)
    workload = parse.parse_workload(chosen.workload, model)
    data = {"batch": chosen.batch, "seed": chosen.seed, "workers": chosen.workers, "skew": chosen.skew}
    task = make_task(workload, **data)
    settings = {"workers": chosen.workers, "durations": law}
    settings |= {"links": parse.parse_links(chosen.link, nic=chosen.nic), "timing_only": chosen.timing_only}
    if not chosen.timing_only:
        # Rounded down to ticks, so that the last evaluation is at the end or before.
        settings["evaluate_every"] = max(1, int(chosen.seconds * 1e9) // chosen.evaluations) / 1e9

    def clock_of(name: str, rate: float | None, seed: int) -> replay.Simulator:
        own = task._replace(params=workload.init(jax.random.key(seed)))
        return replay.simulator(made[name][rate], own, seed=seed, record_events=not _is_sweep(chosen), **settings)

    # What a rule cannot do on this cluster fails before the work.
    clocks = [(name, clock_of(name, next(iter(optimizers)), chosen.seed)) for name in chosen.rule]
    console = new_console()
    # Folders are made and the log is opened first, so that a path that cannot be written fails before the work.
    figure = figure_path(chosen.figure, chosen.out, "replay.png")
    tables.make_folder(chosen.table)
    took = spell_durations(chosen)
    last = chosen.seed + chosen.seeds - 1
    seeds = f"seed {chosen.seed}" if chosen.seeds == 1 else f"seeds {chosen.seed} to {last}"
    title = f"{workload.name}, {chosen.workers} workers, {took}, {chosen.optimizer}, {seeds}"
    if _is_sweep(chosen):
        _sweep(chosen, clock_of, console, title, labels, figure)
        return
    finished = []
    events = None if chosen.events is None else path_in(chosen.events.parent, chosen.events.name)
    with events.open("w") if events is not None else contextlib.nullcontext() as log:
        for name, clock in clocks:
            result = _simulate(name, clock, chosen.seconds, console)
            finished.append((name, result))
            if log is not None:
                write_events(name, result, log)
    console.print(f"\n{title}", style="dim", highlight=False)
    table = rules_table(finished, chosen.target, labels)
    print_table(console, table)
    if chosen.table is not None:
        swept = [sweep.Swept(name, None, (run,)) for name, run in finished]
        print_paths(console, table=tables.write_table(table, sweep_records(swept, chosen.target), chosen.table))
    print_paths(console, figure=draw_replays(finished, figure, title=title, labels=labels))
    if chosen.events is not None:
        print_paths(console, events=chosen.events)


def _check(chosen: ReplayOptions) -> None:
    """Raises ValueError for options that cannot work, before anything is parsed."""
    for name in ("workers", "batch", "seconds", "seeds", "evaluations"):
        check_positive(f"--{name}", getattr(chosen, name))
    if chosen.seconds > LONGEST:
        raise ValueError(f"--seconds must be at most {LONGEST:g}, which is 292 years, got {chosen.seconds:g}")
    # One more seed chooses the rates.
    for seed in (chosen.seed, chosen.seed + chosen.seeds - 1 + bool(chosen.rates)):
        check_seed(seed)
    if not chosen.rule:
        raise ValueError("--rule needs at least one name")
    twice = [name for name in chosen.rule if chosen.rule.count(name) > 1]
    if twice:
        raise ValueError(f"--rule has {twice[0]} more than once: name each rule once")
    for rate in chosen.rates:
        check_positive("--rates", rate)
    if chosen.target is not None:
        check_positive("--target", chosen.target)
    tables.check_table(chosen.table)
    check_figure(chosen.figure)
    _check_combinations(chosen)


def _check_combinations(chosen: ReplayOptions) -> None:
    """Raises ValueError for options that exclude each other."""
    for option in ("target", "rates", "seeds"):
        if chosen.timing_only and getattr(chosen, option) not in (None, (), 1):
            raise ValueError(f"--{option} needs losses: leave out --timing-only")
    if chosen.events is not None and _is_sweep(chosen):
        raise ValueError("--events is a log of one run of each rule: leave out --seeds and --rates")
    if chosen.nic and chosen.link is None:
        raise ValueError("--nic is for messages that take time: give a link, as in --link 100mbit,20ms")


def _is_sweep(chosen: ReplayOptions) -> bool:
    return chosen.seeds > 1 or bool(chosen.rates)


def _sweep(
    chosen: ReplayOptions,
    clock_of: Callable[[str, float | None, int], replay.Simulator],
    console: Console,
    title: str,
    labels: dict[str, str],
    figure: Path,
) -> None:
    """Runs each rule at its best rate on every seed; leaves a table and a plot."""
    goal = sweep.Goal(chosen.seconds, chosen.target)
    swept = []
    for name in chosen.rule:
        with new_progress(console, MofNCompleteColumn, 20) as progress:
            bar = progress.add_task(name, total=chosen.seeds + bool(chosen.rates), now="")
            rate = None
            if chosen.rates:
                clocks = {rate: clock_of(name, rate, chosen.seed + chosen.seeds) for rate in chosen.rates}
                rate, _ = sweep.tune_rate(clocks, goal)
                progress.update(bar, advance=1, now=f"rate {rate:g}")
            runs = []
            for seed in range(chosen.seed, chosen.seed + chosen.seeds):
                runs.append(sweep.run_to_goal(clock_of(name, rate, seed), goal))
                now = f"rate {rate:g}, " if rate else ""
                progress.update(bar, advance=1, now=f"{now}loss {runs[-1].losses[-1]:.3f}")
        swept.append(sweep.Swept(name, rate, tuple(runs)))
    title += f", best of rates {', '.join(f'{rate:g}' for rate in chosen.rates)}" if chosen.rates else ""
    console.print(f"\n{title}", style="dim", highlight=False)
    table = sweep_table(swept, chosen.target, labels)
    print_table(console, table)
    for one in swept:
        if one.rate is not None and (edge := sweep.edge_of(one.rate, chosen.rates)):
            console.print(f"{one.name}: {edge}; its best may be beyond.", highlight=False)
    if chosen.table is not None:
        print_paths(console, table=tables.write_table(table, sweep_records(swept, chosen.target), chosen.table))
    print_paths(console, figure=draw_sweep(swept, chosen.target, figure, title=title, labels=labels))


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
    state = None
    with new_progress(console, TaskProgressColumn, 20) as progress:
        bar = progress.add_task(name, total=sweep.PIECES, now="")
        for state in sweep.in_pieces(clock, seconds):
            now = f"{state.tick / TICKS:.0f} s, {len(state.steps) // 3:,} steps"
            now += f", loss {state.losses[-1]:.3f}" if len(state.losses) else ""
            progress.update(bar, advance=1, now=now)
    assert state is not None
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


def write_events(name: str, run: replay.Result, log: TextIO) -> None:
    """Writes each event as a line of JSON, with the rule's name first."""
    for line in replay.event_lines(run.trace):
        # Spliced as text: the lines are JSON already, and there are many.
        log.write(json.dumps({"rule": name})[:-1] + ", " + line[1:] + "\n")


def rules_table(
    finished: list[tuple[str, replay.Result]], target: float | None, labels: Mapping[str, str] = NO_LABELS
) -> Table:
    """The steps, gradients, staleness and bytes of each rule, and the time until the loss reached the target."""
    headings = ["steps", "gradients", "thrown away", "staleness", "most", "computing", "sent", "held-out loss"]
    headings += [f"to {target:g}"] if target is not None else []
    table = new_table("rule", headings, caption=NOTE, pad_edge=False)
    for name, run in finished:
        gradients = run.trace.gradients
        old = sweep.staleness(name, run.trace)
        cells = [f"{len(run.trace.steps):,}", f"{len(gradients):,}", f"{np.sum(~gradients.accepted):,}"]
        # A rule that has used no gradient has no staleness.
        cells += [f"{old.mean():.1f}", f"{np.max(old)}"] if len(old) else ["-", "-"]
        cells += [f"{run.computing.mean():.0%}", in_bytes(float(run.sent.sum()))]
        cells += [f"{run.losses[-1]:.4f}" if len(run.losses) else "-"]
        if target is not None:
            reached = sweep.seconds_to(run, target)
            cells += [f"{reached:{',.0f' if reached >= 100 else '.3g'}} s" if np.isfinite(reached) else "-"]
        table.add_row(labels.get(name, name), *cells)
    return table


def draw_replays(
    runs: Sequence[tuple[str, replay.Result]],
    path: str | Path,
    *,
    title: str,
    clock: str = "virtual",
    labels: Mapping[str, str] = NO_LABELS,
) -> Path:
    """Draws runs on the same clock side by side."""
    rows = len(runs)
    figure = new_figure(title, 13.5, max(4.6, 1.3 * rows + 1.2))
    grid = figure.add_gridspec(rows, 3, width_ratios=(1.5, 1, 1))
    # One loss panel for all rules, and for each rule a row with its staleness and its time.
    loss, bins = figure.add_subplot(grid[:, 0]), _staleness_bins(runs)
    evaluated = any(len(run.losses) for _, run in runs)
    for row, (name, run) in enumerate(runs):
        color, last, shown = color_of(row), row == rows - 1, labels.get(name, name)
        if evaluated:
            text = describe(shown, f"{run.losses[-1]:.3f}", separator="   ", width=40)
            loss.plot(run.times, run.losses, color=color, linewidth=1.8, label=text)
        else:
            ticks, count = run.trace.steps.tick, len(run.trace.steps)
            # From zero steps at time 0 to the last count at the end.
            seconds = np.concatenate([[0], ticks / run.ticks_per_second, [run.seconds]])
            steps = np.minimum(np.arange(count + 2), count)
            text = describe(shown, f"{count:,}", separator="   ", width=40)
            loss.step(seconds, steps, color=color, linewidth=1.8, label=text, where="post")
        _draw_staleness(
            figure.add_subplot(grid[row, 1]), sweep.staleness(name, run.trace), shown, color, bins, last=last
        )
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
    most = max((int(np.max(sweep.staleness(name, run.trace), initial=0)) for name, run in runs), default=0)
    return [0, *(1 << power for power in range(most.bit_length() + 1))]


def _draw_staleness(axes: Axes, found: np.ndarray, name: str, color: str, bins: list[int], *, last: bool) -> None:
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
