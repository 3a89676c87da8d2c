"""`jaxdist doctor`: the devices and software of this job, and whether they work."""

import os
from dataclasses import dataclass

import jax
from rich.markup import escape
from rich.table import Table

from ...processes.errors import AgreementError
from ...processes.initialize import initialize
from ...runtime.mesh import use_cpu_devices
from .. import diagnosis
from ..running import new_console

COLORS = {"good": "green", "look": "yellow", "wrong": "red", "": ""}


@dataclass(frozen=True)
class DoctorOptions:
    """The options of `jaxdist doctor`."""

    devices: int | None = None
    """How many devices to make of a CPU; the default is the existing ones."""
    timeout: int = 60
    """Seconds to wait for the other processes of this job."""


def run_doctor(chosen: DoctorOptions) -> int:
    """Prints a table and returns 1 if something is wrong. With several processes, process 0 prints."""
    if chosen.devices is not None:
        use_cpu_devices(chosen.devices)
    found = diagnosis.list_software()
    try:
        initialize(timeout_seconds=chosen.timeout)
    except AgreementError as error:
        found.append(diagnosis.Finding("processes", "do not agree", "wrong", str(error)))
    else:
        if failed := diagnosis.check_start():
            found += failed + diagnosis.list_settings(os.environ)
        else:
            found += diagnosis.list_devices() + diagnosis.list_settings(os.environ)
            found += diagnosis.check_allocator(os.environ) + diagnosis.check_links(diagnosis.whole_mesh())
            if jax.process_index() > 0:
                return _exit_code(found)
    table = Table("", "found", "", "what to do", box=None, pad_edge=False)
    for line in found:
        table.add_row(*map(escape, line), style=COLORS[line.verdict])
    console = new_console()
    console.print(table)
    wrong, look = (sum(line.verdict == verdict for line in found) for verdict in ("wrong", "look"))
    console.print(f"\n{wrong or 'nothing'} wrong, {look or 'nothing'} to look at")
    return _exit_code(found)


def _exit_code(found: list[diagnosis.Finding]) -> int:
    return int(any(line.verdict == "wrong" for line in found))
