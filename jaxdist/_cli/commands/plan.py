"""`jaxdist plan`: memory, bytes and time of a run on machines that are not available here."""

import contextlib
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter
from rich.console import Console

from ..._core.checks import check_range
from ...analysis import Span, cost
from .. import planning, planning_disk, planning_step
from ..figures import COLORS, GREY, count_bytes, in_bytes, label, new_figure, new_table, open_axes, print_table, write
from ..models import gpt
from ..models.base import TrainingMethod, Workload
from ..running import Integer, Number, Text, check_positive, new_console, path_in, print_paths, show_compiling
from ..spellings import grammar, parse
from ..spellings.tables import ANY_STEPS
from ..tables import Units, count_units
from ..training.one_worker import check_zero, parse_offload

PARTS = {
    "arguments": COLORS[1],
    "outputs": COLORS[2],
    "parameters": COLORS[1],
    "gradients": COLORS[2],
    "optimizer state": COLORS[6],
    "buffers": COLORS[5],
    "inputs of layers": COLORS[4],
    "batch": COLORS[3],
    "temporaries": "#B8B8B8",
}
# What --step brings itself.
OF_TRAINING = ("model", "sync", "zero", "offload", "optimizer", "batch")
# What a good NVMe disk reads and writes in a second.
DISK_BANDWIDTH = 5e9
COMPUTE, HIDDEN, EXPOSED, OTHER = COLORS[1], COLORS[3], COLORS[4], COLORS[7]
Interval = tuple[float, float]


