"""`jaxdist plan`: what a run would take on machines that are not here."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro
from rich.console import Console
from rich.table import Table

from .. import planning
from ..models import gpt
from ..plotting import planned_plots
from ..plotting.plots import in_bytes
from ..running import fresh, new_console
from ..spellings import methods, parse, sync
from ..training import offloaded

REDUCER = "Default: exact.\n" + parse.describe()
SYNC = "Workers step by themselves and meet every H steps, each with the --optimizer:\n" + sync.describe()


@dataclass(frozen=True)
class Plan:
    """The options of `jaxdist plan`."""

    target: Annotated[str, tyro.conf.arg(help=f"What to compile for: {planning.TARGETS}.")]
    model: str = "gpt:1b"
    """gpt:SIZE[,key=value...]: 125m, 350m, 1b, 3b, 7b, 13b, 70b, or a size of jaxdist train; gpt:1b,context=4096."""
    reducer: Annotated[str | None, tyro.conf.arg(help=REDUCER)] = None
    sync: Annotated[str | None, tyro.conf.arg(help=SYNC)] = None
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO: 1 and 2 cut the optimizer's state over the workers, 3 the parameters too."""
    offload: Literal["host"] | None = None
    """Where the optimizer's state lies: host for the host's memory."""
    optimizer: str = "adamw:1e-3"
    """Any optax optimizer and its learning rate, as in sgd:0.1,momentum=0.9."""
    batch: int | None = None
    """Examples in a step, all workers together; one for each worker unless told."""
    slices: int = 1
    """How many TPU slices, with a data centre's network between them."""
    xla: tuple[str, ...] = ()
    """Flags of the compiler, as in xla_gpu_enable_latency_hiding_scheduler=True."""
    out: Path = Path("runs/plan")
    """Where plan.png goes."""


def plan(chosen: Plan) -> int:
    """Checks, compiles, prints and draws; the exit code: 0, or 1 for what does not fit."""
    console = new_console()
    _check_target(chosen)
    config = _config(chosen.model)
    method = methods.parse_method(_spelled(chosen), chosen.optimizer)
    if chosen.zero and method.reducer is not None and method.reducer.forms.shards is None:
        raise ValueError(
            f"--zero {chosen.zero} needs a reducer with a reduce-scatter form, which {chosen.reducer} has not: exact, "
            "two_shot:qsgd:4, two_shot:int8, and with --zero 1 or 2 also ef:two_shot:qsgd:4"
        )
    options = {name: parse.literal(value) for name, _, value in (flag.partition("=") for flag in chosen.xla)}
    _only_cpu()
    workload = parse.parse_workload("text", chosen.model)
    with console.status(f"compiling for {chosen.target}"):
        found = planning.plan(
            chosen.target,
            workload,
            method,
            offload=offloaded.parse_offload(chosen.offload),
            batch_size=chosen.batch,
            num_slices=chosen.slices,
            compiler_options=options or None,
        )
    title = _title(chosen, found, config)
    _report(console, found, title, chosen, workload.units_per_example)
    picture = planned_plots.draw_plan(found, fresh(chosen.out, "plan.png"), title=title)
    console.print(f"compiled in {found.compile_seconds:.0f} s, picture {picture}", highlight=False, soft_wrap=True)
    return 0 if found.fits else 1


def _only_cpu() -> None:
    """Else JAX looks for the machines that are not here, and complains."""
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or "cpu")
    # So does libtpu, for their names.
    names = {"ACCELERATOR_TYPE": "v5litepod-16", "WORKER_HOSTNAMES": "localhost", "WORKER_ID": "0"}
    for name, value in names.items():
        os.environ.setdefault(f"TPU_{name}", value)


def _check_target(chosen: Plan) -> None:
    if chosen.slices < 1:
        raise ValueError(f"--slices must be at least 1, got {chosen.slices}")
    planning.check_target(chosen.target, chosen.slices)


