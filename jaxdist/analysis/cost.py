"""The speed of chips and links, and the time of a collective in the alpha-beta model."""

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from .base import Collective


class Chip(NamedTuple):
    """One device.

    Attributes:
      name: as in a target, `"v5e"` or `"h100"`.
      flops: operations a second in matrix products, by the dtype of the factors, at JAX's default precision;
        `"other"` for all dtypes that are not listed.
      memory: bytes.
      bandwidth: of the memory, in bytes a second.
      host_bandwidth: between the memories of device and host, one way.
      flops_reached: the share of `flops` that large products reach; 1 if it was not measured.
      bandwidth_reached: the share of `bandwidth` that a large copy reaches; 1 if it was not measured.
      launch: seconds of a kernel beside its work; 0 if they were not measured.
    """

    name: str
    flops: Mapping[str, float]
    memory: float
    bandwidth: float
    host_bandwidth: float
    flops_reached: float = 1.0
    bandwidth_reached: float = 1.0
    launch: float = 0.0

    @property
    def is_measured(self) -> bool:
        """Whether times are those of real kernels, not lower bounds."""
        return self.launch > 0


class Link(NamedTuple):
    """One dimension of a network.

    Attributes:
      name: its class; dimensions with the same name are used together, like the axes of a torus.
      latency: seconds for one hop, the alpha of the model.
      bandwidth: bytes a second that one device sends along this dimension, 1/beta.
    """

    name: str
    latency: float
    bandwidth: float


class Cluster(NamedTuple):
    """Devices and the network between them.

    Attributes:
      chip: the same for all devices.
      links: the dimensions of the network, the slowest first.
      coordinates: of each device in these dimensions, in the order of the flattened mesh.
    """

    chip: Chip
    links: tuple[Link, ...]
    coordinates: tuple[tuple[int, ...], ...]


class Crossing(NamedTuple):
    """One execution of a collective on one class of links: the bytes that a device sends through it, and their time."""

    link: str
    bytes: float
    seconds: float


_T, _G = 1e12, 1e9

# TPU: peak in bfloat16, which float32 products use too by default; memory and its bandwidth as on the pages v5e, v5p,
# v6e and tpu7x below https://cloud.google.com/tpu/docs/. The compiler refuses v5e programs of more than 15.75 GiB, and
# those of more than 94.74 GiB on TPU7x, where a device is one of the two halves of a chip: half of what the page says,
# with no figure for int8. The host's link is a share of PCIe, 16 lanes of generation 3 or more: 15 GB/s ("How To Scale
# Your Model", jax-ml.github.io/scaling-book/tpus, 2025), twice that from v6e on (generation 5).
# GPU: "NVIDIA H100 Tensor Core GPU" and "NVIDIA H200 Tensor Core GPU" data sheets, SXM, without sparsity; float32 is
# TF32, as JAX multiplies by default; PCIe generation 5 has 64 GB/s one way. What programs reach was measured on an H100
# (benchmarks/reports/2026-11-accelerators); an H200 is the same processor with faster memory. The others were not
# measured: "NVIDIA A100 Tensor Core GPU" data sheet, 80 GB SXM; "NVIDIA L40S" data sheet; "NVIDIA Ada GPU Architecture"
# white paper, appendix A, for the RTX 4090, where half precision is added in float32; "NVIDIA Blackwell Architecture
# Technical Brief", HGX B200 at 1000 W, with the 180 GB of the "NVIDIA DGX B200" data sheet. The bandwidth of A100 and
# B200 is that of XLA's descriptions (targets/). PCIe generation 4, of the first three, has 32 GB/s one way.
_HALF = ("bfloat16", "float16")
_HOPPER = {"bfloat16": 989 * _T, "float16": 989 * _T, "float8": 1979 * _T, "int8": 1979 * _T, "other": 494.7 * _T}
_REACHED = {"flops_reached": 0.72, "bandwidth_reached": 0.87, "launch": 4e-6}
CHIPS = {
    "v5e": Chip("v5e", {"int8": 393 * _T, "other": 197 * _T}, 15.75 * 2**30, 819 * _G, 15 * _G),
    "v5p": Chip("v5p", {"int8": 918 * _T, "other": 459 * _T}, 95 * 2**30, 2765 * _G, 15 * _G),
    "v6e": Chip("v6e", {"int8": 1836 * _T, "other": 918 * _T}, 31.25 * 2**30, 1638 * _G, 30 * _G),
    "tpu7x": Chip("tpu7x", {"float8": 2307 * _T, "other": 1153.5 * _T}, 94.74 * 2**30, 3690 * _G, 30 * _G),
    "h100": Chip("h100", _HOPPER | {"float64": 67 * _T}, 84_942_979_072, 3352 * _G, 64 * _G, **_REACHED),
    "h200": Chip("h200", _HOPPER | {"float64": 67 * _T}, 151_397_597_184, 4800 * _G, 64 * _G, **_REACHED),
    "a100": Chip(
        "a100",
        {**dict.fromkeys(_HALF, 312 * _T), "int8": 624 * _T, "float64": 19.5 * _T, "other": 156 * _T},
        85_100_068_864,
        2039 * _G,
        32 * _G,
    ),
    "l40s": Chip(
        "l40s",
        {**dict.fromkeys(_HALF, 362 * _T), "float8": 733 * _T, "int8": 733 * _T, "other": 183 * _T},
        48 * _G,
        864 * _G,
        32 * _G,
    ),
    "rtx4090": Chip(
        "rtx4090",
        {**dict.fromkeys(_HALF, 165.2 * _T), "float8": 330.3 * _T, "int8": 660.6 * _T, "other": 82.6 * _T},
        24 * _G,
        1008 * _G,
        32 * _G,
    ),
    "b200": Chip(
        "b200",
        {
            **dict.fromkeys(_HALF, 2250 * _T),
            "float8": 4500 * _T,
            "int8": 4500 * _T,
            "float64": 40 * _T,
            "other": 1100 * _T,
        },
        180 * _G,
        7672 * _G,
        64 * _G,
    ),
}

