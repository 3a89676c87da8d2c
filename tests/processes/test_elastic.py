"""A job of two processes is killed, and goes on with one, and with three."""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from paths import REPOSITORY, SUPPORT
from real_processes import LIMIT, flags_without_devices

import jaxdist as jd
from jaxdist import checkpoint

MORE = 30  # steps


@contextlib.contextmanager
def launched(processes, folder, steps):
    path = f"{REPOSITORY}{os.pathsep}{SUPPORT}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags_without_devices(), "PYTHONPATH": path}
    command = [
        sys.executable,
        "-m",
        "jaxdist.processes.launch",
        "-n",
        str(processes),
        "--logs",
        f"{folder}-logs-{processes}",
    ]
    command += [str(SUPPORT / "scripts" / "elastic.py"), str(folder), str(steps)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as job:
        try:
            yield job
        finally:
            job.kill()  # else a test that fails would wait for it


def losses(folder, processes):
    """Of both methods, by the number of the step."""
    lines = pathlib.Path(f"{folder}-logs-{processes}", "0.log").read_text().splitlines()
    told = [line.split()[1:] for line in lines if line.startswith("step ")]
    return {int(number): np.array([float(x) for x in values]) for number, *values in told}


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """What a job of two processes left that was killed after 40 steps or more, and the step of its last checkpoint."""
    folder = tmp_path_factory.mktemp("elastic") / "run"
    with launched(2, folder, 100_000) as job:
        until = time.monotonic() + LIMIT
        while (checkpoint.latest(folder) or 0) < 40 and job.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        children = pathlib.Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        one = next(pid for pid in children if b"JAX_PROCESS_ID=1" in pathlib.Path(f"/proc/{pid}/environ").read_bytes())
        os.kill(int(one), signal.SIGKILL)
        out, _ = job.communicate(timeout=LIMIT)
    assert "ProcessFailedError: process 1 was killed by SIGKILL" in out
    return folder, checkpoint.latest(folder)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 3])
def test_fewer_and_more_processes_go_on(killed, processes, tmp_path):
    before, step = killed
    folder = tmp_path / "run"
    shutil.copytree(before, folder)
    with launched(processes, folder, step + MORE) as job:
        out, _ = job.communicate(timeout=LIMIT)
    assert job.returncode == 0, out[-3000:]

    saved, restored = (checkpoint.load(one, step=step).state for one in (folder, f"{folder}-{processes}"))
    kinds = {"agreed": 0, "mean": 0}
    for name, old in saved.items():
        new, marks = restored[name], isinstance(old, jd.PerWorker)
        old, new = (np.asarray(jax.tree.leaves(x)[0]) for x in (old, new))
        if not marks:
            kinds["agreed"] += 1
            assert old.tobytes() == new.tobytes(), name
        elif np.issubdtype(old.dtype, np.floating):
            kinds["mean"] += bool(old.any())
            assert len(new) == processes
            wanted, found = (x.mean(0, dtype=np.float64).astype(np.float32) for x in (old, new))
            np.testing.assert_array_max_ulp(wanted, found, maxulp=1)
    assert kinds["agreed"] >= 20
    assert kinds["mean"] >= 4  # residuals among them

    was, now = losses(before, 2), losses(folder, processes)
    assert min(now) == step
    np.testing.assert_allclose(now[step][0], was[step][0], rtol=1e-5)  # the model is the same
    np.testing.assert_allclose(now[step][1], was[step][1], rtol=0.1)  # between two rounds, the mean of two models
    for number in range(step, step + MORE):
        assert np.all(now[number] < 1.1 * was[step]), number
    assert np.all(now[step + MORE - 1] < was[step])
