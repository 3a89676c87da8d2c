"""`jaxdist tune`: in what messages to send the gradient, on a link that is told or on this machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
from rich.table import Table

from ... import schedule
from ...reducers.exact import exact
from ...reducers.partitioned import partitioned
from .. import advice, layers
from ..models.base import Workload
from ..options import Options
from ..plotting import timelines
from ..running import fresh, new_console, set_up
from ..spellings import parse
from ..training import train

ONE, PLAIN, TUNED = "one message (exact)", "a message for each layer", "layers together or in parts, tuned"
EXACT = "jd.exact()"
PART = 8 * 4  # partitions have whole multiples of 8 entries


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
    """Where timeline.png goes, the schedules inside a step beside each other."""


def tune(chosen: Tune) -> None:
    """Prints what was tried, and the winner."""
    for name in ("batch", "workers", "steps", "evaluations"):
        if getattr(chosen, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(chosen, name)}")
    if chosen.flops is not None and not chosen.flops > 0:
        raise ValueError(f"--flops must be positive, got {chosen.flops}")
    if chosen.workers == 1 and not chosen.measured:
        raise ValueError("--workers must be at least 2, got 1: one worker sends nothing")
    if chosen.batch % chosen.workers:
        raise ValueError(f"--batch must be a multiple of the {chosen.workers} workers, got {chosen.batch}")
    (_tune_steps if chosen.measured else _tune_link)(chosen)


def _tune_link(chosen: Tune) -> None:
    hop, launch = (advice.parse_link(f"{chosen.bandwidth},{each}") for each in (chosen.latency, chosen.overhead))
    workload = parse.parse_workload(chosen.workload, chosen.model, path=chosen.text)
    costs, rate = _layers(workload, chosen)
    profile = layers.profile_from_rate(costs, flops=rate)
    # Of each byte of the gradient a ring all-reduce sends 2 (W-1) / W.
    share = 2 * (chosen.workers - 1) / chosen.workers
    link = {"bandwidth": hop.bandwidth / share, "overhead": launch.latency}
    latency = 2 * (chosen.workers - 1) * hop.latency

    def play(options: Mapping[str, Any]) -> schedule.Timeline:
        rest = {name: value for name, value in options.items() if name != "layers"}
        return layers.step_of(costs, profile, groups=options["layers"], **rest, **link, latency=latency)

    best = schedule.tune(
        lambda **settings: play(_options(costs, settings)).makespan,
        space=_space(costs),
        evaluations=chosen.evaluations,
        seed=chosen.seed,
        start=_starts(costs, schedule.starting_point(profile, **link, latency=latency)["partition_bytes"]),
    )
    one, plain, tuned = (_options(costs, settings) for settings in (_one_message(costs), _plain(costs), best.settings))
    runs = {ONE: play(one), PLAIN: play(plain), TUNED: play(tuned)}
    # Each message of `pipelined` waits for the one before it to arrive.
    each = {**link, "overhead": link["overhead"] + latency}
    deferred = schedule.choose_defer(profile, **each)
    crossing = schedule.pipelined_time(profile, defer=deferred, **each)
    inside, least = (
        schedule.optimum(profile, bandwidth=link["bandwidth"], barrier=barrier) for barrier in (True, False)
    )
    compute = max(profile.ready) + sum(profile.forward)
    rows: list[tuple[str, dict[str, Any], float]] = [
        (ONE, {}, runs[ONE].makespan),
        (PLAIN, plain, runs[PLAIN].makespan),
        (TUNED, tuned, runs[TUNED].makespan),
        ("no order inside a step can beat", {}, inside),
        (f"pipelined, first {deferred} layers deferred", {}, crossing),
        ("no order can beat", {}, least),
    ]
    table = _table("schedule")
    for name, options, seconds in rows:
        _add(table, name, options, seconds, runs[PLAIN].makespan, f"{1e3 * (seconds - compute):,.2f}")
    console = new_console()
    total = sum(profile.sizes)
    console.print(
        f"\n{len(costs)} layers, {total / 2**20:,.2f} MiB of gradients, "
        f"{share * total / 2**20:,.2f} MiB sent by each of {chosen.workers} workers; "
        f"{rate / 1e9:,.1f} GFLOP/s, {1e3 * compute:,.2f} ms of compute, "
        f"{1e3 * total / link['bandwidth']:,.2f} ms of sending",
        style="dim",
        highlight=False,
    )
    console.print(table)
    shortest, spelled = min((runs[ONE].makespan, EXACT), (best.seconds, _spelled(tuned)), key=lambda pair: pair[0])
    _say(console, "inside a step", shortest, spelled)
    if crossing < shortest:
        order = tuple(layer.name for layer in costs)
        _say(console, "across steps", crossing, f"jd.overlap.pipelined(loss, tx, defer={deferred}, layers={order})")
    names = [str(layer.name) for layer in costs]
    plot = timelines.draw(
        profile, {name: runs[name] for name in (ONE, TUNED)}, fresh(chosen.out, "timeline.png"), names=names
    )
    console.print(f"plot {plot}", highlight=False, soft_wrap=True)


def _tune_steps(chosen: Tune) -> None:
    options = Options(
        workload=chosen.workload, model=chosen.model, batch=chosen.batch, devices=chosen.workers, text=chosen.text
    )
    workload, mesh = set_up(options)
    optimizer = parse.parse_optimizer(options.optimizer)
    costs, _ = _shapes(workload, chosen)
    total = sum(layer.bytes for layer in costs)

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
    with console.status("timing") as status:

        def measure(**settings) -> float:
            options = _options(costs, settings)
            status.update(f"timing {_spelled(options)}")
            return seconds(partitioned(exact(), **options))

        best = schedule.tune(
            measure,
            space=_space(costs),
            evaluations=chosen.evaluations,
            seed=chosen.seed,
            start=_starts(costs, max(1, total // 4)),
        )
    table = _table("step", exposed=False)
    _add(table, ONE, {}, plain, plain)
    for number, trial in enumerate(best.trials, 1):
        mark = "*" if trial.settings == best.settings else " "
        _add(table, f"{mark} trial {number}", _options(costs, trial.settings), trial.seconds, plain)
    console.print(
        f"\n{total / 2**20:,.2f} MiB of gradients, {chosen.workers} devices of this machine, "
        f"{chosen.steps} steps a trial",
        style="dim",
        highlight=False,
    )
    console.print(table)
    if best.seconds < plain:
        _say(console, "inside a step", best.seconds, _spelled(_options(costs, best.settings)))
    else:
        console.print(f"nothing is faster than one message: {EXACT}", highlight=False)


def _options(costs: list[layers.Layer], settings: Mapping[str, int]) -> dict[str, Any]:
    """What `partitioned` is told: in which a trial is simulated, timed and printed."""
    groups = layers.grouped(costs, settings["bucket_bytes"])
    names = tuple(tuple(costs[i].name for i in group) if len(group) > 1 else costs[group[0]].name for group in groups)
    sizes = {name: -(-settings[name] // PART) * PART for name in ("partition_bytes", "credit_bytes")}
    return {**sizes, "order": "fifo", "layers": names}


def _plain(costs: list[layers.Layer]) -> dict[str, int]:
    """The settings of a message for each layer."""
    sizes = [layer.bytes for layer in costs if layer.bytes] or [1]
    return {"bucket_bytes": min(sizes), "partition_bytes": max(sizes), "credit_bytes": len(costs) * max(sizes)}


def _one_message(costs: list[layers.Layer]) -> dict[str, int]:
    return dict.fromkeys(("bucket_bytes", "partition_bytes", "credit_bytes"), _plain(costs)["credit_bytes"])


def _starts(costs: list[layers.Layer], size: int) -> list[dict[str, int]]:
    """A message for each layer; small layers together, up to a size; large ones in parts of it, too."""
    plain = _plain(costs)
    together = {**plain, "bucket_bytes": size, "partition_bytes": max(size, plain["partition_bytes"])}
    return [plain, together, {**together, "partition_bytes": size}]


def _space(costs: list[layers.Layer]) -> dict[str, schedule.Range]:
    """From a thousandth of the gradient, or its smallest layer, to all of it."""
    plain = _plain(costs)
    least = max(1, min(sum(layer.bytes for layer in costs) // 1000, plain["bucket_bytes"]))
    return {name: schedule.Range(least, most) for name, most in _one_message(costs).items()}


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
    for heading in ("layers", "partition", "credit", "ms a step", *hidden, "faster"):
        table.add_column(heading, justify="right")
    return table


def _add(table: Table, name: str, options: Mapping[str, Any], seconds: float, plain: float, *more: str) -> None:
    sizes = [_size(options.get(name)) for name in ("partition_bytes", "credit_bytes")]
    messages = f"{len(options['layers'])}" if options else ""
    table.add_row(name, messages, *sizes, f"{1e3 * seconds:,.2f}", *more, f"{plain / seconds:.2f}x")


def _size(size: int | None) -> str:
    return "" if size is None else f"{size / 1024:,.0f} KiB"


def _spelled(options: Mapping[str, Any]) -> str:
    return f"jd.reducers.partitioned({EXACT}, {', '.join(f'{name}={value!r}' for name, value in options.items())})"


def _say(console: Any, where: str, seconds: float, spelled: str) -> None:
    console.print(f"{where}, {1e3 * seconds:,.2f} ms: {spelled}", highlight=False, soft_wrap=True, markup=False)
