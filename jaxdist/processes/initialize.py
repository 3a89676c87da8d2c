"""Connects the processes of a job."""

import os

import jax

from .._core.checks import check_count
from .._core.compat import coordination_client, has_backend, listen_with_gloo_at
from .cluster import COUNT, Job, MismatchError, detect, where_to_listen
from .consistency import exchange, fingerprint_process
from .rendezvous import GRACE_SECONDS, check_in

# The variables with the number of processes of a job; a process must not continue alone if there are several.
RANKS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
UNPROXIED = "no_grpc_proxy"
SECRET = "JAXDIST_SECRET"
HOST = "JAXDIST_HOST"
KUBERNETES = "KUBERNETES_SERVICE_HOST"  # set in every container; the name of a pod resolves only when it is ready


def initialize(*, timeout_seconds: int = 300, heartbeat_timeout_seconds: int = 100) -> bool:
    """Connects the processes of this job; returns whether it has several. Call it before anything runs.

    Reads `JAX_COORDINATOR_ADDRESS` (`host:port` of process 0), `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`, which
    `jaxdist launch` sets; what is not set comes from Slurm, Open MPI, Kubernetes or Cloud TPU. Without a job, or if the
    processes are connected already, the function does nothing.

    All processes first check in with process 0, at the port of JAX's own service: each must come in time, with the same
    number of processes. Then they compare their versions and settings of JAX. `check_consistency` compares what they
    build.

    Between CPU processes, gloo listens where the name of the machine leads, or at `JAXDIST_HOST`, an address of this
    machine, which `jaxdist launch --nodes` sets.

    If `JAXDIST_SECRET` is set, to the same text in all processes, other programs are ignored at the check-in. JAX's own
    service has no secret: keep its port within a trusted network (`docs/how-to/run-on-many-processes.md`).

    Args:
      timeout_seconds: how long to wait for the others.
      heartbeat_timeout_seconds: how long after the last sign of life of a process JAX ends the others: longer than the
        job may be suspended as a whole; short, such as 20, where no launcher ends the others, as in an island on spot
        machines.

    Raises:
      MissingProcessError: a process did not check in in time; the message names it.
      MismatchError: a process has another version or setting than process 0, or expects another number of processes.
      PortError: the coordinator's address does not lead to process 0's machine, process 0 cannot listen at its port, or
        another program answers there.
      ValueError: a timeout is no whole number of seconds, or less than one; some of the three variables are missing or
        not numbers; or JAX has started already, in a job of several processes.

    Examples:
      >>> import jaxdist as jd
      >>> jd.initialize()
      False
    """
    timeouts = {"timeout_seconds": timeout_seconds, "heartbeat_timeout_seconds": heartbeat_timeout_seconds}
    for name, seconds in timeouts.items():
        check_count(name, seconds, 1)
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
        # Not in a cluster.
        return False
    except RuntimeError as problem:
        if "before any JAX" not in str(problem):
            raise
        if any(int(os.environ.get(name, "1")) > 1 for name in RANKS):
            raise ValueError(f"this job has several processes, call initialize() first: {problem}") from None
        # JAX has started already, in a single process.
        return False
    return jax.process_count() > 1


def check_connected() -> None:
    """Raises if this process is one of several by `JAX_NUM_PROCESSES`, but is not connected to the others."""
    count = os.environ.get(COUNT, "")
    if count.isdecimal() and int(count) > 1 and jax.process_count() == 1:
        raise ValueError(
            f"{COUNT}={count}, but this process is not connected to the others, so each would train a model of its "
            "own: call jaxdist.initialize() at the start of the script, before JAX computes anything"
        )


def _join(job: Job, seconds: int, heartbeat_seconds: int) -> None:
    """Checks in, starts JAX's service, and compares versions; does nothing for one process that runs JAX already."""
    if has_backend():
        if job.processes == 1:
            return
        # Before the check-in, so that no process waits for this one.
        raise ValueError("this job has several processes: call initialize() first, before JAX computes anything")
    listen_at = where_to_listen(job.address, os.environ)
    secret, patience = os.environ.get(SECRET, ""), seconds if KUBERNETES in os.environ else GRACE_SECONDS
    check_in(job, listen_at=listen_at, timeout_seconds=seconds, secret=secret, patience_seconds=patience)
    _reach_directly(job.address)
    jax.distributed.initialize(
        job.address,
        job.processes,
        job.process,
        initialization_timeout=seconds,
        heartbeat_timeout_seconds=heartbeat_seconds,
        coordinator_bind_address=listen_at,
    )
    if host := os.environ.get(HOST, ""):
        listen_with_gloo_at(host)
    # Not `compare`, which asks JAX for the number of processes and so starts its backend.
    versions = fingerprint_process()
    store, place = coordination_client(), "jaxdist/versions"
    error = exchange(store, versions, job.process, job.processes, place, seconds, do="compare its versions")
    if isinstance(error, MismatchError):
        # At once, since all processes raise the error.
        jax.distributed.shutdown()
    if error is not None:
        raise error


def _reach_directly(address: str) -> None:
    """Excludes process 0 from HTTP proxies of the environment, behind which gRPC would search for it forever."""
    if not any("_proxy" in name.lower() for name in os.environ):
        # JAX warns of any of them.
        return
    others = os.environ.get(UNPROXIED) or os.environ.get("no_proxy", "")
    host = address.rpartition(":")[0].strip("[]")
    os.environ[UNPROXIED] = ",".join(filter(None, (others, host)))
