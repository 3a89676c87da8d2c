"""A run on machines that are not here: what its step takes in memory, bytes and time, by the machines' compilers."""

import math
import re
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from ..analysis import cost, pods
from ..analysis.base import dtype_name
from ..analysis.cost import Chip
from ..analysis.hlo.simulate_schedule import Span
from ..analysis.memory import memory
from ..analysis.overlap import Overlap, overlap
from ..runtime.distribute import distribute
from .models.base import Method, Workload, check_batch, parameters_of
from .training.offloaded import Offload
from .training.one_worker import one_worker

AXIS = "data"
HOST = "pinned_host"
TARGETS = (
    "v5e:16x16, v5p:4x4x8, v6e:8x8 (TPU: generation and shape), h100:4x8, h200:2x8 (GPU: nodes and GPUs of a node)"
)
_USED = re.compile(r"[Uu]sed ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm")
_UNITS = {"": 1.0, "K": 2.0**10, "M": 2.0**20, "G": 2.0**30, "T": 2.0**40}


class Sent(NamedTuple):
    """What crosses one class of links in a step: bytes that one device sends, and seconds of the collectives."""

    link: str
    bytes: float
    seconds: float


class Kind(NamedTuple):
    """All collectives of one kind and dtype: how many, the bytes of one device, and how long the step waits."""

    kind: str
    dtype: str
    workers: int
    count: int
    wire_bytes: float
    asynchronous_bytes: float
    seconds: float
    exposed_seconds: float


class Planned(NamedTuple):
    """What a step needs and takes.

    Attributes:
      target: as it was asked for, and how many devices that is.
      devices: of the target.
      chip: what they are.
      parameters: of the model.
      fits: whether the program fits the memory of a device.
      device_bytes: on each device, by what it is; all that is known of a program that the compiler refused.
      host_bytes: in the host's memory, of one device's share, by what it is.
      peak: of the device's memory.
      wire_bytes: what one worker sends in a step; of a method that meets every few steps, on average.
      kinds: the collectives of the step (that sends most).
      links: the same by class of links.
      seconds: of the step at best, on average where steps differ.
      compute_seconds: of computation in it.
      exposed_seconds: of waiting for collectives, on average.
      flops: of one device's products of matrices.
      spans: of the step that sends most, for the picture.
      advice: what to turn on, in words.
      compile_seconds: what tracing and compiling took.
      warnings: what could not be read from the program.
    """

    target: str
    devices: int
    chip: Chip
    parameters: int
    fits: bool
    device_bytes: Mapping[str, float]
    host_bytes: Mapping[str, float]
    peak: float
    wire_bytes: float
    kinds: tuple[Kind, ...]
    links: tuple[Sent, ...]
    seconds: float
    compute_seconds: float
    exposed_seconds: float
    flops: float
    spans: tuple[Span, ...]
    advice: tuple[str, ...]
    compile_seconds: float
    warnings: tuple[str, ...]


def check_target(target: str, num_slices: int = 1) -> str:
    """The name of the chip in a target.

    Raises:
      ValueError: the target is not spelled as those in `TARGETS`.
    """
    found = re.fullmatch(r"(\w+):(\d+)x(\d+)(x\d+)?", target)
    name = found.group(1) if found else ""
    if not found or name not in cost.CHIPS or bool(found.group(4)) != (name == "v5p"):
        raise ValueError(f"unknown target {target!r}; there are {TARGETS}")
    if name in pods.GPUS and num_slices != 1:
        raise ValueError(f"slices are of TPUs; for {target} say how many nodes, as in {name}:8x8")
    return name


def mesh_of(target: str, num_slices: int = 1) -> tuple[Chip, jax.sharding.Mesh]:
    """The chip and the mesh, along one axis of workers, of a target such as `"v5e:16x16"` or `"h100:4x8"`.

    Raises:
      ValueError: the target is not known, or what compiles for it is not installed.
    """
    name = check_target(target, num_slices)
    if name in pods.GPUS:
        return cost.CHIPS[name], pods.gpu(target)
    devices = pods.tpu(target, num_slices=num_slices).devices.reshape(-1)
    return cost.CHIPS[name], jax.sharding.Mesh(devices, (AXIS,))


