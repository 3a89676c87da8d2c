"""`jaxdist doctor`: the devices, software, settings and links of this job, and whether they work."""

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from rich.table import Column, Table

from ..._core.checks import check_range
from ..._core.compat import find_known_problems
from ...analysis.measured import measure_link
from ...processes.cluster import AgreementError
from ...processes.consistency import PACKAGES
from ...processes.initialize import initialize
from ...processes.launch import job
from ...processes.self_check import CollectiveError, self_check
from ...runtime.mesh import groups, make_mesh, use_cpu_devices
from ..running import Integer, new_console

SHOWN = ("JAX_PLATFORMS", "XLA_FLAGS", "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "NPROC")
# Packages beside those that processes compare: for checkpoints, and for accelerators.
OTHER_PACKAGES = (
    "orbax-checkpoint",
    *(name.format(version) for version in (12, 13) for name in ("jax-cuda{}-plugin", "nvidia-nccl-cu{}")),
    "libtpu",
)
TRANSPORT = {"gpu": "NCCL", "tpu": "ICI inside a slice, the hosts' network between slices"}
COLORS = {"good": "green", "look": "yellow", "wrong": "red", "": ""}
CURES = {"gloo/transport/tcp": "this machine's own host name does not resolve: add it to /etc/hosts"}


@dataclass(frozen=True)
class DoctorOptions:
    """Lists devices and software, and checks that collectives give right numbers."""

    devices: Integer = None
    """How many devices to make of a CPU; the default is the existing ones."""
    timeout: int = 60
    """Seconds to wait for the other processes of this job."""


class Finding(NamedTuple):
    """A line of the table; the verdict is empty for plain facts."""

    what: str
    found: str
    verdict: Literal["", "good", "look", "wrong"] = ""
    advice: str = ""


def run_doctor(chosen: DoctorOptions) -> int:
    """Prints a table and returns 1 if something is wrong. With several processes, process 0 prints."""
    if chosen.devices is not None:
        check_range("--devices", chosen.devices, 1, ends="[]")
        # JAX fixes the number of CPU devices when it starts.
        use_cpu_devices(chosen.devices)
    # First what needs no backend: versions matter most when JAX does not start.
    found = list_software()
    try:
        initialize(timeout_seconds=chosen.timeout)
    except AgreementError as error:
        found.append(Finding("processes", "do not agree", "wrong", str(error)))
    else:
        # Without a backend no device, link or collective can be checked.
        if failed := check_start():
            found += failed + list_settings(os.environ)
        else:
            found += list_devices() + list_settings(os.environ)
            found += check_allocator(os.environ) + check_links(whole_mesh())
            # All processes have taken part in the checks; one of them prints.
            if jax.process_index() > 0:
                return _exit_code(found)
    headings = (Column(heading, overflow="fold") for heading in ("", "found", "", "what to do"))
    table = Table(*headings, box=None, pad_edge=False)
    for line in found:
        table.add_row(*line, style=COLORS[line.verdict])
    console = new_console()
    console.print(table)
    wrong, look = (sum(line.verdict == verdict for line in found) for verdict in ("wrong", "look"))
    console.print(f"\n{wrong or 'nothing'} wrong, {look or 'nothing'} to look at")
    return _exit_code(found)


def _exit_code(found: list[Finding]) -> int:
    return int(any(line.verdict == "wrong" for line in found))


def list_software() -> list[Finding]:
    """The versions of Python and of the packages that are installed."""
    versions = {"python": platform.python_version()}
    for package in (*PACKAGES, *OTHER_PACKAGES):
        try:
            # From the metadata, without an import: a broken package must not end the diagnosis.
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return [Finding("versions", ", ".join(f"{name} {version}" for name, version in versions.items()))]


def check_start() -> list[Finding]:
    """The reason why JAX does not start; empty if it does."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the second if none of JAX_PLATFORMS is available
        text = " ".join(str(error).split()) or f"none for JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}"
        cures = [cure for sign, cure in CURES.items() if sign in text]
        advice = cures[0] if cures else "install its plugin, or set JAX_PLATFORMS=cpu"
        return [Finding("devices", text, "wrong", advice)]
    return []


def list_devices() -> list[Finding]:
    """Devices, processes, memory and transport, known problems, unused GPUs, and too few threads."""
    here, backend = jax.local_devices(), jax.default_backend()
    kinds = sorted({device.device_kind for device in jax.devices()})
    found = [
        Finding("devices", f"{jax.device_count()} of {' and '.join(kinds)}, {len(here)} in this process"),
        Finding("processes", str(jax.process_count())),
        Finding("memory of a device", _memory(here[0])),
        Finding("between processes", _transport(backend)),
    ]
    found += [Finding("known problem", problem, "look", advice) for problem, advice in find_known_problems()]
    # The driver is there, but not JAX's plugin: JAX falls back to the CPU without an error.
    if backend == "cpu" and Path("/dev/nvidia0").exists() and not os.environ.get("JAX_PLATFORMS"):
        found.append(Finding("unused", "an NVIDIA GPU", "wrong", "pip install 'jax[cuda13]'"))
    # XLA reads the size of its thread pool from NPROC; threads that wait in a collective occupy one each.
    threads = os.environ.get("NPROC", "")
    threads = int(threads) if threads.isdigit() else os.cpu_count() or 1
    if backend == "cpu" and len(here) > 1 and threads < 2 * len(here):
        text = f"{threads} threads for {len(here)} devices"
        advice = "collectives can deadlock: jd.runtime.use_cpu_devices(n)"
        found.append(Finding("threads", text, "look", advice))
    return found


def list_settings(environment: Mapping[str, str]) -> list[Finding]:
    """Environment variables and settings that change programs, and the compilation cache."""
    variables = [f"{name}={environment[name]}" for name in SHOWN if environment.get(name)]
    folder = _setting("compilation_cache_dir")
    bits = "64 bits" if _setting("enable_x64") == "True" else "32 bits"
    numbers = f"{bits}, matmul precision {_setting('default_matmul_precision') or 'default'}"
    found = [Finding("variables", " ".join(variables) or "none"), Finding("numbers", numbers)]
    advice = "JAX_COMPILATION_CACHE_DIR=FOLDER avoids compiling again"
    cache = Finding("compile cache", folder, "good") if folder else Finding("compile cache", "not set", "look", advice)
    return [*found, cache]


def check_allocator(environment: Mapping[str, str]) -> list[Finding]:
    """Checks that glibc keeps freed memory between steps on the CPU; empty on other platforms and C libraries."""
    if jax.default_backend() != "cpu" or not job.is_glibc():
        return []
    chosen = " ".join(f"{name}={value}" for name, value in job.user_allocator(environment).items())
    if chosen:
        # Another choice of the user is reported without a verdict.
        kept = job.KEEPING.items() <= environment.items()
        return [Finding("freed memory", chosen, "good" if kept else "")]
    variables = " ".join(f"{name}={value}" for name, value in job.KEEPING.items())
    advice = f"start with jaxdist launch, or with {variables}"
    return [Finding("freed memory", "returned to the system and cleared in every step", "look", advice)]


def whole_mesh() -> Mesh:
    """A mesh of all devices, with separate axes for slow links between groups of devices and fast links inside."""
    found = groups(jax.devices())
    # A mesh needs groups of one size: the largest that divides all of them.
    inside = int(np.gcd.reduce([len(group) for group in found]))
    if len(found) == 1 or inside == 1:
        return make_mesh()
    return make_mesh(outer={"between": jax.device_count() // inside}, inner={"inside": inside})


def check_links(mesh: Mesh) -> list[Finding]:
    """Checks the collectives over each axis and measures its links."""
    found = []
    try:
        self_check(mesh)
        found.append(Finding("collectives", "all right", "good"))
    except CollectiveError as error:
        wrong = f"wrong over {error.axis!r}: {', '.join(error.collectives)}"
        found.append(Finding("collectives", wrong, "wrong", "try another version of jaxlib or of its plugin"))
    for axis, workers in mesh.shape.items():
        if workers > 1:
            link = measure_link(mesh, axis=axis)
            speed = f"{workers} workers, {1e6 * link.latency:,.0f} µs a hop, {link.bandwidth / 1e9:.2f} GB/s"
            found.append(Finding(f"links of axis {axis!r}", speed, "", _link_advice()))
    return found


def _transport(backend: str) -> str:
    name = TRANSPORT.get(backend) or _setting("cpu_collectives_implementation")
    return name if jax.process_count() > 1 else f"{name}, once there are several"


def _link_advice() -> str:
    if jax.default_backend() == "cpu" and jax.process_count() == 1:
        return "memory of this machine, not a network"
    return "`jaxdist advise` recommends a method for them"


def _setting(name: str) -> str:
    value = getattr(jax.config, f"jax_{name}")
    return "" if value is None else str(value)


def _memory(device: Any) -> str:
    """The memory of a device, and how much is in use; for a CPU device, the memory of the host."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return f"{stats['bytes_limit'] / 2**30:.1f} GiB, {stats.get('bytes_in_use', 0) / 2**30:.1f} in use"
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return f"the host's, {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"
    return "unknown"
