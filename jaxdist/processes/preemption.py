"""Detects that the scheduler is about to take the machine away."""

import signal
import threading

import jax
from jax.experimental import multihost_utils

WARNING = getattr(signal, "SIGUSR1", None)  # Windows has none
_received: threading.Event | None = None


def preemption_requested(step: int) -> bool:
    """Returns whether to save and exit after this step because a process was asked to; the same in all processes.

    Schedulers send SIGTERM before they take a machine away, Slurm also SIGUSR1 if a job asks for a warning, and
    `jaxdist launch` passes both on. Call it once in every step, in all processes. In a job of several processes JAX's
    preemption service chooses a step that none has reached, within about a second; a single process handles SIGTERM
    itself from the first call on. SIGUSR1 is handled from the first call in the main thread on, unless the script has
    its own handler for it.

    Args:
      step: the number of the step, increased by one at each call.

    Raises:
      ValueError: in a single process, the first call is not in the main thread.

    Examples:
      >>> import jaxdist as jd
      >>> jd.processes.preemption_requested(0)
      False
    """
    global _received
    _handle_warnings()
    if jax.distributed.is_initialized():
        return multihost_utils.reached_preemption_sync_point(step)
    if _received is None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("the first call of preemption_requested must be in the main thread, where signals arrive")
        received = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: received.set())
        _received = received
    return _received.is_set()


def _handle_warnings() -> None:
    """Turns SIGUSR1 into SIGTERM, which JAX's service handles."""
    # Python lets no other thread set a handler.
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and WARNING is not None and signal.getsignal(WARNING) == signal.SIG_DFL:
        signal.signal(WARNING, lambda *_: signal.raise_signal(signal.SIGTERM))
