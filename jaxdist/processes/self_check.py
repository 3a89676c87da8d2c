"""Each collective once, on whole numbers of which the result is known, where the run will use them."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, PartitionSpec

from .._core.compat import shard_map
from .._core.errors import Portable
from .._core.types import Array
from ..comm.base import Comm
from ..comm.over import over

# Entries of a message: a few, and more than backends send in one piece.
SIZES = (5, 1 << 16)
TOLERANCE = {"int32": 0.0, "float32": 1e-4, "bfloat16": 0.5}  # of numbers up to 40


class CollectiveError(Portable, RuntimeError):
    """A collective gives wrong numbers on this mesh: what is trained here would be wrong too.

    Attributes:
      axis: the mesh axis.
      collectives: their names, as in `Comm`.
    """

    def __init__(self, axis: str, collectives: tuple[str, ...]):
        super().__init__(
            f"wrong numbers from {', '.join(collectives)} over the axis {axis!r}: run `jaxdist doctor`, and try "
            "another version of jaxlib or of its plugin"
        )
        self.axis, self.collectives = axis, collectives


def self_check(mesh: Mesh) -> None:
    """Runs every collective of `Comm` over every axis of a mesh, and raises unless all results are right.

    On small whole numbers of int32, float32 and bfloat16, with a few entries and with 65,536, each worker having its
    own. It takes the time to compile a small program for each axis.

    *On the wire*: for each axis about thirty messages of at most 256 KiB, and a gather of as much.

    Args:
      mesh: the mesh of the run. All its processes must call it together.

    Raises:
      CollectiveError: a collective is wrong; in all processes alike.

    Example:
      >>> import jaxdist as jd
      >>> jd.processes.self_check(jd.make_mesh({"data": 1}))
    """
    for axis in mesh.axis_names:
        wrong = wrong_collectives(mesh, axis)
        if wrong:
            raise CollectiveError(axis, wrong)


def wrong_collectives(mesh: Mesh, axis: str) -> tuple[str, ...]:
    """The names of the collectives that give wrong numbers over one axis, to any worker of the mesh."""
    names = []

    def local():
        wrong: dict[str, Array] = {}
        for size in SIZES:
            for name, dtype, got, want in _collected(over(axis), size):
                bad = ~(jnp.abs(got.astype(jnp.float32) - want) <= TOLERANCE[dtype]).all()  # not a number is bad too
                wrong[name] = bad | wrong.get(name, False)
        names[:] = wrong
        # Every worker says what it saw: what may be wrong is not asked to collect that.
        return jnp.stack(list(wrong.values())).reshape(*[1] * len(mesh.axis_names), -1)

    axes = mesh.axis_names
    run = shard_map(local, mesh=mesh, in_specs=(), out_specs=PartitionSpec(*axes), axis_names=set(axes), check_vma=True)
    shards = [np.asarray(shard.data).reshape(-1) for shard in jax.jit(run)().addressable_shards]
    seen = np.any(shards, axis=0)
    if jax.process_count() > 1:
        seen = seen | np.asarray(multihost_utils.process_allgather(seen)).any(0)
    return tuple(name for name, bad in zip(names, seen, strict=True) if bad)


def _collected(comm: Comm, size: int) -> Iterator[tuple[str, str, Array, Array]]:
    """Of each collective its name, a dtype, what came and what should have come."""
    workers, me = comm.size, comm.index
    places = jnp.arange(size) % 13
    everybody = jnp.arange(workers) % 8  # what tells workers apart; small, for bfloat16
    mine = everybody[me]
    short = places[: max(5, size // workers)]  # of what is as large as all of them
    rows = mine + 3 * everybody[:, None] + short[None]
    turned = [(worker, (worker + 1) % workers) for worker in range(workers)]
    for dtype in TOLERANCE:
        x, y, table = (values.astype(dtype) for values in (mine + places, mine + short, rows))
        if dtype != "bfloat16":  # it does not hold a sum of many
            yield "sum", dtype, comm.sum(x), everybody.sum() + workers * places
            yield "max", dtype, comm.max(x), everybody.max() + places
        if dtype != "int32":
            mean = everybody.mean()
            yield "mean", dtype, comm.mean(x), mean + places
            yield "reduce_scatter_mean", dtype, comm.reduce_scatter_mean(table), mean + 3 * mine + short
            yield "all_gather", dtype, comm.all_gather(y), everybody[:, None] + short[None]
            yield "all_to_all", dtype, comm.all_to_all(table), everybody[:, None] + 3 * mine + short[None]
            yield "ppermute", dtype, comm.ppermute(x, turned), everybody[(me - 1) % workers] + places
