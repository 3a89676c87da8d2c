"""Plans of runs that are streamed: the optimizer's state from a disk, or layers from a disk or from host memory."""

import math
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax

from .._core.pinned import explain_pinned_limit
from ..analysis.cost import Chip
from ..offload.nvme.files import Store
from . import planning
from .models.base import EqualLayers, TrainingMethod, Workload
from .training.one_worker import Offload, check_combination

# The folder is never made: nothing is written.
DISK = Offload(Path("disk"))
GPU_CHIPS = (*planning.pods.GPUS, planning.OWN)
# `prefetch + 1` of `nvme_layers`.
BUFFERS = 3


def plan_nvme(target: str, workload: Workload, method: TrainingMethod, **options: Any) -> planning.Planned:
    """Plans `train --offload nvme`: the step until the mean gradients is compiled, and the update counted.

    `options` are those of `plan`. Seconds leave the disk out, whose speed is not known.
    """
    check_combination(method, DISK)
    found = planning.plan(target, workload, method, offload=DISK, **options)
    device = dict(found.device_bytes)
    # What the step keeps in place of an optimizer state.
    gradients, parameters = device.pop("optimizer state", 0.0), device["parameters"]
    # With master parameters in float32, as `train` has them.
    stored = parameters / _entry_bytes(workload) * (4 + _state_bytes(method.optimizer))
    return found._replace(
        device_bytes=device | {"gradients": gradients},
        host_bytes={"parameters": parameters, "gradients": gradients, "buffers": 3.0 * Store("").chunk_bytes},
        # A second copy, to which a step writes.
        disk_bytes=2 * stored,
        disk_traffic=(stored, stored),
        seconds=found.seconds + (gradients + parameters) / found.chip.host_bandwidth,
    )


def plan_layers(
    target: str,
    layered: EqualLayers,
    method: TrainingMethod,
    *,
    place: Literal["disk", "host"] = "disk",
    chip: Chip | None = None,
    batch_size: int | None = None,
) -> planning.Planned:
    """Plans `offload.nvme_layers`, or with `place="host"` `offload.host_layers`: three layers in memory at a time.

    Its programs are those of single layers: temporary memory and time are read from the model with one and with two
    layers, and the rest is counted from shapes.
    """
    option = "layers" if place == "disk" else "host_layers"
    if method.sync_period or method.stage or method.reducer is None:
        raise ValueError(f"--offload {option} averages the gradient of each layer: leave --sync and --zero out")
    devices = planning.mesh_of(target)[1].size
    if devices > planning.LARGEST_HOST:
        raise ValueError(
            f"--offload {option} is for the devices of one machine, at most {planning.LARGEST_HOST}, and {target} has "
            f"{devices}: use --zero 3, with --offload host or nvme"
        )
    settings: dict[str, Any] = {"chip": chip, "batch_size": batch_size}
    one, two = (planning.plan(target, layered.with_layers(n), method, offload=DISK, **settings) for n in (1, 2))
    width, state = _entry_bytes(layered.with_layers(layered.count)), _state_bytes(method.optimizer)
    # The parts that are in memory alone: a layer, or the embedding and the head, at most both of these.
    layer = two.parameters - one.parameters
    largest = max(layer, one.parameters - layer)
    more = layered.count - 1
    parameters = one.parameters + more * layer
    device = {
        "parameters": BUFFERS * largest * width,
        "gradients": largest * width,
        "batch": one.device_bytes.get("batch", 0.0),
        "temporaries": one.device_bytes.get("temporaries", 0.0),
    }
    # The host keeps the input of each layer for the backward pass, for all of its devices.
    examples = one.devices if batch_size is None else batch_size
    inputs = layered.count * examples * layered.input_bytes
    host = {"buffers": BUFFERS * largest * (width + state), "gradients": largest * width, "inputs of layers": inputs}
    # Read in both passes, and once in the backward pass.
    read, written = parameters * (2.0 * width + state), parameters * (width + state)
    if place == "host":
        # The update is computed on the device, with the state.
        device["optimizer state"] = BUFFERS * largest * state
        host = {"parameters": parameters * width, "optimizer state": parameters * state, "inputs of layers": inputs}
    # As JAX holds them: pinned.
    pinned = explain_pinned_limit(sum(host.values())) if place == "host" and one.chip.name in GPU_CHIPS else None
    peak = float(sum(device.values()))
    # The backward pass computes each layer again: four passes in place of three. From a disk parameters cross twice,
    # inputs and gradients once each way; from the host what is read and the inputs, while the rest goes back.
    computed = 4 / 3 * (one.compute_seconds + more * (two.compute_seconds - one.compute_seconds))
    waiting = one.exposed_seconds + more * (two.exposed_seconds - one.exposed_seconds)
    crossed = 3.0 * parameters * width + 2 * inputs / one.devices
    if place == "host":
        crossed = read + inputs / one.devices
    crossing = crossed / one.chip.host_bandwidth
    fits = peak <= one.chip.memory
    advice = ("fewer examples on each device (--batch), or tiles of a layer: offload.tiled_dense",)
    if fits:
        advice = ()
    if fits and place == "host" and computed + waiting > 0:
        # What is on the device beside the parts of the model grows with the batch.
        room = 1 + (one.chip.memory - peak) / max(1.0, device["batch"] + device["temporaries"])
        advice = _advise_examples(examples, one.devices, min(crossing / (computed + waiting), room))
    return one._replace(
        parameters=parameters,
        fits=fits,
        device_bytes={name: float(size) for name, size in device.items()},
        host_bytes={name: float(size) for name, size in host.items()},
        peak=peak,
        advice=advice,
        compile_seconds=one.compile_seconds + two.compile_seconds,
        seconds=max(computed + waiting, crossing),
        compute_seconds=computed,
        exposed_seconds=waiting,
        flops=4 / 3 * (one.flops + more * (two.flops - one.flops)),
        wire_bytes=one.wire_bytes + more * (two.wire_bytes - one.wire_bytes),
        collectives=(),
        links=(),
        spans=(),
        disk_bytes=2 * written if place == "disk" else 0.0,
        disk_traffic=(read, written) if place == "disk" else (0.0, 0.0),
        warnings=(
            "counted from the shapes, with the temporary memory and the time of one layer as it is compiled: "
            f"see offload.{'nvme' if place == 'disk' else 'host'}_layers",
            *([pinned] if pinned else []),
        ),
    )


def _advise_examples(examples: int, devices: int, times: float) -> tuple[str, ...]:
    """A batch so many times as large, if that is worth a try, in two digits."""
    each = int(examples * times / devices)
    unit = 10 ** max(0, len(str(each)) - 2)
    more = each // unit * unit * devices
    if more < 1.25 * examples:
        return ()
    return (
        f"--batch {more}: the link to the host decides how long a step takes, and so many examples are computed "
        "meanwhile",
    )


def _entry_bytes(workload: Workload) -> float:
    """The mean bytes of a parameter."""
    leaves = jax.tree.leaves(jax.eval_shape(workload.init, jax.random.key(0)))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves) / sum(math.prod(x.shape) for x in leaves)


def _state_bytes(optimizer: optax.GradientTransformation) -> float:
    """The bytes that an optimizer keeps for each entry of a float32 parameter."""
    size = 2**20
    leaves = jax.tree.leaves(jax.eval_shape(optimizer.init, jax.ShapeDtypeStruct((size,), np.float32)))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves if math.prod(x.shape) >= size) / size
