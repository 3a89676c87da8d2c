"""Joining the other processes of a job."""

import os

import jax

from .._core.compat import coordination_client
from . import fingerprint
from .cluster import Job, detect, where_to_listen
from .consistency import exchange
from .errors import MismatchError
from .rendezvous import GRACE_SECONDS, check_in

# How many processes a scheduler started; each of them must not go on alone.
RANKS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
UNPROXIED = "no_grpc_proxy"
SECRET = "JAXDIST_SECRET"
KUBERNETES = "KUBERNETES_SERVICE_HOST"  # is set in every container; a pod's name is known when the pod is ready


def initialize(*, timeout_seconds: int = 300, heartbeat_timeout_seconds: int = 100) -> bool:
    """Joins the processes of this job, wherever it was started. Call it before anything runs.

    `jaxdist launch` sets `JAX_COORDINATOR_ADDRESS` (`host:port` of process 0), `JAX_NUM_PROCESSES` and
    `JAX_PROCESS_ID`. What is not set is taken from Slurm (`srun`), Open MPI or an indexed Job of Kubernetes;
    otherwise it is left to JAX, which knows Cloud TPU and GKE pods, and Kubernetes by its API. Where there is nothing
    of the kind, or the processes were joined already, it does nothing.

    Before JAX's own service starts, which aborts where a process is missing, all processes that are known so check in
    with process 0, at the same port: they must come in time, and be as many as they were told. Then they compare their
    versions and settings of JAX through that service. `check_consistency` compares what they build.

    Process 0 listens where `JAX_COORDINATOR_BIND_ADDRESS` says; else at the loopback alone where the coordinator's
    address is one, and at all addresses otherwise. Where `JAXDIST_SECRET` is set, to the same text in all processes,
    whoever does not have it is ignored at the check-in; `jaxdist launch` makes one. JAX's own service then has none:
    keep its port within a network that you trust.

    Args:
      timeout_seconds: how long to wait for the others.
      heartbeat_timeout_seconds: after how long without a sign of a process JAX ends the others. It counts the time in
        which the job is stopped as a whole: let it be longer than that (`scontrol suspend`), and have a `watchdog`
        notice processes that die.

    Returns:
      Whether there are several processes now.

    Raises:
      MissingProcessError: a process did not come in time; it is named.
      MismatchError: a process has another version or setting than process 0, or was told of another number of
        processes.
      PortError: the coordinator's address does not lead to process 0's machine, process 0 cannot listen at its port, or
        another program answers there.
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
        _join(job, timeout_seconds, heartbeat_timeout_seconds)
        return job.processes > 1
    try:
        jax.distributed.initialize(
            initialization_timeout=timeout_seconds, heartbeat_timeout_seconds=heartbeat_timeout_seconds
        )
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


def _join(job: Job, seconds: int, heartbeat_seconds: int) -> None:
    listen_at = where_to_listen(job.address, os.environ)
    check_in(
        job,
        listen_at=listen_at,
        timeout_seconds=seconds,
        secret=os.environ.get(SECRET, ""),
        patience_seconds=seconds if KUBERNETES in os.environ else GRACE_SECONDS,
    )
    _reach_directly(job.address)
    jax.distributed.initialize(
        job.address,
        job.processes,
        job.process,
        initialization_timeout=seconds,
        heartbeat_timeout_seconds=heartbeat_seconds,
        coordinator_bind_address=listen_at,
    )
    # Not `compare`, which asks JAX for the number of processes: that starts its backend.
    told = (fingerprint.of_this_process(), job.process, job.processes, "jaxdist/versions", seconds)
    error = exchange(coordination_client(), *told, do="compare its versions")
    if isinstance(error, MismatchError):
        jax.distributed.shutdown()  # all of them know, and none waits for another
    if error is not None:
        raise error


def _reach_directly(address: str) -> None:
    """JAX's service would otherwise be looked for behind an HTTP proxy, where the environment names one, for ever."""
    if not any("_proxy" in name.lower() for name in os.environ):
        return  # JAX warns of any of them
    others = os.environ.get(UNPROXIED) or os.environ.get("no_proxy", "")
    host = address.rpartition(":")[0].strip("[]")
    os.environ[UNPROXIED] = ",".join(filter(None, (others, host)))
