"""The order of a step over a stack of layers, and the computation of each visit to a part."""

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.types import Array, PyTree
from ..nvme.arrays import on_host
from .stack import Programs, StepConfig


class Pass(enum.Enum):
    """What a visit to a part computes: its result, the loss, its gradient, or its update from a gradient."""

    FORWARD = enum.auto()
    EVALUATE = enum.auto()
    BACKWARD = enum.auto()
    UPDATE = enum.auto()


class Visit(NamedTuple):
    """One computation on one part."""

    kind: Pass
    part: int


def list_visits(parts: int, *, train: bool, clips: bool) -> list[Visit]:
    """The visits of a step to this many parts, in order.

    Args:
      train: False computes the loss alone.
      clips: the updates need the norm of all gradients, and so a pass of their own.
    """
    last = parts - 1
    forward = [Visit(Pass.FORWARD, i) for i in range(last)]
    if not train:
        return [*forward, Visit(Pass.EVALUATE, last)]
    # The head's loss and gradient are computed together: it has no visit in the forward pass.
    reverse = range(last, -1, -1)
    backward = [Visit(Pass.BACKWARD, i) for i in reverse]
    # In the same order once more: the gradient that is needed first has been stored for longest.
    return [*forward, *backward, *(Visit(Pass.UPDATE, i) for i in reverse if clips)]


class Passes:
    """The state of a step between its visits to parts: activations, and the gradient of the current one.

    Args:
      parts: the parameters of each part, or their shapes.
      examples: each worker's number of examples, or `None`.
      train, clips: as for `list_visits`.
    """

    def __init__(
        self,
        config: StepConfig,
        programs: Programs,
        parts: Sequence[PyTree],
        batch: PyTree,
        examples: np.ndarray | None,
        *,
        train: bool,
        clips: bool,
    ):
        self.config, self.programs, self.train = config, programs, train
        self.batch = config.place_batch(batch)
        self.examples = None if examples is None else config.place_batch(examples)
        programs.check(parts, self.batch, self.examples, train=train)
        self.last = len(parts) - 1
        self.visits = list_visits(len(parts), train=train, clips=clips)
        # The result of each part on the host, until the backward pass takes it.
        self.results: dict[int, PyTree] = {}
        self.x: Any = None
        self.cotangent: Any = None
        self.loss: Any = None

    def forward(self, i: int, params: PyTree) -> None:
        """Computes the result of part `i`, and keeps it on the host for the backward pass."""
        x = self.programs.layer(params, self.x) if i else self.programs.embed(params, self.batch)
        self.x = copy_forwarded(x, params)
        # The head takes its input from the device.
        if self.train and i < self.last - 1:
            self.results[i] = to_host(self.x)

    def evaluate(self, params: PyTree) -> None:
        """Computes the loss."""
        self.loss = self.programs.head(params, self.x, self.batch, self.examples)

    def backward(self, i: int, params: PyTree) -> PyTree:
        """Computes the gradient of part `i`."""
        if i == self.last:
            found = self.programs.head_grads(params, self.x, self.batch, self.examples)
            # Of the activations on the device only the input of a part is left.
            self.x = None
            self.loss, grads, self.cotangent = copy_forwarded(found, params)
        elif i:
            found = self.programs.layer_grads(params, self.take_input(i), self.cotangent, self.examples)
            grads, self.cotangent = copy_forwarded(found, params)
        elif jax.tree.leaves(params):
            found = self.programs.embed_grads(params, self.batch, self.cotangent, self.examples)
            grads = copy_forwarded(found, params)
        else:
            grads = params
        return grads

    def take_input(self, i: int) -> PyTree:
        """The input of layer `i`, on the device; the host keeps it no longer."""
        return to_device(self.results.pop(i - 1))


def to_host(x: PyTree) -> PyTree:
    """Copies activations to host memory, each device its own; they stay where they are if that is host memory."""
    return jax.tree.map(lambda leaf: _move(leaf, "pinned_host"), x)


def to_device(x: PyTree) -> PyTree:
    """The inverse of `to_host`."""
    return jax.tree.map(lambda leaf: _move(leaf, "device"), x)


def _move(leaf: Array, kind: str) -> Array:
    if all(map(on_host, leaf.devices())):
        return leaf
    return jax.device_put(leaf, leaf.sharding.with_memory_kind(kind))


def copy_forwarded(results: PyTree, params: PyTree) -> PyTree:
    """Copies results that are parameters themselves: `jit` returns the argument, whose memory is a buffer of disk."""
    given = {id(leaf) for leaf in jax.tree.leaves(params)}
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if id(leaf) in given else leaf, results)
