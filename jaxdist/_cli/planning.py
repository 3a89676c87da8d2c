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
from ..analysis.transfers import transfers
from ..runtime.distribute import distribute
from ..state.marks import OnHost, flatten_marks
from .models.base import TrainingMethod, Workload, check_batch, parameters_of
from .training.one_worker import Offload, OneWorker, one_worker

AXIS = "data"
LARGEST_HOST = 8  # devices of one machine
NO_HOST = (
    "the compiler of {target} does not take --offload host ahead of time. This is the step with the state on the "
    "device, which is counted in host memory; gradients and updates cross at the full bandwidth of the link"
)
OWN = "gpu"  # a chip that the command line describes
STAND_IN = "h100"  # whose compiler's description it gets
STOOD_IN = (
    f"compiled as for an {STAND_IN}: another chip has other kernels, and other temporary memory. Between its devices "
    "the links are taken to be the same"
)
HOST = "pinned_host"
TARGETS = (
    "v5e:16x16, v5p:4x4x8, v6e:8x8, tpu7x:4x4x4 (TPU: generation and shape), h100:4x8, h200:2x8, a100:1x8, b200:1x8, "
    "l40s:1x4, rtx4090:1x1 (GPU: nodes and GPUs of a node), gpu:1x1 (any, with --memory, --flops, --bandwidth)"
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
    parameters: int  # the size of the model; 0 if it is not known
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
    across: Mapping[str, float] = {}  # bytes that one device sends across axes of the mesh, of a step of one's own
    seconds: float = math.nan  # the step, on average if steps differ; at best, unless the chip was measured
    compute_seconds: float = math.nan  # computation in it
    exposed_seconds: float = math.nan  # waiting for collectives, on average
    flops: float = math.nan  # operations of one device in matrix products
    spans: tuple[Span, ...] = ()  # the timeline of the step that sends most
    disk_bytes: float = 0.0  # bytes allocated on the disk of one process
    disk_traffic: tuple[float, float] = (0.0, 0.0)  # bytes that a step reads from it, and writes to it
    warnings: tuple[str, ...] = ()  # what could not be read from the program, or is not part of it


def check_target(target: str, num_slices: int = 1) -> str:
    """Returns the name of the chip in a target; raises ValueError if it is not spelled as in `TARGETS`."""
    found = re.fullmatch(r"(\w+):(\d+)x(\d+)(x\d+)?", target)
    name = found.group(1) if found else ""
    if not found or name not in (*cost.CHIPS, OWN) or bool(found.group(4)) != (name in _SOLID):
        raise ValueError(f"unknown target {target!r}; there are {TARGETS}")
    if name in (*pods.GPUS, OWN) and num_slices != 1:
        raise ValueError(f"--slices is for TPUs; for {target} give the number of nodes, as in {name}:8x8")
    return name


def describe_chip(
    target: str, *, memory: float | None = None, flops: float | None = None, bandwidth: float | None = None
) -> Chip | None:
    """The chip of a target with these figures in place of its own; None if there are none to replace.

    `memory` is in bytes, `flops` those of a second in matrix products of any dtype, `bandwidth` of its memory. The
    target `gpu:1x1` needs all three; its link to the host is taken to be PCIe 4 with 16 lanes, 32 GB/s.
    """
    name = target.partition(":")[0]
    given = {"memory": memory, "bandwidth": bandwidth, "flops": None if flops is None else {"other": flops}}
    changed = {key: value for key, value in given.items() if value is not None}
    if name != OWN:
        # What large products and copies reach was measured on the chip as it is.
        best = {"flops_reached": 1.0, "bandwidth_reached": 1.0, "launch": 0.0}
        return cost.CHIPS[name]._replace(**changed, **best) if changed else None
    missing = [f"--{key}" for key in ("memory", "flops", "bandwidth") if key not in changed]
    if missing:
        raise ValueError(
            f"{target} is a chip of your own and needs {', '.join(missing)}, as in --memory 24GB --flops 165e12 "
            "--bandwidth 1TB/s; named chips have them"
        )
    return Chip(OWN, changed["flops"], changed["memory"], changed["bandwidth"], 32e9)


def mesh_of(target: str, num_slices: int = 1, axes: Mapping[str, int] | None = None) -> tuple[Chip, jax.sharding.Mesh]:
    """The chip of a target such as `"v5e:16x16"` or `"h100:4x8"`, and a mesh over its devices, by default of one axis.

    `axes` are those of the mesh, slow links first.
    """
    name = check_target(target, num_slices)
    if name == OWN:
        stand_in = target.replace(OWN, STAND_IN, 1)
        try:
            return cost.CHIPS[STAND_IN], pods.gpu(stand_in, axes)
        except ValueError as problem:
            # Nobody has named that chip.
            raise ValueError(str(problem).replace(stand_in, target)) from problem
    if name in pods.GPUS:
        return cost.CHIPS[name], pods.gpu(target, axes)
    if axes is not None:
        return cost.CHIPS[name], pods.tpu(target, axes, num_slices=num_slices)
    devices = pods.tpu(target, num_slices=num_slices).devices.reshape(-1)
    return cost.CHIPS[name], jax.sharding.Mesh(devices, (AXIS,))


def plan(
    target: str,
    workload: Workload,
    method: TrainingMethod,
    *,
    chip: Chip | None = None,
    offload: Offload | None = None,
    batch_size: int | None = None,
    num_slices: int = 1,
    compiler_options: Mapping[str, Any] | None = None,
) -> Planned:
    """Compiles the step of `train.prepare` for a target and reads memory, bytes and time from the program.

    With an optimizer state on a disk, what is compiled is the step until the mean gradients. The default batch is one
    example for each worker. A plan with `fits=False` is returned for a program that does not fit. `chip` replaces the
    target's, as from `describe_chip`: the compiler is still that of the target.

    Raises:
      ValueError: the compiler failed, in one line.
    """
    compiled_for, mesh = mesh_of(target, num_slices)
    chip = compiled_for if chip is None else chip
    batch_size = mesh.size if batch_size is None else batch_size
    check_batch(batch_size, mesh.size)
    worker = one_worker(workload, method, offload, axis=AXIS)
    start = time.perf_counter()
    traced = _trace(worker, workload.batch(0, 0, batch_size), mesh)
    known = {"target": target if num_slices == 1 else f"{num_slices} x {target}", "devices": mesh.size, "chip": chip}
    known |= {"parameters": parameters_of(workload)}
    moved, waited, notes = 0.0, 0.0, notes_of(chip)
    try:
        if offload is None or offload.folder is not None:
            compiled = compile_for(target, traced.lower(), compiler_options)
        else:
            compiled = _compile_on_host(traced, target, compiler_options, mesh)
        if compiled is None:
            # The same step with its state on the device, which is then counted where it will be.
            moved = sum(traced.bytes[HOST].values())
            waited = sum(transfers(traced.step, traced.state, traced.batch)) / chip.host_bandwidth
            notes = (*notes, NO_HOST.format(target=target))
            plain = _trace(one_worker(workload, method, axis=AXIS), workload.batch(0, 0, batch_size), mesh)
            compiled = compile_for(target, plain.lower(), compiler_options)
    except OutOfMemoryError as error:
        seconds = time.perf_counter() - start
        return _plan_refused(str(error), known, traced.bytes, method, offload, seconds)._replace(warnings=notes)
    used = memory(compiled)
    peak = float(used.peak) - moved
    places = cost.of_mesh(compiled_for.name, mesh)._replace(chip=chip)
    timed = time_of(compiled, places, method.sync_period or 1, waited)
    # Donated arguments are the outputs: only temporary buffers come on top.
    device = traced.bytes["device"] | {"temporaries": float(used.temporary)}
    host = traced.bytes[HOST] | {"temporaries": float(used.host_temporary)}
    found = Planned(
        **known,
        fits=peak <= chip.memory,
        device_bytes=drop_zeros(device),
        host_bytes=drop_zeros(host),
        peak=peak,
        advice=(),
        compile_seconds=time.perf_counter() - start,
        **timed,
    )
    exposed = found.exposed_seconds / found.seconds if found.seconds else 0.0
    advice = advise(device, chip, method, offload, found.fits, devices=mesh.size, exposed=exposed)
    return found._replace(advice=advice, warnings=(*found.warnings, *notes))


def notes_of(chip: Chip) -> tuple[str, ...]:
    """What a reader must know of the chip that a plan is for."""
    return (STOOD_IN,) if chip.name == OWN else ()


class _Traced(NamedTuple):
    """A step, its arguments as shapes with shardings, and the bytes of these on one device by memory and purpose."""

    step: Any
    state: Any
    batch: Any
    bytes: dict[str, dict[str, float]]

    def lower(self) -> jax.stages.Lowered:
        """Traces the step; errors here are mistakes in the step, and raised as they are."""
        return self.step.lower(self.state, self.batch)


def _trace(worker: OneWorker, rows: Any, mesh: jax.sharding.Mesh) -> _Traced:
    # Shapes with shardings: nothing of this size is allocated here.
    state, batch = pods.abstract(partial(worker.make_state, 0), rows, mesh, axis=AXIS)
    return _Traced(distribute(worker.step, mesh, axis=AXIS), state, batch, _argument_bytes(state, batch))


class OutOfMemoryError(Exception):
    """The compiler refused a program that does not fit."""


class _CompilerError(ValueError):
    """The compiler failed."""


def compile_for(
    target: str,
    lowered: jax.stages.Lowered,
    compiler_options: Mapping[str, Any] | None = None,
    *,
    advice: str = "try another --reducer, --zero or --offload to find the part that it does not take",
) -> jax.stages.Compiled:
    """Compiles a step for a target; raises ValueError with the advice if the compiler fails.

    Raises:
      OutOfMemoryError: the program does not fit.
    """
    try:
        return lowered.compile(compiler_options=None if compiler_options is None else dict(compiler_options))
    except Exception as error:
        # What a plugin raises differs between plugins and versions.
        if compiler_options and "INVALID_ARGUMENT" in str(error):
            raise ValueError(f"--xla: {shorten(error)}") from error
        if "RESOURCE_EXHAUSTED" in str(error):
            raise OutOfMemoryError(str(error)) from error
        raise _CompilerError(
            f"the compiler of {target} failed: {shorten(error)}; {advice}, or other versions of jax and its plugin. "
            "JAXDIST_TRACEBACK=1 shows all"
        ) from error


def _compile_on_host(
    traced: _Traced, target: str, compiler_options: Mapping[str, Any] | None, mesh: jax.sharding.Mesh
) -> jax.stages.Compiled | None:
    """Compiles a step with its state in host memory; None if the target's compiler does not take that."""
    if not _has_host_memory(mesh):
        return None
    try:
        return compile_for(target, traced.lower(), compiler_options)
    except _CompilerError:
        return None


def _has_host_memory(mesh: jax.sharding.Mesh) -> bool:
    """Whether the description of devices that are not attached knows of their hosts' memory.

    Of GPUs it does not: JAX ignores the memory of a sharding then, and XLA ends in an internal error where an array on
    the host is donated.
    """
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(), memory_kind=HOST).memory_kind == HOST


