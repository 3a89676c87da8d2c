"""Batches that are kept in step where workers have unequal amounts of data."""

from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from .._core.checks import check_range
from .._core.types import Array, AxisNames, PyTree
from ..processes.broadcast import of_all_processes
from .mesh import global_batch, workers_here

# No number of batches: the largest 32-bit word, in which lengths are exchanged.
UNKNOWN = 2**32 - 1


def join_uneven(
    batches: Iterable[PyTree],
    like: PyTree,
    mesh: Mesh,
    *,
    axis: AxisNames = "data",
    on_uneven: Literal["continue", "stop", "raise"] = "continue",
    pad: bool = False,
    prefetch: int = 1,
) -> Iterator[tuple[PyTree, Array]]:
    """Keeps processes in step when they have different numbers of batches, like `Join` of PyTorch's DDP.

    A step is a collective of all workers, so that a process without a batch would block the others forever. Here it
    continues with dummy batches that do not count: pass `examples` to the update, which is 0 for them.

    *On the wire*: a number from each process: once, if the batches of all have a length; else every `prefetch` steps.

    Args:
      like: a batch, or the shapes of one; all batches must have them. The dummy is the last batch of the process, or
        zeros if it never had one.
      on_uneven: `"continue"` until all processes are done; `"stop"` with the first one; `"raise"` then, in all
        processes at the same step (PyTorch's `throw_on_early_termination`).
      pad: pads a batch with fewer rows than `like` with zeros, and `examples` counts the real ones: for losses that
        leave padding out, as `online.any_batch` does. A plain mean would include it.
      prefetch: how many batches to load before each exchange, if batches have no length. More saves waiting and needs
        more memory.

    Returns:
      An iterator of `(batch, examples)`, both global arrays: `examples` is `Int[Array, "W"]`, one number per worker,
      sharded over the axis like the batch, so that a step reads its own as `examples[0]`.
      `all_reduce(normalize_by=)` sets their weight.

    Examples:
      >>> import numpy as np, jaxdist as jd
      >>> mesh = jd.make_mesh({"data": 1})
      >>> batches = [np.full((2, 3), number) for number in range(2)]
      >>> joined = jd.runtime.join_uneven(batches, batches[0], mesh)
      >>> [(float(batch.sum()), examples.tolist()) for batch, examples in joined]
      [(0.0, [2]), (6.0, [2])]
    """
    if on_uneven not in ("continue", "stop", "raise"):
        raise ValueError(f'on_uneven must be "continue", "stop" or "raise", got {on_uneven!r}')
    check_range("prefetch", prefetch, 1, ends="[]")
    here = max(workers_here(mesh, axis), 1)
    # A dummy batch, too, must divide among the workers of this process.
    rows = {leaf.shape[0] if leaf.shape else 0 for leaf in jax.tree.leaves(like)}
    if len(rows) != 1 or min(rows) == 0 or min(rows) % here:
        raise ValueError(
            f"like must have the same number of rows in each leaf, a multiple of this process's {here} workers, got "
            f"{[leaf.shape for leaf in jax.tree.leaves(like)]}"
        )
    each = min(rows) // here

    # A separate generator, so that the checks above run at once.
    def run():
        # Zeros, for a process that never gets a batch.
        batch = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like)
        for number, found in enumerate(_keep_in_step(batches, on_uneven, prefetch)):
            real = 0
            if found is not None:
                batch, real = _pad_batch(found, like, number, pad)
            # The real rows come first: the last workers have fewer of them.
            examples = np.clip(real - each * np.arange(here), 0, each).astype(np.int32)
            yield global_batch((batch, examples), mesh, axis=axis)

    return run()


def _keep_in_step(batches: Iterable[PyTree], on_uneven: str, prefetch: int) -> Iterator[PyTree | None]:
    """Yields the batches of this process, and `None` if only others have one."""
    steps = 0
    for source, counts in _windows(batches, prefetch):
        shared = int(counts.max() if on_uneven == "continue" else counts.min())
        for _ in range(shared):
            # `None` where this process has none left but another does.
            yield next(source, None)
        steps += shared
        if on_uneven != "continue" and counts.min() < counts.max():
            if on_uneven == "raise":
                raise ValueError(
                    f"process {counts.argmin()} ran out of batches after {steps} steps, and process {counts.argmax()} "
                    'has more: give all the same number, or pass on_uneven="continue" or "stop"'
                )
            return
        if isinstance(batches, Sized) and next(source, None) is not None:
            raise ValueError(f"len(batches) is {len(batches)}, but it yielded more items: correct its __len__")


def _windows(batches: Iterable[PyTree], prefetch: int) -> Iterator[tuple[Iterator[PyTree], np.ndarray]]:
    """Yields some of this process's batches at a time, and how many of them each process has."""
    lengths = of_all_processes([len(batches) if isinstance(batches, Sized) else UNKNOWN])[:, 0]
    if (lengths != UNKNOWN).all():
        yield iter(batches), lengths
        return
    source, counts = iter(batches), np.array([prefetch])
    # A shorter window everywhere means that all processes are done.
    while counts.max() == prefetch:
        loaded = list(islice(source, prefetch))
        counts = of_all_processes([len(loaded)])[:, 0]
        yield iter(loaded), counts


def _pad_batch(batch: PyTree, like: PyTree, number: int, pad: bool) -> tuple[PyTree, int]:
    """Pads a batch to the shapes of `like`; returns it with its number of real rows."""
    if jax.tree.structure(batch) != jax.tree.structure(like):
        raise ValueError(
            f"batch {number} is a {jax.tree.structure(batch)}, but like is a {jax.tree.structure(like)}: pass one of "
            "the batches as like"
        )
    rows = set()

    def pad_leaf(x, like):
        x = np.asarray(x)
        rows.add(x.shape[0] if x.ndim else None)
        alike = x.shape[1:] == like.shape[1:] and _canonical(x) == _canonical(like)
        if not alike or not x.ndim or x.shape[0] > like.shape[0] or len(rows) > 1:
            raise ValueError(
                f"batch {number} has an array {x.dtype}{x.shape} where like has {like.dtype}{like.shape}: pass one of "
                "the batches as like"
            )
        if x.shape[0] < like.shape[0] and not pad:
            raise ValueError(
                f"batch {number} has {x.shape[0]} rows where like has {like.shape[0]}: drop it, or pass pad=True and a "
                "loss that leaves padding out (online.any_batch)"
            )
        # Padding at the end: the real rows keep their places.
        return np.pad(x, [(0, like.shape[0] - x.shape[0])] + [(0, 0)] * (x.ndim - 1))

    return jax.tree.map(pad_leaf, batch, like), rows.pop()


def _canonical(x: Any) -> Any:
    return jax.dtypes.canonicalize_dtype(x.dtype)