def _config(model: str) -> gpt.GPTConfig:
    kind, values, keywords = parse.parse_call(model)
    if kind != "gpt":
        raise ValueError(f"--model is gpt:SIZE with one of {', '.join(gpt.SIZES)}, got {model!r}")
    return parse.call("model", model, parse.gpt_config, values, keywords)


def _spelled(chosen: Plan) -> str:
    if chosen.sync is not None and not sync.is_sync(chosen.sync):
        sync.parse_sync(chosen.sync, chosen.optimizer)  # says what there is
    return methods.spell(chosen.sync, chosen.zero, chosen.reducer, default="exact")


def _title(chosen: Plan, found: planning.Planned, config: gpt.GPTConfig) -> str:
    batch = chosen.batch or found.devices
    host = ", optimizer on the host" if chosen.offload else ""
    return (
        f"{chosen.model}, {found.parameters / 1e9:.2f} G parameters, on {found.devices} {found.chip.name} "
        f"({found.target}), {_spelled(chosen)}, {chosen.optimizer}{host}, batch {batch} x {config.context}"
    )


def _report(console: Console, found: planning.Planned, title: str, chosen: Plan, units: int) -> None:
    console.print(title, style="bold", highlight=False)
    table = Table(title="memory of one device", title_justify="left", box=None)
    table.add_column("")
    table.add_column("device", justify="right")
    table.add_column("host", justify="right")
    for name in planned_plots.PARTS:
        sizes = [found.device_bytes.get(name, 0.0), found.host_bytes.get(name, 0.0)]
        table.add_row(name, *(in_bytes(size) if size else "" for size in sizes))
    verdict = "[green]fits[/green]" if found.fits else "[red]does not fit[/red]"
    share = found.peak / found.chip.memory
    table.add_row(
        "at the most", in_bytes(found.peak), in_bytes(sum(found.host_bytes.values())) if found.host_bytes else ""
    )
    console.print(table)
    console.print(f"{verdict}: {share:.0%} of the {in_bytes(found.chip.memory)} of a {found.chip.name}\n")
    if found.kinds:
        _communication(console, found)
        rate = (chosen.batch or found.devices) * units / found.seconds
        console.print(
            f"step at best {_milliseconds(found.seconds)}: computation {_milliseconds(found.compute_seconds)}, waiting "
            f"for the network {_milliseconds(found.exposed_seconds)} ({found.exposed_seconds / found.seconds:.0%}); "
            f"{rate:,.0f} tokens/s, {found.flops / found.seconds / 1e12:,.0f} TFLOP/s of a device",
            highlight=False,
        )
        console.print(
            "At best: every operation at its roofline, every link at its full bandwidth. Compare plans by it.",
            style="dim",
        )
    for line in found.advice:
        console.print(f"[bold]try[/bold] {line}", highlight=False)
    for warning in found.warnings:
        console.print(f"note: {warning}", style="dim", highlight=False)


def _communication(console: Console, found: planning.Planned) -> None:
    table = Table(title="communication of a step, one worker along the axis data", title_justify="left", box=None)
    headings = ("workers", "times", "sent", "asynchronous", "takes", "waited for")
    for heading in ("collective", "dtype", *headings):
        table.add_column(heading, justify="right" if heading in headings else "left")
    for kind in found.kinds:
        table.add_row(
            kind.kind,
            kind.dtype,
            str(kind.workers),
            str(kind.count),
            in_bytes(kind.wire_bytes),
            f"{kind.asynchronous_bytes / kind.wire_bytes:.0%}" if kind.wire_bytes else "",
            _milliseconds(kind.seconds),
            _milliseconds(kind.exposed_seconds),
        )
    console.print(table)
    for link in found.links:
        console.print(
            f"over {link.link}: {in_bytes(link.bytes)} of each device, {_milliseconds(link.seconds)}", highlight=False
        )
    console.print(f"in all {in_bytes(found.wire_bytes)} a step, on average\n", highlight=False)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms" if seconds < 0.1 else f"{1e3 * seconds:,.0f} ms"
