"""Joining the other processes of a job."""

import os

import jax

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# How many processes a scheduler started; each of them must not go on alone.
RANKS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")


def initialize(*, timeout_seconds: int = 300) -> bool:
    """Joins the processes of this job, wherever it was started. Call it before anything runs.

    It takes `JAX_COORDINATOR_ADDRESS` (`host:port` of process 0), `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` where they
    are set, and otherwise what JAX finds out by itself: Slurm, Open MPI, Kubernetes, Cloud TPU and GKE pods. Where
    there is nothing of the kind, or the processes were joined already, it does nothing.

    Args:
      timeout_seconds: how long to wait for the others.

    Returns:
      Whether there are several processes now.

    Raises:
      ValueError: some of the three variables are set and others are not, or they are not numbers; or JAX runs already,
        in a job of several processes.

    Example:
      >>> import jaxdist as jd
      >>> jd.initialize()
      False
    """
    if jax.distributed.is_initialized():
        return jax.process_count() > 1
    told = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    if told:
        missing = [name for name in VARIABLES if name not in told]
        numbers = [told.get(name, "") for name in VARIABLES[1:]]
        if missing or not all(number.isdigit() for number in numbers):
            raise ValueError(
                f"{', '.join(VARIABLES)} are set together, the last two to numbers; found {told or 'nothing'}"
            )
        count, process = map(int, numbers)
        if process >= count:
            raise ValueError(f"JAX_PROCESS_ID={process} is not below JAX_NUM_PROCESSES={count}")
        address = told["JAX_COORDINATOR_ADDRESS"]
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
