"""The memory and the collectives of a step on machines that are not here, by ahead-of-time compilation."""

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .. import placement
from .._compat import make_mesh
from .._marks import axis_tuple
from .._typing import AxisNames, PyTree, State
from .base import Collectives
from .collectives import collectives
from .memory import Memory, memory


class Plan(NamedTuple):
    """What the compiler plans for a step: the memory of one device, what crosses the network, the program itself."""

    memory: Memory
    collectives: Collectives
    compiled: jax.stages.Compiled


def tpu(topology: str, axes: Mapping[str, int] | None = None) -> Mesh:
    """A mesh of TPU chips that are not attached: steps can be compiled for it, but not run.

    It needs `libtpu` (`pip install 'jax[tpu]'`), which works on machines without a TPU.

    Args:
      topology: generation and shape, such as `"v5e:4x4"` (16 chips of 16 GiB), `"v5p:2x2x4"` or `"v6e:16x16"`. A v5p
        chip counts as one device.
      axes: the number of devices along each axis, slow links first; by default all along `"data"`.

    Returns:
      The mesh.

    Raises:
      ValueError: `libtpu` is missing or does not know the topology, or the axes need another number of devices.

    Example:
      >>> from jaxdist.analysis import pods
      >>> pods.tpu("v5e:2x2").size  # doctest: +SKIP
      4
    """
    # Else libtpu asks the metadata server of a cloud machine that this is not.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # A lock keeps a chip to one process; here there is no chip.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except Exception as error:  # what the plugin raises differs between versions
        raise ValueError(
            f"cannot describe the TPU topology {topology!r}: it must be like 'v5e:4x4', and libtpu installed "
            f"(pip install 'jax[tpu]'): {error}"
        ) from error
    axes = {"data": len(devices)} if axes is None else axes
    if int(np.prod(list(axes.values()))) != len(devices):
        raise ValueError(f"axes {dict(axes)} do not make up the {len(devices)} devices of {topology!r}")
    return make_mesh(tuple(axes.values()), tuple(axes), devices=devices)


def abstract(
    make_state: Callable[[], State],
    batch: PyTree,
    mesh: Mesh,
    *,
    axis: AxisNames = "data",
    batch_specs: PyTree | None = None,
) -> tuple[State, PyTree]:
    """The arguments of a distributed step as shapes that say where they would lie: nothing is allocated.

    Args:
      make_state: makes the state as one worker means it, as for `init_state`; it is only traced.
      batch: the whole batch of all workers, arrays or shapes.
      mesh: the mesh, of devices or of `tpu`.
      axis: the axis or axes that workers lie along.
      batch_specs: as for `distribute`.

    Returns:
      State and batch, of `jax.ShapeDtypeStruct`, for `step.lower(state, batch)`.

    Raises:
      ValueError: a mark or `axis` names an axis that the mesh lacks.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> from jaxdist.analysis import pods
      >>> mesh = jd.make_mesh({"data": 1})
      >>> state, batch = pods.abstract(lambda: jd.PerWorker(jnp.zeros(3)), jnp.zeros((8, 2)), mesh)
      >>> state.value.shape, tuple(batch.sharding.spec)
      ((1, 3), ('data',))
    """
    placement.workers(mesh, axis)
    shapes = jax.eval_shape(lambda: placement.init_state(make_state, dict(mesh.shape), axis=axis))
    state = jax.tree.map(_lying, shapes, placement.shardings(shapes, mesh, axis=axis))
    axes = axis_tuple(axis)
    spec = PartitionSpec(axes[0] if len(axes) == 1 else axes) if batch_specs is None else batch_specs
    return state, jax.tree.map(
        lambda spec, part: jax.tree.map(lambda x: _lying(x, NamedSharding(mesh, spec)), part),
        spec,
        batch,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def plan(
    step: jax.stages.Wrapped,
    make_state: Callable[[], State],
    batch: PyTree,
    mesh: Mesh,
    *,
    axis: AxisNames = "data",
    batch_specs: PyTree | None = None,
) -> Plan:
    """Compiles a distributed step for a mesh, with the backend's own compiler, and says what it will need.

    Args:
      step: what `distribute(step, mesh)` returned.
      make_state: makes the state as one worker means it, as for `init_state`; it is only traced.
      batch: the whole batch of all workers, arrays or shapes.
      mesh: the mesh that `step` was distributed over.
      axis: the axis or axes that workers lie along.
      batch_specs: as for `distribute`.

    Returns:
      The memory of one device, the collectives, and the compiled program.

    Raises:
      ValueError: what `distribute` and `abstract` raise.
      jax.errors.JaxRuntimeError: the program does not fit (TPU): the message says what it would take and what there is.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> from jaxdist.analysis import pods
      >>> mesh = jd.make_mesh({"data": 1})  # pods.tpu("v5e:4x4") where libtpu is installed
      >>> step = jd.distribute(lambda state, batch: (state + jax.lax.psum(batch.sum(), "data"), {}), mesh)
      >>> pods.plan(step, lambda: jnp.zeros(()), jax.ShapeDtypeStruct((64, 4), jnp.float32), mesh).memory.arguments
      1028
    """
    compiled = step.lower(*abstract(make_state, batch, mesh, axis=axis, batch_specs=batch_specs)).compile()
    return Plan(memory(compiled), collectives(compiled), compiled)


def _lying(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
