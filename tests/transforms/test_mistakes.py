"""What two real processes say of a mistake: one line in each, within seconds, before any collective."""

import json
import os
import socket
import subprocess
import sys

import pytest
from paths import REPOSITORY, SUPPORT
from real_processes import flags_without_devices

pytestmark = pytest.mark.slow
LIMIT_SECONDS = 5  # from when the last process has come to it

# The kind of error and how it begins; with a list, one for each process.
MISTAKES = {
    "number of processes": ("MismatchError", "process 1 expects 3 processes, but process 0 expects 2: start all with"),
    "version of jax": ("MismatchError", "version of `jax` is 0.1 in process 1 and 0.1"),
    "busy port": [
        ("PortError", "process 0 cannot listen at port "),
        ("PortError", "another program "),
    ],
    "tree": ("MismatchError", "process 1 has leaf `more`, which process 0 lacks"),
    "shape": ("MismatchError", "leaf `w` is float32[4,2] in process 1 and float32[3,2] in process 0"),
    "dtype": ("MismatchError", "leaf `w` is bfloat16[3,2] in process 1 and float32[3,2] in process 0"),
    "mesh": ("MismatchError", "mesh `axes` is {'data': 2, 'model': 2} in process 1 and {'data': 4} in process 0"),
    "recipe": ("MismatchError", "recipe `batch` is 33 in process 1 and 32 in process 0"),
    "axis of distribute": ("ValueError", "the mesh has no axis 'workers'; its axes are ('data',)"),
    "axis of all_reduce": (
        "ValueError",
        "axis 'model' is not bound here, and the mesh has ('data',): pass axis= with the",
    ),
    "axis of batch_specs": ("ValueError", "batch_specs names the axis 'batch', but the axes of the workers are"),
    "axis of init_state": ("ValueError", "the mesh has no axis 'workers'; its axes are ('data',)"),
    "axis of place": ("ValueError", "the mesh has no axis 'workers'; its axes are ('data',)"),
    "rows of all": ("ValueError", "batch of shape (6, 3) does not divide among 4 workers along its first dimension"),
    "rows of all, with batch_specs": (
        "ValueError",
        "an array of shape (6, 3) in the batch does not divide among the 4",
    ),
    "state of other workers": (
        "ValueError",
        "a PerWorker leaf of the state has shape (2, 1), where dimension 0 should",
    ),
    "axis of global_batch": ("ValueError", "the mesh has no axis 'workers'; its axes are ('data',)"),
    "rows of a process": [
        ("MismatchError", "batch['x'] of shape (3, 3) does not divide among the 2 workers of process 0"),
        ("MismatchError", "batch['x'] of shape (3, 3) does not divide among the 2 workers of process 1"),
    ],
    "rows of one process": (
        "MismatchError",
        "batch['x'] of shape (3, 3) does not divide among the 2 workers of process 1",
    ),
    "rows of each": ("MismatchError", "batch `x` is float32[3 a worker, 3] in process 1 and float32[2 a worker, 3] in"),
    "width": (
        "MismatchError",
        "batch `x` is float32[2 a worker, 4] in process 1 and float32[2 a worker, 3] in process",
    ),
    "dtype of a batch": ("MismatchError", "batch `x` is int32[2 a worker, 3] in process 1 and float32[2 a worker, 3]"),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """How each process ended, and what it printed."""
    folder = tmp_path_factory.mktemp("mistakes")
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{SUPPORT}", "JAX_PLATFORMS": "cpu"}
    environment["XLA_FLAGS"] = flags_without_devices()
    with socket.create_server(("127.0.0.1", 0)) as busy:
        probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
        ports = [str(one.getsockname()[1]) for one in (busy, *probes)]
        for probe in probes:
            probe.close()
        started, logs = [], [folder / f"{number}.log" for number in range(2)]
        try:
            for number, log in enumerate(logs):
                command = [sys.executable, str(SUPPORT / "scripts" / "mistaken.py"), str(number), *ports]
                with log.open("w") as out:
                    started.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))
            codes = [one.wait(timeout=200) for one in started]
        finally:
            for one in started:
                one.kill()
                one.wait()
    return [(code, log.read_text()) for code, log in zip(codes, logs, strict=True)]


@pytest.fixture(scope="module")
def found(ended):
    assert all("RESULT " in text for _, text in ended), "\n".join(text[-3000:] for _, text in ended)
    return [json.loads(text.split("RESULT ")[1].splitlines()[0]) for _, text in ended]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_in_each_process(found, name):
    wanted = MISTAKES[name]
    for one, (kind, beginning) in zip(found, wanted if isinstance(wanted, list) else [wanted] * 2, strict=True):
        assert one[name]["error"] == kind, one[name]["message"]
        assert one[name]["message"].startswith(beginning)
        assert "\n" not in one[name]["message"]
    last_came = max(one[name]["began"] for one in found)
    assert max(one[name]["ended"] for one in found) - last_came < LIMIT_SECONDS


def test_none_was_left_out(found):
    assert all(set(one) == set(MISTAKES) for one in found)


def test_who_does_not_catch_it_ends_with_an_error_and_not_by_a_signal(ended):
    for code, text in ended:
        assert code == 1
        last = text.rstrip().splitlines()[-1]
        assert last.startswith("jaxdist.processes.cluster.MismatchError: recipe `seed` is 1 in process 1 and 0")