def shorten(error: Exception, length: int = 300) -> str:
    """The beginning of a message, in one line: those of compilers list whole programs."""
    line = " ".join((str(error) or type(error).__name__).split())
    return line if len(line) <= length else f"{line[:length]}..."


def time_of(compiled: jax.stages.Compiled, cluster: cost.Cluster, period: int, waited: float = 0.0) -> dict[str, Any]:
    """The fields of `Planned` for communication and time; `waited` seconds in each step are not in the program."""
    # One step of a round takes the branch that sends most, the others the one that sends least.
    most = overlap(compiled, cluster, branch="max")
    least = overlap(compiled, cluster, branch="min") if period > 1 else most
    averaged = ("wire_bytes", "seconds", "compute_seconds", "exposed_seconds")
    lows, highs = ([getattr(found, name) for name in averaged] for found in (least, most))
    means = dict(zip(averaged, [low + (high - low) / period for low, high in zip(lows, highs)]))
    means["seconds"] += waited
    return means | {
        "collectives": _group_collectives(most),
        "links": _group_links(most, cluster),
        "flops": most.flops,
        "spans": most.spans,
        "warnings": most.warnings,
    }


def _argument_bytes(state: Any, batch: Any) -> dict[str, dict[str, float]]:
    """Bytes of the step's arguments on one device, by memory and by purpose."""
    found: dict[str, dict[str, float]] = {"device": defaultdict(float), HOST: defaultdict(float)}
    for name, tree in (("parameters", state.params), ("optimizer state", state.opt_state), ("batch", batch)):
        for marks, _, leaf in flatten_marks(tree):
            size = shard_bytes(leaf)
            # By its mark: the description of a GPU has no host memory, and the sharding forgets that of the array.
            place = HOST if any(isinstance(mark, OnHost) for mark in marks) else "device"
            found[place][name] += size
    return found


