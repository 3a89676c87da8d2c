"""One step over parts on disk: what each visit reads, computes and writes."""

from collections.abc import Sequence

import jax
import numpy as np

from ..._core.types import Array, PyTree
from ..layers.passes import Pass, Passes
from ..layers.stack import Programs, StepConfig
from ..nvme.arrays import check_dtype
from ..nvme.disk import Access
from .parts import PartProgram, StackPart, reshape_vectors


class DiskStep(Passes):
    """The visits of a step, each to a buffer of the disk.

    Args:
      updates: the optimizer for the embedding, for layers and for the head; `numbers` are theirs for this step.
      train: False computes the loss alone.
    """

    def __init__(
        self,
        config: StepConfig,
        programs: Programs,
        parts: Sequence[StackPart],
        updates: Sequence[PartProgram],
        numbers: Sequence[Sequence[np.ndarray]],
        batch: PyTree,
        examples: np.ndarray | None,
        clip_norm: float | int | None,
        *,
        train: bool = True,
    ):
        shapes = [part.model.tree.unflatten(part.model.leaves) for part in parts]
        super().__init__(config, programs, shapes, batch, examples, train=train, clips=clip_norm is not None)
        self.parts, self.updates, self.numbers, self.clip_norm = parts, updates, numbers, clip_norm
        # Parameters that the reading thread has copied to the device, by visit.
        self.placed: dict[int, PyTree] = {}
        self.square = 0.0

    def accesses(self) -> list[Access]:
        """What each visit reads and writes."""
        return [self._access(kind, self.parts[i]) for kind, i in self.visits]

    def _access(self, kind: Pass, part: StackPart) -> Access:
        if kind is Pass.UPDATE or (kind is Pass.BACKWARD and self.clip_norm is None):
            return part.update()
        return part.write_grads() if kind is Pass.BACKWARD else part.load_params()

    def prepare(self, k: int, data: np.ndarray) -> None:
        """Copies the parameters of visit `k` to the device; called by the reading thread, ahead of the visit."""
        kind, i = self.visits[k]
        if kind is Pass.UPDATE:
            return
        part = self.parts[i]
        leaves = reshape_vectors(part.model, part.param_vectors(data))
        # The context `jax.enable_x64` holds for one thread, and this is the one that reads ahead.
        for leaf in leaves:
            check_dtype(leaf.dtype)
        self.placed[k] = self.config.place_params(part.model.tree.unflatten(leaves))

    def visit(self, k: int, data: np.ndarray) -> None:
        """Computes what visit `k` is for. When it returns, nothing reads the buffer any more."""
        kind, i = self.visits[k]
        if kind is Pass.UPDATE:
            self._update(self.parts[i], data)
            return
        if k not in self.placed:
            self.prepare(k, data)
        params = self.placed.pop(k)
        if kind is Pass.BACKWARD:
            grads = jax.block_until_ready(self.backward(i, params))
            jax.block_until_ready((self.cotangent, self.loss))
            self._leave(self.parts[i], [_first_copy(leaf) for leaf in jax.tree.leaves(grads)], data)
            return
        if kind is Pass.FORWARD:
            self.forward(i, params)
        else:
            self.evaluate(params)
        jax.block_until_ready((self.x, self.loss))

    def _leave(self, part: StackPart, grads: list[np.ndarray], data: np.ndarray) -> None:
        """Updates a part with its gradient, or writes the gradient to disk."""
        if self.clip_norm is None:
            self.updates[part.kind].run(self.numbers[part.kind], grads, data)
            return
        for grad in grads:
            wide = grad.astype(np.result_type(grad.dtype, np.float32), copy=False)
            self.square += float(np.vdot(wide, wide))
        part.store_grads(data, grads)

    def _update(self, part: StackPart, data: np.ndarray) -> None:
        """Updates a part with its gradient from disk, clipped by the norm over all parts."""
        limit, norm = self.clip_norm, np.sqrt(self.square)
        assert limit is not None
        grads = part.grad_vectors(data)
        # As `optax.clip_by_global_norm`: a norm that is not finite shows in the parameters.
        if not norm < limit:
            grads = [g / np.asarray(norm, g.dtype) * np.asarray(limit, g.dtype) for g in grads]
        self.updates[part.kind].run(self.numbers[part.kind], grads, data)


def _first_copy(leaf: Array) -> np.ndarray:
    """A replicated array, from its first device, as a vector."""
    return np.asarray(leaf.addressable_data(0)).reshape(-1)