def plan(
    target: str,
    workload: Workload,
    method: Method,
    *,
    offload: Offload | None = None,
    batch_size: int | None = None,
    num_slices: int = 1,
    compiler_options: Mapping[str, Any] | None = None,
) -> Planned:
    """Compiles the step of `train.prepare` for a target, and says what it takes.

    Args:
      target: `"v5e:16x16"`, `"h100:4x8"`; `TARGETS` has more.
      workload: what to train.
      method: how workers learn from each other.
      offload: where the optimizer's state lies; on disk, nothing is planned for the part between two steps.
      batch_size: examples in a step, all workers together; by default one for each.
      num_slices: of TPUs.
      compiler_options: flags of XLA.

    Returns:
      A `Planned`; one that does not fit says so.

    Raises:
      ValueError: the target is not known or its compiler not installed, or the method cannot work.
    """
    chip, mesh = mesh_of(target, num_slices)
    batch_size = mesh.size if batch_size is None else batch_size
    check_batch(batch_size, mesh.size)
    if offload is not None and offload.folder is not None:
        raise ValueError("--offload nvme works between the steps, where nothing is compiled: plan with --offload host")
    one = one_worker(workload, method, offload, axis=AXIS)
    rows = workload.batch(0, 0, batch_size)
    start = time.perf_counter()
    make_state = lambda: one.make_state(0)  # noqa: E731
    shapes, batch = pods.abstract(make_state, rows, mesh, axis=AXIS)
    held = _held(shapes, batch)
    known = {"target": target if num_slices == 1 else f"{num_slices} x {target}", "devices": mesh.size, "chip": chip}
    known |= {"parameters": parameters_of(workload)}
    lowered = distribute(one.step, mesh, axis=AXIS).lower(shapes, batch)
    try:
        compiled = lowered.compile(compiler_options=None if compiler_options is None else dict(compiler_options))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _refused(str(error), known, held, method, offload, time.perf_counter() - start)
    took = time.perf_counter() - start
    where = cost.of_mesh(chip.name, mesh)
    most = overlap(compiled, where, branch="max")
    period = method.sync_period or 1
    least = overlap(compiled, where, branch="min") if period > 1 else most

    def mean(name: str) -> float:
        low, high = getattr(least, name), getattr(most, name)
        return low + (high - low) / period

    used = memory(compiled)
    device = dict(held["device"]) | {"temporaries": float(used.temporary)}
    host = dict(held[HOST]) | {"temporaries": float(used.host_temporary)}
    fits = used.peak <= chip.memory
    return Planned(
        **known,
        fits=fits,
        device_bytes=_kept(device),
        host_bytes=_kept(host),
        peak=float(used.peak),
        wire_bytes=mean("wire_bytes"),
        kinds=_kinds(most),
        links=_links(most, where),
        seconds=mean("seconds"),
        compute_seconds=mean("compute_seconds"),
        exposed_seconds=mean("exposed_seconds"),
        flops=most.flops,
        spans=most.spans,
        advice=advise(device, chip, method, offload, most, fits),
        compile_seconds=took,
        warnings=most.warnings,
    )


def _held(state: Any, batch: Any) -> dict[str, dict[str, float]]:
    """Bytes of the arguments on one device, by memory and by what they are."""
    found: dict[str, dict[str, float]] = {"device": defaultdict(float), HOST: defaultdict(float)}
    for name, tree in (("parameters", state.params), ("optimizer state", state.opt_state), ("batch", batch)):
        for leaf in jax.tree.leaves(tree):
            itemsize = leaf.dtype.itemsize if hasattr(leaf.dtype, "itemsize") else np.dtype(np.uint32).itemsize
            size = math.prod(leaf.sharding.shard_shape(leaf.shape)) * itemsize
            place = HOST if leaf.sharding.memory_kind == HOST else "device"
            found[place][name] += float(size)
    return found


