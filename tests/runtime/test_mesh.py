"""Where slow links come to lie in a mesh, and collectives that are checked before they are used."""

from dataclasses import dataclass
from importlib import import_module

import jax.numpy as jnp
import pytest

import jaxdist as jd
from jaxdist.runtime import mesh


@dataclass(frozen=True)
class Device:
    id: int
    process_index: int
    slice_index: int | None = None
    platform: str = "gpu"


PROCESSES = [Device(i, i // 2) for i in (5, 0, 3, 1, 2, 4, 7, 6)]  # four of two devices, in any order
SLICES = [Device(i, i // 2, slice_index=i % 2) for i in range(8)]  # which are not where the processes are


def test_no_process_is_left_without_a_device(monkeypatch):
    """As where a script names its mesh, and more processes are started."""
    monkeypatch.setattr("jax.devices", lambda: sorted(PROCESSES, key=lambda device: device.id))
    with pytest.raises(ValueError, match=r"a mesh of {'data': 5} leaves process 3 without a device: there are 8"):
        jd.make_mesh({"data": 5})


def test_inner_axes_stay_in_a_group():
    found = mesh.order_devices({"pod": 4}, {"chip": 2}, PROCESSES)
    assert [[device.id for device in row] for row in found] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    found = mesh.order_devices({"pod": 2}, {"data": 2, "model": 2}, SLICES)
    assert [{device.slice_index for device in block.ravel()} for block in found] == [{0}, {1}]
    found = mesh.order_devices({"data": 8}, {}, SLICES)
    assert [device.slice_index for device in found] == [0] * 4 + [1] * 4
    assert len(mesh.groups([Device(i, i // 2, platform="tpu") for i in range(8)])) == 1  # a pod is one slice


@pytest.mark.parametrize(
    ("outer", "inner", "message"),
    [
        ({"pod": 2}, {"chip": 4}, "needs groups of 4 devices with fast links, but there are 4 groups of 2"),
        ({"pod": 2}, {"chip": 2}, "need 4 devices, but there are 8"),
        ({"data": 4}, {"data": 2}, "'data' is both outer and inner"),
    ],
)
def test_what_cannot_be(outer, inner, message):
    with pytest.raises(ValueError, match=message):
        mesh.order_devices(outer, inner, PROCESSES)


def test_one_process_is_one_group():
    assert dict(jd.make_mesh(outer={"pod": 2}, inner={"chip": 4}).shape) == {"pod": 2, "chip": 4}
    assert dict(jd.make_mesh(inner={"chip": 8}).shape) == {"chip": 8}
    with pytest.raises(ValueError, match="give axes, or outer and inner"):
        jd.make_mesh({"data": 8}, inner={"chip": 8})
    for axes in ({"axes": {"data": 0}}, {"outer": {"pod": 2}, "inner": {"data": 0}}):
        with pytest.raises(ValueError, match="the number of devices of axis 'data' must be at least 1, got 0"):
            jd.make_mesh(**axes)


CHECK = import_module("jaxdist.processes.self_check")  # not the function of that name
FAULTS = {
    "sum": lambda x: x + 1,
    "mean": lambda x: jnp.where(x > 5, jnp.nan, x),
    "reduce_scatter_mean": lambda x: x.at[-1].set(0),
    "ppermute": lambda x: x[::-1],
}


def test_good_collectives_pass(pods, monkeypatch):
    monkeypatch.setattr(CHECK, "SIZES", (5,))
    jd.processes.self_check(pods)


def test_wrong_ones_are_named(mesh, monkeypatch):
    def faulty(axis):
        """Wrong for one of the eight."""

        def one(right, fault):
            return lambda *given: jnp.where(comm.index == 6, fault(right(*given)), right(*given))

        comm = jd.comm.over(axis)
        return comm._replace(**{name: one(getattr(comm, name), fault) for name, fault in FAULTS.items()})

    monkeypatch.setattr(CHECK, "over", faulty)
    monkeypatch.setattr(CHECK, "SIZES", (5,))
    with pytest.raises(jd.processes.CollectiveError, match=r"wrong results from .* over the axis 'data'") as caught:
        jd.processes.self_check(mesh)
    assert set(caught.value.collectives) == set(FAULTS)
