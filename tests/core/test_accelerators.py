"""Plugins of accelerators that are not there are not started."""

from types import SimpleNamespace

import jax
import pytest

from jaxdist._core import accelerators


@pytest.fixture
def machine(monkeypatch):
    """A machine before JAX has started, on which files and plugins are as given; the platforms that JAX is told."""
    told = []

    def become(files=(), plugins=("xla_cuda13",), platforms=None, started=False, libtpu=False):
        told.clear()
        monkeypatch.setattr(accelerators, "has_backend", lambda: started)
        monkeypatch.setattr(
            accelerators, "entry_points", lambda group: [SimpleNamespace(name=name) for name in plugins]
        )
        monkeypatch.setattr(accelerators, "find_spec", lambda name: name if name == "libtpu" and libtpu else None)
        monkeypatch.setattr(accelerators, "glob", lambda pattern: [pattern] if pattern in files else [])
        monkeypatch.setattr(accelerators, "Path", lambda path: SimpleNamespace(read_text=lambda: "0x10de\n"))
        monkeypatch.setattr(jax.config, "update", lambda name, value: told.append((name, value)))
        monkeypatch.setattr(accelerators, "sys", SimpleNamespace(platform="linux"))
        monkeypatch.setattr(type(jax.config), "jax_platforms", property(lambda config: platforms), raising=False)
        for name in ("JAX_PLATFORMS", "TPU_NAME", "TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE", "COLAB_TPU_ADDR"):
            monkeypatch.delenv(name, raising=False)
        return told

    return become


HIDDEN = [("jax_platforms", "cpu")]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, HIDDEN),
        ({"plugins": (), "libtpu": True}, HIDDEN),
        ({"plugins": ()}, []),  # nothing that would print
        ({"plugins": ("xla_cuda13", "metal")}, []),  # an accelerator that we do not know
        ({"files": ("/dev/nvidia*",)}, []),
        ({"files": ("/proc/driver/nvidia",)}, []),
        ({"files": ("/dev/accel*",), "plugins": (), "libtpu": True}, []),
        ({"files": ("/sys/bus/pci/devices/*/vendor",)}, []),
        ({"platforms": "cuda,cpu"}, []),
        ({"started": True}, []),
    ],
)
def test_jax_is_told_to_use_the_cpu_only_without_any_sign_of_an_accelerator(machine, given, expected):
    told = machine(**given)
    accelerators.ignore_absent_accelerators()
    assert told == expected


@pytest.mark.parametrize("name", ["JAX_PLATFORMS", "TPU_NAME"])
def test_a_choice_in_the_environment_stays(machine, monkeypatch, name):
    told = machine()
    monkeypatch.setenv(name, "")
    accelerators.ignore_absent_accelerators()
    assert told == []
