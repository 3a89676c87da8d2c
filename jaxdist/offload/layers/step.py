"""One step over the parts of a stack: the order of reads and writes, and what is computed at each."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ..._core.types import PyTree
from ..nvme.disk import Access
from .optimizer import PartProgram
from .parts import StackPart, reshape_vectors
from .programs import Config, Programs, copy_forwarded, first_copy, place_batch, place_params, to_device, to_host


class _Visit(NamedTuple):
    """One access to a part, and the method that computes on it."""

    run: Callable[[int, PyTree, np.ndarray], None]
    part: int
    access: Access
    needs_params: bool


class Step:
    """The state of a step between its visits to parts: activations, and the gradient of the current one.

    Args:
      updates: the optimizer for the embedding, for layers and for the head; `numbers` are theirs for this step.
      train: False computes the loss alone.
    """

    def __init__(
        self,
        cfg: Config,
        programs: Programs,
        parts: Sequence[StackPart],
        updates: Sequence[PartProgram],
        numbers: Sequence[Sequence[np.ndarray]],
        batch: PyTree,
        clip_norm: float | int | None,
        *,
        train: bool = True,
    ):
        self.cfg, self.programs, self.parts = cfg, programs, parts
        self.updates, self.numbers, self.clip_norm = updates, numbers, clip_norm
        self.batch = place_batch(cfg, batch)
        self.visits = self._schedule(train)
        # Parameters that the reading thread has copied to the device, by visit.
        self.placed: dict[int, PyTree] = {}
        # The result of each part on the host, until the backward pass takes it from the end.
        self.results: list[PyTree] = []
        self.x: Any = None
        self.cotangent: Any = None
        self.loss: Any = None
        self.train = train
        self.square = 0.0

    def _schedule(self, train: bool) -> list[_Visit]:
        last = len(self.parts) - 1
        forward = [_Visit(self.forward, i, self.parts[i].load_params(), True) for i in range(last)]
        if not train:
            return [*forward, _Visit(self.evaluate, last, self.parts[last].load_params(), True)]
        # The head's loss and gradient are computed together: it has no visit in the forward pass.
        reverse = range(last, -1, -1)
        if self.clip_norm is None:
            return [*forward, *(_Visit(self.backward, i, self.parts[i].update(), True) for i in reverse)]
        backward = [_Visit(self.backward, i, self.parts[i].write_grads(), True) for i in reverse]
        # In the same order once more: the gradient that is needed first has been on disk for longest.
        return [*forward, *backward, *(_Visit(self.update, i, self.parts[i].update(), False) for i in reverse)]

    def accesses(self) -> list[Access]:
        """What each visit reads and writes."""
        return [visit.access for visit in self.visits]

    def prepare(self, k: int, data: np.ndarray) -> None:
        """Copies the parameters of visit `k` to the device; called by the reading thread, ahead of the visit."""
        visit = self.visits[k]
        if visit.needs_params:
            part = self.parts[visit.part]
            self.placed[k] = place_params(
                self.cfg, part.model.tree, reshape_vectors(part.model, part.param_vectors(data))
            )

    def visit(self, k: int, data: np.ndarray) -> None:
        """Computes what visit `k` is for. When it returns, nothing reads the buffer any more."""
        visit = self.visits[k]
        if visit.needs_params and k not in self.placed:
            self.prepare(k, data)
        visit.run(visit.part, self.placed.pop(k, None), data)

    def forward(self, i: int, params: PyTree, data: np.ndarray) -> None:
        """Computes the result of part `i`, and keeps it on the host for the backward pass."""
        del data
        x = self.programs.layer(params, self.x) if i else self.programs.embed(params, self.batch)
        self.x = jax.block_until_ready(copy_forwarded(x, params))
        if self.train:
            self.results.append(to_host(self.x))

    def evaluate(self, i: int, params: PyTree, data: np.ndarray) -> None:
        """Computes the loss."""
        del i, data
        self.loss = jax.block_until_ready(self.programs.head(params, self.x, self.batch))

    def backward(self, i: int, params: PyTree, data: np.ndarray) -> None:
        """Computes the gradient of part `i`, and updates it at once, or writes the gradient to disk."""
        # Of the activations on the device only the input of this part is left.
        self.x = None
        grads: PyTree = {}
        if i == len(self.parts) - 1:
            found = self.programs.head_grads(params, to_device(self.results.pop()), self.batch)
            self.loss, grads, self.cotangent = jax.block_until_ready(copy_forwarded(found, params))
        elif i:
            found = self.programs.layer_grads(params, to_device(self.results.pop()), self.cotangent)
            grads, self.cotangent = jax.block_until_ready(copy_forwarded(found, params))
        elif jax.tree.leaves(params):
            grads = jax.block_until_ready(self.programs.embed_grads(params, self.batch, self.cotangent))
        self._leave(self.parts[i], [first_copy(leaf) for leaf in jax.tree.leaves(grads)], data)

    def _leave(self, part: StackPart, grads: list[np.ndarray], data: np.ndarray) -> None:
        """Uses up the gradient of a part."""
        if self.clip_norm is None:
            self.updates[part.kind].run(self.numbers[part.kind], grads, data)
            return
        for grad in grads:
            wide = grad.astype(np.result_type(grad.dtype, np.float32), copy=False)
            self.square += float(np.vdot(wide, wide))
        part.store_grads(data, grads)

    def update(self, i: int, params: PyTree, data: np.ndarray) -> None:
        """Updates part `i` with its gradient from disk, clipped by the norm over all parts."""
        del params
        part, limit, norm = self.parts[i], self.clip_norm, np.sqrt(self.square)
        assert limit is not None
        grads = part.grad_vectors(data)
        # As `optax.clip_by_global_norm`: a norm that is not finite shows in the parameters.
        if not norm < limit:
            grads = [g / np.asarray(norm, g.dtype) * np.asarray(limit, g.dtype) for g in grads]
        self.updates[part.kind].run(self.numbers[part.kind], grads, data)
