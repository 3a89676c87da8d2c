"""Predicts memory, bytes and time of a step on machines that are not available here, with their compilers."""

import math
import re
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from ..analysis import cost, pods
from ..analysis.base import dtype_name
from ..analysis.cost import Chip
from ..analysis.memory import memory
from ..analysis.overlap import Overlap, Span, overlap
from ..runtime.distribute import distribute
from .models.base import TrainingMethod, Workload, check_batch, parameters_of
from .training.one_worker import Offload, one_worker

AXIS = "data"
HOST = "pinned_host"
TARGETS = (
    "v5e:16x16, v5p:4x4x8, v6e:8x8, tpu7x:4x4x4 (TPU: generation and shape), h100:4x8, h200:2x8 (GPU: nodes and GPUs "
    "of a node)"
)
_SOLID = ("v5p", "tpu7x")  # whose torus has three dimensions
_TEMPORARIES = re.compile(r"HLO temporaries \(([\d.]+)([KMGT]?)\)")
_USED = re.compile(r"[Uu]sed ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm")
_UNITS = {"": 1.0, "K": 2.0**10, "M": 2.0**20, "G": 2.0**30, "T": 2.0**40}


class LinkUse(NamedTuple):
    """The use of one class of links in a step: bytes that one device sends, and seconds of the collectives."""

    link: str
    bytes: float
    seconds: float


class CollectiveUse(NamedTuple):
    """All collectives of one kind and dtype: their count, the bytes of one device, and how long the step waits."""

    kind: str
    dtype: str
    workers: int
    count: int
    wire_bytes: float
    asynchronous_bytes: float
    seconds: float
    exposed_seconds: float


class Planned(NamedTuple):
    """Memory, bytes and time of a step. Times and bytes are NaN for a program that the compiler refused."""

    target: str
    devices: int
    chip: Chip
    parameters: int  # the size of the model
    fits: bool  # true if the program fits the memory of a device
    device_bytes: Mapping[str, float]  # bytes on each device, by purpose
    host_bytes: Mapping[str, float]  # bytes in host memory for each device, by purpose
    peak: float  # peak memory of a device
    advice: tuple[str, ...]  # options to turn on
    compile_seconds: float  # time to trace and compile
    # bytes that one worker sends in a step; on average for methods that synchronize every few steps
    wire_bytes: float = math.nan
    collectives: tuple[CollectiveUse, ...] = ()  # the collectives of the step that sends most
    links: tuple[LinkUse, ...] = ()  # their use of each class of links
    seconds: float = math.nan  # the step, on average if steps differ; at best, unless the chip was measured
    compute_seconds: float = math.nan  # computation in it
    exposed_seconds: float = math.nan  # waiting for collectives, on average
    flops: float = math.nan  # operations of one device in matrix products
    spans: tuple[Span, ...] = ()  # the timeline of the step that sends most
    warnings: tuple[str, ...] = ()  # parts of the program that could not be read


def check_target(target: str, num_slices: int = 1) -> str:
    """Returns the name of the chip in a target; raises ValueError if it is not spelled as in `TARGETS`."""
    found = re.fullmatch(r"(\w+):(\d+)x(\d+)(x\d+)?", target)
    name = found.group(1) if found else ""
    if not found or name not in cost.CHIPS or bool(found.group(4)) != (name in _SOLID):
        raise ValueError(f"unknown target {target!r}; there are {TARGETS}")
    if name in pods.GPUS and num_slices != 1:
        raise ValueError(f"--slices is for TPUs; for {target} give the number of nodes, as in {name}:8x8")
    return name


def mesh_of(target: str, num_slices: int = 1) -> tuple[Chip, jax.sharding.Mesh]:
    """The chip of a target such as `"v5e:16x16"` or `"h100:4x8"`, and a mesh with one axis over its devices."""
    name = check_target(target, num_slices)
    if name in pods.GPUS:
        return cost.CHIPS[name], pods.gpu(target)
    devices = pods.tpu(target, num_slices=num_slices).devices.reshape(-1)
    return cost.CHIPS[name], jax.sharding.Mesh(devices, (AXIS,))


