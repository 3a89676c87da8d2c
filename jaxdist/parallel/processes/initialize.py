"""Joining the other processes of a job."""

import os

import jax

from . import cards
from .check_in import check_in
from .cluster import detect

# How many processes a scheduler started; each of them must not go on alone.
RANKS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
UNPROXIED = "no_grpc_proxy"


def initialize(*, timeout_seconds: int = 300) -> bool:
    """Joins the processes of this job, wherever it was started. Call it before anything runs.

    `jaxdist launch` sets `JAX_COORDINATOR_ADDRESS` (`host:port` of process 0), `JAX_NUM_PROCESSES` and
    `JAX_PROCESS_ID`. What is not set is taken from Slurm (`srun`), Open MPI or an indexed Job of Kubernetes;
    otherwise it is left to JAX, which knows Cloud TPU and GKE pods, and Kubernetes by its API. Where there is nothing
    of the kind, or the processes were joined already, it does nothing.

    Before JAX's own service starts, which aborts where a process is missing, all processes that are known so check in
    with process 0, at the same port: they must have come in time, be as many as they were told, and have the same
    versions and settings of JAX. `agree` then compares what they build.

    Args:
      timeout_seconds: how long to wait for the others.

    Returns:
      Whether there are several processes now.

    Raises:
      MissingProcessError: a process did not come in time; it is named.
      MismatchError: a process has another version or setting than process 0, or was told of another number of
        processes.
      PortError: process 0 cannot listen at its port, or another program answers there.
      ValueError: some of the three variables are missing, and nobody tells them, or they are not numbers; or JAX runs
        already, in a job of several processes.

    Example:
      >>> import jaxdist as jd
      >>> jd.initialize()
      False
    """
    if jax.distributed.is_initialized():
        return jax.process_count() > 1
    job = detect(os.environ)
    if job is not None:
        address, count, process = job
        check_in(address, count, process, cards.of_this_process(), timeout_seconds=timeout_seconds)
        _reach_directly(address)
        jax.distributed.initialize(address, count, process, initialization_timeout=timeout_seconds)
        return count > 1
    try:
        jax.distributed.initialize(initialization_timeout=timeout_seconds)
    except ValueError as problem:
        if "coordinator_address" not in str(problem):
            raise
        return False  # no cluster around us
    except RuntimeError as problem:
        if "before any JAX" not in str(problem):
            raise
        if any(int(os.environ.get(name, "1")) > 1 for name in RANKS):
            raise ValueError(f"this job has several processes: {problem}") from None
        return False  # JAX runs already, by itself
    return jax.process_count() > 1


def _reach_directly(address: str) -> None:
    """JAX's service would otherwise be looked for behind an HTTP proxy, where the environment names one, for ever."""
    if not any("_proxy" in name.lower() for name in os.environ):
        return  # JAX warns of any of them
    others = os.environ.get(UNPROXIED) or os.environ.get("no_proxy", "")
    host = address.rpartition(":")[0].strip("[]")
    os.environ[UNPROXIED] = ",".join(filter(None, (others, host)))
