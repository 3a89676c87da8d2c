"""Environments of launchers and schedulers."""

import pytest

from jaxdist.processes.cluster import PORTS, detect, first_host

OWN = {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
SLURM = {
    "SLURM_JOB_ID": "81",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


def host(job):
    name, _, port = job.address.rpartition(":")
    assert int(port) in PORTS
    return name


def test_nothing_around():
    assert detect({}) is None
    # GKE with TPUs, and an indexed Job whose processes are alone: JAX finds out, or nobody needs to.
    assert detect({"JOB_COMPLETION_INDEX": "0", "TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "a,b"}) is None
    # A shell of `salloc`, outside `srun`.
    assert detect({"SLURM_JOB_ID": "81", "SLURM_NTASKS": "8"}) is None


def test_the_three_variables_come_first():
    assert detect(OWN) == detect(SLURM | OWN) == ("h:1", 4, 3)


def test_slurm():
    job = detect(SLURM)
    assert (host(job), job.processes, job.process) == ("gpu07", 8, 5)
    assert detect(SLURM | {"SLURM_PROCID": "0"}).address == job.address
    assert detect(SLURM | {"SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"})[1:] == (2, 1)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a1", "a1"),
        ("a1,b2", "a1"),
        ("a[001-15],b", "a001"),
        ("a[3,7-9]", "a3"),
        ("r[1-2]n4,x", "r1n4"),
        ("a-b", "a-b"),
        ("rack[0-1]_blade[02-41],x[1-2]", "rack0_blade02"),
        ("gpu[001-003,007],login1", "gpu001"),
        ("tpu-a-[1-2]", "tpu-a-1"),
    ],
)
def test_the_first_host(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("uri", "name"),
    [
        ("1531576320.0;tcp://10.96.0.1,10.148.0.1:34911", "10.96.0.1"),
        ("1314521088.0;tcp6://[fe80::b9b,2620:10d::2]:43370", "[fe80::b9b]"),
    ],
)
def test_open_mpi(uri, name):
    job = detect(MPI | {"OMPI_MCA_orte_hnp_uri": uri})
    assert (host(job), job.processes, job.process) == (name, 4, 2)


def test_open_mpi_five():
    """It does not say where process 0 is, unless all are on one host."""
    assert host(detect(MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "prterun-a-7@1"})) == "127.0.0.1"
    with pytest.raises(ValueError, match="JAX_COORDINATOR_ADDRESS missing; Open MPI sets the rest"):
        detect(MPI)
    assert detect(MPI | {"JAX_COORDINATOR_ADDRESS": "h:1"}) == ("h:1", 4, 2)


def test_open_mpi_inside_of_slurm():
    """On other hosts than the first, mpirun starts processes through one `srun` for each host, whose variables stay."""
    own = MPI | {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.96.0.1:34911", "OMPI_COMM_WORLD_RANK": "3"}
    assert detect(SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"} | own) == detect(own)
    assert detect(own)[1:] == (4, 3)


def test_an_indexed_job():
    job = {"JAX_COORDINATOR_ADDRESS": "w-0.s:9", "JAX_NUM_PROCESSES": "3", "JOB_COMPLETION_INDEX": "2"}
    assert detect(job) == ("w-0.s:9", 3, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"JAX_NUM_PROCESSES": ""}, "JAX_NUM_PROCESSES missing"),
        ({"JAX_NUM_PROCESSES": "", "JAX_PROCESS_ID": ""}, "JAX_NUM_PROCESSES and JAX_PROCESS_ID missing$"),
        ({"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES must be a number, got 'two'"),
        ({"JAX_NUM_PROCESSES": "²"}, "JAX_NUM_PROCESSES must be a number, got '²'"),
        ({"JAX_PROCESS_ID": "4"}, "JAX_PROCESS_ID=4 must be below JAX_NUM_PROCESSES=4"),
    ],
)
def test_what_does_not_fit(change, message):
    with pytest.raises(ValueError, match=message):
        detect(OWN | change)
