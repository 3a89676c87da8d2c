"""Means over workers by a second thread, in programs of their own, while the first thread computes.

Within one program XLA:CPU waits in each collective. Two programs that two threads start run side by side, if the pool
of the client has two threads (`NPROC=2`). All processes must start their collectives in one order.
"""

import queue
import threading
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class Reducing:
    """A thread that averages vectors over all processes, in the order in which they are given to it."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.cut = NamedSharding(mesh, PartitionSpec("data"))
        self.orders: queue.Queue = queue.Queue()

        @jax.jit
        @jax.shard_map(mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec())
        def mean(rows):
            return lax.pmean(rows[0], "data")

        self.mean_of_rows = mean
        threading.Thread(target=self._run, daemon=True).start()

    def start(self, vector: jax.Array) -> Any:
        """Starts the mean of this process's vectors; returns it, not computed yet."""
        row = vector[None]
        rows = jax.make_array_from_single_device_arrays((self.mesh.size, *vector.shape), self.cut, [row])
        return self.mean_of_rows(rows).addressable_data(0)

    def submit(self, vector: jax.Array) -> Future:
        """Gives a vector to the thread; the result of the future is the mean, computed."""
        arrived: Future = Future()
        self.orders.put((vector, arrived))
        return arrived

    def _run(self) -> None:
        while True:
            vector, arrived = self.orders.get()
            arrived.set_result(jax.block_until_ready(self.start(vector)))


class Averages:
    """Means of models in the background, of which each process offers one whenever it likes, or pauses.

    Each average is preceded by a number from every process that says whether it has paused: the average takes place
    only if none has. So all take part in the same averages, although none waits for another.
    """

    def __init__(self, mesh: Mesh):
        self.reducing = Reducing(mesh)
        self.offered: queue.Queue = queue.Queue()
        self.free = threading.Event()
        self.free.set()
        self.arrived: Any = None
        self.open = True
        threading.Thread(target=self._run, daemon=True).start()

    def offer(self, params: Any) -> bool:
        """Offers a snapshot, unless an average is on its way or another process has paused."""
        if not self.free.is_set() or not self.open:
            return False
        self.free.clear()
        self.offered.put(params)
        return True

    def take(self) -> tuple[Any, Any] | None:
        """Returns the mean that has arrived and the snapshot that belongs to it, once."""
        if not self.free.is_set():
            return None
        arrived, self.arrived = self.arrived, None
        return arrived

    def pause(self) -> None:
        """Waits until no process will begin another average; the next offer goes on."""
        self.free.wait()
        if self.open:
            self.free.clear()
            self.offered.put(None)
            self.free.wait()
        self.open = True

    def _run(self) -> None:
        while True:
            params = self.offered.get()
            paused = self.reducing.start(jnp.array([0.0 if params is not None else 1.0]))
            if float(np.asarray(paused)[0]) > 0:
                # Until this process pauses too, it offers in vain.
                self.open = False
            else:
                leaves, structure = jax.tree.flatten(params)
                flat = self.reducing.start(join(leaves))
                mean = jax.block_until_ready(split(flat, leaves))
                self.arrived = (structure.unflatten(mean), params)
            self.free.set()


@jax.jit
def join(leaves: list[jax.Array]) -> jax.Array:
    """Returns one vector of all leaves."""
    return jnp.concatenate([leaf.ravel() for leaf in leaves])


@jax.jit
def split(flat: jax.Array, likes: list[jax.Array]) -> list[jax.Array]:
    """Returns leaves of these shapes from the vector of `join`."""
    ends = np.cumsum([leaf.size for leaf in likes])[:-1]
    return [part.reshape(leaf.shape) for part, leaf in zip(jnp.split(flat, ends), likes, strict=True)]
