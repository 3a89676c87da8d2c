"""Processes with different numbers of batches: those that are done go on with batches that do not count."""

from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from .._core.types import Array, AxisNames, PyTree
from ..processes.broadcast import of_all_processes
from .mesh import global_batch, workers_here

UNKNOWN = 2**32 - 1


def join_uneven(
    batches: Iterable[PyTree],
    like: PyTree,
    mesh: Mesh,
    *,
    axis: AxisNames = "data",
    on_uneven: Literal["continue", "stop", "raise"] = "continue",
    pad: bool = False,
    ahead: int = 1,
) -> Iterator[tuple[PyTree, Array]]:
    """DDP's `join_uneven`: takes every process through as many steps, though their batches differ in number.

    A step is a collective of all workers, so that a process which has no batch left makes the others wait for ever.
    Here it goes on with batches that do not count: pass `examples` to the update, where 0 stands for nothing.

    *On the wire*: a number from each process: once, if the batches of all have a length; else once in `ahead` steps.

    Args:
      batches: this process's batches, as for `global_batch`.
      like: a batch, or its shapes: all batches have them. The dummy of a process that never had one is zero, else its
        last one again.
      mesh: the mesh.
      axis: the axis or axes that workers lie along.
      on_uneven: `"continue"` until all are done; `"stop"` with the first that is; `"raise"` then, in all processes at
        the same step (PyTorch's `throw_on_early_termination`).
      pad: fills a batch of fewer rows than `like` up with zeros, and `examples` says how many are real: for losses that
        leave the others out, as `online.any_batch` does. A plain mean would count them.
      ahead: how many batches to load before asking the others, where there is no length. More waits less and holds more
        in memory.

    Returns:
      An iterator of `(batch, examples)`, both global arrays: `examples` is `Int[Array, "W"]`, one for each worker; cut
      over the axis like the batch, so that a step finds its own as `examples[0]`. With what weight they enter is the
      business of `all_reduce(normalize_by=)`.

    Raises:
      ValueError: `on_uneven` or `ahead` is unknown, `like` does not divide among this process's workers; while
        iterating, a batch that is not like `like`, more batches than their length, and with `on_uneven="raise"`, which
        process ran out.

    Example:
      >>> import numpy as np, jaxdist as jd
      >>> mesh = jd.make_mesh({"data": 1})
      >>> batches = [np.full((2, 3), number) for number in range(2)]
      >>> [(float(batch.sum()), examples.tolist()) for batch, examples in jd.runtime.join_uneven(batches, batches[0],
      mesh)] [(0.0, [2]), (6.0, [2])]

    References:
      Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", arXiv 2006.15704, 2020.
    """
    if on_uneven not in ("continue", "stop", "raise"):
        raise ValueError(f'on_uneven must be "continue", "stop" or "raise", got {on_uneven!r}')
    if ahead < 1:
        raise ValueError(f"ahead must be at least 1, got {ahead}")
    here = max(workers_here(mesh, axis), 1)
    rows = {leaf.shape[0] if leaf.shape else 0 for leaf in jax.tree.leaves(like)}
    if len(rows) != 1 or min(rows) == 0 or min(rows) % here:
        raise ValueError(
            f"like must have as many rows in each leaf, and a multiple of this process's {here} workers, got "
            f"{[leaf.shape for leaf in jax.tree.leaves(like)]}"
        )
    each = min(rows) // here

    def placed(batch: PyTree, real: int) -> tuple[PyTree, Array]:
        examples = np.clip(real - each * np.arange(here), 0, each).astype(np.int32)
        return global_batch((batch, examples), mesh, axis=axis)

    def run():
        dummy = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like)
        for number, batch in enumerate(_together(batches, on_uneven, ahead)):
            if batch is None:
                yield placed(dummy, 0)
            else:
                dummy, real = _fitted(batch, like, number, pad)
                yield placed(dummy, real)

    return run()


def _together(batches: Iterable[PyTree], on_uneven: str, ahead: int) -> Iterator[PyTree | None]:
    """The batches of this process, and `None` where only others have one."""
    steps = 0
    for source, counts in _windows(batches, ahead):
        shared = int(counts.max() if on_uneven == "continue" else counts.min())
        for _ in range(shared):
            yield next(source, None)
        steps += shared
        if on_uneven != "continue" and counts.min() < counts.max():
            if on_uneven == "raise":
                raise ValueError(
                    f"process {counts.argmin()} ran out of batches after {steps} steps, and process {counts.argmax()} "
                    'has more: give all processes as many, or pass on_uneven="continue" or "stop"'
                )
            return
        if isinstance(batches, Sized) and next(source, None) is not None:
            raise ValueError(f"batches has a length of {len(batches)}, and more than that: it must tell the truth")


def _windows(batches: Iterable[PyTree], ahead: int) -> Iterator[tuple[Iterator[PyTree], np.ndarray]]:
    """Some of this process's batches, and how many of them each process has."""
    lengths = of_all_processes([len(batches) if isinstance(batches, Sized) else UNKNOWN])[:, 0]
    if (lengths != UNKNOWN).all():
        yield iter(batches), lengths
        return
    source, counts = iter(batches), np.array([ahead])
    while counts.max() == ahead:
        loaded = list(islice(source, ahead))
        counts = of_all_processes([len(loaded)])[:, 0]
        yield iter(loaded), counts


def _fitted(batch: PyTree, like: PyTree, number: int, pad: bool) -> tuple[PyTree, int]:
    """A batch filled up to the shapes of `like`, and its number of real rows."""
    if jax.tree.structure(batch) != jax.tree.structure(like):
        raise ValueError(f"batch {number} is a {jax.tree.structure(batch)}, and like a {jax.tree.structure(like)}")
    rows = set()

    def one(x, like):
        x = np.asarray(x)
        rows.add(x.shape[0] if x.ndim else None)
        alike = x.shape[1:] == like.shape[1:] and _canonical(x) == _canonical(like)
        if not alike or not x.ndim or x.shape[0] > like.shape[0] or len(rows) > 1:
            raise ValueError(f"batch {number} has an array {x.dtype}{x.shape} where like has {like.dtype}{like.shape}")
        if x.shape[0] < like.shape[0] and not pad:
            raise ValueError(
                f"batch {number} has {x.shape[0]} rows where like has {like.shape[0]}: drop it, or pass pad=True and a "
                "loss that leaves padding out (online.any_batch)"
            )
        return np.pad(x, [(0, like.shape[0] - x.shape[0])] + [(0, 0)] * (x.ndim - 1))

    return jax.tree.map(one, batch, like), rows.pop()


def _canonical(x: Any) -> Any:
    return jax.dtypes.canonicalize_dtype(x.dtype)
