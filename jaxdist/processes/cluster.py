"""The job of this process, as the environment variables of its launcher or scheduler describe it."""

import ipaddress
import re
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from .._core.checks import Portable

ADDRESS, COUNT, PROCESS = VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
BIND = "JAX_COORDINATOR_BIND_ADDRESS"
PORTS = range(61440, 65536)  # to derive a port from the name of a job


class AgreementError(Portable, ValueError):
    """The processes of a job cannot work together. All of them raise the same error, before the first collective.

    `processes` are the numbers of those that are the cause.
    """

    def __init__(self, message: str, processes: tuple[int, ...] = ()):
        super().__init__(message)
        self.processes = processes


class MismatchError(AgreementError):
    """The version, setting, number of processes, mesh, recipe or leaf of a process differs, or two have one id."""


class MissingProcessError(AgreementError):
    """A process did not check in in time, or ended while it waited for the others."""


class PortError(AgreementError):
    """The coordinator's address is unknown or not process 0's, or another program uses the port."""


class Job(NamedTuple):
    """The address of process 0 (`host:port`), the number of processes, and the number of this one."""

    address: str
    processes: int
    process: int


class _Scheduled(NamedTuple):
    """The fields of a `Job` that a scheduler sets, as text."""

    scheduler: str
    address: str = ""
    processes: str = ""
    process: str = ""


def detect(environment: Mapping[str, str]) -> Job | None:
    """Returns the job of a process from the three variables; a scheduler fills in those that are not set.

    Raises:
      ValueError: a variable is missing, or is not a number.
    """
    scheduled = read_scheduler(environment)
    given = [environment.get(name, "") for name in VARIABLES]
    if not any(given) and (scheduled is None or not scheduled.processes):
        return None
    found = [own or (getattr(scheduled, field) if scheduled else "") for own, field in zip(given, Job._fields)]
    if missing := [name for name, value in zip(VARIABLES, found) if not value]:
        source = f"; {scheduled.scheduler} sets the rest" if scheduled else ""
        raise ValueError(f"{', '.join(VARIABLES)} must be set together: {' and '.join(missing)} missing{source}")
    address, count, process = found
    for name, value in ((COUNT, count), (PROCESS, process)):
        if not value.isdecimal():
            raise ValueError(f"{name} must be a number, got {value!r}")
    if int(process) >= int(count):
        raise ValueError(f"{PROCESS}={process} must be below {COUNT}={count}")
    return Job(address, int(count), int(process))


def split_address(address: str, what: str) -> tuple[str, int]:
    """Splits `host:port`, and removes the brackets of IPv6 addresses."""
    host, _, port = address.rpartition(":")
    # Python connects to an IPv6 address without brackets; gRPC cannot read it, and aborts the process.
    bare = ":" in host and not re.fullmatch(r"\[.*\]", host)
    if not host or bare or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise ValueError(f"{what} must be host:port, or [address]:port for IPv6, got {address!r}")
    return host.strip("[]"), int(port)


def where_to_listen(address: str, environment: Mapping[str, str]) -> str:
    """Returns `host:port` for process 0: as set, else the loopback if the address is one, else all interfaces."""
    if bind := environment.get(BIND, ""):
        return bind
    host, port = split_address(address, "the coordinator's address")
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback, host = host == "localhost", "127.0.0.1"
    if not loopback:
        return f"[::]:{port}"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def read_scheduler(environment: Mapping[str, str]) -> _Scheduled | None:
    """Returns what Open MPI, Slurm or Kubernetes sets for this process."""
    get = environment.get
    # First: inside Slurm, mpirun starts one srun per host, whose variables do not describe this process.
    if "OMPI_COMM_WORLD_RANK" in environment:
        count, process = get("OMPI_COMM_WORLD_SIZE", ""), environment["OMPI_COMM_WORLD_RANK"]
        return _Scheduled("Open MPI", _open_mpi_address(environment), count, process)
    if "SLURM_PROCID" in environment and (nodes := get("SLURM_STEP_NODELIST")):
        count = get("SLURM_STEP_NUM_TASKS") or get("SLURM_NTASKS", "")
        port = _port(f"{get('SLURM_JOB_ID')}.{get('SLURM_STEP_ID')}")
        return _Scheduled("Slurm", f"{first_host(nodes)}:{port}", count, environment["SLURM_PROCID"])
    # Kubernetes gives the index alone: address and size are set in the manifest of the job.
    if "JOB_COMPLETION_INDEX" in environment:
        return _Scheduled("Kubernetes", process=environment["JOB_COMPLETION_INDEX"])
    return None


def first_host(nodes: str) -> str:
    """Returns the first of Slurm's list of nodes, where process 0 runs: `n008` of `n[008-011,13],m2`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    if not first or not first[0]:
        raise ValueError(f"SLURM_STEP_NODELIST={nodes!r} does not name a node")
    # The first number of a range, with its leading zeros.
    return re.sub(r"\[([^,\-\]]*)[^\]]*\]", r"\1", first[0])


def _open_mpi_address(environment: Mapping[str, str]) -> str:
    """Returns the address of process 0: the host of `mpirun` (up to version 4), or this host if it runs all."""
    uri = environment.get("OMPI_MCA_orte_hnp_uri", "")
    if found := re.search(r"tcp://([^,:]+)|tcp6://\[([^,\]]+)", uri):
        host = found[1] or f"[{found[2]}]"
        return f"{host}:{_port(uri)}"
    if environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == environment.get("OMPI_COMM_WORLD_SIZE"):
        return f"127.0.0.1:{_port(environment.get('PMIX_NAMESPACE', ''))}"
    return ""


def _port(job: str) -> int:
    """Derives a port from the name of a job: the same in all its processes, and likely unique."""
    return PORTS[zlib.crc32(job.encode()) % len(PORTS)]
