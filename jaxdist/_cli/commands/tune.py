"""`jaxdist tune`: the message sizes of the gradient, for a simulated link or measured on this machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
from matplotlib import colormaps
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table

from ... import schedule
from ..._core.checks import check_range
from ...reducers.exact import exact
from ...reducers.partitioned import partitioned
from ...reducers.reducer import Reducer
from ...schedule.profile import Profile
from ...schedule.timeline import Timeline
from .. import layers
from ..figures import GREY, label, new_figure, new_table, open_axes, print_table, write
from ..layers import Layer
from ..models.base import Workload
from ..running import File, Number, Options, Text, check_positive, check_seed, new_console, path_in, print_paths, set_up
from ..spellings import parse
from ..training import train

ONE, EACH, TUNED = "one message (exact)", "a message for each layer", "layers together or in parts, tuned"
EXACT = "jd.exact()"
OUT = Path("runs/tune")
YEAR = 365 * 86400.0  # seconds
# The options that only a simulated link has.
FOR_LINK = ("bandwidth", "latency", "overhead", "flops", "out")
PART = 8 * 4  # bytes: partitions are whole multiples of 8 entries


@dataclass(frozen=True)
class TuneOptions:
    """Finds message sizes for the gradient, for a link that is given or measured.

    Examples:
      jaxdist tune --model gpt:medium,layers=11 --bandwidth 10gbit --latency 20us --flops 3e12
      jaxdist tune --model gpt:demo --workers 4 --measured
    """

    workload: Literal["text", "digits"] = "text"
    """text or digits, as for jaxdist train."""
    model: Text = None
    """As for jaxdist train."""
    text: File = None
    """A file or a folder of your own to train on."""
    batch: int = 32
    """Examples in a step, all workers together."""
    workers: int = 8
    """Number of workers; with --measured, of devices to use."""
    bandwidth: Text = None
    """Bandwidth of the link of each worker. Default: 10gbit."""
    latency: Text = None
    """Latency from one worker to the next; a ring all-reduce has 2(W-1) hops. The latencies of messages overlap.
    Default: 20us."""
    overhead: Text = None
    """Time of each message beside its bytes: launch and negotiation. Default: 50us."""
    flops: Number = None
    """Floating-point operations per second of one worker. The default is measured on a device of this machine."""
    measured: bool = False
    """Time real steps on the devices of this machine instead of a simulated link."""
    steps: int = 20
    """With --measured: number of steps to time for each trial."""
    evaluations: int = 15
    """Number of trials."""
    seed: int = 0
    """Draws the trials."""
    out: File = None
    """Folder of timeline.png, with the schedules inside a step side by side. Default: runs/tune."""


def run_tune(chosen: TuneOptions) -> None:
    """Checks the options, and tunes on a simulated link or on this machine."""
    for name in ("batch", "workers", "steps", "evaluations"):
        check_range(f"--{name}", getattr(chosen, name), 1, ends="[]")
    check_seed(chosen.seed)
    if chosen.flops is not None:
        check_positive("--flops", chosen.flops)
    if chosen.workers == 1:
        raise ValueError("--workers must be at least 2, got 1: one worker sends nothing")
    if chosen.batch % chosen.workers:
        raise ValueError(f"--batch must be a multiple of the {chosen.workers} workers, got {chosen.batch}")
    given = [name for name in FOR_LINK if getattr(chosen, name) is not None]
    if chosen.measured and given:
        raise ValueError(f"--{given[0]} is for a simulated link: leave it out, or --measured")
    (_tune_steps if chosen.measured else _tune_link)(chosen)


def _tune_link(chosen: TuneOptions) -> None:
    """Tunes on a simulated link; prints the schedules, the best possible ones, and the winner."""
    seconds = (chosen.latency or "20us", chosen.overhead or "50us")
    hop, launch = (parse.parse_link(f"{chosen.bandwidth or '10gbit'},{each}") for each in seconds)
    workload = parse.parse_workload(chosen.workload, chosen.model, path=chosen.text)
    figure = path_in(chosen.out or OUT, "timeline.png")
    costs, batch = _trace_layers(workload, chosen)
    rate = chosen.flops
    if rate is None:
        # A device of this machine is measured in place of one of the cluster.
        rate = layers.measure_rate(workload.loss, workload.init(jax.random.key(0)), batch, costs)
    work = 3 * sum(layer.flops for layer in costs)
    if not work < rate * YEAR:
        raise ValueError(
            f"--flops is operations a second, as in 3e12 for 3 TFLOP/s, and at {rate:g} a step of {work:.1e} would "
            "take longer than a year"
        )
    profile = layers.profile_from_rate(costs, flops=rate)
    # A ring all-reduce sends each byte of the gradient 2 (W-1) / W times, over 2 (W-1) hops.
    share = 2 * (chosen.workers - 1) / chosen.workers
    link = {"bandwidth": hop.bandwidth / share, "overhead": launch.latency}
    latency = 2 * (chosen.workers - 1) * hop.latency

    def simulate(options: Mapping[str, Any]) -> schedule.Timeline:
        rest = {name: value for name, value in options.items() if name != "layers"}
        return layers.step_of(costs, profile, groups=options["layers"], **rest, **link, latency=latency)

    best = schedule.tune(
        lambda **settings: simulate(_to_options(costs, settings)).makespan,
        space=_search_space(costs),
        evaluations=chosen.evaluations,
        seed=chosen.seed,
        start=_starting_points(costs, schedule.starting_point(profile, **link, latency=latency)["partition_bytes"]),
    )
    # The simulation is deterministic, so the winner can be run again for its timeline.
    one, each, tuned = (_to_options(costs, x) for x in (_one_message(costs), _each_layer(costs), best.settings))
    runs = {ONE: simulate(one), EACH: simulate(each), TUNED: simulate(tuned)}
    # Each message of `pipelined` waits for the one before it to arrive.
    serial = {**link, "overhead": link["overhead"] + latency}
    deferred = schedule.choose_defer(profile, **serial)
    crossing = schedule.pipelined_time(profile, defer=deferred, **serial)
    inside, least = (
        schedule.optimum(profile, bandwidth=link["bandwidth"], barrier=barrier) for barrier in (True, False)
    )
    # The backward pass ends with its last gradient; the next forward pass cannot begin earlier.
    compute = max(profile.ready) + sum(profile.forward)
    rows: list[tuple[str, dict[str, Any], float]] = [
        (ONE, {}, runs[ONE].makespan),
        (EACH, each, runs[EACH].makespan),
        (TUNED, tuned, runs[TUNED].makespan),
        ("no order inside a step can beat", {}, inside),
        (f"pipelined, first {deferred} layers deferred", {}, crossing),
        ("no order can beat", {}, least),
    ]
    table = _new_schedules_table("schedule", exposed=True)
    for name, options, seconds in rows:
        _add_schedule(table, name, options, seconds, runs[EACH].makespan, f"{1e3 * (seconds - compute):,.2f}")
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
    print_table(console, table)
    candidates = ((runs[ONE].makespan, EXACT), (best.seconds, _spell_reducer(tuned)))
    shortest, code = min(candidates, key=lambda pair: pair[0])
    _print_winner(console, "inside a step", shortest, code)
    if crossing < shortest:
        order = tuple(layer.name for layer in costs)
        _print_winner(
            console, "across steps", crossing, f"jd.overlap.pipelined(loss, tx, defer={deferred}, layers={order})"
        )
    names, shown = [str(layer.name) for layer in costs], {name: runs[name] for name in (ONE, TUNED)}
    print_paths(console, figure=draw_timelines(profile, shown, figure, names=names))


def _tune_steps(chosen: TuneOptions) -> None:
    """Tunes by timing real steps; prints all trials and the winner."""
    options = Options(
        workload=chosen.workload, model=chosen.model, batch=chosen.batch, devices=chosen.workers, text=chosen.text
    )
    workload, mesh = set_up(options)
    optimizer = parse.parse_optimizer(options.optimizer)
    costs, _ = _trace_layers(workload, chosen)
    total = sum(layer.bytes for layer in costs)

    def time_reducer(reducer: Reducer) -> float:
        run = train.prepare(workload, reducer, optimizer, mesh=mesh, batch_size=chosen.batch)
        return _time_steps(run, chosen.steps)

    console = new_console()
    baseline = time_reducer(exact())
    with console.status("timing") as status:

        def time_settings(**settings: int) -> float:
            options = _to_options(costs, settings)
            status.update(f"timing {_spell_reducer(options)}")
            return time_reducer(partitioned(exact(), **options))

        best = schedule.tune(
            time_settings,
            space=_search_space(costs),
            evaluations=chosen.evaluations,
            seed=chosen.seed,
            start=_starting_points(costs, max(1, total // 4)),
        )
    table = _new_schedules_table("step", exposed=False)
    _add_schedule(table, ONE, {}, baseline, baseline)
    for number, trial in enumerate(best.trials, 1):
        mark = "*" if trial.settings == best.settings else " "
        _add_schedule(table, f"{mark} trial {number}", _to_options(costs, trial.settings), trial.seconds, baseline)
    console.print(
        f"\n{total / 2**20:,.2f} MiB of gradients, {chosen.workers} devices of this machine, "
        f"{chosen.steps} steps a trial",
        style="dim",
        highlight=False,
    )
    print_table(console, table)
    if best.seconds < baseline:
        _print_winner(console, "inside a step", best.seconds, _spell_reducer(_to_options(costs, best.settings)))
    else:
        console.print(f"nothing is faster than one message: {EXACT}", highlight=False)


def _time_steps(run: train.Run, steps: int) -> float:
    state, number = run.state, 0

    def run_step() -> None:
        nonlocal state, number
        state, metrics = run.step(state, run.batch(number))
        # Dispatch is asynchronous: without this only the launch would be timed.
        jax.block_until_ready(metrics)
        number += 1

    return schedule.step_seconds(run_step, steps=steps)


def _trace_layers(workload: Workload, chosen: TuneOptions) -> tuple[list[Layer], Any]:
    params = jax.eval_shape(workload.init, jax.random.key(0))
    batch = workload.batch(0, 0, chosen.batch // chosen.workers)
    return layers.layers_of(workload.loss, params, batch), batch


def _to_options(costs: Sequence[Layer], settings: Mapping[str, int]) -> dict[str, Any]:
    """The arguments of `partitioned` for the settings of a trial."""
    groups = layers.group_layers(costs, settings["bucket_bytes"])
    # A group of one layer is spelled as its name.
    names = tuple(tuple(costs[i].name for i in group) if len(group) > 1 else costs[group[0]].name for group in groups)
    sizes = {name: -(-settings[name] // PART) * PART for name in ("partition_bytes", "credit_bytes")}
    return {**sizes, "order": "fifo", "layers": names}


def _each_layer(costs: Sequence[Layer]) -> dict[str, int]:
    """The settings of one message for each layer."""
    sizes = [layer.bytes for layer in costs if layer.bytes] or [1]
    return {"bucket_bytes": min(sizes), "partition_bytes": max(sizes), "credit_bytes": len(costs) * max(sizes)}


def _one_message(costs: Sequence[Layer]) -> dict[str, int]:
    """The settings of one message for all layers."""
    return dict.fromkeys(("bucket_bytes", "partition_bytes", "credit_bytes"), _each_layer(costs)["credit_bytes"])


def _starting_points(costs: Sequence[Layer], size: int) -> list[dict[str, int]]:
    """One message for each layer; small layers together, up to a size; and large ones in parts of it, too."""
    each = _each_layer(costs)
    together = {**each, "bucket_bytes": size, "partition_bytes": max(size, each["partition_bytes"])}
    return [each, together, {**together, "partition_bytes": size}]


def _search_space(costs: Sequence[Layer]) -> dict[str, schedule.Range]:
    """From a thousandth of the gradient, or its smallest layer, to all of it."""
    least = max(1, min(sum(layer.bytes for layer in costs) // 1000, _each_layer(costs)["bucket_bytes"]))
    return {name: schedule.Range(least, most) for name, most in _one_message(costs).items()}


def _new_schedules_table(first: str, *, exposed: bool) -> Table:
    hidden = ["ms not hidden"] if exposed else []
    return new_table(first, ("layers", "partition", "credit", "ms a step", *hidden, "faster"))


def _add_schedule(
    table: Table, name: str, options: Mapping[str, Any], seconds: float, baseline: float, *more: str
) -> None:
    sizes = [options.get(size) for size in ("partition_bytes", "credit_bytes")]
    cells = [f"{len(options['layers'])}" if options else ""]
    cells += ["" if size is None else f"{size / 1024:,.0f} KiB" for size in sizes]
    table.add_row(name, *cells, f"{1e3 * seconds:,.2f}", *more, f"{baseline / seconds:.2f}x")


def _spell_reducer(options: Mapping[str, Any]) -> str:
    arguments = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return f"jd.reducers.partitioned({EXACT}, {arguments})"


def _print_winner(console: Console, where: str, seconds: float, code: str) -> None:
    console.print(f"{where}, {1e3 * seconds:,.2f} ms: {code}", highlight=False, soft_wrap=True)


def draw_timelines(profile: Profile, runs: Mapping[str, Timeline], path: str | Path, *, names: Sequence[str]) -> Path:
    """Draws each schedule as two bars, the device's and the link's, with a color for each layer."""
    figure = new_figure("", 11.5, 1.2 + 1.3 * len(runs))
    panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    # From the input, dark, to the output, yellow: the layers that are needed first are dark.
    colors = [colormaps["viridis"](i / max(1, len(names) - 1)) for i in range(len(names))]
    order = sorted(range(len(names)), key=lambda layer: (profile.ready[layer], -layer))
    longest = max(run.makespan for run in runs.values())
    for axes, (name, run) in zip(panels, runs.items(), strict=True):
        # The backward pass: each layer's bar begins where the one before it became ready.
        before = 0.0
        for layer in order:
            _draw_bar(axes, 1, before, profile.ready[layer], colors[layer])
            before = profile.ready[layer]
        for layer, (start, end) in enumerate(run.forward):
            _draw_bar(axes, 1, start, end, colors[layer])
        for message in run.messages:
            _draw_bar(axes, 0, message.start, message.end, colors[message.layer])
        axes.axvline(1e3 * run.makespan, color=GREY, linewidth=1)
        axes.set_yticks([1, 0], ["device", "link"])
        limits = {"xlim": (0, 1.02e3 * longest), "ylim": (-0.5, 1.5)}
        label(axes, f"{name}: {1e3 * run.makespan:,.1f} ms", size=10, **limits)
        open_axes(axes, left=False)
    panels[-1].set_xlabel("milliseconds from the start of the backward pass to the end of the next forward pass")
    shown = sorted({0, len(names) // 2, len(names) - 1})
    handles = [panels[0].barh(0, 0, color=colors[layer], label=names[layer]) for layer in shown]
    panels[0].legend(handles=handles, loc="lower right", ncols=len(shown), frameon=False, bbox_to_anchor=(1, 1))
    return write(figure, path)


def _draw_bar(axes: Axes, row: int, start: float, end: float, color: Any) -> None:
    # A white hairline separates neighbors.
    axes.barh(row, 1e3 * (end - start), left=1e3 * start, height=0.8, color=color, edgecolor="white", linewidth=0.3)
