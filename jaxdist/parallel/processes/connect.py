"""The connections of a mesh between processes, opened while all of them are at the same place."""

from itertools import chain, combinations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..._compat import shard_map
from ...comm import over


def connect(mesh: Mesh) -> None:
    """A first message over every set of axes, where gloo carries them: devices that are CPUs of several processes.

    Gloo waits 30 s for the others when it opens a connection, and in what it opened as long as it takes. A process
    that compiles or reads data that much longer than the others must find its connections open.
    """
    if jax.process_count() == 1 or mesh.devices.flat[0].platform != "cpu":
        return
    names = mesh.axis_names
    groups = list(chain.from_iterable(combinations(names, count) for count in range(1, len(names) + 1)))
    sharding = NamedSharding(mesh, PartitionSpec(*names))

    def local(x):
        return sum(over(group).sum(x) for group in groups)

    spec = sharding.spec
    run = shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=set(names), check_vma=True)
    zeros = jax.make_array_from_callback(
        mesh.devices.shape, sharding, lambda index: np.zeros([1] * mesh.devices.ndim, jnp.int32)
    )
    jax.jit(run)(zeros).block_until_ready()
