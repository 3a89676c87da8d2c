"""ZeRO-Infinity: training with parameters and optimizer state on disk, one layer in memory at a time."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from ..._core.checks import check_range
from ..._core.types import Array, AxisNames, PyTree, State
from ...reducers.exact import exact
from ...reducers.reducer import Reducer
from ...transforms.extra_args import with_extra_args
from ..layers.stack import LayerStack, StepConfig, check_layer, configure, describe_part
from ..nvme.disk import Access, Disk
from ..nvme.files import Store, StreamedStats, check_store, folder_of_process
from ..nvme.folder import StreamedFolder
from ..nvme.model import Model
from .parts import PartProgram, StackPart, init_program, lay_out_parts, reshape_vectors, update_program
from .step import DiskStep

EXACT = exact()


class StreamedLayers(NamedTuple):
    """A run whose parameters and optimizer state are on disk.

    A part is `"embed"`, `"head"` or the number of a layer, from 0.

    Attributes:
      init: `init(layer, count, *, embed, head) -> step`. `layer(i)` returns the initial parameters of layer `i`; only
        one layer is in memory at a time. `embed` and `head` are their parameters, `{}` for none. If the folder holds
        a run, it continues from there, the given values only tell the shapes, and the step is that of the last commit.
      step: `step(batch, examples=None) -> loss`, one step of training. `examples` are the numbers of examples of the
        workers, by which their gradients and losses are weighted; if all are 0, nothing changes and the loss is NaN.
        If it raises, the run on disk is that of the last commit, and it can be called again.
      loss: `loss(batch, examples=None) -> loss`, the forward pass alone; nothing is written.
      params: `params(part) -> tree`, in numpy.
      state: `state(part) -> state`, the optimizer's state for the part, in numpy.
      flush: `flush() -> step`: waits until the last step is committed, and returns its number.
      stats: `stats() -> StreamedStats`, counters.
      close: releases the folder.
    """

    init: Callable[..., int]
    step: Callable[..., Array]
    loss: Callable[..., Array]
    params: Callable[[str | int], PyTree]
    state: Callable[[str | int], State]
    flush: Callable[[], int]
    stats: Callable[[], StreamedStats]
    close: Callable[[], None]


def nvme_layers(
    stack: LayerStack,
    inner: optax.GradientTransformation,
    store: Store,
    *,
    prefetch: int = 2,
    clip_norm: float | int | None = None,
    mesh: Mesh | None = None,
    axis: AxisNames = "data",
    reducer: Reducer = EXACT,
) -> StreamedLayers:
    """Trains a stack of layers whose parameters and optimizer state are on disk, with one layer in memory at a time.

    The backward pass computes each layer again, averages its gradient over the workers, updates the layer and writes it
    back. A step is committed as a whole: a process that is killed continues from the last committed one.
    `docs/explanation/zero-and-offloading.md` has the order of a step and what is in memory meanwhile.

    *On disk*, for Adam in float32 and `n` parameters: `16n` bytes read and `12n` written per step, `24n` allocated;
    with `clip_norm` `24n`, `16n` and `32n`.

    *In host memory*: `prefetch + 1` buffers, each for parameters and state of the largest part; the inputs of all
    layers; a layer's gradient.

    *On the wire*, with a `mesh`: an all-reduce of each part's gradient.

    Args:
      stack: the model.
      inner: an entrywise optimizer (Adam, SGD, Lion, with schedules, weight decay); it sees one part at a time, so
        masks and labels are functions. It updates parameters in the dtype that `init` was given: let that be float32,
        and let the functions of the stack cast them to compute in bfloat16.
      store: the folder; `host_bytes` bounds the buffers.
      prefetch: the parts that are read ahead while one is computed; 2 overlaps reads, computation and writes.
      clip_norm: clips gradients by their norm over all parts.
      mesh: its devices are the workers; `None`: one device.
      axis: the axes of the mesh over which the batch is split.
      reducer: averages gradients; one without state.

    Returns:
      Functions that are not pure: they own the folder.

    Raises:
      TypeError: `store` is not a `Store`.
      ValueError: a negative `prefetch` or `clip_norm`; functions with other arguments; a reducer with residuals or
        random keys; several processes; from `init`, an optimizer that is not entrywise, layers that differ, too few
        `host_bytes`, a folder of another model or in use; from `step`, a batch that cannot be split, a layer that
        changes the shape of `x`.
      StoreFullError, StoreDamagedError, StoreError: as `nvme`.

    Examples:
      >>> import jax.numpy as jnp, optax, tempfile
      >>> from jaxdist import offload
      >>> stack = offload.LayerStack(
      ...     embed=lambda p, batch: batch,
      ...     layer=lambda p, x: x @ p["w"],
      ...     head=lambda p, x, batch: jnp.mean(x),
      ... )
      >>> run = offload.nvme_layers(stack, optax.sgd(0.5), offload.Store(tempfile.mkdtemp()))
      >>> run.init(lambda i: {"w": jnp.ones((1, 1))}, 3, embed={}, head={})
      0
      >>> float(run.step(jnp.ones((2, 1)))), run.params(1)["w"].tolist()
      (1.0, [[0.5]])
      >>> float(run.loss(jnp.ones((2, 1)))), run.stats().step
      (0.125, 1)
      >>> run.close()

    References:
      Rajbhandari, Ruwase, Rasley, Smith, He, "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep
      Learning", arXiv:2104.07857, 2021; Ren, Rajbhandari, Aminabadi, Ruwase, Yang, Zhang, Li, He, "ZeRO-Offload:
      Democratizing Billion-Scale Model Training", arXiv:2101.06840, 2021 (gradients that leave as they are produced).
    """
    check_store(store)
    check_range("prefetch", prefetch, 0)
    if clip_norm is not None:
        check_range("clip_norm", clip_norm, 0, ends="(]")
    config = configure("nvme_layers", stack, reducer, mesh, axis)
    run = _LayerStream(config, with_extra_args(inner), store, prefetch, clip_norm)
    return StreamedLayers(run.init, run.step, run.loss, run.params, run.state, run.flush, run.stats, run.close)


class _Opened(NamedTuple):
    """The parts, their folder, and the optimizer's update for the embedding, for layers and for the head."""

    parts: list[StackPart]
    disk: Disk
    updates: list[PartProgram]


