"""`jaxdist advise`: recommends a method for the links between the workers."""

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
from ..plotting.figures import in_bytes
from ..running import new_console
from ..spellings import parse, rules
from ..tables import new_table

NOTE = (
    "Bytes: sent by one worker, from the traced step. Coding: timed on this device.\n"
    "Step: the model's own work, coding and network, one after the other.\n"
    "Hidden: with communication hidden behind the model's own work as far as possible.\n"
    "Break-even: on slower links than this the method beats the first one."
)


@dataclass(frozen=True)
class AdviseOptions:
    """The options of `jaxdist advise`."""

    link: str | None = None
    """Bandwidth and latency of the links, as in 100mbit,20ms. The default is to measure those between the processes of
    this job (Slurm, Open MPI, Kubernetes, TPU pods, or the variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID), or between the accelerators here."""
    workers: int | None = None
    """Number of workers; by default all devices of all processes, or 8 with --link."""
    reducers: tuple[str, ...] = advice.METHODS
    """The methods to compare, spelled as for jaxdist compare; the first is the baseline."""
    workload: Literal["text", "digits"] = "text"
    """As for jaxdist train."""
    model: str | None = None
    """As for jaxdist train."""
    optimizer: str = "adamw:1e-3"
    """As for jaxdist train."""
    batch: int = 32
    """Examples in a step, all workers together."""
    compute: float | None = None
    """Milliseconds of one worker's step without communication, if it will run on another device than this one."""


def run_advise(chosen: AdviseOptions) -> None:
    """Measures the link and the step, or takes them from the options; prints predictions and a recommendation."""
    console = new_console()
    several = chosen.link is None and initialize()
    workload = parse.parse_workload(chosen.workload, chosen.model)
    if chosen.link is not None:
        link, workers = rules.parse_link(chosen.link), chosen.workers or 8
    elif several or (jax.device_count() > 1 and jax.default_backend() != "cpu"):
        workers = chosen.workers or jax.device_count()
        link = measure_link(make_mesh({advice.AXIS: jax.device_count()}), axis=advice.AXIS)
    else:
        raise ValueError("there is no other worker to measure a link to: give one, as in --link 100mbit,20ms")
    if chosen.compute is not None and chosen.compute <= 0:
        raise ValueError(f"--compute must be positive, got {chosen.compute}")
    compute = chosen.compute and chosen.compute / 1e3
    if compute is None:
        compute = advice.compute_seconds(workload, chosen.optimizer, max(1, chosen.batch // workers))
    settings = {"optimizer": chosen.optimizer, "workers": workers, "batch_size": chosen.batch}
    found = advice.predict(workload, chosen.reducers, **settings, link=link, compute=compute)
    if jax.process_index():
        return  # all processes have measured; process 0 prints
    console.print(
        f"\n{workers} workers, {_spell_link(link)}, {1e3 * compute:,.0f} ms of the model's own work", style="dim"
    )
    console.print(_predictions_table(found))
    console.print("\n".join(_conclude(found, link)), highlight=False, soft_wrap=True)


def _conclude(found: Sequence[advice.Prediction], link: cost.Link) -> list[str]:
    """The recommendation in words."""
    baseline, best = found[0], advice.recommend(found)
    waiting = 100 * (baseline.network + baseline.coding) / baseline.step
    lines = [f"{baseline.name}: {waiting:.0f} % of a step goes to communication."]
    if best is baseline:
        rates = [other.break_even for other in found[1:] if 0 < other.break_even < math.inf]
        when = f"it starts to pay below {_spell_rate(max(rates))}" if rates else "no link makes these pay"
        return [*lines, f"Stay with {baseline.name}: compression will lose here, {when}."]
    fewer = f"{baseline.wire_bytes / best.wire_bytes:,.0f} times" if best.wire_bytes else "infinitely many times"
    lines.append(f"Take {best.name}: {baseline.step / best.step:.1f} times as fast, {fewer} fewer bytes.")
    losing = [other.name for other in found[1:] if other.step > baseline.step]
    if losing:
        lines.append(f"Slower than {baseline.name} over {_spell_link(link)}: {', '.join(losing)}.")
    if best.hidden < best.step / advice.CLOSE:
        lines.append("Hiding it behind the model's own work gains more: see 'Hide the communication'.")
    return [*lines, "Speed is half of it: jaxdist compare shows what each costs in loss."]


def _predictions_table(found: Sequence[advice.Prediction]) -> Table:
    headings = ("bytes a step", "coding ms", "network ms", "step ms", "hidden ms", "speed", "break-even")
    table = new_table("method", headings, caption=NOTE)
    best = advice.recommend(found)
    for method in found:
        times = (f"{1e3 * x:,.1f}" for x in (method.coding, method.network, method.step, method.hidden))
        break_even = "" if method is found[0] else _spell_rate(method.break_even)
        speed = f"{found[0].step / method.step:.2f}x"
        style = "bold green" if method is best else None
        table.add_row(method.name, in_bytes(method.wire_bytes), *times, speed, break_even, style=style)
    return table


def _spell_link(link: cost.Link) -> str:
    return f"links of {_spell_rate(link.bandwidth)} and {1e3 * link.latency:,.2f} ms"


def _spell_rate(bandwidth: float) -> str:
    """A bandwidth in bits per second."""
    if bandwidth in (0, math.inf):
        return "never" if bandwidth == 0 else "always"
    bits = 8 * bandwidth
    return f"{bits / 1e9:,.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:,.1f} Mbit/s"
