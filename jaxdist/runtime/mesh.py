"""Makes meshes, and global batches of several processes."""

import itertools
import math
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .._core import compat
from .._core.accelerators import ignore_absent_accelerators
from .._core.checks import check_count, check_range
from .._core.types import AxisNames, PyTree
from ..processes.consistency import compare, fingerprint_batch
from ..processes.initialize import check_connected
from ..state.marks import axis_tuple
from ..state.placement import workers

# A process may read its data that much longer than the others.
BATCH_SECONDS = 600.0
_compared: set[str] = set()
_comparisons = itertools.count()


def make_mesh(
    axes: Mapping[str, int] | None = None,
    *,
    outer: Mapping[str, int] | None = None,
    inner: Mapping[str, int] | None = None,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Makes a mesh with Auto axes.

    With `outer` and `inner`, every inner axis stays within a group of devices with fast links: a TPU slice, the devices
    that share NVLink, else those of one process, as given by JAX (`slice_index`, `process_index`).

    Args:
      axes: the number of devices along each axis, slow links first; by default all devices along `"data"`.
      outer: instead of `axes`, the axes between groups. They come first.
      inner: instead of `axes`, the axes within groups.

    Raises:
      ValueError: there are too few devices; by default, a process would have no device in the mesh; an inner axis would
        leave a group; an axis is named twice; `axes` together with `outer` or `inner`; `jaxdist launch` has started
        several processes, and this one has not called `initialize`.

    Examples:
      >>> import jax, jaxdist as jd
      >>> jd.make_mesh({"data": 1}).axis_names
      ('data',)
      >>> jd.make_mesh(outer={"pod": 1}, inner={"chip": 1}, devices=jax.devices()[:1]).axis_names
      ('pod', 'chip')
    """
    check_connected()
    if outer is not None or inner is not None:
        if axes is not None:
            raise ValueError(f"give axes, or outer and inner, got axes {dict(axes)} too")
        outer, inner = dict(outer or {}), dict(inner or {})
        _check_sizes(outer | inner)
        ordered = order_devices(outer, inner, jax.devices() if devices is None else list(devices))
        names = (*outer, *inner)
        return Mesh(ordered, names, axis_types=(AxisType.Auto,) * len(names))
    count = len(jax.devices() if devices is None else devices)
    axes = {"data": count} if axes is None else axes
    _check_sizes(axes)
    needed = int(np.prod(list(axes.values())))
    if needed > count:
        raise ValueError(f"a mesh of {dict(axes)} needs {needed} devices, but there are {count}")
    chosen = (jax.devices() if devices is None else list(devices))[:needed]
    idle = {device.process_index for device in jax.devices()} - {device.process_index for device in chosen}
    if idle and devices is None:
        raise ValueError(
            f"a mesh of {dict(axes)} leaves process {min(idle)} without a device: there are {count} devices, so start "
            "fewer processes, or make the mesh larger"
        )
    return compat.make_mesh(tuple(axes.values()), tuple(axes), devices=chosen)


def _check_sizes(axes: Mapping[str, int]) -> None:
    for name, size in axes.items():
        check_count(f"the number of devices of axis {name!r}", size, 1)


def use_cpu_devices(count: int) -> None:
    """Splits the CPU into several devices, to try a distributed step on one machine. Call it before anything runs.

    It also gives XLA four threads per device (the environment variable `NPROC`), unless that is set: with one thread
    per device, threads that wait in a collective can keep the others from ever running. On two cores, four devices with
    the default number of threads always hung within 1,500 steps.

    Where the plugin of a TPU or an NVIDIA GPU is installed but no such device, JAX does not start the plugin, which
    would print errors.

    Examples:
      >>> import jax, jaxdist as jd
      >>> jd.runtime.use_cpu_devices(jax.device_count())  # in a program: a number, before the first array is made
    """
    check_range("count", count, 1, ends="[]")
    ignore_absent_accelerators()
    # XLA reads the variable when the backend starts.
    os.environ.setdefault("NPROC", str(max(4 * count, os.cpu_count() or 1)))
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        if jax.device_count() != count:
            raise ValueError(
                f"JAX has already started with {jax.device_count()} devices: call use_cpu_devices({count}) earlier"
            ) from None


def global_batch(local: PyTree, mesh: Mesh, *, axis: AxisNames = "data") -> PyTree:
    """Combines this process's part of a batch with those of the others, to arrays `[B, ...]` sharded over the axis.

    *On the wire*: no collective. For each new combination of shapes and dtypes, all processes compare them through
    JAX's coordination service, since steps on different batches would wait for each other forever. Calls outside of the
    main thread, whose order is undefined, are not compared.

    Args:
      local: NumPy arrays `[b, ...]`; every process passes the same number of examples per device.

    Raises:
      MismatchError: a process has other arrays than process 0, or another number of examples per worker.
      MissingProcessError: a process did not pass a batch of these shapes within ten minutes.
      ValueError: an array has no first dimension, or one that does not divide among this process's devices; the mesh
        has no such axis.

    Examples:
      >>> import numpy as np, jaxdist as jd
      >>> jd.global_batch(np.ones((8, 2)), jd.make_mesh({"data": 1})).shape
      (8, 2)
    """
    axes = axis_tuple(axis)
    # Refuses an axis that the mesh lacks.
    workers(mesh, axis)
    sharding = NamedSharding(mesh, PartitionSpec(axes[0] if len(axes) == 1 else axes))
    here = workers_here(mesh, axis)
    local = jax.tree.map(np.asarray, local)
    wrong = _indivisible(local, here)
    if jax.process_count() > 1:
        _compare(local, mesh, here, wrong)
    # After the comparison, so that the others do not wait for this process.
    if wrong:
        raise ValueError(wrong)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), local)


def _indivisible(batch: PyTree, here: int) -> str:
    """Describes an array of this process that does not divide among its workers; empty if all do."""
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        if x.ndim == 0 or x.shape[0] % max(here, 1):
            return (
                f"batch{jax.tree_util.keystr(path)} of shape {x.shape} does not divide among the {here} workers of "
                f"process {jax.process_index()}: pad it (and pass examples= to the update)"
            )
    return ""


def _compare(batch: PyTree, mesh: Mesh, here: int, wrong: str) -> None:
    """Checks that all processes pass similar batches, else raises in all; compares each kind of batch once."""
    own = fingerprint_batch(batch, here)
    kind = str(own)
    # The common case.
    if kind in _compared and not wrong:
        return
    # A mesh over a part of the processes: the others would never come to the comparison.
    everywhere = len({device.process_index for device in mesh.devices.flat}) == jax.process_count()
    if everywhere and threading.current_thread() is threading.main_thread():
        do = "pass a batch like this to global_batch()"
        compare(own, f"batch/{next(_comparisons)}", BATCH_SECONDS, do=do, wrong=wrong)
        _compared.add(kind)


def workers_here(mesh: Mesh, axis: AxisNames) -> int:
    """Returns the number of workers of the axis whose devices are in this process."""
    here = sum(device.process_index == jax.process_index() for device in mesh.devices.flat)
    # Devices along the other axes belong to one worker.
    return here // int(np.prod([size for name, size in mesh.shape.items() if name not in axis_tuple(axis)]))


def groups(devices: Sequence[Any]) -> list[list[Any]]:
    """Groups devices with fast links: by slice if it has a number, else by process; TPUs without one are one group."""

    def group_of(device):
        number = getattr(device, "slice_index", None)
        # Chips of a TPU without slices are one torus, over however many processes.
        if number is None and device.platform == "tpu":
            return 0
        return device.process_index if number is None else number

    found: dict[int, list[Any]] = {}
    for device in sorted(devices, key=lambda device: (group_of(device), device.process_index, device.id)):
        found.setdefault(group_of(device), []).append(device)
    return list(found.values())


def order_devices(outer: Mapping[str, int], inner: Mapping[str, int], devices: Sequence[Any]) -> np.ndarray:
    """Orders devices in the shape `[*outer, *inner]`, so that inner axes stay within groups."""
    twice = set(outer) & set(inner)
    if twice:
        raise ValueError(f"the axis {min(twice)!r} is both outer and inner: give them two names")
    between, inside = math.prod(outer.values()), math.prod(inner.values())
    if between * inside != len(devices):
        raise ValueError(
            f"outer {dict(outer)} and inner {dict(inner)} need {between * inside} devices, but there are {len(devices)}"
        )
    found = groups(devices)
    sizes = sorted({len(group) for group in found})
    if any(size % inside for size in sizes):
        raise ValueError(
            f"inner {dict(inner)} needs groups of {inside} devices with fast links, but there are {len(found)} groups "
            f"of {' and '.join(map(str, sizes))}: an axis over several groups has slow links, name it in outer"
        )
    parts = [_arrange(group, (len(group) // inside, *inner.values())) for group in found]
    return np.concatenate(parts).reshape(*outer.values(), *inner.values())


def _arrange(group: list[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Orders a group to suit its links: JAX knows the shapes of TPU slices."""
    if group[0].platform == "tpu":
        return mesh_utils.create_device_mesh(shape, group, allow_split_physical_axes=True)
    return np.array(group, dtype=object).reshape(shape)