def plan(
    target: str,
    workload: Workload,
    method: TrainingMethod,
    *,
    offload: Offload | None = None,
    batch_size: int | None = None,
    num_slices: int = 1,
    compiler_options: Mapping[str, Any] | None = None,
) -> Planned:
    """Compiles the step of `train.prepare` for a target and reads memory, bytes and time from the program.

    The optimizer state may not be on a disk, since nothing is compiled for that. The default batch is one example for
    each worker. A plan with `fits=False` is returned for a program that does not fit.
    """
    chip, mesh = mesh_of(target, num_slices)
    batch_size = mesh.size if batch_size is None else batch_size
    check_batch(batch_size, mesh.size)
    if offload is not None and offload.folder is not None:
        raise ValueError("--offload nvme works between the steps, where nothing is compiled: plan with --offload host")
    worker = one_worker(workload, method, offload, axis=AXIS)
    rows = workload.batch(0, 0, batch_size)
    start = time.perf_counter()
    # Shapes with shardings: nothing of this size is allocated here.
    shapes, batch = pods.abstract(partial(worker.make_state, 0), rows, mesh, axis=AXIS)
    arguments = _argument_bytes(shapes, batch)
    known = {"target": target if num_slices == 1 else f"{num_slices} x {target}", "devices": mesh.size, "chip": chip}
    known |= {"parameters": parameters_of(workload)}
    # Lowering stays outside of the `try`: its errors are mistakes in the step, not a lack of memory.
    lowered = distribute(worker.step, mesh, axis=AXIS).lower(shapes, batch)
    try:
        compiled = lowered.compile(compiler_options=None if compiler_options is None else dict(compiler_options))
    except jax.errors.JaxRuntimeError as error:
        if compiler_options and "INVALID_ARGUMENT" in str(error):
            raise ValueError(f"--xla: {error}") from error
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _plan_refused(str(error), known, arguments, method, offload, time.perf_counter() - start)
    compile_seconds = time.perf_counter() - start
    cluster = cost.of_mesh(chip.name, mesh)
    # One step of a round takes the branch that sends most, the others the one that sends least.
    most = overlap(compiled, cluster, branch="max")
    period = method.sync_period or 1
    least = overlap(compiled, cluster, branch="min") if period > 1 else most
    averaged = ("wire_bytes", "seconds", "compute_seconds", "exposed_seconds")
    lows, highs = ([getattr(found, name) for name in averaged] for found in (least, most))
    means = [low + (high - low) / period for low, high in zip(lows, highs)]
    used = memory(compiled)
    # Donated arguments are the outputs: only temporary buffers come on top.
    device = arguments["device"] | {"temporaries": float(used.temporary)}
    host = arguments[HOST] | {"temporaries": float(used.host_temporary)}
    fits = used.peak <= chip.memory
    return Planned(
        **known,
        fits=fits,
        device_bytes=_drop_zeros(device),
        host_bytes=_drop_zeros(host),
        peak=float(used.peak),
        advice=advise(device, chip, method, offload, fits, exposed=means[-1] / means[1] if means[1] else 0.0),
        compile_seconds=compile_seconds,
        **dict(zip(averaged, means)),
        collectives=_group_collectives(most),
        links=_group_links(most, cluster),
        flops=most.flops,
        spans=most.spans,
        warnings=most.warnings,
    )


def _argument_bytes(state: Any, batch: Any) -> dict[str, dict[str, float]]:
    """Bytes of the step's arguments on one device, by memory and by purpose."""
    found: dict[str, dict[str, float]] = {"device": defaultdict(float), HOST: defaultdict(float)}
    for name, tree in (("parameters", state.params), ("optimizer state", state.opt_state), ("batch", batch)):
        for leaf in jax.tree.leaves(tree):
            # Typed keys have no item size; they are made of 32-bit words.
            itemsize = leaf.dtype.itemsize if hasattr(leaf.dtype, "itemsize") else np.dtype(np.uint32).itemsize
            size = math.prod(leaf.sharding.shard_shape(leaf.shape)) * itemsize
            place = HOST if leaf.sharding.memory_kind == HOST else "device"
            # Bytes of one device: a sharded leaf counts as its shard.
            found[place][name] += float(size)
    return found


def _drop_zeros(sizes: Mapping[str, float]) -> dict[str, float]:
    return {name: float(size) for name, size in sizes.items() if size > 0}


