"""`jaxdist advise`: what to send over the links that there are."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax
from rich.table import Table

from ...analysis import cost
from ...analysis.measured import measure_link
from ...processes.initialize import initialize
from ...runtime.mesh import make_mesh
from .. import advice
from ..plotting import plots
from ..running import new_console
from ..spellings import parse

NOTE = (
    "Bytes: sent by one worker, from the traced step. Coding: timed on this device.\n"
    "Step: the model's own work, coding and network, one after the other.\n"
    "Hidden: with communication behind the model's own work, as far as it goes.\n"
    "Break-even: on slower links than this the method beats the first one."
)


@dataclass(frozen=True)
class Advise:
    """The options of `jaxdist advise`."""

    link: str | None = None
    """Bandwidth and latency of the links, as in 100mbit,20ms. The default is to measure those between the processes of
    this job (Slurm, Open MPI, Kubernetes, TPU pods, or the variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID), or between the accelerators here."""
    workers: int | None = None
    """How many workers; by default all devices of all processes, or 8 with --link."""
    reducers: tuple[str, ...] = advice.METHODS
    """What to compare, spelled as for jaxdist compare; the first is what the others are measured against."""
    workload: Literal["text", "digits"] = "text"
    """As for jaxdist train."""
    model: str | None = None
    """As for jaxdist train."""
    optimizer: str = "adamw:1e-3"
    """As for jaxdist train."""
    batch: int = 32
    """Examples in a step, all workers together."""
    compute: float | None = None
    """Milliseconds of one worker's step without communication, where another device than this one will do it."""


def advise(chosen: Advise) -> None:
    """Measures, or takes what it is told, and prints a table and what follows from it."""
    console = new_console()
    several = chosen.link is None and initialize()
    workload = parse.parse_workload(chosen.workload, chosen.model)
    if chosen.link is not None:
        link, workers = advice.parse_link(chosen.link), chosen.workers or 8
    elif several or (jax.device_count() > 1 and jax.default_backend() != "cpu"):
        workers = chosen.workers or jax.device_count()
        link = measure_link(make_mesh({advice.AXIS: jax.device_count()}), axis=advice.AXIS)
    else:
        raise ValueError("there is no other worker here to measure a link to: say --link, as in --link 100mbit,20ms")
    if chosen.compute is not None and chosen.compute <= 0:
        raise ValueError(f"--compute must be positive, got {chosen.compute}")
    compute = chosen.compute and chosen.compute / 1e3
    if compute is None:
        compute = advice.compute_seconds(workload, chosen.optimizer, max(1, chosen.batch // workers))
    settings = {"optimizer": chosen.optimizer, "workers": workers, "batch_size": chosen.batch}
    found = advice.predict(workload, chosen.reducers, **settings, link=link, compute=compute)
    if jax.process_index():
        return  # all have measured; one speaks
    console.print(f"\n{workers} workers, {_spell(link)}, {1e3 * compute:,.0f} ms of the model's own work", style="dim")
    console.print(_table(found))
    console.print("\n".join(verdict(found, link)), highlight=False, soft_wrap=True)


def verdict(found: Sequence[advice.Prediction], link: cost.Link) -> list[str]:
    """What to do, in words."""
    plain, best = found[0], advice.recommend(found)
    waiting = 100 * (plain.network + plain.coding) / plain.step
    lines = [f"{plain.name}: {waiting:.0f} % of a step goes to communication."]
    if best is plain:
        rates = [one.break_even for one in found[1:] if 0 < one.break_even < math.inf]
        when = f"it starts to pay below {_rate(max(rates))}" if rates else "no link makes these pay"
        return [*lines, f"Stay with {plain.name}: compression will lose here, {when}."]
    lines.append(f"Take {best.name}: {plain.step / best.step:.1f} times as fast, {_times(plain, best)} fewer bytes.")
    losing = [one.name for one in found[1:] if one.step > plain.step]
    if losing:
        lines.append(f"Slower than {plain.name} over {_spell(link)}: {', '.join(losing)}.")
    if best.hidden < best.step / advice.CLOSE:
        lines.append("More is to be had by hiding it behind the model's work: see 'Hide the communication'.")
    return [*lines, "Speed is half of it: jaxdist compare shows what each costs in loss."]


def _table(found: Sequence[advice.Prediction]) -> Table:
    table = Table(box=None, caption=NOTE, caption_justify="left", header_style="bold", padding=(0, 1))
    table.add_column("method", no_wrap=True)
    for heading in ("bytes a step", "coding ms", "network ms", "step ms", "hidden ms", "speed", "break-even"):
        table.add_column(heading, justify="right")
    best = advice.recommend(found)
    for one in found:
        numbers = (f"{1e3 * x:,.1f}" for x in (one.coding, one.network, one.step, one.hidden))
        even = "" if one is found[0] else _rate(one.break_even)
        style = "bold green" if one is best else None
        speed = f"{found[0].step / one.step:.2f}x"
        table.add_row(one.name, plots.in_bytes(one.wire_bytes), *numbers, speed, even, style=style)
    return table


def _times(plain: advice.Prediction, best: advice.Prediction) -> str:
    return f"{plain.wire_bytes / best.wire_bytes:,.0f} times" if best.wire_bytes else "infinitely many times"


def _spell(link: cost.Link) -> str:
    return f"links of {_rate(link.bandwidth)} and {1e3 * link.latency:,.2f} ms"


def _rate(bandwidth: float) -> str:
    """Bytes a second, as people speak of links."""
    if bandwidth in (0, math.inf):
        return "never" if bandwidth == 0 else "always"
    bits = 8 * bandwidth
    return f"{bits / 1e9:,.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:,.1f} Mbit/s"