def _kept(sizes: Mapping[str, float]) -> dict[str, float]:
    return {name: float(size) for name, size in sizes.items() if size > 0}


def _refused(
    message: str,
    known: dict[str, Any],
    held: dict[str, dict[str, float]],
    method: Method,
    offload: Offload | None,
    took: float,
) -> Planned:
    """The plan of a program that the compiler did not finish, since it does not fit."""
    found = _USED.search(message)
    arguments = sum(held["device"].values())
    peak = float(found.group(1)) * _UNITS[found.group(2)] if found else arguments
    device = dict(held["device"]) | {"temporaries": max(0.0, peak - arguments)}
    return Planned(
        **known,
        fits=False,
        device_bytes=_kept(device),
        host_bytes=_kept(held[HOST]),
        peak=peak,
        wire_bytes=math.nan,
        kinds=(),
        links=(),
        seconds=math.nan,
        compute_seconds=math.nan,
        exposed_seconds=math.nan,
        flops=math.nan,
        spans=(),
        advice=advise(device, known["chip"], method, offload, None, False),
        compile_seconds=took,
        warnings=(),
    )


def _kinds(found: Overlap) -> tuple[Kind, ...]:
    merged: dict[tuple[str, str, int], list[Any]] = defaultdict(list)
    for op in found.ops:
        merged[op.collective.kind, dtype_name(op.collective), op.collective.group_size].append(op)
    kinds = [
        Kind(
            *key,
            count=sum(op.collective.count for op in ops),
            wire_bytes=float(sum(op.collective.wire_bytes for op in ops)),
            asynchronous_bytes=float(sum(op.collective.wire_bytes for op in ops if op.asynchronous)),
            seconds=float(sum(op.seconds * op.collective.count for op in ops)),
            exposed_seconds=float(sum(op.exposed_seconds for op in ops)),
        )
        for key, ops in merged.items()
    ]
    return tuple(sorted(kinds, key=lambda kind: -kind.wire_bytes))


def _links(found: Overlap, where: cost.Cluster) -> tuple[Sent, ...]:
    totals: dict[str, list[float]] = {}
    for op in found.ops:
        for crossing in cost.crossings(op.collective, where):
            total = totals.setdefault(crossing.link, [0.0, 0.0])
            total[0] += crossing.bytes * op.collective.count
            total[1] += crossing.seconds * op.collective.count
    return tuple(Sent(link, *total) for link, total in totals.items())


def advise(
    device: Mapping[str, float],
    chip: Chip,
    method: Method,
    offload: Offload | None,
    found: Overlap | None,
    fits: bool,
) -> tuple[str, ...]:
    """What to turn on, the largest gain first."""
    lines = []
    cut = method.sync_period is None and method.reducer is not None
    state = device.get("parameters", 0) + device.get("optimizer state", 0)
    if not fits:
        if cut and method.stage == 0:
            lines.append("--zero 1 cuts the optimizer's state over the workers, --zero 3 the parameters too")
        elif cut and method.stage < 3:
            lines.append("--zero 3 cuts the parameters too")
        if offload is None and device.get("optimizer state", 0) > 0.05 * chip.memory:
            lines.append("--offload host keeps the optimizer's state in the host's memory")
        if device.get("temporaries", 0) > state:
            lines.append("temporaries are the larger part: fewer examples on each device (--batch), or more devices")
        if not lines:
            lines.append("more devices, or ones with more memory")
    elif found is not None and found.exposed_seconds > 0.2 * found.seconds:
        if method.reducer is not None and method.stage == 0:
            lines.append("communication is not hidden: a --reducer with fewer bytes, or --sync diloco:H=50")
        elif method.stage:
            lines.append(
                "communication is not hidden: more examples on each device (--batch), or --reducer two_shot:int8"
            )
        else:
            lines.append("communication is not hidden: more examples on each device (--batch), or a larger H")
    return tuple(lines)
