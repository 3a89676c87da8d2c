"""Measures the links between the devices of a mesh, and the computation of a reducer."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from .._core.checks import check_range
from .._core.compat import shard_map
from .._core.types import Array, AxisNames, Like, PyTree
from ..comm.base import Comm, alone
from ..comm.over import over
from ..reducers.exact import exact
from ..reducers.reducer import Reducer
from ..state.marks import PerWorker, Sharded, axis_tuple, map_marked
from ..state.placement import init_state
from ..state.placement import workers as state_workers
from .cost import Link

_AXIS = "simulated"
SIZES = (2**10, 2**14, 2**18, 2**22)


def measure_link(mesh: Mesh, *, axis: AxisNames = "data", sizes: Sequence[int] = SIZES, turns: int = 7) -> Link:
    """Times means of several sizes and fits seconds a hop, and bytes a second that one worker sends.

    Every process of the mesh must call it. A mean of `n` bytes over a ring of `W` workers takes `2(W-1)` hops and sends
    `2(W-1)/W n` bytes; the fit minimizes relative errors. On one machine it measures memory, not a network.

    *On the wire*: `turns + 1` means of each size.

    Args:
      mesh: the devices, of all processes.
      axis: the axis or axes whose links are measured.
      sizes: bytes of the means, at least two different ones.
      turns: how often each is timed; the median is used.

    Examples:
      >>> import jaxdist as jd
      >>> jd.runtime.use_cpu_devices(8)
      >>> link = measure_link(jd.make_mesh({"data": 2}), sizes=(2**10, 2**16), turns=3)
      >>> link.bandwidth > 0 and link.latency >= 0
      True
    """
    workers = state_workers(mesh, axis)
    if workers < 2:
        raise ValueError(f"axis {axis!r} has a single worker: there is no link to measure; give a cost.Link instead")
    check_range("turns", turns, 1, ends="[]")
    if len(set(sizes)) < 2:
        raise ValueError(f"sizes must contain two different sizes, to tell latency from bandwidth, got {tuple(sizes)}")
    specs = {"in_specs": PartitionSpec(), "out_specs": PartitionSpec(), "axis_names": set(axis_tuple(axis))}
    mean = jax.jit(shard_map(lambda x: over(axis).mean(over(axis).varying(x)), mesh=mesh, **specs, check_vma=True))
    values = (jnp.ones(max(1, size // 4), jnp.float32) for size in sizes)
    medians = [statistics.median(seconds_of(partial(mean, x), turns)) for x in values]
    latency, beta = fit(sizes, medians, workers)
    return Link("measured", latency, 1 / beta)


def fit(sizes: Sequence[int], seconds: Sequence[float], workers: int) -> tuple[float, float]:
    """Fits seconds per hop and seconds per byte, neither negative, to the times of all-reduces.

    Examples:
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
    """Times `turns` calls until their results are ready, after a first call that compiles."""
    jax.block_until_ready(call())
    return [_seconds(call) for _ in range(turns)]


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def codec_seconds(reducer: Reducer, like: PyTree[Like], *, workers: int, turns: int = 5) -> float:
    """Times what a reducer computes in one step: packing, encoding, decoding, factorizing.

    It is the difference of two programs that subtract updates from parameters, one their mean by `reducer`, the other
    those of a worker that trains alone, which take turns. In a step, too, the mean goes straight into the optimizer: a
    reducer that is timed by itself seems slower than it is, by the memory that both programs read and write.

    It runs on one device, with the other workers simulated by copies of this one's payload, so that a gather of `W`
    payloads is decoded `W` times as in a real job. Nothing is sent and no waiting is counted: `collectives` of the step
    and a link give those. Random updates of unit variance replace gradients, and the state is that of the first steps.

    Args:
      reducer: the reducer; it must not need a second axis.
      like: arrays or shapes of the trees to reduce.
      workers: the number of workers, `W`.
      turns: runs after the compiling one; the result is the median of their differences, or 0 if that is negative.

    Examples:
      >>> import jax, jaxdist as jd
      >>> like = jax.ShapeDtypeStruct((512, 512), "float32")
      >>> 0 < codec_seconds(jd.compressed(jd.qsgd(4)), like, workers=16) < 10
      True
    """
    for name, value in (("workers", workers), ("turns", turns)):
        check_range(name, value, 1, ends="[]")
    runs = [
        _make_run(reducer, like, partial(_simulate_comm, workers), _state_of_one_worker(reducer, like, workers)),
        _make_run(exact(), like, lambda zero: alone(), ()),
    ]
    for run in runs:
        jax.block_until_ready(run())
    # In turns, as machines drift.
    differences = [own - idle for own, idle in ([_seconds(run) for run in runs] for _ in range(turns))]
    return max(0.0, statistics.median(differences))


def _make_run(
    reducer: Reducer, like: PyTree[Like], make_comm: Callable[[Array], Comm], state: PyTree
) -> Callable[[], Any]:
    """Makes a function that reduces updates of one worker, and subtracts the mean from its parameters."""
    leaves, tree = jax.tree.flatten(like)
    # Sparse or constant updates could be cheaper to encode than real gradients.
    keys = jax.random.split(jax.random.key(0), max(1, len(leaves)))
    updates = tree.unflatten(jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, leaves, strict=False))
    carry = (jax.tree.map(jnp.zeros_like, updates), state)

    @partial(jax.jit, donate_argnums=1)
    def reduce(updates, carry, zero):
        params, state = carry
        reduced, state = reducer.reduce(updates, state, make_comm(zero))
        return jax.tree.map(jnp.subtract, params, reduced.mean), state

    def run():
        nonlocal carry
        carry = reduce(updates, carry, jnp.int32(0))
        return carry

    return run


def _state_of_one_worker(reducer: Reducer, like: PyTree[Like], workers: int) -> PyTree:
    """Makes the state of the first worker, with its marks, as inside a step."""

    def take_first(marks, x):
        for mark in marks:
            if isinstance(mark, PerWorker) and axis_tuple(mark.axis):
                x = x[0]
            elif isinstance(mark, Sharded) and axis_tuple(mark.axis):
                x = x.reshape(workers, -1)[0]
        return x

    # In one program, which then never materializes the state of all workers.
    return jax.jit(lambda: map_marked(take_first, init_state(lambda: reducer.init(like), workers, axis=_AXIS)))()


def _simulate_comm(workers: int, zero: Array) -> Comm:
    """Makes a group whose other workers send what this one does.

    `zero` is 0, but the compiler cannot know it: it would decode equal rows once instead of `W` times.
    """

    def gather(x):
        never = jnp.arange(workers).reshape(-1, *[1] * x.ndim) < zero
        return jnp.where(never, jnp.zeros_like(x), x[None])

    # The barrier stands for the transport: around a plain identity XLA would leave out packing and unpacking.
    identity = jax.lax.optimization_barrier

    return Comm(
        size=workers,
        index=jnp.zeros((), jnp.int32) + zero,
        mean=identity,
        sum=identity,
        max=identity,
        all_gather=lambda tree, *, agreed=True: jax.tree.map(gather, tree),
        all_to_all=identity,
        reduce_scatter_mean=partial(jax.tree.map, lambda x: x[zero]),
        ppermute=lambda tree, pairs: tree,
        varying=identity,
    )
