"""Accelerators that are not there: the plugins of the extras `tpu-plan` and `gpu-plan` on a machine without any."""

import os
import pkgutil
import sys
from glob import glob
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import jax

from .compat import has_backend


def ignore_absent_accelerators() -> None:
    """Keeps JAX from starting the plugins of TPUs and NVIDIA GPUs on a machine without any, where they print errors.

    The extras `tpu-plan` and `gpu-plan` install them for their compilers. Without effect if the user chose a platform,
    if another plugin is installed, or if JAX's backend has started.
    """
    if (
        "JAX_PLATFORMS" in os.environ
        or getattr(jax.config, "jax_platforms", None)
        or has_backend()
        or sys.platform != "linux"
    ):
        return
    names = {point.name for point in entry_points(group="jax_plugins")}
    if (found := find_spec("jax_plugins")) is not None:
        names |= {module.name for module in pkgutil.iter_modules(found.submodule_search_locations)}
    ours = {name for name in names if name.startswith("xla_cuda")}
    if ours == names and (ours or find_spec("libtpu") is not None) and not _has_accelerator():
        jax.config.update("jax_platforms", "cpu")


def _has_accelerator() -> bool:
    """Whether there is a sign of a TPU or of an NVIDIA GPU: a device file, a setting, or a card of these vendors."""
    devices = ("nvidia*", "nvmap", "nvhost*", "dxg", "accel*", "vfio/[0-9]*")
    if any(glob(pattern) for pattern in (*(f"/dev/{name}" for name in devices), "/proc/driver/nvidia")):
        return True
    # JAX sets others of this kind itself.
    if any(name in os.environ for name in ("TPU_NAME", "TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE", "COLAB_TPU_ADDR")):
        return True
    # NVIDIA and Google.
    vendors = [Path(path).read_text().strip() for path in glob("/sys/bus/pci/devices/*/vendor")]
    return not {"0x10de", "0x1ae0"}.isdisjoint(vendors)