def _plan_refused(
    message: str,
    known: dict[str, Any],
    arguments: dict[str, dict[str, float]],
    method: TrainingMethod,
    offload: Offload | None,
    compile_seconds: float,
) -> Planned:
    """The plan of a program that the compiler refused because it does not fit."""
    # The arguments are known without the compiler: a lower bound.
    total = sum(arguments["device"].values())
    peak = total
    # The TPU compiler says how much it would have used, in all or for temporaries; other messages do not.
    if found := _USED.search(message):
        peak = float(found.group(1)) * _UNITS[found.group(2)]
    elif found := _TEMPORARIES.search(message):
        peak = total + float(found.group(1)) * _UNITS[found.group(2)]
    device = arguments["device"] | {"temporaries": max(0.0, peak - total)}
    return Planned(
        **known,
        fits=False,
        device_bytes=_drop_zeros(device),
        host_bytes=_drop_zeros(arguments[HOST]),
        peak=peak,
        advice=advise(device, known["chip"], method, offload, False),
        compile_seconds=compile_seconds,
    )


def _group_collectives(found: Overlap) -> tuple[CollectiveUse, ...]:
    """Collectives by kind, dtype and group size, the most bytes first."""
    groups: dict[tuple[str, str, int], list[Any]] = defaultdict(list)
    for op in found.ops:
        groups[op.collective.kind, dtype_name(op.collective), op.collective.group_size].append(op)
    uses = [
        CollectiveUse(
            *key,
            count=sum(op.collective.count for op in ops),
            wire_bytes=float(sum(op.collective.wire_bytes for op in ops)),
            asynchronous_bytes=float(sum(op.collective.wire_bytes for op in ops if op.asynchronous)),
            seconds=float(sum(op.seconds * op.collective.count for op in ops)),
            exposed_seconds=float(sum(op.exposed_seconds for op in ops)),
        )
        for key, ops in groups.items()
    ]
    return tuple(sorted(uses, key=lambda use: -use.wire_bytes))


def _group_links(found: Overlap, cluster: cost.Cluster) -> tuple[LinkUse, ...]:
    totals: dict[str, list[float]] = {}
    for op in found.ops:
        for crossing in cost.crossings(op.collective, cluster):
            total = totals.setdefault(crossing.link, [0.0, 0.0])
            # A collective inside a loop runs `count` times.
            total[0] += crossing.bytes * op.collective.count
            total[1] += crossing.seconds * op.collective.count
    return tuple(LinkUse(link, *total) for link, total in totals.items())


def advise(
    device: Mapping[str, float],
    chip: Chip,
    method: TrainingMethod,
    offload: Offload | None,
    fits: bool,
    *,
    exposed: float = 0.0,
) -> tuple[str, ...]:
    """Options to turn on, the largest gain first; `exposed` is the share of a mean step that waits for the network."""
    lines = []
    can_shard = method.sync_period is None and method.reducer is not None
    state = device.get("parameters", 0) + device.get("optimizer state", 0)
    if not fits:
        # Below a twentieth of the memory, sharding or moving it would slow the step and gain little.
        can_shard = can_shard and state > 0.05 * chip.memory
        if can_shard and method.stage == 0:
            lines.append("--zero 1 shards the optimizer state over the workers, --zero 3 the parameters too")
        elif can_shard and method.stage < 3:
            lines.append("--zero 3 shards the parameters too")
        if offload is None and device.get("optimizer state", 0) > 0.05 * chip.memory:
            lines.append("--offload host keeps the optimizer state in host memory")
        if device.get("temporaries", 0) > state:
            lines.append("temporaries are the larger part: fewer examples on each device (--batch), or more devices")
        if not lines:
            lines.append("more devices, or devices with more memory")
    # Less than a fifth of the step is not worth another method.
    elif exposed > 0.2:
        lines.append(f"communication is not hidden: {_cure_of(method)}")
    return tuple(lines)


def _cure_of(method: TrainingMethod) -> str:
    """What makes the communication of a method a smaller part of the step."""
    if method.reducer is not None and not method.stage:
        return "a --reducer with fewer bytes, or --sync diloco:H=50"
    other = ", or --reducer two_shot:int8" if method.stage else ", or a larger H" if method.sync_period else ""
    return f"more examples on each device (--batch){other}"
