"""Training layer by layer, beside a queue that sends the most urgent gradient first: ByteScheduler on real links.

The forward and the backward pass of each layer are programs of their own, and so is each message, so that the next
forward pass begins with the layers whose gradients have arrived: it crosses the border of steps. The iterates are those
of synchronous training.

All processes must start their collectives in one order. A live queue in each would not agree; so the order is that of
`jaxdist.schedule.timeline` for the passes and the link as they are measured, once, before training.
"""

import collections
import sys
import threading
import time
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from background import Reducing, join, split
from jax.experimental import multihost_utils
from server import Way

from jaxdist import schedule


def queued(names, functions, tx, problem, mesh, policy="fifo", kib="", parts="1"):
    """Makes a way to train; without a mesh nothing is sent, and each layer moves by its own gradient."""
    layers = Layers(names, functions, tx, problem)
    if mesh is None:
        return Way(lambda number: layers.step(number, layers.keep, layers.take_own))
    size = int(kib) * 256 if kib else max(layers.sizes)
    queue = Queue(layers, mesh, policy, size, int(parts))

    def step(number):
        if policy == "barrier":
            queue.wait()
        return layers.step(number, queue.send, queue.take)

    return Way(step, queue.wait, counts=True)


class Layers:
    """A model whose layers go forward and backward one by one."""

    def __init__(self, names, functions, tx, problem):
        self.last = len(names) - 1
        self.parts = [{key: jnp.asarray(problem.params[key]) for key in of_layer} for of_layer in names]
        self.sizes = [sum(leaf.size for leaf in part.values()) for part in self.parts]
        self.states = [tx.init(part) for part in self.parts]
        self.batches = jax.tree.map(jnp.asarray, problem.batches)
        self.own: list[Any] = [None] * len(names)
        # Tokens and labels have no gradient.
        self.forward = [jax.jit(lambda w, batch: jax.vjp(lambda w: functions[0](w, batch), w))]
        self.forward += [jax.jit(lambda w, x, f=f: jax.vjp(f, w, x)) for f in functions[1:-1]]
        self.forward += [jax.jit(lambda w, x, y: jax.vjp(lambda w, x: functions[-1](w, x, y), w, x))]
        self.backward = jax.jit(self._pull_back)
        self.move = jax.jit(lambda part, state, flat: self._move(tx, part, state, flat))

    @staticmethod
    def _pull_back(pull, cotangent):
        gradient, *rest = pull(cotangent)
        return join(jax.tree.leaves(gradient)), rest

    @staticmethod
    def _move(tx, part, state, flat):
        leaves, structure = jax.tree.flatten(part)
        updates, state = tx.update(structure.unflatten(split(flat, leaves)), state, part)
        return optax.apply_updates(part, updates), state

    def update(self, i, flat):
        self.parts[i], self.states[i] = self.move(self.parts[i], self.states[i], flat)

    def keep(self, i, gradient):
        self.own[i] = gradient

    def take_own(self, i):
        if self.own[i] is not None:
            self.update(i, self.own[i])

    def step(self, number, send, take, times=None):
        """`take(i)` brings layer `i` up to date before its forward pass; `send(i, gradient)` gets its gradient."""
        x, y = self.batches[number % len(self.batches)]
        mark = Stopwatch(times)
        x, pulls = self.batches[number % len(self.batches)], []
        for i in range(self.last + 1):
            take(i)
            mark.start()
            x, pull = jax.block_until_ready(self.forward[i](self.parts[i], x, *([y] if i == self.last else [])))
            mark.stop("forward", i)
            pulls.append(pull)
        loss, cotangent = x, jnp.ones_like(x)
        for i in range(self.last, -1, -1):
            mark.start()
            gradient, rest = jax.block_until_ready(self.backward(pulls.pop(), cotangent))
            mark.stop("backward", i)
            send(i, gradient)
            cotangent = rest[0] if rest else None
        return float(loss)


class Stopwatch:
    """Seconds of each pass of each layer, if they are wanted."""

    def __init__(self, times):
        self.times, self.began = times, 0.0

    def start(self):
        self.began = time.perf_counter()

    def stop(self, kind, i):
        if self.times is not None:
            self.times[kind, i].append(time.perf_counter() - self.began)


