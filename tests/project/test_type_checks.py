"""The annotations of the library are checked at every call while the tests run."""

import importlib
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
import type_checks
from jaxtyping import TypeCheckError

SOURCE = '''
"""A docstring."""
from __future__ import annotations
from dataclasses import dataclass
from jaxtyping import Array, Float

@dataclass
class Point:
    x: int

    def move(self, by: float = 0) -> int:
        return by

def add(x: Float[Array, " size"], y: Float[Array, " size"]) -> Float[Array, " size"]:
    return x + y[0]

def count(names: list[str] | None = None, *rest: int, key: int) -> float:
    return key
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "annotated.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    type_checks.install_import_hook("annotated")
    yield importlib.import_module("annotated")
    del sys.modules["annotated"]


def test_what_fits_passes(module):
    assert module.__doc__ == "A docstring."
    assert module.add(jnp.ones(3), jnp.ones(3)).tolist() == [2.0] * 3
    assert module.count(["a"], 2, 3, key=4) == 4  # an int is a float
    assert module.Point(3).move(2) == 2
    assert not list(Path(module.__file__).parent.rglob("*.pyc"))  # users would load it


@pytest.mark.parametrize(
    "call",
    [
        lambda module: module.add(jnp.ones(3), jnp.ones(4)),  # sizes differ
        lambda module: module.add(jnp.ones(3), jnp.ones((3, 1))),
        lambda module: module.add(jnp.ones(3), jnp.ones(3, int)),
        lambda module: module.count([1], key=1),
        lambda module: module.count(None, "2", key=1),
        lambda module: module.count(None, key="1"),
        lambda module: module.Point("3"),
        lambda module: module.Point(3).move(2.5),  # what it returns
    ],
)
def test_what_does_not_fit_is_refused(module, call):
    with pytest.raises(TypeCheckError):
        call(module)


def test_the_library_is_checked():
    import jaxdist as jd

    with pytest.raises(TypeCheckError):
        jd.qsgd("4")
