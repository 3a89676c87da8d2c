"""Predicts memory and collectives of a step on machines that are not attached, by ahead-of-time compilation."""

import contextlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .._core.compat import make_mesh
from .._core.types import AxisNames, PyTree, State
from ..state.marks import axis_tuple
from ..state.placement import init_state, shardings, workers
from .base import Collectives
from .collectives import collectives
from .memory import Memory, memory

GPUS = ("a100", "b200", "h100", "h200", "l40s", "rtx4090")  # the files of targets/


class Plan(NamedTuple):
    """The compiler's plan for a step: the memory of one device, the collectives, the program."""

    memory: Memory
    collectives: Collectives
    compiled: jax.stages.Compiled


def tpu(topology: str, axes: Mapping[str, int] | None = None, *, num_slices: int = 1) -> Mesh:
    """Makes a mesh of TPU devices that are not attached: steps can be compiled for it, but not run.

    It needs `libtpu` (`pip install '.[tpu-plan]'` in a clone), which works on machines without a TPU.

    Args:
      topology: generation and shape in chips, such as `"v5e:4x4"` (16 chips of 16 GiB), `"v5p:2x2x4"`, `"v6e:16x16"` or
        `"tpu7x:2x2x1"`. A v5p chip counts as one device, a TPU7x chip as two, which are neighbors in the mesh.
      axes: the number of devices along each axis, slow links first; by default all along `"data"`, or, of several
        slices, `"slice"` and `"data"`.
      num_slices: the number of such slices, with a data center's network between them. The first axes then span the
        slices: their sizes multiply to this number.

    Examples:
      >>> from jaxdist.analysis import pods
      >>> pods.tpu("v5e:2x2").size  # doctest: +SKIP
      4
    """
    if not re.fullmatch(r"(v|tpu)\w+:\d+x\d+(x\d+)?", topology) or num_slices < 1:
        raise ValueError(
            f"cannot describe the TPU topology {topology!r} (num_slices={num_slices}): it must be like 'v5e:4x4', "
            "'v5p:2x2x4' or 'tpu7x:2x2x1', of at least one slice"
        )
    _check_installed(("libtpu",), "tpu-plan", topology)
    # Else libtpu asks the metadata server of a cloud machine that this is not.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # A lock reserves a chip for one process; here there is no chip.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    several = {"num_slices": num_slices} if num_slices > 1 else {}
    devices = _describe("TPU", topology, platform="tpu", topology_name=topology, **several)
    default = {"slice": num_slices, "data": len(devices) // num_slices} if several else {"data": len(devices)}
    axes = _check_axes(axes, default, len(devices), topology)
    if not several:
        return make_mesh(tuple(axes.values()), tuple(axes), devices=devices)
    inside = list(axes.values())
    across = 1
    while inside and across < num_slices:
        across *= inside.pop(0)
    if across != num_slices:
        raise ValueError(f"the first of axes={dict(axes)} must multiply to num_slices={num_slices}")
    slices = [[device for device in devices if device.slice_index == number] for number in range(num_slices)]
    # JAX chooses the order of the devices within a slice, for rings; the slices follow each other.
    ordered = [make_mesh((len(part),), ("data",), devices=part).devices for part in slices]
    return Mesh(np.stack(ordered).reshape(tuple(axes.values())), tuple(axes))


def gpu(topology: str, axes: Mapping[str, int] | None = None) -> Mesh:
    """Makes a mesh of NVIDIA GPUs that are not attached: steps can be compiled for it, but not run.

    It needs JAX's CUDA plugin (`pip install '.[gpu-plan]'` in a clone), and no GPU and no driver. Devices of a node are
    neighbors in the mesh.

    Args:
      topology: the chip, one of `"a100"` (80 GB), `"b200"`, `"h100"`, `"h200"`, `"l40s"` and `"rtx4090"`, the number of
        nodes, and the GPUs of a node, as in `"h100:4x8"`.
      axes: the number of devices along each axis, slow links first; by default all along `"data"`.

    Examples:
      >>> from jaxdist.analysis import pods
      >>> pods.gpu("h100:4x8").size  # doctest: +SKIP
      32
    """
    found = re.fullmatch(r"(\w+):(\d+)x(\d+)", topology)
    if not found or found.group(1) not in GPUS or "0" in found.groups():
        raise ValueError(
            f"cannot describe the GPU topology {topology!r}: it must be one of {', '.join(GPUS)}, nodes and GPUs of a "
            "node, as in 'h100:4x8'"
        )
    chip, nodes, each = found.groups()
    _check_installed(("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"), "gpu-plan", topology)
    # Else the plugin would compare its libraries with a driver, which is missing here.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    facts = (resources.files("jaxdist.analysis") / "targets" / f"{chip}.txtpb").read_text()
    devices = _describe("GPU", topology, platform="cuda", topology=f"1x{nodes}x{each}", target_config=facts)
    axes = _check_axes(axes, {"data": len(devices)}, len(devices), topology)
    return Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes))


