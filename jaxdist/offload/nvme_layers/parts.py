"""The parts of a stack (embedding, layers, head) on disk, as views of a buffer, and the optimizer of one part.

A part is contiguous. It has the chunks of `nvme`, in each the parameters first and then the optimizer's state, as two
records with a checksum each: the forward pass reads the first alone. Gradients, where they go to disk, follow.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
import optax

from ..nvme.chunks import Chunk, Layout, Runner, pieces, planes
from ..nvme.disk import Access
from ..nvme.entrywise import Split
from ..nvme.model import Model, split_init, split_update

WHOLE = (
    "the optimizer computes a number from whole arrays, such as the norm of all gradients, but it sees one layer at a "
    "time here: clip with nvme_layers(clip_norm=...), or entry by entry with optax.clip"
)


class StackPart(NamedTuple):
    """One part on disk. `layout` counts bytes from `start`; `params`, `state` and `grads` are numbers of records.

    `kind` is 0 for the embedding, 1 for layers and 2 for the head.
    """

    kind: int
    model: Model
    layout: Layout
    start: int
    nbytes: int
    params: tuple[int, ...]
    state: tuple[int, ...]
    grads: tuple[int, ...]

    def load_params(self) -> Access:
        """Reads the parameters."""
        return Access(self.start, reads=self.params)

    def write_grads(self) -> Access:
        """Reads the parameters, and writes gradients."""
        return Access(self.start, reads=self.params, writes=self.grads)

    def create(self) -> Access:
        """Writes parameters and state."""
        return Access(self.start, writes=(*self.params, *self.state))

    def update(self) -> Access:
        """Reads and writes parameters and state; reads gradients too, if they are on disk."""
        both = (*self.params, *self.state)
        return Access(self.start, reads=both, writes=both, rereads=self.grads)

    def param_vectors(self, data: np.ndarray) -> list[np.ndarray]:
        """The entries of each parameter, views of the buffer where they are in one chunk."""
        return self.vectors(data, 0)

    def vectors(self, data: np.ndarray, plane: int) -> list[np.ndarray]:
        """The entries that belong to each leaf, in its array number `plane` (0: the parameter)."""
        return self._gather(lambda k: planes(data[self.layout.chunks[k].offset :], *self._chunk(k))[plane], plane)

    def grad_vectors(self, data: np.ndarray) -> list[np.ndarray]:
        """The entries of each gradient."""
        views = self._grad_planes(data)
        return self._gather(lambda k: views[k], 0)

    def store_grads(self, data: np.ndarray, grads: Sequence[np.ndarray]) -> None:
        """Copies gradients to their place in the buffer."""
        views = self._grad_planes(data)
        for k, chunk in enumerate(self.layout.chunks):
            at, stop = 0, chunk.start + chunk.length
            for piece in pieces(self.layout.segments[chunk.stream], chunk.start, stop):
                views[k][at : at + piece.size] = grads[piece.leaf][piece.start : piece.start + piece.size]
                at += piece.size
            views[k][at:] = 0

    def _chunk(self, k: int) -> tuple[Chunk, tuple[np.dtype, ...]]:
        chunk = self.layout.chunks[k]
        return chunk, self.layout.dtypes[chunk.stream]

    def _grad_planes(self, data: np.ndarray) -> list[np.ndarray]:
        """Where the gradients of each chunk are: in the same order as its parameters, behind all chunks."""
        views, at = [], self.layout.nbytes
        for k in range(len(self.layout.chunks)):
            chunk, (dtype, *_) = self._chunk(k)
            views.append(data[at : at + chunk.length * dtype.itemsize].view(dtype))
            at += chunk.length * dtype.itemsize
        return views

    def _gather(self, view: Callable[[int], np.ndarray], plane: int) -> list[np.ndarray]:
        found: list[list[np.ndarray]] = [[] for _ in self.model.leaves]
        for k in range(len(self.layout.chunks)):
            chunk, dtypes = self._chunk(k)
            if plane >= len(dtypes):
                continue
            at, stop = 0, chunk.start + chunk.length
            # Pieces of a leaf come in the order of its entries.
            for piece in pieces(self.layout.segments[chunk.stream], chunk.start, stop):
                found[piece.leaf].append(view(k)[at : at + piece.size])
                at += piece.size
        # Leaves without entries, and those for which the optimizer keeps fewer arrays than for others.
        empty = [np.empty(0, (each[plane:] or each)[0]) for each in self.model.dtypes()]
        return [x[0] if len(x) == 1 else np.concatenate(x or [e]) for x, e in zip(found, empty, strict=True)]


def lay_out_parts(
    models: Sequence[Model], count: int, chunk_bytes: int, *, grads: bool
) -> tuple[Layout, list[StackPart]]:
    """The records of the embedding, `count` equal layers and the head, one part after the other.

    Args:
      models: of the embedding, of a layer, and of the head.
      grads: gradients have a place on disk too.
    """
    layouts = [model.lay_out(chunk_bytes) for model in models]
    records: list[Chunk] = []
    parts: list[StackPart] = []
    start = 0
    for kind in (0, *[1] * count, 2):
        layout = layouts[kind]
        numbers: list[list[int]] = [[], [], []]
        at = start + layout.nbytes
        for chunk in layout.chunks:
            width = chunk.length * layout.dtypes[chunk.stream][0].itemsize
            first = start + chunk.offset
            spans = [(first, width), (first + width, chunk.nbytes - width), (at, width if grads else 0)]
            for which, (offset, nbytes) in zip(numbers, spans, strict=True):
                # An optimizer without state, such as SGD, has no second record.
                if nbytes:
                    which.append(len(records))
                    records.append(Chunk(0, 0, 0, offset, nbytes))
            at += spans[2][1]
        params, state, spilled = map(tuple, numbers)
        parts.append(StackPart(kind, models[kind], layout, start, at - start, params, state, spilled))
        start = at
    text = repr(([layout.signature for layout in layouts], count, grads))
    signature = hashlib.sha256(text.encode()).hexdigest()
    kinds = zip(("embed", "layer", "head"), models, strict=True)
    order = tuple((f"{kind}.{name}", shape) for kind, model in kinds for name, shape in model.order())
    return Layout((), (), tuple(records), start, signature, order), parts


def reshape_vectors(model: Model, vectors: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Vectors in the shapes of the leaves; those of leaves without such an array stay empty."""
    pairs = zip(vectors, model.shapes, strict=True)
    return [x.reshape(shape) if x.size == math.prod(shape) else x for x, shape in pairs]


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
