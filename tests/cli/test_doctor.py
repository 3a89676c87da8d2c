"""`jaxdist doctor`, and metrics as lines of JSON."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist as jd
from jaxdist._cli.commands import doctor as diagnosis
from jaxdist._cli.main import main


@pytest.fixture
def quick(monkeypatch, pods):
    """Nothing is sent, on two axes of eight devices."""
    monkeypatch.setattr(diagnosis, "self_check", lambda mesh: None)
    monkeypatch.setattr(diagnosis, "whole_mesh", lambda: pods)
    monkeypatch.setattr(diagnosis, "measure_link", lambda mesh, axis: jd.analysis.cost.Link("measured", 2e-5, 3e9))


def test_doctor_finds_nothing_wrong(quick, capsys, monkeypatch):
    monkeypatch.setattr(diagnosis.job, "is_glibc", lambda: True)
    for name in diagnosis.job.user_allocator(os.environ):
        monkeypatch.delenv(name)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for part in ("jax 0.", "8 of cpu, 8 in this process", "gloo", "all right", "axis 'chip'", "20 µs a hop, 3.00 GB/s"):
        assert part in out
    assert "JAX_COMPILATION_CACHE_DIR=FOLDER" in out
    assert "nothing wrong, 3 to look at" in out


def test_doctor_fails_where_a_collective_is_wrong(quick, capsys, monkeypatch):
    def wrong(mesh):
        raise jd.processes.CollectiveError("pod", ("mean", "ppermute"))

    monkeypatch.setattr(diagnosis, "self_check", wrong)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "wrong over 'pod': mean, ppermute" in out
    assert "1 wrong" in out


def test_doctor_fails_where_processes_do_not_agree(capsys, monkeypatch):
    def alone(**options):
        raise jd.processes.MissingProcessError("process 1 of 2 did not check in within 60 s", (1,))

    monkeypatch.setattr("jaxdist._cli.commands.doctor.initialize", alone)
    assert main(["doctor"]) == 1
    assert "process 1 of 2 did not check in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("Unable to initialize backend 'cpu': [enforce fail at gloo/transport/tcp]"), "[enforce fail at"),
        (AssertionError(), "none for JAX_PLATFORMS=cuda"),
    ],
)
def test_doctor_says_why_jax_does_not_start(capsys, monkeypatch, error, told):
    def fails():
        raise error

    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr("jax.devices", fails)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert told in out
    assert ("/etc/hosts" in out) == isinstance(error, RuntimeError)


def test_settings_are_shown():
    found = {line.what: line for line in diagnosis.list_settings({"XLA_FLAGS": "--xla_dump_to=/x", "HOME": "/root"})}
    assert found["variables"].found == "XLA_FLAGS=--xla_dump_to=/x"
    assert found["compile cache"].verdict == "look"


def test_the_allocator_is_told_of_where_it_gives_memory_back(monkeypatch):
    monkeypatch.setattr(diagnosis.job, "is_glibc", lambda: True)
    (line,) = diagnosis.check_allocator({"HOME": "/root"})
    assert line.verdict == "look"
    assert "MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_ARENA_MAX=1" in line.advice
    assert diagnosis.check_allocator(diagnosis.job.KEEPING)[0].verdict == "good"
    assert diagnosis.check_allocator({"MALLOC_ARENA_MAX": "2"}) == [("freed memory", "MALLOC_ARENA_MAX=2", "", "")]
    monkeypatch.setattr(diagnosis.job, "is_glibc", lambda: False)
    assert diagnosis.check_allocator({}) == []


def test_what_only_concerns_several_processes(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    jax.config.update("jax_compilation_cache_dir", "/cache")
    try:
        lines = diagnosis.list_devices()
        problems = [line.found for line in lines]
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
    assert any("30 s after another" in found for found in problems)
    assert any("only process 0 finds" in found for found in problems)
    assert any("jd.processes.check_consistency(state, mesh=mesh)" in line.advice for line in lines)


def test_json_log(tmp_path):
    path = tmp_path / "runs" / "log.jsonl"
    write = jd.runtime.json_log(path)
    write(
        {"step": 1, "loss": jnp.float32(0.5), "rank": np.int64(3), "rates": np.ones(2), "note": "µ", "x": {"y": (1,)}}
    )
    write({"step": 2, "loss": jnp.bfloat16(float("nan"))})
    with path.open("a") as file:
        file.write('{"step": 3, "lo')  # killed here
    jd.runtime.json_log(path)({"step": 3})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "loss": 0.5, "rank": 3, "rates": [1.0, 1.0], "note": "µ", "x": {"y": [1]}},
        {"step": 2, "loss": None},
        {"step": 3},
    ]
