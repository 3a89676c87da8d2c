"""`jaxdist tune`: in what messages to send the gradient, on a link that is told or on this machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
from rich.table import Table

from .. import schedule
from ..reducers import exact, scheduled
from ..workloads import advice, layers, parse, timelines, train
from ..workloads.base import Workload
from .options import Options
from .running import fresh, new_console, set_up

PLAIN = "a message for each layer, and a barrier"


@dataclass(frozen=True)
class Tune:
    """The options of `jaxdist tune`."""

    workload: Literal["text", "digits"] = "text"
    """text or digits, as for jaxdist train."""
    model: str | None = None
    """As for jaxdist train."""
    text: Path | None = None
    """A file or a folder of your own."""
    batch: int = 32
    """Examples in a step, all workers together."""
    workers: int = 8
    """How many workers there are; with --measured how many devices to use."""
    bandwidth: str = "10gbit"
    """Of the link of each worker."""
    latency: str = "20us"
    """From one worker to the next; a ring all-reduce has 2(W-1) hops. Messages under way overlap."""
    overhead: str = "50us"
    """What each message costs beside its bytes: launch and negotiation."""
    flops: float | None = None
    """Floating-point operations a second of one worker. The default is measured on a device of this machine."""
    measured: bool = False
    """Time real steps on the devices of this machine instead of a simulated link."""
    steps: int = 20
    """With --measured: how many steps to time for each trial."""
    evaluations: int = 15
    """How many trials."""
    seed: int = 0
    """Draws the trials."""
    out: Path = Path("runs/tune")
    """Where timeline.png goes, the two schedules beside each other."""


def tune(chosen: Tune) -> None:
    """Prints what was tried, and the winner."""
    for name in ("batch", "workers", "steps", "evaluations"):
        if getattr(chosen, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(chosen, name)}")
    if chosen.flops is not None and not chosen.flops > 0:
        raise ValueError(f"--flops must be positive, got {chosen.flops}")
    if chosen.batch % chosen.workers:
        raise ValueError(f"--batch must be a multiple of the {chosen.workers} workers, got {chosen.batch}")
    (_tune_steps if chosen.measured else _tune_link)(chosen)


def _space(total: int, start: Mapping[str, int]) -> dict[str, schedule.Range]:
    """From a thousandth of the gradient, or less where the start is, up to all of it."""
    least = max(1, min(total // 1000, *start.values()))
    return {name: schedule.Range(least, max(least, total)) for name in ("partition_bytes", "credit_bytes")}


def _tune_link(chosen: Tune) -> None:
    hop, launch = (advice.parse_link(f"{chosen.bandwidth},{each}") for each in (chosen.latency, chosen.overhead))
    workload = parse.parse_workload(chosen.workload, chosen.model, path=chosen.text)
    costs, rate = _layers(workload, chosen)
    profile = layers.profile_from_rate(costs, flops=rate, workers=chosen.workers)
    link = {"bandwidth": hop.bandwidth, "overhead": launch.latency}
    waiting = {**link, "latency": 2 * (chosen.workers - 1) * hop.latency}
    play = partial(schedule.timeline, profile, **waiting)
    start = schedule.starting_point(profile, **waiting)
    best = schedule.tune(
        lambda **settings: play(**settings).makespan,
        space=_space(round(sum(profile.sizes)) or 1, start),
        evaluations=chosen.evaluations,
        seed=chosen.seed,
        start=[start],
    )
    compute = max(profile.ready) + sum(profile.forward)
    plain = play(policy="fifo", barrier=True)
    each = {**link, "overhead": link["overhead"] + waiting["latency"]}
    deferred = schedule.choose_defer(profile, **each)
    rows: list[tuple[str, dict[str, Any], float]] = [
        (PLAIN, {}, plain.makespan),
        ("a message for each layer, by priority", {}, play().makespan),
        ("partitions, at the start", start, play(**start).makespan),
        ("partitions, tuned", best.settings, best.seconds),
        (f"pipelined, first {deferred} layers deferred", {}, schedule.pipelined_time(profile, defer=deferred, **each)),
        ("no order can beat", {}, schedule.optimum(profile, bandwidth=link["bandwidth"])),
    ]
    table = _table("schedule")
    for name, settings, seconds in rows:
        _add(table, name, settings, seconds, plain.makespan, f"{1e3 * (seconds - compute):,.2f}")
    console = new_console()
    sent = sum(profile.sizes)
    console.print(
        f"\n{len(costs)} layers, {sum(layer.bytes for layer in costs) / 2**20:,.2f} MiB of gradients, "
        f"{sent / 2**20:,.2f} MiB sent by each of {chosen.workers} workers; "
        f"{rate / 1e9:,.1f} GFLOP/s, {1e3 * compute:,.2f} ms of compute, "
        f"{1e3 * sent / link['bandwidth']:,.2f} ms of sending",
        style="dim",
        highlight=False,
    )
    console.print(table)
    # A partition on the link is that much of the gradient.
    share = sum(layer.bytes for layer in costs) / max(sent, 1)
    _print_winner(console, {name: max(1, round(size * share)) for name, size in best.settings.items()})
    drawn = {PLAIN: plain, "partitions by priority, tuned": play(**best.settings)}
    names = [layer.name for layer in costs]
    plot = timelines.draw(profile, drawn, fresh(chosen.out, "timeline.png"), names=names)
    console.print(f"plot {plot}", highlight=False, soft_wrap=True)


def _tune_steps(chosen: Tune) -> None:
    options = Options(
        workload=chosen.workload, model=chosen.model, batch=chosen.batch, devices=chosen.workers, text=chosen.text
    )
    workload, mesh = set_up(options)
    optimizer = parse.parse_optimizer(options.optimizer)
    total = sum(layer.bytes for layer in _shapes(workload, chosen)[0])

    def seconds(reducer) -> float:
        run = train.prepare(workload, reducer, optimizer, mesh=mesh, batch_size=chosen.batch)
        state, number = run.state, 0

        def step():
            nonlocal state, number
            state, metrics = run.step(state, run.batch(number))
            jax.block_until_ready(metrics)
            number += 1

        return schedule.step_seconds(step, steps=chosen.steps)

    console = new_console()
    plain = seconds(exact())
    start = {"partition_bytes": max(1, total // 4), "credit_bytes": max(1, total // 2)}
    with console.status("timing") as status:

        def measure(**settings) -> float:
            status.update(f"timing {_spelled(settings)}")
            return seconds(scheduled(exact(), **settings))

        best = schedule.tune(
            measure, space=_space(total, start), evaluations=chosen.evaluations, seed=chosen.seed, start=[start]
        )
    table = _table("step", exposed=False)
    _add(table, "one message (exact)", {}, plain, plain)
    for number, trial in enumerate(best.trials, 1):
        mark = "*" if trial.settings == best.settings else " "
        _add(table, f"{mark} trial {number}", trial.settings, trial.seconds, plain)
    console.print(
        f"\n{total / 2**20:,.2f} MiB of gradients, {chosen.workers} devices of this machine, "
        f"{chosen.steps} steps a trial",
        style="dim",
        highlight=False,
    )
    console.print(table)
    if best.seconds < plain:
        _print_winner(console, best.settings)
    else:
        console.print("nothing is faster than one message: jd.exact()", highlight=False)


def _shapes(workload: Workload, chosen: Tune) -> tuple[list[layers.Layer], Any]:
    """The layers, and the batch of one worker."""
    params = jax.eval_shape(workload.init, jax.random.key(0))
    batch = workload.batch(0, 0, chosen.batch // chosen.workers)
    return layers.layers_of(workload.loss, params, batch), batch


def _layers(workload: Workload, chosen: Tune) -> tuple[list[layers.Layer], float]:
    costs, batch = _shapes(workload, chosen)
    if chosen.flops is not None:
        return costs, chosen.flops
    return costs, layers.measured_rate(workload.loss, workload.init(jax.random.key(0)), batch, costs)


def _table(first: str, *, exposed: bool = True) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1))
    table.add_column(first, no_wrap=True)
    hidden = ["ms not hidden"] if exposed else []
    for heading in ("partition", "credit", "ms a step", *hidden, "faster"):
        table.add_column(heading, justify="right")
    return table


def _add(table: Table, name: str, settings: Mapping[str, Any], seconds: float, plain: float, *more: str) -> None:
    sizes = [_size(settings.get(name)) for name in ("partition_bytes", "credit_bytes")]
    table.add_row(name, *sizes, f"{1e3 * seconds:,.2f}", *more, f"{plain / seconds:.2f}x")


def _size(size: int | None) -> str:
    return "" if size is None else f"{size / 1024:,.0f} KiB"


def _spelled(settings: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in settings.items())


def _print_winner(console: Any, settings: Mapping[str, int]) -> None:
    console.print(f"jd.scheduled(jd.exact(), {_spelled(settings)})", highlight=False, soft_wrap=True)
