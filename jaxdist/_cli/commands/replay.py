"""`jaxdist replay`: asynchronous methods on a virtual clock."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table

from ...asynchronous import replay
from ..plotting import plots, replay_plots
from ..running import fresh, new_console
from ..spellings import parse, replayed

GRID = 60
NOTE = "Staleness: versions between reading a model and using its gradient.\nSent: by all, models and gradients."


@dataclass(frozen=True)
class Replay:
    """The options of `jaxdist replay`."""

    rule: Annotated[tuple[str, ...], tyro.conf.arg(help="One or several to compare:\n" + replayed.describe())] = (
        "bsp",
        "asgd",
        "ringmaster:8",
    )
    workers: int = 8
    """How many workers."""
    seconds: float = 120.0
    """How long, in virtual time."""
    law: str = "exponential:1"
    """How many seconds gradients take: constant:1, exponential:1, shifted_exponential:0.5,0.5, lognormal:1,0.3."""
    slow: str | None = None
    """Worker 0 is slower, as in 4x."""
    random_slow: str | None = None
    """Each gradient is slower with some probability, as in 6x,0.1."""
    failures: str | None = None
    """Mean seconds until a worker fails and until it is back, as in 100,5."""
    recorded: Path | None = None
    """Instead of --law, a JSON file with the seconds of gradients that were measured, a list for each worker."""
    link: str | None = None
    """Bandwidth and latency of the links, as in 100mbit,20ms. The default is messages that take no time."""
    optimizer: str = "sgd:0.05"
    """Any optax optimizer, of the server or, for bsp, of every worker."""
    gradient: str | None = None
    """A code for gradients on the wire, as in qsgd:4 or ef:top_k:0.01."""
    workload: Literal["text", "digits"] = "digits"
    """As for jaxdist train."""
    model: str | None = None
    """As for jaxdist train; the default is convnet:8 for digits."""
    batch: int = 32
    """Examples in a gradient."""
    skew: float | None = None
    """Workers have labels of their own, for digits: 0.1 is one to three each, 100 nearly all alike."""
    seed: int = 0
    """Draws parameters, batches and durations: equal seeds see the same under every rule."""
    target: float | None = None
    """Report when the held-out loss is as low, three evaluations in a row."""
    timing_only: bool = False
    """No model: when things happen, and how many bytes."""
    events: Path | None = None
    """A file for every event, one JSON object a line."""
    out: Path = Path("runs/replay")
    """Where replay.png goes."""


def run(chosen: Replay) -> None:
    """Replays each rule on the same cluster, data and seed; prints a table and draws."""
    for name in ("workers", "batch", "seconds"):
        if not getattr(chosen, name) > 0:
            raise ValueError(f"--{name} must be positive, got {getattr(chosen, name)}")
    if not chosen.rule:
        raise ValueError("--rule needs at least one name")
    optimizer = parse.parse_optimizer(chosen.optimizer)
    made = [(name, replayed.parse_rule(name, optimizer, chosen.gradient)) for name in chosen.rule]
    law = replayed.parse_durations(
        chosen.law,
        slow=chosen.slow,
        random_slow=chosen.random_slow,
        failures=chosen.failures,
        recorded=chosen.recorded,
    )
    model = chosen.model or ("convnet:8" if chosen.workload == "digits" else None)
    workload = parse.parse_workload(chosen.workload, model)
    task = replayed.task(workload, batch=chosen.batch, seed=chosen.seed, workers=chosen.workers, skew=chosen.skew)
    settings = {"workers": chosen.workers, "durations": law, "links": replayed.parse_links(chosen.link)}
    settings |= {"seed": chosen.seed, "timing_only": chosen.timing_only}
    if not chosen.timing_only:
        # Rounded down to ticks, so that the last evaluation is at the end or before.
        settings["evaluate_every"] = max(1, int(chosen.seconds * 1e9) // GRID) / 1e9
    clocks = [(name, replay.simulator(rule, task, **settings)) for name, rule in made]
    console = new_console()
    log = chosen.events.open("w") if chosen.events is not None else None
    finished = []
    for name, clock in clocks:
        result = _finish(name, clock, chosen.seconds, console)
        finished.append((name, result))
        if log is not None:
            replayed.write_events(name, result, log)
    if log is not None:
        log.close()
    title = (
        f"{workload.name}, {chosen.workers} workers, gradients take {law.name}, {chosen.optimizer}, seed {chosen.seed}"
    )
    console.print(f"\n{title}", style="dim", highlight=False)
    console.print(table(finished, chosen.target))
    plot = replay_plots.draw(finished, fresh(chosen.out, "replay.png"), title=title)
    console.print(f"plot {plot}", highlight=False, soft_wrap=True)
    if chosen.events is not None:
        console.print(f"events {chosen.events}", highlight=False, soft_wrap=True)


def _finish(name: str, clock: replay.Simulator, seconds: float, console: Console) -> replay.Result:
    """Runs to the end in pieces, behind a progress bar."""
    state = clock.init()
    columns = [TextColumn(f"{name:<18}"), BarColumn(20), TaskProgressColumn(), TextColumn("{task.fields[now]}")]
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(name, total=GRID, now="")
        for piece in range(1, GRID + 1):
            state = clock.advance(state, seconds=seconds * piece / GRID)
            now = f"{state.tick / clock.setup.ticks_per_second:.0f} s, {len(state.steps) // 3:,} steps"
            now += f", loss {state.losses[-1]:.3f}" if len(state.losses) else ""
            progress.update(bar, completed=piece, now=now)
    return clock.result(state)


def table(finished: list[tuple[str, replay.Result]], target: float | None) -> Table:
    """What each rule did."""
    table = Table(box=None, pad_edge=False, caption=NOTE, caption_justify="left", header_style="bold")
    table.add_column("rule")
    headings = ["steps", "gradients", "thrown away", "staleness", "most", "computing", "sent", "held-out loss"]
    for heading in [*headings, *([f"to {target:g}"] if target is not None else [])]:
        table.add_column(heading, justify="right")
    for name, run in finished:
        gradients = run.trace.gradients
        old = replayed.staleness(name, run.trace)
        cells = [f"{len(run.trace.steps):,}", f"{len(gradients):,}", f"{np.sum(~gradients.accepted):,}"]
        cells += [f"{old.mean():.1f}", f"{old.max()}"] if len(old) else ["-", "-"]
        cells += [f"{run.computing.mean():.0%}", plots.in_bytes(float(run.sent.sum()))]
        cells += [f"{run.losses[-1]:.4f}" if len(run.losses) else "-"]
        if target is not None:
            reached = replay.time_to_target(run, target, persist=3)
            cells += [f"{reached:{',.0f' if reached >= 100 else '.3g'}} s" if np.isfinite(reached) else "-"]
        table.add_row(name, *cells)
    return table