@dataclass(frozen=True)
class PlanOptions:
    """Predicts memory, bytes and time of a run on TPUs or GPUs that are not available here.

    Examples:
      jaxdist plan --target v5e:16x16 --model gpt:1b --zero 3
      jaxdist plan --target h100:4x8 --model gpt:7b --zero 3 --offload host --batch 64
      jaxdist plan --target rtx4090:1x1 --model gpt:7b --offload host_layers
      jaxdist plan --memory 24GB --flops 165e12 --bandwidth 1TB/s --model my_model:make
      jaxdist plan --target v5e:4x4 --step my_step:make --axes data=4,fsdp=4
    """

    target: Annotated[
        str | None,
        tyro.conf.arg(
            metavar="STR",
            help_behavior_hint="",
            help=f"The target to compile for: {planning.TARGETS}; h100:1x1 is one GPU, h100:1x8 are 8.",
        ),
    ] = None
    memory: Text = None
    """Memory of a device, as in 24GB, instead of the target's. Without a target: one GPU, with --flops, --bandwidth."""
    flops: Number = None
    """Operations a second of a device in matrix products, as in 165e12, instead of the target's."""
    bandwidth: Text = None
    """Bandwidth of a device's memory, as in 1TB/s, instead of the target's."""
    model: str = "gpt:1b"
    """gpt:SIZE[,key=value...]: 125m, 350m, 1b, 3b, 7b, 13b, 70b, or a size of jaxdist train; gpt:1b,context=4096. Or
    MODULE:FUNCTION of your own."""
    step: Text = None
    """MODULE:FUNCTION of your own, in place of --model and the options of training: FUNCTION(mesh) returns a compiled
    step and its arguments as shapes; FUNCTION(mesh, reducer=...) takes --reducer."""
    axes: Text = None
    """With --step, the axes of the mesh, slow links first, as in dcn=2,fsdp=8. Default: data (and slice)."""
    reducer: Text = None
    """Encodes what workers send: see jaxdist reducers. Default: exact."""
    sync: Text = None
    """Local steps, synchronized every H: diloco:H=50; see jaxdist reducers."""
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO: 1 and 2 shard the optimizer state over the workers, 3 the parameters too."""
    offload: Annotated[
        Literal["host", "nvme", "host_layers", "layers"] | None,
        tyro.conf.arg(metavar="host|nvme|host_layers|layers", help_behavior_hint=""),
    ] = None
    """The place of the optimizer state: host (memory), nvme (a disk); with host_layers and layers parameters too."""
    optimizer: str = "adamw:1e-3"
    """Any optax optimizer and its learning rate, as in sgd:0.1,momentum=0.9 or adamw:4e-3,schedule=cosine."""
    batch: Integer = None
    """Examples in a step, all workers together; by default one for each worker."""
    slices: int = 1
    """Number of TPU slices, with a data-center network between them."""
    xla: Annotated[tuple[str, ...], tyro.conf.arg(metavar="STR...", help_behavior_hint="")] = ()
    """Compiler flags, as in xla_gpu_enable_latency_hiding_scheduler=True."""
    out: Path = Path("runs/plan")
    """Folder of plan.png."""


def run_plan(chosen: PlanOptions) -> int:
    """Compiles, prints and draws; returns 0, or 1 for a program that does not fit."""
    console = new_console()
    check_range("--slices", chosen.slices, 1, ends="[]")
    target, chip = _parse_target(chosen)
    if chosen.step is not None:
        return _run_own_step(chosen, console, target, chip, chosen.step)
    if chosen.axes is not None:
        raise ValueError("--axes is for --step: the step of --model has one axis, data")
    config = None if parse.is_own_model(chosen.model) else _parse_model(chosen.model)
    spelling = parse.join_options(chosen.sync, chosen.zero, chosen.reducer, chosen.optimizer, default="exact")
    # The conditions of a warm-up are those of other steps: with them the step that sends most would send three times.
    method = parse.parse_method(spelling, chosen.optimizer, ANY_STEPS, warm_up=False)
    check_zero(spelling, method)
    flags = _parse_flags(chosen.xla)
    # Before the first use of JAX, which starts its backends.
    _hide_accelerators()
    workload = parse.parse_workload("text", chosen.model)
    picture = path_in(chosen.out, "plan.png")
    with show_compiling(console, f"for {target}"):
        found = _plan(chosen, target, chip, workload, method, flags)
    batch = chosen.batch or found.devices
    places = {"host": ", optimizer on the host", "nvme": ", optimizer on a disk", "layers": ", layers on a disk"}
    host = (places | {"host_layers": ", layers on the host"}).get(chosen.offload or "", "")
    length = f" x {config.context}" if config is not None else ""
    title = (
        f"{chosen.model}, {_count(found.parameters)} parameters, on {found.devices} {found.chip.name} "
        f"({found.target}), {spelling}, {chosen.optimizer}{host}, batch {batch}{length}"
    )
    console.print(title, style="bold", highlight=False)
    _print_memory(console, found)
    if found.collectives:
        _print_communication(console, found, count_units(workload, batch, found.devices))
    # A single chip communicates with none, and has a time too.
    if not math.isnan(found.seconds):
        _print_times(console, found, batch * workload.units_per_example, workload.unit)
    return _finish(console, found, chosen, picture, title)


def _run_own_step(chosen: PlanOptions, console: Console, target: str, chip: cost.Chip | None, step: str) -> int:
    """As `run_plan`, for a step that its author has made of a mesh."""
    given = [field.name for field in fields(chosen) if getattr(chosen, field.name) != field.default]
    if others := [name for name in given if name in OF_TRAINING]:
        raise ValueError(f"--{others[0]} is for the step of --model, and {step} has its own: leave it out")
    axes = None if chosen.axes is None else parse.parse_axes(chosen.axes)
    flags = _parse_flags(chosen.xla)
    # Before the first use of JAX, which starts its backends: the module may be that.
    _hide_accelerators()
    make = parse.parse_step(step)
    reducer = None if chosen.reducer is None else parse.parse_reducer(chosen.reducer)
    picture = path_in(chosen.out, "plan.png")
    with show_compiling(console, f"for {target}"):
        found = planning_step.plan_step(
            target,
            step,
            make,
            reducer=reducer,
            chip=chip,
            axes=axes,
            num_slices=chosen.slices,
            compiler_options=flags or None,
        )
    mesh = "" if chosen.axes is None else f", {chosen.axes}"
    named = step if chosen.reducer is None else f"{step}, {chosen.reducer}"
    title = f"{named}, on {found.devices} {found.chip.name} ({found.target}{mesh})"
    console.print(title, style="bold", highlight=False)
    _print_memory(console, found)
    if found.collectives:
        _print_communication(console, found)
    if not math.isnan(found.seconds):
        _print_times(console, found)
    return _finish(console, found, chosen, picture, title)


def _finish(console: Console, found: planning.Planned, chosen: PlanOptions, picture: Path, title: str) -> int:
    for line in found.advice:
        console.print(f"[bold]try[/bold] {line}", highlight=False, markup=True)
    _print_notes(console, found, chosen.offload)
    draw_plan(found, picture, title=title)
    console.print(f"compiled in {found.compile_seconds:.0f} s", highlight=False)
    print_paths(console, figure=picture)
    # Scripts can search for the smallest target that fits.
    return 0 if found.fits else 1


def _parse_flags(given: Sequence[str]) -> dict[str, Any]:
    """The flags of the compiler, with their values."""
    unnamed = [flag for flag in given if not flag.partition("=")[0] or "=" not in flag]
    if unnamed:
        raise ValueError(
            f"--xla needs NAME=VALUE, as in xla_gpu_enable_latency_hiding_scheduler=True, got {unnamed[0]!r}"
        )
    return {name: grammar.parse_literal(value) for name, _, value in (flag.partition("=") for flag in given)}


def _plan(
    chosen: PlanOptions,
    target: str,
    chip: cost.Chip | None,
    workload: Workload,
    method: TrainingMethod,
    flags: Mapping[str, Any],
) -> planning.Planned:
    settings = {"chip": chip, "batch_size": chosen.batch}
    if chosen.offload in ("layers", "host_layers"):
        if chosen.slices > 1 or flags:
            raise ValueError(
                f"--offload {chosen.offload} is for one machine, with the compiler's defaults: leave "
                f"{'--xla' if flags else '--slices'} out"
            )
        place = "disk" if chosen.offload == "layers" else "host"
        return planning_disk.plan_layers(target, parse.parse_layers(chosen.model), method, place=place, **settings)
    options = settings | {"num_slices": chosen.slices, "compiler_options": flags or None}
    if chosen.offload == "nvme":
        return planning_disk.plan_nvme(target, workload, method, **options)
    return planning.plan(target, workload, method, offload=parse_offload(chosen.offload), **options)


def _parse_target(chosen: PlanOptions) -> tuple[str, cost.Chip | None]:
    """The target, and the chip in the place of its own if the options describe one."""
    memory = None if chosen.memory is None else parse.parse_bytes("--memory", chosen.memory)
    bandwidth = None if chosen.bandwidth is None else parse.parse_bytes("--bandwidth", chosen.bandwidth)
    if chosen.flops is not None:
        check_positive("--flops", chosen.flops)
    if chosen.target is None and memory is bandwidth is chosen.flops is None:
        raise ValueError(
            f"plan needs --target, one of {planning.TARGETS}, or a GPU of your own, as in --memory 24GB --flops 165e12 "
            "--bandwidth 1TB/s"
        )
    target = chosen.target or f"{planning.OWN}:1x1"
    _check_target(target)
    planning.check_target(target, chosen.slices)
    flops = None if chosen.flops is None else float(chosen.flops)
    return target, planning.describe_chip(target, memory=memory, flops=flops, bandwidth=bandwidth)


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} G" if parameters >= 1e7 else f"{parameters:,}"


def _check_target(target: str) -> None:
    """Raises ValueError for a chip without a shape, with the shapes that people look for."""
    found = re.fullmatch(r"(\w+)(?::(\d*))?", target)
    name = found.group(1) if found else ""
    if name in (*planning.pods.GPUS, planning.OWN):
        shapes = f"{name}:1x1 is one GPU, {name}:1x8 a node of 8, {name}:4x8 four such nodes"
    elif name in cost.CHIPS:
        shapes = "v5e:1x1 is one chip, v5e:8x8 and v5p:4x4x4 are 64"
    else:
        return
    raise ValueError(f"--target {target!r} needs a shape: {shapes}")


def _hide_accelerators() -> None:
    """Keeps JAX and libtpu from searching for machines that are not available, which prints warnings."""
    # An error means that JAX runs already.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or "cpu")
    # libtpu would ask the cloud's metadata server for these.
    names = {"ACCELERATOR_TYPE": "v5litepod-16", "WORKER_HOSTNAMES": "localhost", "WORKER_ID": "0"}
    for name, value in names.items():
        os.environ.setdefault(f"TPU_{name}", value)


def _parse_model(model: str) -> gpt.GPTConfig:
    kind, values, keywords = grammar.parse_call(model)
    if kind != "gpt":
        raise ValueError(
            f"{grammar.suggest(kind, [])}--model must be gpt:SIZE with one of {', '.join(gpt.SIZES)}, or "
            f"MODULE:FUNCTION of your own, got {model!r}"
        )
    return grammar.call("model", model, parse.gpt_config, values, keywords)


def _print_memory(console: Console, found: planning.Planned) -> None:
    table = new_table("", ("device", "host"), title="memory of one device", title_justify="left")
    for name in PARTS:
        sizes = [found.device_bytes.get(name, 0.0), found.host_bytes.get(name, 0.0)]
        if not any(sizes):
            continue
        table.add_row(name, *(in_bytes(size) if size else "" for size in sizes))
    host = in_bytes(sum(found.host_bytes.values())) if found.host_bytes else ""
    table.add_row("at the most", in_bytes(found.peak), host)
    print_table(console, table)
    verdict = "[green]fits[/green]" if found.fits else "[red]does not fit[/red]"
    share = found.peak / found.chip.memory
    console.print(
        f"{verdict}: {share:.0%} of the {in_bytes(found.chip.memory)} of one {found.chip.name}\n", markup=True
    )


def _print_communication(console: Console, found: planning.Planned, units: Units | None = None) -> None:
    headings = ("workers", "times", "sent", "asynchronous", "takes", "waited for")
    title = f"communication of a step, {'one device' if units is None else 'one worker along the axis data'}"
    table = new_table("collective", ("dtype", *headings), title=title, title_justify="left")
    table.columns[1].justify = "left"
    for use in found.collectives:
        share = f"{use.asynchronous_bytes / use.wire_bytes:.0%}" if use.wire_bytes else ""
        times = _duration(use.seconds), _duration(use.exposed_seconds)
        counts = str(use.workers), str(use.count)
        table.add_row(use.kind, use.dtype, *counts, in_bytes(use.wire_bytes), share, *times)
    print_table(console, table)
    for link in found.links:
        line = f"over {link.link}: {in_bytes(link.bytes)} of each device, {_duration(link.seconds)}"
        console.print(line, highlight=False)
    for axes, sent in found.across.items():
        console.print(f"across {axes}: {in_bytes(sent)} of each device", highlight=False)
    sent = f"in all {in_bytes(found.wire_bytes)} a step"
    if units is not None:
        each = f"{units.share(found.wire_bytes)} a {units.name} of its own, sent and as many received"
        sent = f"{sent}, on average: {each}"
    console.print(f"{sent}\n", highlight=False)


def _print_times(console: Console, found: planning.Planned, units: int = 0, unit: str = "") -> None:
    rest = found.seconds - found.compute_seconds - found.exposed_seconds
    waits = {"host": rest} if rest > 0.005 * found.seconds else {}
    if found.devices > 1:
        waits = {"network": found.exposed_seconds} | waits
    waiting = "".join(
        f", waiting for the {name} {_duration(seconds)} ({seconds / found.seconds:.0%})"
        for name, seconds in waits.items()
    )
    rate = f"{units / found.seconds:,.0f} {unit}/s, " if units else ""
    note = "Computation as measured on an H100, every link at its full bandwidth."
    if not found.chip.is_measured:
        note = "At best: every operation at its roofline, every link at its full bandwidth."
    console.print(
        f"{_name_of_step(found)} {_duration(found.seconds)}: computation {_duration(found.compute_seconds)}{waiting}; "
        f"{rate}{found.flops / found.seconds / 1e12:,.0f} TFLOP/s of a device",
        highlight=False,
    )
    console.print(f"{note} Use it to compare plans.", style="dim")


def _print_notes(console: Console, found: planning.Planned, offload: str | None) -> None:
    if found.disk_bytes:
        read, written = found.disk_traffic
        seconds = max(read, written) / DISK_BANDWIDTH
        console.print(
            f"disk: {in_bytes(found.disk_bytes)} allocated; a step reads {in_bytes(read)} and writes "
            f"{in_bytes(written)}, {seconds:,.1f} s at {DISK_BANDWIDTH / 1e9:.0f} GB/s each way, which the time of the "
            "step leaves out",
            highlight=False,
        )
    if offload and offload != "host_layers":
        note = "note: transfers to the host are counted, its arithmetic is not"
        console.print(note, style="dim", highlight=False)
    for warning in found.warnings:
        console.print(f"note: {warning}", style="dim", highlight=False)


def _name_of_step(found: planning.Planned) -> str:
    return "step" if found.chip.is_measured else "step at best"


def _duration(seconds: float) -> str:
    if 0 < seconds < 1e-4:
        return f"{1e6 * seconds:,.1f} µs"
    return f"{1e3 * seconds:,.1f} ms" if seconds < 0.1 else f"{1e3 * seconds:,.0f} ms"


def draw_plan(planned: planning.Planned, path: str | Path, *, title: str) -> Path:
    """Draws memory as stacked bars, and the lanes of a step: all of it, and a sixteenth enlarged."""
    figure = new_figure(title, 11.5, 5.0)
    if not planned.spans:
        _draw_memory(figure.subplots(), planned)
        return write(figure, path)
    halves: Any = figure.subfigures(1, 2, width_ratios=(1, 2.6))
    left, right = halves
    _draw_memory(left.subplots(), planned)
    whole, close = right.subplots(2, 1)
    end = max(span.end for span in planned.spans)
    _draw_lanes(whole, planned.spans, (0.0, end))
    share = planned.exposed_seconds / planned.seconds
    waiting = f", {share:.0%} of it waiting for the network" if planned.devices > 1 else ""
    seconds = EngFormatter(unit="s", places=0 if planned.seconds >= 1e-3 else 1)(planned.seconds)
    label(whole, f"one {_name_of_step(planned)}: {seconds}{waiting}", size=10)
    # Away from the start, where no collective has begun.
    middle = 0.3 * end
    _draw_lanes(close, planned.spans, (middle, middle + end / 16))
    label(close, "a sixteenth of it", size=10, xlabel="time since the step began")
    return write(figure, path)


def _draw_memory(axes: Axes, planned: planning.Planned) -> None:
    bars = [("device", planned.device_bytes)] + ([("host", planned.host_bytes)] if planned.host_bytes else [])
    # The line of the limit must be in view, whether the program fits or not.
    tallest = max(planned.chip.memory, *(sum(sizes.values()) for _, sizes in bars))
    # Parts below this height have no room for text.
    readable = 0.045 * tallest
    for place, (_, sizes) in enumerate(bars):
        bottom = 0.0
        for name, color in PARTS.items():
            size = sizes.get(name, 0.0)
            if not size:
                continue
            axes.bar(place, size, 0.56, bottom, color=color, label=name if place == 0 else None)
            if size > readable:
                style = {"ha": "center", "va": "center", "fontsize": 8, "color": "w" if color == COLORS[1] else "k"}
                axes.text(place, bottom + size / 2, f"{name}\n{in_bytes(size)}", **style)
            bottom += size
    limit = planned.chip.memory
    axes.axhline(limit, color=EXPOSED, linewidth=1.5, linestyle=(0, (4, 2)))
    note = f"{in_bytes(limit)} of one {planned.chip.name}"
    axes.annotate(note, (-0.5, limit), (0, 4), textcoords="offset points", color=EXPOSED, fontsize=9)
    axes.set_xticks(range(len(bars)), [name for name, _ in bars])
    count_bytes(axes.yaxis)
    verdict = "fits" if planned.fits else "does not fit"
    limits = {"xlim": (-0.55, len(bars) - 0.45), "ylim": (0, 1.12 * tallest)}
    label(axes, f"memory: {in_bytes(planned.peak)}, {verdict}", size=10, **limits)
    open_axes(axes)
    small = [name for name, size in planned.device_bytes.items() if 0 < size <= readable]
    if small:
        sizes = ", ".join(f"{name} {in_bytes(planned.device_bytes[name])}" for name in small)
        text = f"too small to see: {sizes}" if len(small) < 3 else sizes
        axes.set_xlabel(text, fontsize=7.5, color=GREY, wrap=True)


def _draw_lanes(axes: Axes, spans: Sequence[Span], window: Interval) -> None:
    """Draws the part of each lane inside the window; of the links' lanes, exposed time in another color."""
    computing = merge_intervals([(span.start, span.end) for span in spans if span.lane == "compute"])
    lanes = ["compute", *sorted({span.lane for span in spans} - {"compute", "memory"})]
    for row, lane in enumerate(lanes):
        # Operations of one lane may overlap: their union is drawn.
        busy = _clip(merge_intervals([(span.start, span.end) for span in spans if span.lane == lane]), window)
        if lane in ("compute", "host"):
            layers = [(busy, COMPUTE if lane == "compute" else OTHER)]
        else:
            # Exposed is what no computation covers; it is drawn over the whole.
            layers = [(busy, HIDDEN), (subtract_intervals(busy, _clip(computing, window)), EXPOSED)]
        for intervals, color in layers:
            widths = [(start, end - start) for start, end in intervals]
            axes.broken_barh(widths, (row - 0.36, 0.72), color=color, linewidth=0)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set(xlim=window, ylim=(len(lanes) - 0.45, -0.55))
    axes.xaxis.set_major_formatter(EngFormatter(unit="s"))
    open_axes(axes, left=False)
    for x, text, color in ((0.875, "hidden", HIDDEN), (0.995, "waited for", EXPOSED)):
        axes.text(x, 1.02, text, transform=axes.transAxes, ha="right", va="bottom", fontsize=9, color=color)


def merge_intervals(intervals: Sequence[Interval]) -> list[Interval]:
    """The union of intervals, sorted and without overlaps."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def subtract_intervals(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The parts of `intervals` that `others` do not cover; both merged."""
    rest, n = [], 0
    for start, end in intervals:
        while n < len(others) and others[n][1] <= start:
            n += 1
        # Walk over the others that overlap this interval; `n` stays, since they may overlap the next one too.
        at, later = start, n
        while later < len(others) and others[later][0] < end:
            if others[later][0] > at:
                rest.append((at, others[later][0]))
            at = max(at, others[later][1])
            later += 1
        if at < end:
            rest.append((at, end))
    return rest


def _clip(intervals: Sequence[Interval], window: Interval) -> list[Interval]:
    low, high = window
    return [(max(start, low), min(end, high)) for start, end in intervals if end > low and start < high]
