"""The jobs for clusters: their files parse, their options exist, and an island that must leave comes back."""

import dataclasses
import os
import re
import shlex
import signal
import subprocess
import time

import pytest
import yaml
from paths import REPOSITORY

from jaxdist._cli import main as cli

CLUSTER = REPOSITORY / "examples" / "cluster"
JOBSETS = sorted(CLUSTER.glob("*.yaml"))
ISLANDS = [CLUSTER / "islands-slurm.sh", CLUSTER / "islands-jobset.yaml"]
FLAGS = {"train": cli.TrainOptions, "islands": cli.IslandsOptions}


def containers(path):
    (job,) = yaml.safe_load(path.read_text())["spec"]["replicatedJobs"]
    return job["template"]["spec"]["template"]["spec"]["containers"]


@pytest.mark.parametrize("path", JOBSETS, ids=lambda path: path.name)
def test_a_jobset_parses_and_mounts_the_volumes_that_it_has(path):
    found = yaml.safe_load(path.read_text())
    assert (found["kind"], found["apiVersion"]) == ("JobSet", "jobset.x-k8s.io/v1alpha2")
    (job,) = found["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]["template"]["spec"]
    mounted = {mount["name"] for container in spec["containers"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["volumes"]}
    assert spec["restartPolicy"] == "Never"


@pytest.mark.parametrize("path", ISLANDS, ids=lambda path: path.name)
def test_every_option_in_a_job_exists(path):
    """Of the commands of jaxdist, and their values are those that the parser takes."""
    commands = re.findall(r"jaxdist (\w+) ((?:.*\\\n)*.*?) &$", path.read_text(), re.MULTILINE)
    assert len(commands) == 1
    for name, rest in commands:
        words = shlex.split(rest.replace("\\\n", " "))
        fields = {field.name for field in dataclasses.fields(FLAGS[name])}
        given = [word[2:].replace("-", "_") for word in words if word.startswith("--")]
        assert len(given) > 5
        assert {*given} <= fields
        parsed = cli.tyro.cli(FLAGS[name], args=words, config=(cli.tyro.conf.FlagCreatePairsOff,))
        assert parsed.islands is not None
        assert parsed.resume


# Run before each command of a script.
SIGNAL_BEFORE_IT_IS_KNOWN = """
tell() {
  while [ ! -e ready ]; do sleep 0.01; done
  kill -TERM $$
}
trap 'case $BASH_COMMAND in running=?!) tell ;; esac' DEBUG
"""


@pytest.fixture
def start(tmp_path):
    """Starts a script whose commands are replaced, and sends it a signal when its `jaxdist` runs.

    `is_early` has it come before the script knows the number of that process.
    """

    def run(command, number=None, *, is_early=False):
        # Without a signal it ends after a while, with an error.
        waits = "trap 'exit 0' TERM; touch ready; for i in $(seq 100); do sleep 0.1; done; exit 1"
        code = waits if number else "exit 0"
        for name, body in {"jaxdist": code, "scontrol": 'echo "$@" >queued'}.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
            (tmp_path / name).chmod(0o755)
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "ISLAND": "1"}
        environment |= {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}
        if is_early:
            (tmp_path / "early").write_text(SIGNAL_BEFORE_IT_IS_KNOWN)
            environment["BASH_ENV"] = str(tmp_path / "early")
        with subprocess.Popen(command, cwd=tmp_path, env=environment) as job:
            while number and not (tmp_path / "ready").exists():
                assert job.poll() is None
                time.sleep(0.01)
            if number and not is_early:
                job.send_signal(number)
        return job.returncode

    return run


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_an_island_under_slurm_leaves_at_a_signal_and_goes_back_to_the_queue(number, start, tmp_path):
    assert start(["bash", str(ISLANDS[0]), "/shared/run"], number) == 0
    assert (tmp_path / "queued").read_text() == "requeue 7_1\n"


def test_an_island_under_slurm_that_has_finished_is_not_queued_again(start, tmp_path):
    assert start(["bash", str(ISLANDS[0]), "/shared/run"]) == 0
    assert not (tmp_path / "queued").exists()


@pytest.mark.parametrize(("path", "code"), [(ISLANDS[0], 0), (ISLANDS[1], 75)], ids=lambda x: getattr(x, "name", None))
def test_a_signal_before_the_process_of_an_island_is_known_is_passed_on(path, code, start):
    is_script = path.suffix == ".sh"
    command = ["bash", str(path), "/shared/run"] if is_script else containers(path)[0]["command"]
    assert start(command, signal.SIGTERM, is_early=True) == code


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (None, 0)])
def test_an_island_in_a_pod_is_started_again_if_it_was_asked_to_leave(number, code, start):
    (container,) = containers(ISLANDS[1])
    assert start(container["command"], number) == code
