"""Leaving in time when the machine is taken away."""

import signal
import threading

import jax
from jax.experimental import multihost_utils

WARNING = getattr(signal, "SIGUSR1", None)  # Windows has none
_received: threading.Event | None = None


def preemption_requested(step: int) -> bool:
    """Whether to save and leave after this step, since a process of the job was asked to: the same answer in all.

    Schedulers send SIGTERM before they take a machine away, Slurm also SIGUSR1 where a job asks for a warning, and
    `jaxdist launch` passes both on. Call it once in every step, in all processes. Where JAX joined them, its own
    preemption service agrees on a step that none has reached, within about a second; alone, the process watches for
    SIGTERM itself from the first call on. SIGUSR1 counts from the first call in the main thread on, unless the script
    has a handler of its own for it.

    Args:
      step: the number of the step, one more at each call.

    Returns:
      True in one step, the same in all processes; alone, from the signal on.

    Raises:
      ValueError: alone, the first call comes from another thread than the main one.

    Example:
      >>> import jaxdist as jd
      >>> jd.processes.preemption_requested(0)
      False
    """
    global _received
    _take_warnings()
    if jax.distributed.is_initialized():
        return multihost_utils.reached_preemption_sync_point(step)
    if _received is None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("the first call of preempted must come from the main thread: signals arrive there")
        received = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: received.set())
        _received = received
    return _received.is_set()


def _take_warnings() -> None:
    """Has SIGUSR1 count as SIGTERM, which is the one that JAX's service knows."""
    in_main = threading.current_thread() is threading.main_thread()  # no other thread may say what a signal does
    if in_main and WARNING is not None and signal.getsignal(WARNING) == signal.SIG_DFL:
        signal.signal(WARNING, lambda *_: signal.raise_signal(signal.SIGTERM))
