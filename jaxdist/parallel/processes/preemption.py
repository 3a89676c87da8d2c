"""Leaving in time when the machine is taken away."""

import signal
import threading

import jax
from jax.experimental import multihost_utils

_received: threading.Event | None = None


def preempted(step: int) -> bool:
    """Whether to save and leave after this step, since some process of the job got SIGTERM: the same answer in all.

    Schedulers send SIGTERM before they take a machine away, and `jaxdist launch` passes it on. Call it once in every
    step, in all processes. Where JAX joined them, its own preemption service agrees on a step that none has reached,
    within about a second; alone, the process watches for the signal itself from the first call on.

    Args:
      step: the number of the step, one more at each call.

    Returns:
      True in one step, the same in all processes; alone, from the signal on.

    Raises:
      ValueError: alone, the first call comes from another thread than the main one.

    Example:
      >>> import jaxdist as jd
      >>> jd.preempted(0)
      False
    """
    global _received
    if jax.distributed.is_initialized():
        return multihost_utils.reached_preemption_sync_point(step)
    if _received is None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("the first call of preempted must come from the main thread: signals arrive there")
        received = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: received.set())
        _received = received
    return _received.is_set()