def shard_bytes(leaf: Any) -> float:
    """The bytes of an array on one device, of which a sharded one has its shard."""
    # Typed keys have no item size; they are made of 32-bit words.
    itemsize = leaf.dtype.itemsize if hasattr(leaf.dtype, "itemsize") else np.dtype(np.uint32).itemsize
    sharding = getattr(leaf, "sharding", None)
    return float(math.prod(leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)) * itemsize)


def drop_zeros(sizes: Mapping[str, float]) -> dict[str, float]:
    """The purposes that memory is used for, with their bytes."""
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
    peak = peak_of(message, total)
    device = arguments["device"] | {"temporaries": max(0.0, peak - total)}
    return Planned(
        **known,
        fits=False,
        device_bytes=drop_zeros(device),
        host_bytes=drop_zeros(arguments[HOST]),
        peak=peak,
        advice=advise(device, known["chip"], method, offload, False, devices=known["devices"]),
        compile_seconds=compile_seconds,
    )


def peak_of(message: str, arguments: float) -> float:
    """The memory that a program which does not fit needs, if the compiler says it; else that of its arguments."""
    # The TPU compiler says how much it would have used, in all or for temporaries; other messages do not.
    if found := _USED.search(message):
        return float(found.group(1)) * _UNITS[found.group(2)]
    if found := _TEMPORARIES.search(message):
        return arguments + float(found.group(1)) * _UNITS[found.group(2)]
    return arguments


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
    devices: int = 2,
    exposed: float = 0.0,
) -> tuple[str, ...]:
    """Options to turn on, the largest gain first; `exposed` is the share of a mean step that waits for the network."""
    if fits:
        # Less than a fifth of the step is not worth another method.
        return (f"communication is not hidden: {_cure_of(method)}",) if exposed > 0.2 else ()
    lines = []
    can_shard = method.sync_period is None and method.reducer is not None
    state = device.get("parameters", 0) + device.get("optimizer state", 0)
    # Below a twentieth of the memory, sharding or moving it would slow the step and gain little.
    is_large = state > 0.05 * chip.memory
    # A single device has none to share with.
    if devices > 1 and can_shard and is_large and method.stage < 3:
        both = "--zero 1 shards the optimizer state over the workers, --zero 3 the parameters too"
        lines.append("--zero 3 shards the parameters too" if method.stage else both)
    # Of a single device that has no room for the parameters alone, the optimizer state is not the problem.
    has_room = devices > 1 or device.get("parameters", 0) < chip.memory
    if offload is None and has_room and device.get("optimizer state", 0) > 0.05 * chip.memory:
        lines.append("--offload host keeps the optimizer state in host memory, --offload nvme on a disk")
    if can_shard and is_large and not (method.stage and devices > 1) and devices <= LARGEST_HOST:
        # A stage of ZeRO shards nothing on a single device, and would be refused.
        leave = " instead of --zero" if method.stage else ""
        lines.append(
            f"--offload host_layers{leave} (offload.host_layers) keeps parameters and gradients in host memory too, "
            "with three layers on the device at a time"
        )
        lines.append(f"--offload layers{leave} (offload.nvme_layers) keeps all of these on the disk of one machine")
    if device.get("temporaries", 0) > state:
        more = ", or more devices" if devices > 1 else ", or a shorter context (--model gpt:1b,context=1024)"
        lines.append(f"temporaries are the larger part: fewer examples on each device (--batch){more}")
    return tuple(lines or ["more devices, or devices with more memory"])


def _cure_of(method: TrainingMethod) -> str:
    """What makes the communication of a method a smaller part of the step."""
    if method.reducer is not None and not method.stage:
        return "a --reducer with fewer bytes, or --sync diloco:H=50"
    other = ", or --reducer two_shot:int8" if method.stage else ", or a larger H" if method.sync_period else ""
    return f"more examples on each device (--batch){other}"
