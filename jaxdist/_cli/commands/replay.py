"""`jaxdist replay`: asynchronous methods on a virtual clock."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table

from ...asynchronous import replay
from ..plotting.figures import in_bytes
from ..plotting.replays import draw_replays
from ..running import new_console, path_in, print_paths
from ..spellings import grammar, parse, rules
from ..spellings.tables import RULES
from ..tables import new_table
from ..training import asynchronous

EVALUATIONS = 60
NOTE = "Staleness: versions between reading a model and using its gradient.\nSent: models and gradients of all workers."


@dataclass(frozen=True)
class ReplayOptions:
    """The options of `jaxdist replay`."""

    rule: Annotated[tuple[str, ...], tyro.conf.arg(help="One or several to compare:\n" + grammar.describe(RULES))] = (
        "bsp",
        "asgd",
        "ringmaster:8",
    )
    workers: int = 8
    """Number of workers."""
    seconds: float = 120.0
    """Duration in virtual time."""
    law: str = "exponential:1"
    """Seconds that gradients take: constant:1, exponential:1, shifted_exponential:0.5,0.5, lognormal:1,0.3."""
    slow: str | None = None
    """Worker 0 is slower, as in 4x."""
    random_slow: str | None = None
    """Each gradient is slower with some probability, as in 6x,0.1."""
    failures: str | None = None
    """Mean seconds until a worker fails and until it is back, as in 100,5."""
    recorded: Path | None = None
    """Instead of --law, a JSON file of measured seconds of gradients, with a list for each worker."""
    link: str | None = None
    """Bandwidth and latency of the links, as in 100mbit,20ms. By default messages take no time."""
    optimizer: str = "sgd:0.05"
    """Any optax optimizer; it runs on the server or, for bsp, on every worker."""
    gradient: str | None = None
    """The code of gradients on the wire, as in qsgd:4 or ef:top_k:0.01."""
    workload: Literal["text", "digits"] = "digits"
    """As for jaxdist train."""
    model: str | None = None
    """As for jaxdist train; the default is convnet:8 for digits."""
    batch: int = 32
    """Examples in a gradient."""
    skew: float | None = None
    """For digits, different labels for each worker: 0.1 is one to three each, 100 nearly the same for all."""
    seed: int = 0
    """Draws parameters, batches and durations: equal seeds give every rule the same."""
    target: float | None = None
    """Report when the held-out loss first reaches this value in three evaluations in a row."""
    timing_only: bool = False
    """Train no model; only simulate times and bytes."""
    events: Path | None = None
    """A file for all events, one JSON object per line."""
    out: Path = Path("runs/replay")
    """Folder of replay.png."""


def run_replay(chosen: ReplayOptions) -> None:
    """Replays each rule on the same cluster, data and seed; prints a table and draws."""
    for name in ("workers", "batch", "seconds"):
        if not getattr(chosen, name) > 0:
            raise ValueError(f"--{name} must be positive, got {getattr(chosen, name)}")
    if not chosen.rule:
        raise ValueError("--rule needs at least one name")
    optimizer = parse.parse_optimizer(chosen.optimizer)
    made = [(name, rules.parse_rule(name, optimizer, chosen.gradient)) for name in chosen.rule]
    slowdowns = {"slow": chosen.slow, "random_slow": chosen.random_slow, "failures": chosen.failures}
    law = rules.parse_durations(chosen.law, **slowdowns, recorded=chosen.recorded)
    model = chosen.model or ("convnet:8" if chosen.workload == "digits" else None)
    workload = parse.parse_workload(chosen.workload, model)
    data = {"batch": chosen.batch, "seed": chosen.seed, "workers": chosen.workers, "skew": chosen.skew}
    task = asynchronous.make_task(workload, **data)
    settings = {"workers": chosen.workers, "durations": law, "links": rules.parse_links(chosen.link)}
    settings |= {"seed": chosen.seed, "timing_only": chosen.timing_only}
    if not chosen.timing_only:
        # Rounded down to ticks, so that the last evaluation is at the end or before.
        settings["evaluate_every"] = max(1, int(chosen.seconds * 1e9) // EVALUATIONS) / 1e9
    clocks = [(name, replay.simulator(rule, task, **settings)) for name, rule in made]
    console = new_console()
    finished = []
    # The log is opened first, so that a path that cannot be written fails before the work.
    with chosen.events.open("w") if chosen.events is not None else contextlib.nullcontext() as log:
        for name, clock in clocks:
            result = _simulate(name, clock, chosen.seconds, console)
            finished.append((name, result))
            if log is not None:
                asynchronous.write_events(name, result, log)
    title = (
        f"{workload.name}, {chosen.workers} workers, gradients take {law.name}, {chosen.optimizer}, seed {chosen.seed}"
    )
    console.print(f"\n{title}", style="dim", highlight=False)
    console.print(rules_table(finished, chosen.target))
    print_paths(console, plot=draw_replays(finished, path_in(chosen.out, "replay.png"), title=title))
    if chosen.events is not None:
        print_paths(console, events=chosen.events)


def _simulate(name: str, clock: replay.Simulator, seconds: float, console: Console) -> replay.Result:
    """Runs to the end in pieces, with a progress bar."""
    state = clock.init()
    columns = [TextColumn(f"{name:<18}"), BarColumn(20), TaskProgressColumn(), TextColumn("{task.fields[now]}")]
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(name, total=EVALUATIONS, now="")
        for piece in range(1, EVALUATIONS + 1):
            state = clock.advance(state, seconds=seconds * piece / EVALUATIONS)
            now = f"{state.tick / clock.config.ticks_per_second:.0f} s, {len(state.steps) // 3:,} steps"
            now += f", loss {state.losses[-1]:.3f}" if len(state.losses) else ""
            progress.update(bar, completed=piece, now=now)
    return clock.result(state)


def rules_table(finished: list[tuple[str, replay.Result]], target: float | None) -> Table:
    """The steps, gradients, staleness and bytes of each rule, and the time until the loss reached the target."""
    headings = ["steps", "gradients", "thrown away", "staleness", "most", "computing", "sent", "held-out loss"]
    headings += [f"to {target:g}"] if target is not None else []
    table = new_table("rule", headings, caption=NOTE, pad_edge=False)
    for name, run in finished:
        gradients = run.trace.gradients
        old = asynchronous.staleness(name, run.trace)
        cells = [f"{len(run.trace.steps):,}", f"{len(gradients):,}", f"{np.sum(~gradients.accepted):,}"]
        cells += [f"{old.mean():.1f}", f"{old.max()}"] if len(old) else ["-", "-"]
        cells += [f"{run.computing.mean():.0%}", in_bytes(float(run.sent.sum()))]
        cells += [f"{run.losses[-1]:.4f}" if len(run.losses) else "-"]
        if target is not None:
            reached = replay.time_to_target(run, target, persist=3)
            cells += [f"{reached:{',.0f' if reached >= 100 else '.3g'}} s" if np.isfinite(reached) else "-"]
        table.add_row(name, *cells)
    return table
