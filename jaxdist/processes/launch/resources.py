"""Which of a machine's GPUs each process takes, and whether there is anything but the CPU."""

import os
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

CHOSEN = "JAX_LOCAL_DEVICE_IDS"
OTHERS = ("kfd", "accel[0-9]*", "vfio/[0-9]*")  # AMD's GPUs, and TPUs under two drivers


def gpus(environment: Mapping[str, str], folder: Path = Path("/dev")) -> int:
    """How many GPUs JAX would use here."""
    platforms = environment.get("JAX_PLATFORMS")
    if environment.get(CHOSEN) or (platforms and not {"cuda", "gpu"} & set(platforms.split(","))):
        return 0
    return _visible(environment, folder)


def on_cpu(environment: Mapping[str, str], folder: Path = Path("/dev")) -> bool:
    """Whether JAX computes on the CPU here."""
    if platforms := environment.get("JAX_PLATFORMS"):
        return platforms.split(",")[0] == "cpu"
    return not _visible(environment, folder) and not any(any(folder.glob(pattern)) for pattern in OTHERS)


def _visible(environment: Mapping[str, str], folder: Path) -> int:
    """How many NVIDIA GPUs a process may use."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name and not name.startswith("-")])
    return sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in folder.glob("nvidia*"))


def given(processes: int, environment: Mapping[str, str], folder: Path = Path("/dev")) -> list[dict[str, str]]:
    """The variable that gives each process its GPUs, the same number to all; none where there are no GPUs.

    Raises:
      ValueError: the GPUs do not divide among the processes.
    """
    count = gpus(environment, folder)
    if count % processes:
        raise ValueError(
            f"{count} GPUs do not divide among {processes} processes: set CUDA_VISIBLE_DEVICES, or JAX_PLATFORMS=cpu"
        )
    if not count:
        return [{} for _ in range(processes)]
    each = count // processes
    parts = [range(number * each, (number + 1) * each) for number in range(processes)]
    return [{CHOSEN: ",".join(map(str, part))} for part in parts]


# XLA:CPU takes fresh memory for every large buffer. Blocks beyond 32 MiB glibc maps anew each time, and the end of its
# heap it gives back, to be cleared by the kernel page by page. Other arenas than the first cannot hold a block beyond
# 64 MiB and are mapped as well: without the third variable the first two do nothing.
KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34), "MALLOC_ARENA_MAX": "1"}


def keeping(environment: Mapping[str, str], folder: Path = Path("/dev")) -> dict[str, str]:
    """The variables with which a process on the CPU keeps freed memory for its next step.

    None where the C library is not glibc, and none where the environment says anything of an allocator already: the
    variables only make sense together.
    """
    return dict(KEEPING) if is_glibc() and on_cpu(environment, folder) and not chosen(environment) else {}


def chosen(environment: Mapping[str, str]) -> dict[str, str]:
    """What the environment says of an allocator: settings of glibc, or another library in its place."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith("MALLOC_")
        or (name == "GLIBC_TUNABLES" and "glibc.malloc." in value)
        or (name == "LD_PRELOAD" and "malloc" in value)
    }


def is_glibc() -> bool:
    """Whether the C library of this process is glibc."""
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):  # Windows has no confstr, and other libraries not this name
        return False


def hold_port(port: int = 0) -> socket.socket:
    """Binds a port for process 0 to listen at; 0 takes a free one.

    The socket stays bound while the processes run and never listens: the kernel then gives the port to nobody who asks
    for any port, and Linux lets another socket with `SO_REUSEADDR` (those of Python and of gRPC) listen at it.

    Raises:
      ValueError: the port is taken.
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
        raise ValueError(f"port {port} cannot be had ({reason}): take another, or leave it out") from None
    return held


def number_of(held: socket.socket) -> int:
    """Its port. Other systems than Linux let nobody listen at a port that is held, so there it is let go."""
    port = held.getsockname()[1]
    if not sys.platform.startswith("linux"):
        held.close()
    return port
