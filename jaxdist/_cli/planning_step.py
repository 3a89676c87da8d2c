"""Plans of a step of the user's own, on a mesh with any axes."""

import time
from collections.abc import Mapping
from typing import Any

import jax

from ..analysis import cost
from ..analysis.base import Collective, crossing
from ..analysis.collectives import collectives
from ..analysis.memory import memory
from ..reducers.reducer import Reducer
from . import planning
from .models.own_step import MakeStep

FEWER = "temporaries are the larger part: fewer examples on each device, jax.checkpoint around layers, or more devices"
SHARD = (
    "shard the state: zero_redundancy, zero.gathered, or further axes in the specs of the parameters; or more devices"
)
DONATE = (
    "donate the state, jax.jit(step, donate_argnums=0): outputs take {share:.0%} of the memory beside the arguments"
)

ON_HOST = (
    "the step keeps arrays in host memory (jaxdist.offload.host), which the compiler of a GPU that is not attached "
    "does not take: count these arrays on the host and try the step without it"
)


def plan_step(
    target: str,
    name: str,
    make: MakeStep,
    *,
    reducer: Reducer | None = None,
    chip: cost.Chip | None = None,
    axes: Mapping[str, int] | None = None,
    num_slices: int = 1,
    compiler_options: Mapping[str, Any] | None = None,
) -> planning.Planned:
    """Compiles the step that `make(mesh, reducer)` returns for a target, and reads memory, bytes and time from it.

    The mesh is set while the step is made and traced, so that a plain `jax.jit` may name its axes. While it is made,
    the mesh is one without devices: those of the target could not make an array.

    Raises:
      ValueError: `make`, the step or the compiler fails; JAX refuses a step for other devices than those of the mesh.
    """
    compiled_for, mesh = planning.mesh_of(target, num_slices, axes)
    chip = compiled_for if chip is None else chip
    start = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        step = make(mesh, reducer)
    with jax.set_mesh(mesh):
        lowered = step.lower(name)
    spelled = target if num_slices == 1 else f"{num_slices} x {target}"
    known: dict[str, Any] = {"target": spelled, "devices": mesh.size, "chip": chip, "parameters": 0}
    known["warnings"] = planning.notes_of(chip)
    try:
        advice = ON_HOST if planning.HOST in lowered.as_text() else "try parts of the step"
        compiled = planning.compile_for(target, lowered, compiler_options, advice=advice)
    except planning.OutOfMemoryError as error:
        arguments = sum(planning.shard_bytes(leaf) for leaf in jax.tree.leaves(step.arguments))
        peak = planning.peak_of(str(error), arguments)
        refused = {"arguments": arguments, "outputs": 0.0, "temporaries": max(0.0, peak - arguments)}
        return planning.Planned(
            **known,
            fits=False,
            device_bytes=planning.drop_zeros(refused),
            host_bytes={},
            peak=peak,
            advice=_advise(refused, is_too_large=True),
            compile_seconds=time.perf_counter() - start,
        )
    used = memory(compiled)
    outputs = used.outputs - used.aliased
    device = {"arguments": used.arguments, "outputs": outputs, "temporaries": used.temporary}
    host_outputs = used.host_outputs - used.host_aliased
    host = {"arguments": used.host_arguments, "outputs": host_outputs, "temporaries": used.host_temporary}
    places = cost.of_mesh(compiled_for.name, mesh)._replace(chip=chip)
    timed = planning.time_of(compiled, places, period=1)
    known["warnings"] = (*timed.pop("warnings"), *known["warnings"])
    return planning.Planned(
        **known,
        fits=used.peak <= chip.memory,
        device_bytes=planning.drop_zeros(device),
        host_bytes=planning.drop_zeros(host),
        peak=float(used.peak),
        advice=_advise(device, is_too_large=used.peak > chip.memory),
        compile_seconds=time.perf_counter() - start,
        across=bytes_across(compiled, mesh),
        **timed,
    )


def bytes_across(compiled: jax.stages.Compiled, mesh: jax.sharding.Mesh) -> dict[str, float]:
    """The bytes that one device sends in collectives that cross each axis, or several axes, of a mesh."""
    crosses = {axis: crossing(mesh, axis) for axis in mesh.axis_names if mesh.shape[axis] > 1}

    def spell(op: Collective) -> str:
        return " and ".join(axis for axis, does in crosses.items() if does(op))

    found: dict[str, float] = {}
    for op in collectives(compiled).ops:
        if axes := spell(op):
            found[axes] = found.get(axes, 0.0) + op.wire_bytes
    return found


def _advise(device: Mapping[str, float], *, is_too_large: bool) -> tuple[str, ...]:
    # What a step returns beside its state is small.
    share = device["outputs"] / max(1, sum(device.values()))
    donate = (DONATE.format(share=share),) if share > 0.2 else ()
    if not is_too_large:
        return donate
    return (*donate, FEWER if device["temporaries"] > device["arguments"] else SHARD)
