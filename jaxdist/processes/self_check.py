"""Runs each collective once on the mesh of the run, with known results."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, PartitionSpec

from .._core.checks import Portable
from .._core.compat import shard_map
from .._core.types import Array
from ..comm.base import Comm
from ..comm.over import over

# Entries of a message: a few, and more than backends send in one chunk.
SIZES = (5, 1 << 16)
TOLERANCE = {"int32": 0.0, "float32": 1e-4, "bfloat16": 0.5}  # of numbers up to 40


class CollectiveError(Portable, RuntimeError):
    """The `collectives` of this name in `Comm` give wrong results over a mesh axis, and so would training."""

    def __init__(self, axis: str, collectives: tuple[str, ...]):
        super().__init__(
            f"wrong results from {', '.join(collectives)} over the axis {axis!r}: run `jaxdist doctor`, and try "
            "another version of jaxlib or of its plugin"
        )
        self.axis, self.collectives = axis, collectives


def self_check(mesh: Mesh) -> None:
    """Runs every collective of `Comm` over every axis of a mesh, and raises an error unless all results are right.

    The inputs are small integers in int32, float32 and bfloat16, with a few entries and with 65,536, different on each
    worker. It takes the time to compile a small program for each axis.

    All processes of the mesh must call it together.

    *On the wire*: for each axis about thirty messages of at most 256 KiB, and a gather of the same size.

    Raises:
      CollectiveError: a collective is wrong; in all processes.

    Examples:
      >>> import jaxdist as jd
      >>> jd.processes.self_check(jd.make_mesh({"data": 1}))
    """
    for axis in mesh.axis_names:
        wrong = wrong_collectives(mesh, axis)
        if wrong:
            raise CollectiveError(axis, wrong)


def wrong_collectives(mesh: Mesh, axis: str) -> tuple[str, ...]:
    """Returns the names of the collectives that give wrong results over one axis, to any worker of the mesh."""
    names = []

    def local():
        wrong: dict[str, Array] = {}
        for size in SIZES:
            for name, dtype, got, want in _run_collectives(over(axis), size):
                # Negated, so that NaN counts as wrong.
                bad = ~(jnp.abs(got.astype(jnp.float32) - want) <= TOLERANCE[dtype]).all()
                wrong[name] = bad | wrong.get(name, False)
        names[:] = wrong
        # Every worker returns its findings: a collective that may be wrong cannot collect them.
        return jnp.stack(list(wrong.values())).reshape(*[1] * len(mesh.axis_names), -1)

    axes = mesh.axis_names
    run = shard_map(local, mesh=mesh, in_specs=(), out_specs=PartitionSpec(*axes), axis_names=set(axes), check_vma=True)
    shards = [np.asarray(shard.data).reshape(-1) for shard in jax.jit(run)().addressable_shards]
    found = np.any(shards, axis=0)
    if jax.process_count() > 1:
        found = found | np.asarray(multihost_utils.process_allgather(found)).any(0)
    return tuple(name for name, bad in zip(names, found, strict=True) if bad)


def _run_collectives(comm: Comm, size: int) -> Iterator[tuple[str, str, Array, Array]]:
    """Yields for each collective its name, a dtype, the result and the expected result."""
    workers, me = comm.size, comm.index
    # Entries differ within a message, so that a shifted or truncated one is noticed.
    places = jnp.arange(size) % 13
    # Distinguish workers; small, to be exact in bfloat16.
    ids = jnp.arange(workers) % 8
    mine = ids[me]
    # For collectives with one row per worker.
    short = places[: max(5, size // workers)]
    rows = mine + 3 * ids[:, None] + short[None]
    ring = [(worker, (worker + 1) % workers) for worker in range(workers)]
    for dtype in TOLERANCE:
        x, y, table = (values.astype(dtype) for values in (mine + places, mine + short, rows))
        # bfloat16 cannot represent a sum of many.
        if dtype != "bfloat16":
            yield "sum", dtype, comm.sum(x), ids.sum() + workers * places
            yield "max", dtype, comm.max(x), np.max(ids) + places
        # Integers have no mean.
        if dtype != "int32":
            mean = ids.mean()
            yield "mean", dtype, comm.mean(x), mean + places
            yield "reduce_scatter_mean", dtype, comm.reduce_scatter_mean(table), mean + 3 * mine + short
            yield "all_gather", dtype, comm.all_gather(y), ids[:, None] + short[None]
            yield "all_to_all", dtype, comm.all_to_all(table), ids[:, None] + 3 * mine + short[None]
            yield "ppermute", dtype, comm.ppermute(x, ring), ids[(me - 1) % workers] + places
