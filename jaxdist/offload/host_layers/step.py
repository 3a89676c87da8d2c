"""One step over parts in host memory: what is on the device at each visit, and when it gets there and back."""

from typing import Any, NamedTuple

import jax
import numpy as np

from ..._core.types import Array, PyTree, State
from ..layers.passes import Pass, Passes
from ..layers.stack import Programs, StepConfig
from .update import PartUpdate


class LayerState(NamedTuple):
    """One part of a model in host memory: `params`, and `opt_state`, the optimizer's state for them."""

    params: PyTree
    opt_state: State


class _Loaded(NamedTuple):
    """What a visit needs on the device; `None` what it does not."""

    params: PyTree
    opt_state: State
    grads: PyTree


class _Dispatched(NamedTuple):
    """What a visit computes, and the part on the host in whose place it is."""

    results: PyTree
    replaced: LayerState | None


class HostStep(Passes):
    """The visits of a step, each dispatched while the next parts are on their way to the device.

    Args:
      parts: the parts on the host; the step replaces them, and deletes the arrays of those it was given.
      ahead: how many visits ahead their parts are sent to the device.
      clips: gradients wait on the host for the norm of all of them.
      train: False computes the loss alone.
    """

    def __init__(
        self,
        config: StepConfig,
        programs: Programs,
        update: PartUpdate,
        parts: list[LayerState],
        batch: PyTree,
        examples: np.ndarray | None,
        *,
        ahead: int,
        clips: bool,
        train: bool = True,
    ):
        super().__init__(config, programs, [part.params for part in parts], batch, examples, train=train, clips=clips)
        self.update, self.parts, self.clips = update, parts, clips
        # A gradient is on the host before it is sent back: as many visits ago as there are parts.
        self.ahead = min(ahead, self.last)
        self.loaded: dict[int, _Loaded] = {}
        self.grads: dict[int, PyTree] = {}
        self.inputs: dict[int, PyTree] = {}
        self.square: Any = 0.0

    def run(self) -> Array:
        """Runs all visits, and returns the loss once everything is on the host."""
        for k in range(min(self.ahead, len(self.visits))):
            self.load(k)
        before = None
        for k in range(len(self.visits)):
            if k not in self.loaded:
                self.settle(before)
                before = None
                self.load(k)
            # The device computes this visit while the host waits for the one before it. Only then the next part is
            # sent: of the visit before nothing is on the device any more.
            now = self.visit(k)
            self.settle(before)
            before = now
            if self.ahead and k + self.ahead < len(self.visits):
                self.load(k + self.ahead)
        self.settle(before)
        return self.loss

    def load(self, k: int) -> None:
        """Begins to send what visit `k` needs to the device."""
        kind, i = self.visits[k]
        params, opt_state = self.parts[i]
        updates = kind is Pass.UPDATE or (kind is Pass.BACKWARD and not self.clips)
        needed = (params, opt_state if updates else None, self.grads.pop(i) if kind is Pass.UPDATE else None)
        self.loaded[k] = _Loaded(*self.config.place_params(needed))
        if kind is Pass.BACKWARD and i - 1 in self.results:
            self.inputs[i] = super().take_input(i)

    def take_input(self, i: int) -> PyTree:
        """The input of layer `i`, which is on the device if there was time to send it ahead."""
        return self.inputs.pop(i) if i in self.inputs else super().take_input(i)

    def visit(self, k: int) -> _Dispatched:
        """Dispatches the computation of visit `k`, and the way of its results to the host."""
        kind, i = self.visits[k]
        params, opt_state, grads = self.loaded.pop(k)
        if kind is Pass.FORWARD:
            self.forward(i, params)
            return _Dispatched(self.x, None)
        if kind is Pass.EVALUATE:
            self.evaluate(params)
            return _Dispatched(self.loss, None)
        if kind is Pass.BACKWARD:
            grads = self.backward(i, params)
            if self.clips:
                self.grads[i] = hold(grads)
                self.square = self.square + self.update.square(grads)
                return _Dispatched((self.cotangent, self.grads[i]), None)
        old, square = self.parts[i], self.square if self.clips else None
        self.parts[i] = LayerState(*hold(self.update.update(params, opt_state, grads, square)))
        return _Dispatched((self.cotangent, self.parts[i]), old)

    def settle(self, before: _Dispatched | None) -> None:
        """Waits for a visit, and deletes what it has replaced on the host."""
        if before is None:
            return
        jax.block_until_ready(before.results)
        for leaf in jax.tree.leaves(before.replaced):
            if isinstance(leaf, jax.Array):
                leaf.delete()


def hold(tree: PyTree) -> PyTree:
    """Copies replicated arrays from their first device to its host's memory."""

    def hold_leaf(leaf: Array) -> Array:
        first = leaf.addressable_data(0)
        return jax.device_put(first, first.sharding.with_memory_kind("pinned_host"))

    return jax.tree.map(hold_leaf, tree)