class _LayerStream(StreamedFolder[_Opened]):
    """The functions of `StreamedLayers`."""

    OPEN = "init(layer, count, embed=..., head=...)"

    def __init__(
        self,
        config: StepConfig,
        inner: optax.GradientTransformationExtraArgs,
        store: Store,
        prefetch: int,
        clip_norm: float | int | None,
    ):
        self.config, self.inner, self.store, self.prefetch, self.clip_norm = config, inner, store, prefetch, clip_norm
        self.programs = config.build_programs()
        super().__init__()

    def init(self, layer: Callable[[int], PyTree], count: int, *, embed: PyTree, head: PyTree) -> int:
        self.close()
        check_range("count", count, 1)
        trees = [jax.tree.map(np.asarray, tree) for tree in (embed, layer(0), head)]
        # On disk are the parameters that the optimizer updates: `master`.
        models = [describe_part(self.inner, tree)._replace(master=True) for tree in trees]
        store = self.store
        folder = folder_of_process(store.path, 0, 1)
        disk = Disk(folder, direct=store.direct, durable=store.durable, wait=store.wait, progress=store.progress)
        compiled: dict[str, Callable] = {}
        try:
            # The chunks of an existing store keep their size.
            chunk_bytes = disk.chunk_bytes() or store.chunk_bytes
            layout, parts = lay_out_parts(models, count, chunk_bytes, grads=self.clip_norm is not None)
            layouts = [parts[0].layout, parts[1].layout, parts[-1].layout]
            pairs = list(zip(models, layouts, strict=True))
            updates = [update_program(self.inner, model, layout, compiled) for model, layout in pairs]
            largest, depth = self._buffers(parts)
            if disk.attach_buffers(layout, chunk_bytes, largest, depth):
                disk.check_numbers([x for model in models for x in model.numbers()])
            else:
                starts = [init_program(self.inner, model, layout, compiled) for model, layout in pairs]
                _create(disk, parts, models, starts, layer)
        except BaseException:
            disk.unlock()
            raise
        forgotten = [model.forget() for model in models]
        self.opened = _Opened([part._replace(model=forgotten[part.kind]) for part in parts], disk, updates)
        return disk.step

    def _buffers(self, parts: Sequence[StackPart]) -> tuple[int, int]:
        """The bytes of a buffer, and how many there are."""
        largest = max(part.nbytes for part in parts)
        # The second pass reads gradients that an access has written as many accesses ago as there are parts.
        depth = min(self.prefetch + 1, len(parts))
        limit = self.store.host_bytes
        if limit is not None and limit < depth * largest:
            raise ValueError(
                f"host_bytes={limit} is less than {depth} buffers for a part of {largest} bytes: reduce prefetch"
            )
        return largest, depth

    def step(self, batch: PyTree, examples: Any = None) -> Array:
        opened = self.require_open()
        counts = self.config.count_examples(examples)
        if counts is not None and not counts.any():
            return jnp.asarray(jnp.nan, jnp.float32)
        disk = opened.disk
        # The numbers of the last step, whose writes may still be in progress.
        disk.flush()
        stored = _split_numbers(opened.updates, disk.numbers)
        numbers = [update.numbers(x) for update, x in zip(opened.updates, stored, strict=True)]
        step = DiskStep(
            self.config, self.programs, opened.parts, opened.updates, numbers, batch, counts, self.clip_norm
        )
        kept = [x for update, each in zip(opened.updates, numbers, strict=True) for x in update.keep(each)]
        disk.advance(step.visit, kept, lambda: None, accesses=step.accesses(), prepare=step.prepare)
        return step.loss

    def loss(self, batch: PyTree, examples: Any = None) -> Array:
        opened = self.require_open()
        counts = self.config.count_examples(examples)
        step = DiskStep(self.config, self.programs, opened.parts, opened.updates, [], batch, counts, None, train=False)
        opened.disk.scan(step.visit, step.accesses())
        return step.loss

    def params(self, part: str | int) -> PyTree:
        which = self._part(part)
        (leaves,) = self._load(which, [0])
        return which.model.tree.unflatten(leaves)

    def state(self, part: str | int) -> State:
        which = self._part(part)
        opened, model = self.require_open(), which.model
        counts = [model.beside.count(k) for k in range(len(model.leaves))]
        rows = self._load(which, range(1, 1 + max(counts, default=0)))
        numbers = iter(_split_numbers(opened.updates, opened.disk.numbers)[which.kind])
        # The arrays of a leaf are in the order of the flat state.
        arrays = [iter([row[k] for row in rows]) for k in range(len(model.leaves))]
        flat = [next(numbers) if k < 0 else next(arrays[k]) for k in model.beside]
        return jax.tree.structure(model.state).unflatten(flat)

    def _part(self, part: str | int) -> StackPart:
        parts = self.require_open().parts
        names = {"embed": 0, "head": len(parts) - 1, **{i: i + 1 for i in range(len(parts) - 2)}}
        if part not in names:
            raise ValueError(f'part must be "embed", "head" or a number below {len(parts) - 2}, got {part!r}')
        return parts[names[part]]

    def _load(self, part: StackPart, planes: Iterable[int]) -> list[list[np.ndarray]]:
        """Arrays of the leaves of a part, copied: `0` is the parameter, then the optimizer's state."""
        found: list[list[np.ndarray]] = []

        def visit(k, data):
            found.extend([np.array(x) for x in reshape_vectors(part.model, part.vectors(data, i))] for i in planes)

        # An access is there for parts without parameters, too.
        self.require_open().disk.scan(visit, [Access(part.start, reads=(*part.params, *part.state))])
        return found


def _create(
    disk: Disk,
    parts: Sequence[StackPart],
    models: Sequence[Model],
    starts: Sequence[PartProgram],
    layer: Callable[[int], PyTree],
) -> None:
    """Writes the initial parameters and state, as step 0."""
    numbers = [start.first_numbers() for start in starts]

    def visit(k, data):
        part = parts[k]
        leaves = models[part.kind].leaves if part.kind != 1 else check_layer(models[1], layer(k - 1), k - 1)
        starts[part.kind].run(numbers[part.kind], [np.asarray(x).reshape(-1) for x in leaves], data, fresh=True)

    kept = [x for start, each in zip(starts, numbers, strict=True) for x in start.keep(each)]
    disk.advance(visit, kept, lambda: None, accesses=[part.create() for part in parts])


def _split_numbers(updates: Sequence[PartProgram], stored: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
    """The numbers of the last step for the embedding, for layers and for the head."""
    numbers = iter(stored)
    return [[next(numbers) for _ in update.split.others] for update in updates]
