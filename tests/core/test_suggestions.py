"""A name that a public module does not have: the error says where it is, or what is close."""

import functools
import importlib
import pickle
import sys
from pathlib import Path

import pytest
from public_names import exported, public_names

import jaxdist as jd
from jaxdist._core import suggestions


@pytest.mark.parametrize(
    ("room", "name", "end"),
    [
        ("", "diloco", ": it is jaxdist.local_sgd.diloco"),
        ("", "asgd", ": it is jaxdist.asynchronous.rules.asgd"),
        ("", "any_batch", ": it is jaxdist.online.any_batch or jaxdist.asynchronous.rules.any_batch"),
        ("", "PowerSGD", "; did you mean jaxdist.power_sgd?"),
        ("", "topk", "; did you mean jaxdist.top_k?"),
        ("", "error_feeback", "; did you mean jaxdist.error_feedback?"),
        ("", "frobnicate", ""),
        ("", "_power_sgd", ""),
        (".reducers", "PowerSGD", "; did you mean jaxdist.reducers.power_sgd?"),
        (".reducers", "qsgd", ": it is jaxdist.qsgd"),
        (".compressors", "base_", ""),
        (".asynchronous.rules", "ASGD", "; did you mean jaxdist.asynchronous.rules.asgd?"),
        (".testing", "assert_compressor_law", "; did you mean jaxdist.testing.assert_compressor_laws?"),
    ],
)
def test_a_missing_name_is_found(room, name, end):
    # As a program reaches it: rooms that nobody has asked for are not imported yet.
    module = functools.reduce(getattr, room.split(".")[1:], jd)
    with pytest.raises(AttributeError) as caught:
        getattr(module, name)
    assert str(caught.value) == f"module 'jaxdist{room}' has no attribute {name!r}{end}"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_names_of_the_search_are_those_of_the_reference():
    # The switch of the type checks is put into every module by the tests alone.
    found = {
        module.__name__: set(suggestions.public_names(module)) - {"CHECK_TYPES"}
        for module in suggestions.public_modules()
    }
    rooms = {name for name in found if name.count(".") == 1}
    # A test may have imported a room that the package does not import, which is then an attribute of it.
    found["jaxdist"] -= {room.partition(".")[2] for room in rooms} - public_names()["jaxdist"]
    assert {name: found[name] for name in public_names()} == public_names()
    # The modules inside rooms are the ones that the rooms export.
    inside = {
        f"{room}.{name}"
        for room in rooms
        for name in exported(Path(importlib.import_module(room).__file__))
        if f"{room}.{name}" in sys.modules and not callable(getattr(sys.modules[room], name))
    }
    assert inside == set(found) - rooms - {"jaxdist"}


def test_asking_for_a_name_searches_nothing(monkeypatch):
    monkeypatch.setattr(suggestions, "_places", pytest.fail)
    assert not hasattr(jd, "diloco")
    assert getattr(jd.reducers, "PowerSGD", None) is None


def test_every_public_module_has_the_search():
    assert all("__getattr__" in vars(module) for module in suggestions.public_modules())
