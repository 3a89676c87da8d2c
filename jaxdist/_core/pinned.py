"""The pinned memory of a host, of which XLA takes a limited pool for its GPUs."""

import math
import os

# Gigabytes of 2^30 bytes, as in `GetGpuHostAllocator` of xla/pjrt/gpu/gpu_helpers.cc; read when the backend starts.
VARIABLE, DEFAULT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 64
# What is on its way, and what an allocator cannot use.
ROOM = 1.2


def explain_pinned_limit(nbytes: float) -> str | None:
    """What to set so that a GPU's process can hold this many bytes in pinned memory; `None` if nothing.

    Examples:
      >>> explain_pinned_limit(50e9)
      >>> explain_pinned_limit(86e9)
      'XLA gives a GPU 64 GiB of pinned host memory: set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=97 before JAX starts'
    """
    text = os.environ.get(VARIABLE, "")
    limit = int(text) if text.isdecimal() else DEFAULT
    if nbytes <= limit * 2**30:
        return None
    needed = math.ceil(ROOM * nbytes / 2**30)
    return f"XLA gives a GPU {limit} GiB of pinned host memory: set {VARIABLE}={needed} before JAX starts"