def _check_installed(modules: Sequence[str], extra: str, topology: str) -> None:
    """Checks that one of the plugins is installed."""
    for module in modules:
        with contextlib.suppress(ModuleNotFoundError):  # the package around the plugin is missing
            if find_spec(module) is not None:
                return
    plugin = modules[0].split(".")[-1]
    raise ValueError(f"compiling for {topology} needs {plugin}: pip install '.[{extra}]' in a clone of jaxdist")


def _describe(kind: str, spelled: str, **arguments: Any) -> Sequence[Any]:
    try:
        return topologies.get_topology_desc(**arguments).devices
    except Exception as error:
        # What the plugins raise differs between versions.
        raise ValueError(f"cannot describe the {kind} topology {spelled!r}: {error}") from error


def _check_axes(
    axes: Mapping[str, int] | None, default: Mapping[str, int], devices: int, topology: str
) -> Mapping[str, int]:
    """Returns the axes, or the default, after checking that they use all devices."""
    axes = default if axes is None else axes
    if int(np.prod(list(axes.values()))) != devices:
        raise ValueError(f"axes {dict(axes)} do not make up the {devices} devices of {topology!r}")
    return axes


def abstract(
    make_state: Callable[[], State],
    batch: PyTree,
    mesh: Mesh | AbstractMesh,
    *,
    axis: AxisNames = "data",
    specs: PyTree | None = None,
    batch_specs: PyTree | None = None,
) -> tuple[State, PyTree]:
    """Returns the arguments of a distributed step as shapes with shardings, for `step.lower`; allocates nothing.

    Args:
      make_state: makes the state, as for `init_state`; it is only traced.
      batch: the whole batch of all workers, arrays or shapes.
      mesh: the mesh, of devices or of `tpu` or `gpu`; an `AbstractMesh` for a step that is only traced.
      axis: the axis or axes of the workers.
      specs: as for `init_state`.
      batch_specs: as for `distribute`.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> from jaxdist.analysis import pods
      >>> mesh = jd.make_mesh({"data": 1})
      >>> state, batch = pods.abstract(lambda: jd.PerWorker(jnp.zeros(3)), jnp.zeros((8, 2)), mesh)
      >>> state.value.shape, tuple(batch.sharding.spec)
      ((1, 3), ('data',))
    """
    workers(mesh, axis)
    # As `init_state` does: a reducer on shards reads the sizes of the axes.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        shapes = jax.eval_shape(lambda: init_state(make_state, dict(mesh.shape), axis=axis))
    state = jax.tree.map(_with_sharding, shapes, shardings(shapes, mesh, axis=axis, specs=specs))
    axes = axis_tuple(axis)
    rows = PartitionSpec(axes[0] if len(axes) == 1 else axes) if batch_specs is None else batch_specs

    def place(spec: PartitionSpec, part: PyTree) -> PyTree:
        return jax.tree.map(lambda x: _with_sharding(x, NamedSharding(mesh, spec)), part)

    # A spec may apply to a whole part of the batch.
    return state, jax.tree.map(place, rows, batch, is_leaf=lambda x: isinstance(x, PartitionSpec))


def plan(
    step: jax.stages.Wrapped,
    make_state: Callable[[], State],
    batch: PyTree,
    mesh: Mesh,
    *,
    axis: AxisNames = "data",
    specs: PyTree | None = None,
    batch_specs: PyTree | None = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> Plan:
    """Compiles a distributed step for a mesh with the backend's own compiler, and returns what it will need.

    Args:
      step: the result of `distribute(step, mesh)`.
      make_state: as for `abstract`.
      batch: as for `abstract`.
      mesh: the mesh that `step` was distributed over.
      axis: the axis or axes of the workers.
      specs: as for `init_state`.
      batch_specs: as for `distribute`.
      compiler_options: flags of XLA for this compilation, as in `{"xla_gpu_enable_latency_hiding_scheduler": True}`.

    Raises:
      jax.errors.JaxRuntimeError: the program does not fit (TPU); the message gives the memory that it needs and has.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> from jaxdist.analysis import pods
      >>> mesh = jd.make_mesh({"data": 1})  # pods.tpu("v5e:4x4") where libtpu is installed
      >>> step = jd.distribute(lambda state, batch: (state + jax.lax.psum(batch.sum(), "data"), {}), mesh)
      >>> pods.plan(step, lambda: jnp.zeros(()), jax.ShapeDtypeStruct((64, 4), jnp.float32), mesh).memory.arguments
      1028
    """
    lowered = step.lower(*abstract(make_state, batch, mesh, axis=axis, specs=specs, batch_specs=batch_specs))
    compiled = lowered.compile(compiler_options=None if compiler_options is None else dict(compiler_options))
    return Plan(memory(compiled), collectives(compiled), compiled)


def _with_sharding(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
