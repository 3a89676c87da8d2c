"""What an optimizer does to a part of the stack, on buffers of the disk."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
import optax

from ..nvme.chunks import Layout, Runner
from ..nvme.entrywise import Split
from ..nvme.model import Model, split_init, split_update

WHOLE = (
    "the optimizer computes a number from whole arrays, such as the norm of all gradients, but it sees one layer at a "
    "time here: clip with nvme_layers(clip_norm=...), or entry by entry with optax.clip"
)


class PartProgram(NamedTuple):
    """The optimizer's `init` or `update` for parts of one kind: numbers once a step, then entries."""

    split: Split
    head: Callable[..., list[jax.Array]]
    runner: Runner
    model: Model

    def numbers(self, stored: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The numbers of this step, from those that the last one has stored."""
        given = iter(stored)
        count = len(self.model.leaves)
        state = [None if k >= 0 else next(given) for k in self.model.beside]
        flat = [*[None] * count, *state, *[None] * count]
        arguments = [x if i in self.split.memory else None for i, x in enumerate(flat)]
        return [np.asarray(x) for x in self.head(arguments)]

    def first_numbers(self) -> list[np.ndarray]:
        """The numbers of `init`."""
        return [np.asarray(x) for x in self.head([None] * len(self.model.leaves))]

    def keep(self, numbers: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Those of a step's numbers that the next one needs: the parts of the state that are not arrays."""
        return [numbers[at] for at in self.split.others]

    def run(
        self, numbers: Sequence[np.ndarray], vectors: Sequence[np.ndarray], data: np.ndarray, *, fresh: bool = False
    ) -> None:
        """Updates a part in its buffer, from gradients; or creates it (`fresh`), from parameters."""
        sources = [[partial(_entries, x)] for x in vectors]
        visit = self.runner.step(numbers, [sources], None, fresh=fresh)
        for k, chunk in enumerate(self.runner.layout.chunks):
            visit(k, data[chunk.offset : chunk.offset + chunk.nbytes])


def _entries(x: np.ndarray, start: int, size: int) -> np.ndarray:
    return x[start : start + size]


def init_program(
    inner: optax.GradientTransformationExtraArgs, model: Model, layout: Layout, compiled: dict[str, Callable]
) -> PartProgram:
    """The optimizer's `init` for parts that this model describes."""
    split = split_init(inner, model)
    if split.memory:
        raise ValueError(WHOLE)
    return PartProgram(split, jax.jit(split.head), Runner(layout, split.programs, compiled), model)


def update_program(
    inner: optax.GradientTransformationExtraArgs, model: Model, layout: Layout, compiled: dict[str, Callable]
) -> PartProgram:
    """The optimizer's `update` for parts that this model describes."""
    model = model.forget()
    split = split_update(inner, model, model.leaves, {})
    count = len(model.leaves)
    # A norm would be that of each layer, and of another number of layers in another model.
    if any(not count <= i < count + len(model.beside) for i in split.memory):
        raise ValueError(WHOLE)
    return PartProgram(split, jax.jit(split.head), Runner(layout, split.programs, compiled), model)