class Queue:
    """Sends partitions of gradients in a fixed order, `most` of them at a time, and hands over layers that arrived."""

    def __init__(self, layers, mesh, policy, size, most):
        self.layers, self.most, self.size = layers, most, size
        self.reducing = Reducing(mesh)
        self.counts = [-(-n // size) for n in layers.sizes]
        self.cut = jax.jit(self._cut, static_argnums=1)
        self.order = self._order(policy)
        self.gradients: list[Future] = [Future() for _ in layers.sizes]
        self.arriving: list[Future | None] = [None] * len(layers.sizes)
        self.begin = threading.Semaphore(0)
        threading.Thread(target=self._run, daemon=True).start()

    def _cut(self, gradient, count):
        # Equal parts, so that all messages are one program; a layer that is smaller than a part is sent as it is.
        if count == 1:
            return [gradient]
        return list(jnp.pad(gradient, (0, count * self.size - gradient.size)).reshape(count, self.size))

    def _order(self, policy):
        """The messages `(layer, part)` in the order of the simulated queue."""
        seconds = self._measure()
        profile = schedule.profile_of(
            forward=seconds[: len(self.counts)], backward=seconds[len(self.counts) : -2], sizes=self._bytes()
        )
        overhead, bandwidth = seconds[-2], 1 / seconds[-1]
        free, inside = (schedule.optimum(profile, bandwidth=bandwidth, barrier=barrier) for barrier in (False, True))
        simulated = schedule.timeline(
            profile,
            bandwidth=bandwidth,
            policy="priority" if policy == "priority" else "fifo",
            partition_bytes=4 * self.size,
            credit_bytes=4 * self.size * self.most,
            overhead=overhead,
            barrier=policy == "barrier",
        )
        print(
            f"{policy}, {4 * self.size >> 10} KiB, {self.most} at a time: simulated {1e3 * simulated.makespan:.0f} ms, "
            f"best order {1e3 * free:.0f} ms, with a barrier {1e3 * inside:.0f} ms; "
            f"{1e3 * overhead:.2f} ms a message, {bandwidth / 125e3:.0f} Mbit/s",
            file=sys.stderr,
        )
        return [(message.layer, message.part) for message in simulated.messages]

    def _bytes(self):
        return [4.0 * n for n in self.layers.sizes]

    def _measure(self):
        """Forward and backward seconds of each layer, then those of a message and of a byte: the slowest process's."""
        times: dict = collections.defaultdict(list)
        for number in range(4):
            self.layers.step(number, lambda i, gradient: None, lambda i: None, times)
        found = [min(times[kind, i]) for kind in ("forward", "backward") for i in range(len(self.counts))]
        small, large = (self._message_seconds(count) for count in (1 << 10, 1 << 18))
        per_byte = (large - small) / (4 * ((1 << 18) - (1 << 10)))
        return multihost_utils.process_allgather(np.array([*found, small, per_byte])).max(0).tolist()

    def _message_seconds(self, count):
        vector, found = jnp.ones(count), []
        for _ in range(5):
            began = time.perf_counter()
            jax.block_until_ready(self.reducing.start(vector))
            found.append(time.perf_counter() - began)
        return min(found[1:])

    def send(self, i, gradient):
        if i == self.layers.last:
            # The last layer's gradient comes first: a new round of messages.
            self.arriving = [Future() for _ in self.arriving]
            self.begin.release()
        self.gradients[i].set_result(gradient)

    def take(self, i):
        if self.arriving[i] is not None:
            self.layers.update(i, self.arriving[i].result())
            self.arriving[i] = None

    def wait(self):
        for arriving in self.arriving:
            if arriving is not None:
                arriving.result()

    def _run(self):
        while True:
            self.begin.acquire()
            arriving, gradients = self.arriving, self.gradients
            parts: dict[int, list] = {}
            found: list[list] = [[None] * count for count in self.counts]
            under_way: collections.deque = collections.deque()
            for layer, part in self.order:
                if layer not in parts:
                    parts[layer] = self.cut(gradients[layer].result(), self.counts[layer])
                while len(under_way) >= self.most:
                    self._land(under_way.popleft(), found, arriving)
                under_way.append((layer, part, self.reducing.start(parts[layer][part])))
            # Nobody sends before all has arrived, which the forward pass of the last layer waits for.
            self.gradients = [Future() for _ in self.counts]
            while under_way:
                self._land(under_way.popleft(), found, arriving)

    def _land(self, message, found, arriving):
        layer, part, mean = message
        found[layer][part] = jax.block_until_ready(mean)
        if all(piece is not None for piece in found[layer]):
            whole = found[layer][0] if len(found[layer]) == 1 else jnp.concatenate(found[layer])
            arriving[layer].set_result(whole[: self.layers.sizes[layer]])
