"""Plans of runs with a disk: the optimizer state there (`offload.nvme`), or all of it (`offload.nvme_layers`)."""

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from ..offload.nvme.files import Store
from . import planning
from .models.base import TrainingMethod, Workload
from .models.gpt import GPTConfig
from .models.text import text_workload
from .training.one_worker import Offload, check_combination

# The folder is never made: nothing is written.
DISK = Offload(Path("disk"))
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
    target: str, config: GPTConfig, method: TrainingMethod, *, batch_size: int | None = None
) -> planning.Planned:
    """Plans `offload.nvme_layers`: parameters and optimizer state on a disk, one layer in memory at a time.

    Its programs are those of single layers: temporary memory and time are read from the model with one and with two
    layers, and the rest is counted from shapes.
    """
    if method.sync_period or method.stage or method.reducer is None:
        raise ValueError("--offload layers averages the gradient of each layer: leave --sync and --zero out")
    devices = planning.mesh_of(target)[1].size
    if devices > planning.LARGEST_HOST:
        raise ValueError(
            f"--offload layers is for the devices of one machine, at most {planning.LARGEST_HOST}, and {target} has "
            f"{devices}: use --zero 3, with --offload host or nvme"
        )
    one, two = (
        planning.plan(target, text_workload(config._replace(layers=n)), method, offload=DISK, batch_size=batch_size)
        for n in (1, 2)
    )
    width, state = _entry_bytes(text_workload(config)), _state_bytes(method.optimizer)
    # The parts that are in memory alone: a layer, or the embedding and the head, at most both of these.
    layer = two.parameters - one.parameters
    largest = max(layer, one.parameters - layer)
    parameters = one.parameters + (config.layers - 1) * layer
    device = {
        "parameters": BUFFERS * largest * width,
        "gradients": largest * width,
        "batch": one.device_bytes.get("batch", 0.0),
        "temporaries": one.device_bytes.get("temporaries", 0.0),
    }
    # The host keeps the input of each layer for the backward pass, in float32, for all of its devices.
    examples = one.devices if batch_size is None else batch_size
    inputs = 4.0 * config.layers * examples * config.context * config.width
    host = {"buffers": BUFFERS * largest * (width + state), "gradients": largest * width, "inputs of layers": inputs}
    peak = float(sum(device.values()))
    # The backward pass computes each layer again: four passes in place of three. Parameters cross twice, inputs and
    # gradients once each way.
    computed = 4 / 3 * (one.compute_seconds + (config.layers - 1) * (two.compute_seconds - one.compute_seconds))
    waiting = one.exposed_seconds + (config.layers - 1) * (two.exposed_seconds - one.exposed_seconds)
    crossing = (3.0 * parameters * width + 2 * inputs / one.devices) / one.chip.host_bandwidth
    fits = peak <= one.chip.memory
    return one._replace(
        parameters=parameters,
        fits=fits,
        device_bytes={name: float(size) for name, size in device.items()},
        host_bytes={name: float(size) for name, size in host.items()},
        peak=peak,
        advice=() if fits else ("fewer examples on each device (--batch), or tiles of a layer: offload.tiled_dense",),
        compile_seconds=one.compile_seconds + two.compile_seconds,
        seconds=max(computed + waiting, crossing),
        compute_seconds=computed,
        exposed_seconds=waiting,
        flops=4 / 3 * (one.flops + (config.layers - 1) * (two.flops - one.flops)),
        wire_bytes=one.wire_bytes + (config.layers - 1) * (two.wire_bytes - one.wire_bytes),
        collectives=(),
        links=(),
        spans=(),
        disk_bytes=2 * parameters * (width + state),
        # The parameters are read in both passes.
        disk_traffic=(parameters * (2.0 * width + state), parameters * (width + state)),
        warnings=(
            "counted from the shapes, with the temporary memory and the time of one layer as it is compiled: "
            "see offload.nvme_layers",
        ),
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
