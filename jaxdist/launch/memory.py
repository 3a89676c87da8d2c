"""Has the C library keep the memory that a process on a CPU takes and frees in every step."""

import os
from collections.abc import Mapping
from pathlib import Path

from .devices import on_cpu

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
