"""ZeRO-Infinity: an optimizer whose state is stored on disk and streamed through a few buffers each step."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..._core.types import PyTree, State
from ...state.marks import is_mark
from ...transforms.extra_args import with_extra_args
from . import arrays
from .chunks import Runner
from .disk import Disk
from .entrywise import Split
from .files import Store, Streamed, check_store, folder_of_process, read_manifests
from .folder import StreamedFolder
from .model import Model, assemble, describe, hash_params, read_params, read_state, split_init, split_update


def nvme(inner: optax.GradientTransformation, store: Store, *, master_dtype: Any | None = None) -> Streamed:
    """Keeps an optimizer's state on disk; each step reads, updates and writes it in chunks, all three concurrently.

    For entrywise optimizers (Adam, SGD, Lion, with schedules, masks, weight decay), after any operations on gradients
    alone (clipping by the global norm, NovoGrad's norms). It is used between compiled steps, with mean gradients;
    updates run on the CPU. Results are bit for bit those of the optimizer for each leaf under `jax.jit`.

    A step is committed whole: a killed process or a full disk leaves the last one intact.

    *On disk*, for Adam in float32 and `n` parameters: `8n` bytes read and `8n` written per step, `12n` with
    `master_dtype=jnp.float32`; twice that is allocated. Nothing is sent.

    *In host memory*: the chunks (`Store.host_bytes`), 2^18 entries of each array, and the new parameters (those of
    an accelerator only in passing).

    Each process streams its own shards of parameters that are sharded over a mesh, and all of the others.

    Args:
      inner: the optimizer.
      store: the folder and how it is used.
      master_dtype: parameters in this dtype are on disk too, and are updated there: float32 for bfloat16 parameters,
        which lose small updates; also for a run that resumes after a crash without a checkpoint.

    Returns:
      Functions that are not pure: they own the folder.

    Raises:
      TypeError: `inner` is no optimizer, or `store` not a `Store`.
      ValueError: `chunk_bytes` or `host_bytes` is too small or no whole number; from `init` and `apply`, an optimizer
        that is not entrywise (the message names the primitive), a folder that holds another state or is in use,
        parameters of another step than the state in the folder (without `master_dtype`), gradients of other shapes,
        parameters of other dtypes.
      StoreFullError: no space left on disk.
      StoreDamagedError: a file is missing, too short or changed.
      StoreError: any other error of the disk.

    Examples:
      >>> import jax.numpy as jnp, optax, tempfile
      >>> from jaxdist import offload
      >>> opt = offload.nvme(optax.adam(0.1), offload.Store(tempfile.mkdtemp()), master_dtype=jnp.float32)
      >>> params = opt.init({"w": jnp.ones(3)})
      >>> params = opt.apply(params, {"w": jnp.ones(3)})
      >>> [round(x, 3) for x in params["w"].tolist()], opt.stats().step
      ([0.9, 0.9, 0.9], 1)
      >>> opt.close()

    References:
      Rajbhandari, Ruwase, Rasley, Smith, He, "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep
      Learning", arXiv:2104.07857, 2021.
    """
    check_store(store)
    host_bytes = 3 * store.chunk_bytes if store.host_bytes is None else store.host_bytes
    if host_bytes < store.chunk_bytes:
        raise ValueError(f"host_bytes={host_bytes} must be at least chunk_bytes={store.chunk_bytes}")
    stream = _NvmeOptimizer(with_extra_args(inner), store, host_bytes, master_dtype)
    return Streamed(stream.init, stream.apply, stream.flush, stream.state, stream.stats, stream.close)


def committed_step(path: str | Path) -> int:
    """The last step of this process in the folder of a store, which may be in use; 0 if there is none.

    Raises:
      ValueError: the folder has the state of another number of processes.
    """
    manifests = read_manifests(folder_of_process(path, jax.process_index(), jax.process_count()))
    return max((manifest["step"] for manifest in manifests.values()), default=0)


class _Plan(NamedTuple):
    """A step for gradients of certain dtypes and extra arguments of certain shapes."""

    split: Split
    head: Callable
    runner: Runner


class _Opened(NamedTuple):
    """The model and its folder; `plans` and `compiled` cache traced steps and compiled programs."""

    model: Model
    disk: Disk
    plans: dict[str, _Plan]
    compiled: dict[str, Callable]


class _NvmeOptimizer(StreamedFolder[_Opened]):
    """The functions of `Streamed`."""

    OPEN = "init(params)"

    def __init__(
        self, inner: optax.GradientTransformationExtraArgs, store: Store, host_bytes: int, master_dtype: Any | None
    ):
        self.inner, self.store, self.host_bytes, self.master_dtype = inner, store, host_bytes, master_dtype
        super().__init__()

    def init(self, params: PyTree) -> PyTree:
        self.close()
        store, model = self.store, describe(self.inner, params, self.master_dtype)
        split = split_init(self.inner, model)
        folder = folder_of_process(store.path, jax.process_index(), jax.process_count())
        disk = Disk(folder, direct=store.direct, durable=store.durable, wait=store.wait, progress=store.progress)
        compiled: dict[str, Callable] = {}
        try:
            # The chunks of an existing store keep their size.
            chunk_bytes = disk.chunk_bytes() or store.chunk_bytes
            layout = model.lay_out(chunk_bytes)
            if not disk.attach(layout, chunk_bytes, self.host_bytes):
                self._create(model, split, disk, compiled)
            else:
                params = _resume(model, disk, params)
        except BaseException:
            disk.unlock()
            raise
        self.opened = _Opened(model.forget(), disk, {}, compiled)
        return params

    def _create(self, model: Model, split: Split, disk: Disk, compiled: dict[str, Callable]) -> None:
        """Writes the initial state, as step 0."""
        numbers = [np.asarray(x) for x in jax.jit(split.head)(_head_arguments(split, model.leaves, model.shapes))]
        runner = Runner(disk.layout, split.programs, compiled)
        gave = None if model.master else hash_params(model)
        visit = runner.step(numbers, [_sources(model, model.leaves)], None, fresh=True)
        disk.advance(visit, [numbers[at] for at in split.others], lambda: gave)

    def apply(self, params: PyTree, grads: PyTree, *, donate: bool = False, **extra_args: Any) -> PyTree:
        opened = self.require_open()
        model, disk = opened.model, opened.disk
        placements = list(zip(_check_params(model, params), _check_tree(model, grads), model.places, strict=True))
        leaves = [arrays.place(p, place) for p, _, place in placements]
        if donate:
            arrays.check_apart(leaves)
        gradients = [g if isinstance(g, np.ndarray) else arrays.place(g, place) for _, g, place in placements]
        extra = jax.tree.map(jnp.asarray, extra_args)
        plan = self._plan(opened, gradients, extra)
        # The head reads the numbers of the last step, whose writes may still be in progress.
        disk.flush()
        numbers = self._run_head(model, disk, plan, gradients, leaves, extra)
        # With master parameters the ones in memory are only written, as roundings.
        sources = [*([] if model.master else [_sources(model, leaves)]), _sources(model, gradients)]
        sinks = [
            [arrays.sink(leaf, shard, donate=donate) for shard in shards]
            for leaf, shards in zip(leaves, model.shards, strict=True)
        ]
        # Without master parameters on disk, hashes tie the parameters in memory to the step.
        hashes: list[list[list[int]]] = [[[] for _ in each] for each in sinks]
        if not model.master:
            sinks = [list(map(arrays.hashing, *pair)) for pair in zip(sinks, hashes, strict=True)]
        disk.advance(
            plan.runner.step(numbers, sources, sinks),
            [numbers[at] for at in plan.split.others],
            lambda: None if model.master else [[sum(parts) % 2**64 for parts in each] for each in hashes],
        )
        return assemble(model, leaves, sinks)

    def _plan(self, opened: _Opened, gradients: Sequence[Any], extra: PyTree) -> _Plan:
        # What a trace depends on: dtypes, since gradients may come in several, and the extra arguments, also whether
        # they are weakly typed.
        kinds = [jax.typeof(x) for x in jax.tree.leaves(extra)]
        key = str(([g.dtype for g in gradients], jax.tree.structure(extra), kinds))
        if key not in opened.plans:
            split = split_update(self.inner, opened.model, gradients, extra)
            runner = Runner(opened.disk.layout, split.programs, opened.compiled)
            opened.plans[key] = _Plan(split, jax.jit(split.head), runner)
        return opened.plans[key]

    def _run_head(
        self, model: Model, disk: Disk, plan: _Plan, gradients: Sequence[Any], leaves: Sequence[Any], extra: PyTree
    ) -> list[np.ndarray]:
        """The numbers of this step, from gradients and from the numbers of the last step."""
        numbers, others = iter(disk.numbers), jax.tree.leaves(extra)
        state: list[Any] = [None if k >= 0 else next(numbers) for k in model.beside]
        flat = [*gradients, *state, *([None] * len(leaves) if model.master else leaves), *others]
        shapes = [*model.shapes, *(() if x is None else x.shape for x in state), *model.shapes]
        shapes += [x.shape for x in others]
        return [np.asarray(x) for x in plan.head(_head_arguments(plan.split, flat, shapes))]

    def state(self) -> State:
        opened = self.require_open()
        return read_state(opened.model, opened.disk)


def _resume(model: Model, disk: Disk, params: PyTree) -> PyTree:
    """The parameters of the committed step: those on disk, or else the given ones, if they belong to it."""
    disk.check_numbers(model.numbers())
    if model.master:
        return read_params(model, disk)
    if disk.gave not in (None, hash_params(model)):
        raise ValueError(
            f"{disk.folder} holds the state of step {disk.step}, and these are not the parameters of that step: "
            f"restore those of step {disk.step}, or keep them on disk too, with master_dtype"
        )
    return params


def _check_params(model: Model, params: PyTree) -> list[Any]:
    """The leaves of parameters, which must have the dtypes that `init` saw, too: the programs are for those."""
    leaves = _check_tree(model, params)
    for leaf, like, name in zip(leaves, model.leaves, model.names, strict=True):
        if leaf.dtype != like.dtype:
            raise ValueError(
                f"parameter `{name}` was {like.dtype} in `init` and is {leaf.dtype} now: cast it back, or call `init` "
                "with these parameters in another folder"
            )
    return leaves


def _check_tree(model: Model, tree: PyTree) -> list[Any]:
    """The leaves of parameters or gradients, which must have the tree and the shapes that `init` saw."""
    leaves, shapes, _ = arrays.strip_marks(tree)
    if shapes != model.shapes:
        wrong = next((s for s, t in zip(shapes, model.shapes) if s != t), f"{len(shapes)} leaves")
        raise ValueError(f"the shapes of parameters and gradients must be as `init` saw them, got {wrong}")
    # Leaves are matched by their order: those of other names would update others.
    found, expected = jax.tree.structure(tree, is_leaf=is_mark), jax.tree.structure(model.held)
    if found != expected:
        raise ValueError(f"the tree of parameters and gradients must be as `init` saw it, {expected}, got {found}")
    for leaf, like in zip(leaves, model.leaves, strict=True):
        if leaf.shape != like.shape:
            raise ValueError(
                f"a parameter that is an array {like.shape} of all shards has a gradient {leaf.shape}: mark the "
                "gradient Sharded as the parameter is, and place it"
            )
    return leaves


def _head_arguments(split: Split, flat: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """The flat arguments that the head reads, in their logical shapes, and `None` for the others."""
    arguments: list[Any] = [None] * len(flat)
    for i in split.memory:
        x, shape = flat[i], shapes[i]
        # A sharded parameter of one worker is flat and padded.
        arguments[i] = x if x.shape == shape else x.reshape(-1)[: int(np.prod(shape))].reshape(shape)
    return arguments


def _sources(model: Model, leaves: Sequence[Any]) -> list[list[Any]]:
    pairs = zip(leaves, model.shards, strict=True)
    return [[arrays.source(leaf, shard) for shard in shards] for leaf, shards in pairs]