# ICI: the pages above give the sum over ports and both directions, 400 GB/s on v5e (4 ports), 1200 on v5p and TPU7x (6)
# and 800 on v6e (4): 50, 100 and 100 GB/s for one port and direction, and a ring along one axis sends in both
# directions. The two devices of a TPU7x chip share its ports. About 1 microsecond a hop ("How To Scale Your Model").
# Between slices, one device's share of its host's network cards: 2 x 100 Gb/s for 8 chips of v5e, 50 Gb/s a chip on
# v5p, 4 x 200 Gb/s for 8 chips of v6e, 100 Gb/s a chip of TPU7x.
_ICI = {"v5e": 100 * _G, "v5p": 200 * _G, "v6e": 200 * _G, "tpu7x": 100 * _G}
_DCN = {"v5e": 3.125 * _G, "v5p": 6.25 * _G, "v6e": 12.5 * _G, "tpu7x": 6.25 * _G}
# Between the devices of a chip, where it has two: "six times faster than a 1D ICI link" (the page tpu7x), which is a
# port. Its latency is not published; a hop of ICI is an upper bound.
_WITHIN_CHIP = {"tpu7x": Link("chip", 1e-6, 600 * _G)}
_DCN_LATENCY = 10e-6  # across a data center's switches; less than the transfer time of messages over 100 kB
# NVLink 4: 900 GB/s both ways (data sheets above). Network: one ConnectX-7 of 400 Gb/s for each GPU (NVIDIA DGX H100
# data sheet). Latencies: a hop of NCCL's rings in its LL128 protocol, `hwLat` of src/graph/tuning.cc: 1.9 and 4 us.
NVLINK, NETWORK = Link("NVLink", 1.9e-6, 450 * _G), Link("network", 4.0e-6, 50 * _G)
# Of the other GPUs: NVLink 3 and 5 have 600 and 1800 GB/s both ways (data sheets above), a DGX A100 a ConnectX-6 of 200
# Gb/s for each GPU, and a DGX B200 the network of a DGX H100. An L40S and an RTX 4090 have no NVLink: their links are
# those of PCIe, and the network is taken to be that of a DGX A100, since no data sheet says one.
_SLOWER_NETWORK, _PCIE = NETWORK._replace(bandwidth=25 * _G), Link("PCIe", 4.0e-6, 32 * _G)
_GPU_LINKS = {
    "a100": (_SLOWER_NETWORK, NVLINK._replace(bandwidth=300 * _G)),
    "b200": (NETWORK, NVLINK._replace(bandwidth=900 * _G)),
    "l40s": (_SLOWER_NETWORK, _PCIE),
    "rtx4090": (_SLOWER_NETWORK, _PCIE),
}


def tpu_links(chip: str, *, slices: bool = False) -> tuple[Link, ...]:
    """Returns the links of a TPU: a data center's network between slices, three axes of ICI, and TPU7x's in a chip."""
    ici = Link("ICI", 1e-6, _ICI[chip])
    within = (_WITHIN_CHIP[chip],) if chip in _WITHIN_CHIP else ()
    return ((Link("DCN", _DCN_LATENCY, _DCN[chip]),) if slices else ()) + (ici, ici, ici) + within


