"""Which of a machine's GPUs each process takes, and whether there is anything but the CPU."""

import re
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
