"""Who this process is among those that a launcher or a scheduler started: read from its environment alone."""

import ipaddress
import re
import zlib
from collections.abc import Mapping
from itertools import chain, combinations
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._core.compat import shard_map
from ..comm.over import over

ADDRESS, COUNT, PROCESS = VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
BIND = "JAX_COORDINATOR_BIND_ADDRESS"
PORTS = range(61440, 65536)  # where a port must be agreed on without a word


class Job(NamedTuple):
    """Where process 0 listens (`host:port`), how many processes there are, and which this is."""

    address: str
    processes: int
    process: int


class _Told(NamedTuple):
    """The same, as far as a scheduler says it."""

    by: str
    address: str = ""
    processes: str = ""
    process: str = ""


def detect(environment: Mapping[str, str]) -> Job | None:
    """The job of a process, from the three variables, and what they leave out from a scheduler.

    Raises:
      ValueError: something is missing, or is no number.
    """
    told = scheduler(environment)
    given = [environment.get(name, "") for name in VARIABLES]
    if not any(given) and (told is None or not told.processes):
        return None
    found = [own or (getattr(told, field) if told else "") for own, field in zip(given, Job._fields)]
    if missing := [name for name, value in zip(VARIABLES, found) if not value]:
        source = f"; {told.by} tells the rest" if told else ""
        raise ValueError(f"{', '.join(VARIABLES)} are set together: {' and '.join(missing)} missing{source}")
    address, count, process = found
    for name, value in ((COUNT, count), (PROCESS, process)):
        if not value.isdigit():
            raise ValueError(f"{name} must be a number, got {value!r}")
    if int(process) >= int(count):
        raise ValueError(f"{PROCESS}={process} is not below {COUNT}={count}")
    return Job(address, int(count), int(process))


def split_address(address: str, what: str) -> tuple[str, int]:
    """The host and the port of `host:port`, without the brackets of IPv6."""
    host, _, port = address.rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise ValueError(f"{what} must be host:port, got {address!r}")
    return host.strip("[]"), int(port)


def where_to_listen(address: str, environment: Mapping[str, str]) -> str:
    """`host:port` for process 0: what is set, the loopback where processes are told of it, or all addresses."""
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


def scheduler(environment: Mapping[str, str]) -> _Told | None:
    """What a scheduler says of this process."""
    get = environment.get
    # Inside of Slurm, mpirun has one srun for each host: what that sets is not about this process.
    if "OMPI_COMM_WORLD_RANK" in environment:
        count, process = get("OMPI_COMM_WORLD_SIZE", ""), environment["OMPI_COMM_WORLD_RANK"]
        return _Told("Open MPI", _open_mpi_address(environment), count, process)
    if "SLURM_PROCID" in environment and (nodes := get("SLURM_STEP_NODELIST")):
        count = get("SLURM_STEP_NUM_TASKS") or get("SLURM_NTASKS", "")
        port = _port(f"{get('SLURM_JOB_ID')}.{get('SLURM_STEP_ID')}")
        return _Told("Slurm", f"{first_host(nodes)}:{port}", count, environment["SLURM_PROCID"])
    if "JOB_COMPLETION_INDEX" in environment:
        return _Told("Kubernetes", process=environment["JOB_COMPLETION_INDEX"])
    return None


def first_host(nodes: str) -> str:
    """The first of Slurm's list of nodes, where its process 0 runs: `n[008-011,13],m2` begins with `n008`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    if not first or not first[0]:
        raise ValueError(f"SLURM_STEP_NODELIST={nodes!r} names no node")
    return re.sub(r"\[([^,\-\]]*)[^\]]*\]", r"\1", first[0])


def _open_mpi_address(environment: Mapping[str, str]) -> str:
    """Up to version 4 it says where `mpirun` runs, which starts process 0 beside itself; later versions do not."""
    uri = environment.get("OMPI_MCA_orte_hnp_uri", "")
    if found := re.search(r"tcp://([^,:]+)|tcp6://\[([^,\]]+)", uri):
        host = found[1] or f"[{found[2]}]"
        return f"{host}:{_port(uri)}"
    if environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == environment.get("OMPI_COMM_WORLD_SIZE"):
        return f"127.0.0.1:{_port(environment.get('PMIX_NAMESPACE', ''))}"
    return ""


def _port(job: str) -> int:
    """The same in all processes of a job, and likely another for each."""
    return PORTS[zlib.crc32(job.encode()) % len(PORTS)]


def connect(mesh: Mesh) -> None:
    """A first message over every set of axes, where gloo carries them: devices that are CPUs of several processes.

    Gloo waits 30 s for the others when it opens a connection, and in what it opened as long as it takes. A process
    that compiles or reads data that much longer than the others must find its connections open.
    """
    if jax.process_count() == 1 or mesh.devices.flat[0].platform != "cpu":
        return
    names = mesh.axis_names
    groups = list(chain.from_iterable(combinations(names, count) for count in range(1, len(names) + 1)))
    sharding = NamedSharding(mesh, PartitionSpec(*names))

    def local(x):
        return sum(over(group).sum(x) for group in groups)

    spec = sharding.spec
    run = shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=set(names), check_vma=True)
    zeros = jax.make_array_from_callback(
        mesh.devices.shape, sharding, lambda index: np.zeros([1] * mesh.devices.ndim, jnp.int32)
    )
    jax.jit(run)(zeros).block_until_ready()
