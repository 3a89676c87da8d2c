"""What there is to run on, as lines that `jaxdist doctor` prints: each a fact, a word to look at, or a fault."""

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from .._core.compat import known_problems
from ..analysis.measured import measure_link
from ..processes.fingerprint import PACKAGES
from ..processes.launch import resources
from ..processes.self_check import CollectiveError, self_check
from ..runtime.mesh import groups, make_mesh

SHOWN = ("JAX_PLATFORMS", "XLA_FLAGS", "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "NPROC")
# Whose versions matter here, beside those that processes compare: what writes checkpoints, and what runs accelerators.
ALSO = (
    "orbax-checkpoint",
    *(name.format(version) for version in (12, 13) for name in ("jax-cuda{}-plugin", "nvidia-nccl-cu{}")),
    "libtpu",
)
TRANSPORT = {"gpu": "NCCL", "tpu": "ICI inside a slice, the hosts' network between slices"}
CURES = {"gloo/transport/tcp": "this machine's own name does not resolve: write it into /etc/hosts"}


class Finding(NamedTuple):
    """One line of the table."""

    what: str
    found: str
    verdict: Literal["", "good", "look", "wrong"] = ""
    advice: str = ""


def software() -> list[Finding]:
    """Versions."""
    versions = {"python": platform.python_version()}
    for package in (*PACKAGES, *ALSO):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return [Finding("versions", ", ".join(f"{name} {version}" for name, version in versions.items()))]


def start() -> list[Finding]:
    """Why JAX does not start; empty where it does."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the second where nothing that was asked for is here
        text = " ".join(str(error).split()) or f"none for JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}"
        advice = next(
            (cure for sign, cure in CURES.items() if sign in text), "install its plugin, or JAX_PLATFORMS=cpu"
        )
        return [Finding("devices", text, "wrong", advice)]
    return []


def devices() -> list[Finding]:
    """What JAX sees, how its processes talk, what is known to be bad there, and what may be left unused."""
    here, backend = jax.local_devices(), jax.default_backend()
    kinds = sorted({device.device_kind for device in jax.devices()})
    found = [
        Finding("devices", f"{jax.device_count()} of {' and '.join(kinds)}, {len(here)} in this process"),
        Finding("processes", str(jax.process_count())),
        Finding("memory of a device", _memory(here[0])),
        Finding("between processes", _transport(backend)),
    ]
    found += [Finding("known problem", problem, "look", advice) for problem, advice in known_problems()]
    if backend == "cpu" and Path("/dev/nvidia0").exists() and not os.environ.get("JAX_PLATFORMS"):
        found.append(Finding("unused", "an NVIDIA GPU", "wrong", "pip install 'jax[cuda13]'"))
    threads = os.environ.get("NPROC", "")
    threads = int(threads) if threads.isdigit() else os.cpu_count() or 1
    if backend == "cpu" and len(here) > 1 and threads < 2 * len(here):
        text = f"{threads} threads for {len(here)} devices"
        found.append(
            Finding("threads", text, "look", "they can wait for each other for ever: jd.runtime.use_cpu_devices(n)")
        )
    return found


def settings(environment: Mapping[str, str]) -> list[Finding]:
    """Variables and settings that change programs, and the cache of compiled ones."""
    told = [f"{name}={environment[name]}" for name in SHOWN if environment.get(name)]
    folder = _setting("compilation_cache_dir")
    bits = "64 bits" if _setting("enable_x64") == "True" else "32 bits"
    numbers = f"{bits}, matmul precision {_setting('default_matmul_precision') or 'default'}"
    found = [Finding("variables", " ".join(told) or "none"), Finding("numbers", numbers)]
    if folder:
        return [*found, Finding("compile cache", folder, "good")]
    return [
        *found,
        Finding("compile cache", "not set", "look", "JAX_COMPILATION_CACHE_DIR=FOLDER saves compiling again"),
    ]


def allocator(environment: Mapping[str, str]) -> list[Finding]:
    """Whether the C library of a process on the CPU keeps memory between steps; nothing where it is not glibc."""
    if jax.default_backend() != "cpu" or not resources.is_glibc():
        return []
    told = " ".join(f"{name}={value}" for name, value in resources.chosen(environment).items())
    if told:
        kept = resources.KEEPING.items() <= environment.items()
        return [Finding("freed memory", told, "good" if kept else "")]
    variables = " ".join(f"{name}={value}" for name, value in resources.KEEPING.items())
    advice = f"start with jaxdist launch, or with {variables}"
    return [Finding("freed memory", "given back and cleared in every step", "look", advice)]


def whole_mesh() -> Mesh:
    """All devices; where there are groups of them, slow links apart from fast ones."""
    found = groups(jax.devices())
    inside = int(np.gcd.reduce([len(group) for group in found]))
    if len(found) == 1 or inside == 1:
        return make_mesh()
    return make_mesh(outer={"between": jax.device_count() // inside}, inner={"inside": inside})


def links(mesh: Mesh) -> list[Finding]:
    """The collectives over each axis, and how fast its links are."""
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
            found.append(Finding(f"links of axis {axis!r}", speed, "", _advice_on_links()))
    return found


def _transport(backend: str) -> str:
    name = TRANSPORT.get(backend) or _setting("cpu_collectives_implementation")
    return name if jax.process_count() > 1 else f"{name}, once there are several"


def _advice_on_links() -> str:
    if jax.default_backend() == "cpu" and jax.process_count() == 1:
        return "the memory of this machine, no network"
    return "`jaxdist advise` says what pays over them"


def _setting(name: str) -> str:
    """What JAX is told; empty for None."""
    value = getattr(jax.config, f"jax_{name}")
    return "" if value is None else str(value)


def _memory(device: Any) -> str:
    """What it has, and what is taken; a CPU device has the host's."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return f"{stats['bytes_limit'] / 2**30:.1f} GiB, {stats.get('bytes_in_use', 0) / 2**30:.1f} in use"
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return f"the host's, {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"
    return "unknown"