def cluster(chip: Chip | str, shape: Mapping[Link, int] | Sequence[tuple[Link, int]]) -> Cluster:
    """Makes a cluster whose devices are numbered along each dimension of its network in turn.

    Args:
      chip: the device, or its name in `CHIPS`.
      shape: each dimension of the network with its size, the slowest first.

    Examples:
      >>> from jaxdist.analysis import cost
      >>> ethernet = cost.Link("ethernet", latency=50e-6, bandwidth=1.25e9)
      >>> cost.cluster("h100", [(ethernet, 2), (cost.NVLINK, 8)]).coordinates[9]
      (1, 1)
    """
    if isinstance(chip, str):
        chip = _chip(chip)
    pairs = list(shape.items()) if isinstance(shape, Mapping) else list(shape)
    for link, size in pairs:
        if size < 1 or link.bandwidth <= 0:
            raise ValueError(f"{link.name} needs a positive size and bandwidth, got {size} and {link.bandwidth}")
    places = np.indices([size for _, size in pairs]).reshape(len(pairs), -1).T
    return Cluster(
        chip,
        tuple(link for link, _ in pairs),
        tuple(tuple(place) for place in places.tolist()),
    )


def of_mesh(chip: str, mesh: Mesh) -> Cluster:
    """Returns the cluster of a mesh of `pods.tpu` or `pods.gpu`, with the coordinates of its devices."""
    known = _chip(chip)
    devices = list(mesh.devices.flat)
    if chip in _ICI:
        # ICI coordinates within a slice. Between slices, the number of the slice comes first; within a chip of several
        # devices, their number last.
        slices = [getattr(device, "slice_index", None) or 0 for device in devices]
        several = len(set(slices)) > 1
        places = [
            (*([part] if several else []), *device.coords, *([device.core_on_chip] if chip in _WITHIN_CHIP else []))
            for part, device in zip(slices, devices)
        ]
        return Cluster(known, tpu_links(chip, slices=several), tuple(tuple(map(int, p)) for p in places))
    # A node is a process: the id of its first device numbers the others.
    first = {device.process_index: device.id for device in sorted(devices, key=lambda device: -device.id)}
    places = tuple((device.process_index, device.id - first[device.process_index]) for device in devices)
    return Cluster(known, _GPU_LINKS.get(chip, (NETWORK, NVLINK)), places)


def _chip(name: str) -> Chip:
    if name not in CHIPS:
        raise ValueError(f"unknown chip {name!r}; pass one of {', '.join(CHIPS)}, or a cost.Chip")
    return CHIPS[name]


