"""Assigns a machine's GPUs, a port, and allocator settings to the processes of a job."""

import os
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

CHOSEN = "JAX_LOCAL_DEVICE_IDS"
OTHERS = ("kfd", "accel[0-9]*", "vfio/[0-9]*")  # AMD's GPUs, and TPUs under two drivers


def gpus(environment: Mapping[str, str], folder: Path = Path("/dev")) -> int:
    """Returns the number of GPUs that JAX would use."""
    platforms = environment.get("JAX_PLATFORMS")
    if environment.get(CHOSEN) or (platforms and not {"cuda", "gpu"} & set(platforms.split(","))):
        return 0
    return _visible(environment, folder)


def on_cpu(environment: Mapping[str, str], folder: Path = Path("/dev")) -> bool:
    """Returns whether JAX would run on the CPU."""
    if platforms := environment.get("JAX_PLATFORMS"):
        return platforms.split(",")[0] == "cpu"
    return not _visible(environment, folder) and not any(any(folder.glob(pattern)) for pattern in OTHERS)


def _visible(environment: Mapping[str, str], folder: Path) -> int:
    """Returns the number of NVIDIA GPUs that a process may use."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name and not name.startswith("-")])
    return sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in folder.glob("nvidia*"))


def assign_gpus(processes: int, environment: Mapping[str, str], folder: Path = Path("/dev")) -> list[dict[str, str]]:
    """Returns the environment variables that give each process an equal share of the GPUs; empty without GPUs."""
    count = gpus(environment, folder)
    if count % processes:
        raise ValueError(
            f"{count} GPUs do not divide among {processes} processes: set CUDA_VISIBLE_DEVICES, or JAX_PLATFORMS=cpu"
        )
    if not count:
        return [{} for _ in range(processes)]
    each = count // processes
    return [{CHOSEN: ",".join(map(str, range(first, first + each)))} for first in range(0, count, each)]


# XLA:CPU allocates every large buffer anew. Glibc maps blocks beyond 32 MiB each time and returns the end of its heap
# to the kernel, which then has to clear the pages again. Arenas other than the first cannot hold a block beyond 64 MiB
# and map it as well: the first two variables have no effect without the third.
KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34), "MALLOC_ARENA_MAX": "1"}


def allocator_settings(environment: Mapping[str, str], folder: Path = Path("/dev")) -> dict[str, str]:
    """Returns the variables with which a process on the CPU keeps freed memory for its next step.

    Empty if the C library is not glibc, or if the environment configures an allocator already: the variables only work
    together.
    """
    return dict(KEEPING) if is_glibc() and on_cpu(environment, folder) and not user_allocator(environment) else {}


def user_allocator(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that configure an allocator: settings of glibc, or another library that replaces it."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith("MALLOC_")
        or (name == "GLIBC_TUNABLES" and "glibc.malloc." in value)
        or (name == "LD_PRELOAD" and "malloc" in value)
    }


def is_glibc() -> bool:
    """Returns whether the C library of this process is glibc."""
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):
        # Windows lacks confstr, and other libraries this name.
        return False


def hold_port(port: int = 0) -> socket.socket:
    """Reserves a port for process 0 to listen at; 0 chooses a free one.

    The socket stays bound while the processes run and never listens: the kernel then assigns the port to no other
    program that asks for a free one, and Linux lets a socket with `SO_REUSEADDR` (those of Python and gRPC) listen.
    """
    dual = socket.has_dualstack_ipv6()
    held = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
    try:
        if dual:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("::" if dual else "0.0.0.0", port))
    except (OSError, OverflowError) as problem:
        held.close()
        reason = getattr(problem, "strerror", "it must be from 0 to 65535")
        raise ValueError(f"port {port} is not available ({reason}): choose another, or omit it") from None
    return held


def port_of(held: socket.socket) -> int:
    """Returns the port of a socket. Systems other than Linux refuse to listen at a bound port: there it is released."""
    port = held.getsockname()[1]
    if not sys.platform.startswith("linux"):
        held.close()
    return port
