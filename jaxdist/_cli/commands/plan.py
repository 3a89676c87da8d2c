"""`jaxdist plan`: memory, bytes and time of a run on machines that are not available here."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro
from rich.console import Console

from .. import planning
from ..models import gpt
from ..options import SYNC
from ..plotting.figures import in_bytes
from ..plotting.plans import PARTS, draw_plan
from ..running import new_console, path_in
from ..spellings import grammar, parse
from ..tables import new_table
from ..training import offloaded

REDUCER = "Default: exact.\n" + parse.describe_reducers()


@dataclass(frozen=True)
class PlanOptions:
    """The options of `jaxdist plan`."""

    target: Annotated[str, tyro.conf.arg(help=f"The target to compile for: {planning.TARGETS}.")]
    model: str = "gpt:1b"
    """gpt:SIZE[,key=value...]: 125m, 350m, 1b, 3b, 7b, 13b, 70b, or a size of jaxdist train; gpt:1b,context=4096."""
    reducer: Annotated[str | None, tyro.conf.arg(help=REDUCER)] = None
    sync: Annotated[str | None, tyro.conf.arg(help=SYNC)] = None
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO: 1 and 2 shard the optimizer state over the workers, 3 the parameters too."""
    offload: Literal["host"] | None = None
    """Where to keep the optimizer state: host for host memory."""
    optimizer: str = "adamw:1e-3"
    """Any optax optimizer and its learning rate, as in sgd:0.1,momentum=0.9."""
    batch: int | None = None
    """Examples in a step, all workers together; by default one for each worker."""
    slices: int = 1
    """Number of TPU slices, with a data-center network between them."""
    xla: tuple[str, ...] = ()
    """Compiler flags, as in xla_gpu_enable_latency_hiding_scheduler=True."""
    out: Path = Path("runs/plan")
    """Folder of plan.png."""


def run_plan(chosen: PlanOptions) -> int:
    """Compiles, prints and draws; returns 0, or 1 for a program that does not fit."""
    console = new_console()
    if chosen.slices < 1:
        raise ValueError(f"--slices must be at least 1, got {chosen.slices}")
    planning.check_target(chosen.target, chosen.slices)
    config = _parse_model(chosen.model)
    spelling = parse.join_options(chosen.sync, chosen.zero, chosen.reducer, chosen.optimizer, default="exact")
    method = parse.parse_method(spelling, chosen.optimizer)
    if chosen.zero and method.reducer is not None and method.reducer.forms.shards is None:
        raise ValueError(
            f"--zero {chosen.zero} needs a reducer with a reduce-scatter form, which {chosen.reducer} has not: exact, "
            "two_shot:qsgd:4, two_shot:int8, and with --zero 1 or 2 also ef:two_shot:qsgd:4"
        )
    flags = {name: grammar.parse_literal(value) for name, _, value in (flag.partition("=") for flag in chosen.xla)}
    _hide_accelerators()
    workload = parse.parse_workload("text", chosen.model)
    with console.status(f"compiling for {chosen.target}"):
        found = planning.plan(
            chosen.target,
            workload,
            method,
            offload=offloaded.parse_offload(chosen.offload),
            batch_size=chosen.batch,
            num_slices=chosen.slices,
            compiler_options=flags or None,
        )
    batch = chosen.batch or found.devices
    host = ", optimizer on the host" if chosen.offload else ""
    title = (
        f"{chosen.model}, {found.parameters / 1e9:.2f} G parameters, on {found.devices} {found.chip.name} "
        f"({found.target}), {spelling}, {chosen.optimizer}{host}, batch {batch} x {config.context}"
    )
    console.print(title, style="bold", highlight=False)
    _print_memory(console, found)
    if found.collectives:
        _print_communication(console, found)
        _print_times(console, found, batch * workload.units_per_example)
    for line in found.advice:
        console.print(f"[bold]try[/bold] {line}", highlight=False)
    for warning in found.warnings:
        console.print(f"note: {warning}", style="dim", highlight=False)
    picture = draw_plan(found, path_in(chosen.out, "plan.png"), title=title)
    console.print(f"compiled in {found.compile_seconds:.0f} s, picture {picture}", highlight=False, soft_wrap=True)
    return 0 if found.fits else 1


def _hide_accelerators() -> None:
    """Keeps JAX and libtpu from searching for machines that are not available, which prints warnings."""
    with contextlib.suppress(RuntimeError):  # JAX runs already
        jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or "cpu")
    # libtpu would ask the cloud's metadata server for these.
    names = {"ACCELERATOR_TYPE": "v5litepod-16", "WORKER_HOSTNAMES": "localhost", "WORKER_ID": "0"}
    for name, value in names.items():
        os.environ.setdefault(f"TPU_{name}", value)


def _parse_model(model: str) -> gpt.GPTConfig:
    kind, values, keywords = grammar.parse_call(model)
    if kind != "gpt":
        raise ValueError(f"--model must be gpt:SIZE with one of {', '.join(gpt.SIZES)}, got {model!r}")
    return grammar.call("model", model, parse.gpt_config, values, keywords)


def _print_memory(console: Console, found: planning.Planned) -> None:
    table = new_table("", ("device", "host"), title="memory of one device", title_justify="left")
    for name in PARTS:
        sizes = [found.device_bytes.get(name, 0.0), found.host_bytes.get(name, 0.0)]
        table.add_row(name, *(in_bytes(size) if size else "" for size in sizes))
    host = in_bytes(sum(found.host_bytes.values())) if found.host_bytes else ""
    table.add_row("at the most", in_bytes(found.peak), host)
    console.print(table)
    verdict = "[green]fits[/green]" if found.fits else "[red]does not fit[/red]"
    share = found.peak / found.chip.memory
    console.print(f"{verdict}: {share:.0%} of the {in_bytes(found.chip.memory)} of a {found.chip.name}\n")


def _print_communication(console: Console, found: planning.Planned) -> None:
    headings = ("workers", "times", "sent", "asynchronous", "takes", "waited for")
    title = "communication of a step, one worker along the axis data"
    table = new_table("collective", ("dtype", *headings), title=title, title_justify="left")
    table.columns[1].justify = "left"
    for use in found.collectives:
        share = f"{use.asynchronous_bytes / use.wire_bytes:.0%}" if use.wire_bytes else ""
        times = _milliseconds(use.seconds), _milliseconds(use.exposed_seconds)
        counts = str(use.workers), str(use.count)
        table.add_row(use.kind, use.dtype, *counts, in_bytes(use.wire_bytes), share, *times)
    console.print(table)
    for link in found.links:
        line = f"over {link.link}: {in_bytes(link.bytes)} of each device, {_milliseconds(link.seconds)}"
        console.print(line, highlight=False)
    console.print(f"in all {in_bytes(found.wire_bytes)} a step, on average\n", highlight=False)


def _print_times(console: Console, found: planning.Planned, tokens: int) -> None:
    console.print(
        f"step at best {_milliseconds(found.seconds)}: computation {_milliseconds(found.compute_seconds)}, waiting "
        f"for the network {_milliseconds(found.exposed_seconds)} ({found.exposed_seconds / found.seconds:.0%}); "
        f"{tokens / found.seconds:,.0f} tokens/s, {found.flops / found.seconds / 1e12:,.0f} TFLOP/s of a device",
        highlight=False,
    )
    console.print(
        "At best: every operation at its roofline, every link at its full bandwidth. Use it to compare plans.",
        style="dim",
    )


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms" if seconds < 0.1 else f"{1e3 * seconds:,.0f} ms"