def crossings(op: Collective, where: Cluster) -> tuple[Crossing, ...]:
    """Computes the use that one execution of a collective makes of each class of links, with hierarchical rings.

    Of the `T` bytes that a group of `n` reduces or gathers, a ring over the `k` parts of a class of links with
    `m` members each sends `(k-1)/k · T/m` through that class, twice for an all-reduce, in `k-1` (or twice) hops; along
    several axes of a torus at once, `k_i-1` hops on each. An all-to-all sends `(k-1)/k` of its operand itself.

    The slowest class comes first. Of several groups it is the slowest group's; groups of one member cross none.

    Raises:
      ValueError: the collective is of more devices than the cluster has.

    Examples:
      >>> from jaxdist.analysis import base, cost
      >>> mean = base.make_collective("all-reduce", [("float32", 1024)], groups=((0, 1, 2, 3),), devices=4, where="")
      >>> places = cost.cluster("h100", [(cost.NETWORK, 2), (cost.NVLINK, 2)])
      >>> [(crossing.link, crossing.bytes) for crossing in cost.crossings(mean, places)]
      [('network', 512.0), ('NVLink', 1024.0)]
    """
    groups = op.replica_groups or (tuple(range(len(where.coordinates))),)
    last, count = max((*chain(*groups), *chain(*op.pairs)), default=0), len(where.coordinates)
    if last >= count:
        raise ValueError(f"the program runs on {last + 1} devices or more, the cluster has {count}: pass its own")
    if op.kind == "collective-permute":
        return _crossings_of_permutation(op, where)
    worst: tuple[Crossing, ...] = ()
    # Groups of one mesh axis are alike, except where the first or the last crosses the edge of a node or a slice.
    for group in dict.fromkeys((groups[0], groups[len(groups) // 2], groups[-1])):
        found = _crossings_of_group(op, group, where)
        worst = max(worst, found, key=seconds)
    return worst


def seconds(crossed: Sequence[Crossing]) -> float:
    """Returns the time of a collective: its classes of links work at the same time, as a pipeline."""
    return max((crossing.seconds for crossing in crossed), default=0.0)


def _crossings_of_group(op: Collective, group: Sequence[int], where: Cluster) -> tuple[Crossing, ...]:
    places = np.array([where.coordinates[member] for member in group])
    count = len(places)
    if count < 2:
        return ()
    total = op.bytes * (count if op.kind == "all-gather" else 1)
    times = 2 if op.kind == "all-reduce" else 1
    # From the slowest class to the fastest: `through` counts the parts of the group that its links tell apart.
    found, parts = [], 1
    for name in dict.fromkeys(link.name for link in where.links):
        columns = [n for n, link in enumerate(where.links) if link.name == name]
        through = len(np.unique(places[:, : columns[-1] + 1], axis=0))
        k, parts = through // parts, through
        if k < 2:
            continue
        sizes = [(where.links[n], len(np.unique(places[:, n]))) for n in columns]
        used = [(link, size) for link, size in sizes if size > 1] or sizes[:1]
        # The members of a part share its traffic to other parts; in an all-to-all each has its own.
        members = 1 if op.kind in ("all-to-all", "ragged-all-to-all") else count // through
        sent = times * (k - 1) / k * total / members
        hops = times * sum((min(size, k) - 1) * link.latency for link, size in used)
        found.append(Crossing(name, sent, hops + sent / sum(link.bandwidth for link, _ in used)))
    return tuple(found)


def _crossings_of_permutation(op: Collective, where: Cluster) -> tuple[Crossing, ...]:
    """A permutation is as slow as the slowest link of any pair."""
    slowest = None
    for source, target in op.pairs:
        for n, (here, there) in enumerate(zip(where.coordinates[source], where.coordinates[target])):
            if here != there:
                slowest = n if slowest is None else min(slowest, n)
                break
    if slowest is None:
        return ()
    link = where.links[slowest]
    return (Crossing(link.name, float(op.bytes), link.latency + op.bytes / link.bandwidth),)


def compute_seconds(flops: Mapping[str, float], nbytes: float, chip: Chip) -> float:
    """Returns the time of a kernel: its products or its memory traffic, whichever takes longer, and its launch."""
    products = math.fsum(count / _peak(dtype, chip) for dtype, count in flops.items()) / chip.flops_reached
    work = max(products, nbytes / chip.bandwidth / chip.bandwidth_reached)
    return work + chip.launch if work else 0.0


def _peak(dtype: str, chip: Chip) -> float:
    short = {"bf16": "bfloat16", "f16": "float16", "f64": "float64", "s8": "int8", "u8": "int8"}.get(dtype, dtype)
    return chip.flops.get("float8" if short.startswith("f8") else short, chip.flops["other"])


def offload_efficiency(
    what: str,
    *,
    bandwidth: float | int,
    flops: float | int,
    tokens: int | None = None,
    width: int | None = None,
    every: int = 1,
) -> float:
    """The share of a step in which a device computes, if what is offloaded moves while it waits.

    `ait · bandwidth / (ait · bandwidth + flops)`, with `ait` the operations for each byte that moves, of a transformer
    that recomputes its activations in mixed precision (8 operations a parameter and token):

    | `what` | moves | `ait` |
    |---|---|---|
    | `"parameters"` | 8 bytes a parameter: loaded three times, gradients stored | `tokens` |
    | `"optimizer"` | 32 bytes a parameter: 16 read and 16 written | `tokens / 4` |
    | `"activations"` | checkpoints of every `every`-th block, written and read | `24 width every` |

    Parameters and activations can move while the device computes, so half is enough for them; the optimizer's state can
    not, unless the step is delayed.

    Args:
      what: what is offloaded: `"parameters"` with their gradients, `"optimizer"` or `"activations"`.
      bandwidth: bytes per second between this device and the memory or disk.
      flops: operations per second that the device reaches, not its peak.
      tokens: of this device in a step, for parameters and the optimizer.
      width: of the model, for activations.
      every: the blocks from one checkpoint to the next.

    Raises:
      ValueError: `what` is unknown, or the number that it needs is missing or not positive.

    Examples:
      >>> from jaxdist.analysis import cost
      >>> round(cost.offload_efficiency("parameters", tokens=1024, bandwidth=70e9, flops=70e12), 3)
      0.506
      >>> round(cost.offload_efficiency("activations", width=8192, bandwidth=1e9, flops=70e12), 3)
      0.737

    References:
      Rajbhandari, Ruwase, Rasley, Smith, He, "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep
      Learning", arXiv:2104.07857, 2021 (section 4).
    """
    needed = {"parameters": ("tokens", tokens, 1), "optimizer": ("tokens", tokens, 1 / 4)}
    needed["activations"] = ("width", width, 24 * every)
    if what not in needed:
        raise ValueError(f"what must be one of {', '.join(needed)}, got {what!r}")
    name, number, factor = needed[what]
    numbers = {name: number, "bandwidth": bandwidth, "flops": flops, "every": every}
    for key, value in numbers.items():
        if value is None or not value > 0:
            raise ValueError(f"{key} must be positive for {what!r}, got {value}")
    moved = number * factor * bandwidth
    return moved / (moved + flops)
