"""ZeRO-Infinity: an optimizer whose state lies on disk and passes through a few buffers, once a step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..._core.types import PyTree, State
from . import arrays
from .disk import Disk
from .entries import runner
from .entrywise import Split
from .model import Model, describe, initial, update
from .restore import assembled, stored_params, sums_of_params, whole_state
from .store import Store, Streamed, StreamedStats


class _Opened(NamedTuple):
    """What `init` found; the rest remembers what was traced and compiled."""

    model: Model
    disk: Disk
    plans: dict[Any, tuple[Split, Callable, Callable]]
    compiled: dict[str, Callable]


def nvme(inner: optax.GradientTransformation, store: Store, *, master_dtype: Any | None = None) -> Streamed:
    """Keeps an optimizer's state on disk; each step reads, updates and writes it in chunks, all three at a time.

    For optimizers that work entry by entry (Adam, SGD, Lion, with schedules, masks, weight decay), after whatever they
    do to gradients alone (clipping by the global norm, NovoGrad's norms). It is used between compiled steps, with mean
    gradients; updates run on the CPU. Bit for bit what the optimizer gives for each leaf under `jax.jit`.

    A step writes beside the last one and is committed by renaming a small manifest, so that a process that is killed,
    or a disk that is full, leaves the last step as it was. Every chunk is read with a checksum.

    *On disk*, for Adam in float32 and `n` parameters: `8n` bytes read and `8n` written a step, `12n` with
    `master_dtype=jnp.float32`; twice that is taken. Leaves are laid in a row (those whose state has the same dtypes),
    and the row is padded to 4096 entries. Nothing is sent.

    *In host memory*: the chunks (`Store.host_bytes`), 2^18 entries of each array, and the new parameters (those of
    an accelerator only in passing).

    Several processes each stream the parts that lie in them: of parameters that are cut over a mesh (`Sharded`, or by a
    sharding) their own shards, of others all. Gradients are brought to the sharding of the parameters.

    Args:
      inner: the optimizer.
      store: where.
      master_dtype: parameters in this dtype are on disk too, and are updated there: float32 for bfloat16 parameters,
        which lose small updates; also for a run that is to go on after a crash without a checkpoint of its own.

    Returns:
      Functions that are not pure: they own the folder.

    Raises:
      ValueError: sizes that cannot work; from `init` and `apply`, an optimizer that needs more than entries (it names
        the primitive), a folder that holds another state or is in use, parameters of another step than the state in
        the folder (without `master_dtype`), gradients of other shapes.
      StoreFullError: no room on disk.
      StoreDamagedError: a file that is missing, too short or changed.
      StoreError: anything else that the disk refuses.

    Example:
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
      Learning", arXiv 2104.07857, 2021.
    """
    if store.chunk_bytes < 1:
        raise ValueError(f"chunk_bytes must be positive, got {store.chunk_bytes}")
    host_bytes = 3 * store.chunk_bytes if store.host_bytes is None else store.host_bytes
    if host_bytes < store.chunk_bytes:
        raise ValueError(f"host_bytes={host_bytes} holds no chunk of chunk_bytes={store.chunk_bytes}")
    transformation = optax.with_extra_args_support(inner)
    found: list[_Opened] = []

    def opened() -> _Opened:
        if not found:
            raise ValueError("the store is not open: call init(params) first")
        return found[0]

    def init(params: PyTree) -> PyTree:
        close()
        model = describe(transformation, params, master_dtype)
        made = initial(transformation, model)
        folder = Path(store.path).absolute() / f"worker-{jax.process_index():05d}-of-{jax.process_count():05d}"
        disk = Disk(folder, direct=store.direct, durable=store.durable, wait=store.wait, progress=store.progress)
        try:
            chunk_bytes = disk.chunk_bytes() or store.chunk_bytes
            layout = model.lay_out(chunk_bytes)
            exists = disk.attach(layout, chunk_bytes, host_bytes)
            compiled: dict[str, Callable] = {}
            if not exists:
                numbers = [np.asarray(x) for x in jax.jit(made.head)(_picked(made, model.leaves, model.shapes))]
                step = runner(layout, made.programs, compiled)
                gave = None if model.master else sums_of_params(model)
                visit = step(numbers, [_sources(model, model.leaves)], None, fresh=True)
                disk.advance(visit, _others(made, numbers), lambda: gave)
            elif model.master:
                params = stored_params(model, disk)
            elif disk.gave not in (None, sums_of_params(model)):
                raise ValueError(
                    f"{folder} holds the state of step {disk.step}, and these are not the parameters that it gave: "
                    f"restore those of step {disk.step}, or keep them on disk too, with master_dtype"
                )
        except BaseException:
            disk.unlock()
            raise
        found[:] = [_Opened(model.forget(), disk, {}, compiled)]
        return params

    def apply(params: PyTree, grads: PyTree, *, donate: bool = False, **extra_args: Any) -> PyTree:
        model, disk, plans, compiled = opened()
        leaves = [arrays.placed(p, place) for p, place in zip(_checked(model, params), model.places, strict=True)]
        gradients = _checked(model, grads)
        pairs = zip(gradients, model.places, strict=True)
        gradients = [g if isinstance(g, np.ndarray) else arrays.placed(g, place) for g, place in pairs]
        extra = jax.tree.map(jnp.asarray, extra_args)
        kinds = [(x.shape, x.dtype) for x in jax.tree.leaves(extra)]
        key = str(([g.dtype for g in gradients], jax.tree.structure(extra), kinds))
        if key not in plans:
            plan = update(transformation, model, gradients, extra)
            plans[key] = plan, jax.jit(plan.head), runner(disk.layout, plan.programs, compiled)
        plan, head, step = plans[key]
        disk.flush()
        numbers = iter(disk.numbers)
        state: list[Any] = [None if k >= 0 else next(numbers) for k in model.beside]
        flat = [*gradients, *state, *([None] * len(leaves) if model.master else leaves), *jax.tree.leaves(extra)]
        shapes = [*model.shapes, *(() if x is None else x.shape for x in state), *model.shapes]
        ready = [np.asarray(x) for x in head(_picked(plan, flat, [*shapes, *(shape for shape, _ in kinds)]))]
        sources = [*([] if model.master else [_sources(model, leaves)]), _sources(model, gradients)]
        sinks = [
            [arrays.sink(leaf, shard, donate=donate) for shard in shards]
            for leaf, shards in zip(leaves, model.shards, strict=True)
        ]
        sums: list[list[list[int]]] = [[[] for _ in each] for each in sinks]
        if not model.master:
            sinks = [list(map(arrays.summed, *pair)) for pair in zip(sinks, sums, strict=True)]
        disk.advance(
            step(ready, sources, sinks),
            _others(plan, ready),
            lambda: None if model.master else [list(map(arrays.added, each)) for each in sums],
        )
        return assembled(model, leaves, sinks)

    def flush() -> int:
        opened().disk.flush()
        return opened().disk.step

    def state() -> State:
        return whole_state(opened().model, opened().disk)

    def stats() -> StreamedStats:
        disk = opened().disk
        return StreamedStats(disk.step, disk.read_bytes, disk.written_bytes, disk.layout.nbytes, disk.buffer_bytes)

    def close() -> None:
        if found:
            disk = found.pop().disk
            try:
                disk.flush()
            finally:
                disk.unlock()

    return Streamed(init, apply, flush, state, stats, close)


def _checked(model: Model, tree: PyTree) -> list[Any]:
    leaves, shapes, _ = arrays.unmarked(tree)
    if shapes != model.shapes:
        wrong = next((s for s, t in zip(shapes, model.shapes) if s != t), f"{len(shapes)} leaves")
        raise ValueError(f"parameters and gradients must be as `init` saw them, got {wrong}")
    return leaves


def _picked(plan: Split, flat: Any, shapes: Any) -> list[Any]:
    """The flat arguments that the head looks at, as the shapes that they stand for."""

    def one(x, shape):
        return x if x.shape == shape else x.reshape(-1)[: int(np.prod(shape))].reshape(shape)

    return [one(flat[i], shapes[i]) if i in plan.memory else None for i in range(len(flat))]


def _sources(model: Model, leaves: Any) -> list[list[Any]]:
    pairs = zip(leaves, model.shards, strict=True)
    return [[arrays.source(leaf, shard) for shard in shards] for leaf, shards in pairs]


def _others(plan: Split, numbers: list[np.ndarray]) -> list[np.ndarray]:
    return [numbers[at] for at in plan.others]
