"""Measures the latency and the bandwidth of the links between the devices of a mesh."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from .._core.compat import shard_map
from .._core.types import AxisNames
from ..comm.over import over
from ..state.marks import axis_tuple
from ..state.placement import workers as state_workers
from .cost import Link

SIZES = (2**10, 2**14, 2**18, 2**22)


def measure_link(mesh: Mesh, *, axis: AxisNames = "data", sizes: Sequence[int] = SIZES, turns: int = 7) -> Link:
    """Times means of several sizes and fits the latency and the bandwidth of the links.

    Every process of the mesh must call it. A mean of `n` bytes over a ring of `W` workers takes `2(W-1)` hops and sends
    `2(W-1)/W n` bytes; the fit minimizes relative errors. On one machine it measures memory, not a network.

    *On the wire*: `turns + 1` means of each size.

    Args:
      mesh: the devices, of all processes.
      axis: the axis or axes whose links are measured.
      sizes: bytes of the means, at least two different ones.
      turns: how often each is timed; the median is used.

    Returns:
      A link named `"measured"`: seconds a hop, and bytes a second that one worker sends.

    Raises:
      ValueError: the axis has a single worker, so there is no link; fewer than two sizes.

    Example:
      >>> import jaxdist as jd
      >>> jd.runtime.use_cpu_devices(8)
      >>> link = measure_link(jd.make_mesh({"data": 2}), sizes=(2**10, 2**16), turns=3)
      >>> link.bandwidth > 0 and link.latency >= 0
      True
    """
    workers = state_workers(mesh, axis)
    if workers < 2:
        raise ValueError(f"axis {axis!r} has a single worker: there is no link to measure; give a cost.Link instead")
    if len(set(sizes)) < 2:
        raise ValueError(f"sizes must contain two different sizes, to tell latency from bandwidth, got {tuple(sizes)}")
    axes = axis_tuple(axis)
    mean = jax.jit(
        shard_map(
            lambda x: over(axis).mean(over(axis).varying(x)),
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            axis_names=set(axes),
            check_vma=True,
        )
    )
    values = (jnp.ones(max(1, size // 4), jnp.float32) for size in sizes)
    medians = [statistics.median(seconds_of(partial(mean, x), turns)) for x in values]
    latency, beta = fit(sizes, medians, workers)
    return Link("measured", latency, 1 / beta)


def fit(sizes: Sequence[int], seconds: Sequence[float], workers: int) -> tuple[float, float]:
    """Fits seconds per hop and seconds per byte, neither negative, to the times of all-reduces.

    Example:
      >>> latency, beta = fit([1000, 1000000], [2 * 3 * 1e-4 + 1.5e-6, 2 * 3 * 1e-4 + 1.5e-3], 4)
      >>> round(latency, 9), round(beta * 1e9, 6)
      (0.0001, 1.0)
    """
    hops = 2.0 * (workers - 1)
    times = np.asarray(seconds, float)
    # T(n) = 2(W-1) α + 2(W-1)/W n β, each equation divided by its measured time.
    rows = np.stack([np.full(len(times), hops), hops / workers * np.asarray(sizes, float)], axis=1)
    relative = rows / times[:, None]
    found, *_ = np.linalg.lstsq(relative, np.ones(len(times)), rcond=None)
    # Noise can make one coefficient negative: set it to zero and fit the other alone.
    for which in (0, 1):
        if found[which] <= 0:
            other = relative[:, 1 - which]
            found[which], found[1 - which] = 0.0, (other @ np.ones(len(times))) / (other @ other)
    return float(found[0]), max(float(found[1]), 1e-15)


def seconds_of(call: Callable[[], Any], turns: int) -> list[float]:
    """Times `turns` calls until their results are ready, after a first call that compiles.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdist.analysis.measured import seconds_of
      >>> len(seconds_of(lambda: jnp.ones(3) + 1, 5))
      5
    """
    jax.block_until_ready(call())
    found = []
    for _ in range(turns):
        start = time.perf_counter()
        jax.block_until_ready(call())
        found.append(time.perf_counter() - start)
    return found
