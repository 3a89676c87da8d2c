"""Reading a state: as it was saved, for other workers, by another method, or without devices."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from .._typing import State
from . import _files, _manifest
from ._filling import filled, read_to_host
from ._manifest import Manifest
from .errors import CheckpointDamagedError

# How often a reader begins anew where a writer took away what it read.
_TRIES = 10
# Stands for the list of files itself, among the numbers of files that processes tell each other.
_CHECKSUMS = np.iinfo(np.int32).max


class Resumed(NamedTuple):
    """What `resume` found.

    Attributes:
      state: to go on with.
      step: how many steps it has done; 0 where there was no checkpoint.
      data: what was saved beside it; None where there was no checkpoint.
      new: leaves that the checkpoint lacks, or has in another shape or dtype: they are as they were in `like`.
      dropped: leaves that only the checkpoint has.
      converted: leaves that are marked otherwise than they were.
      damaged: steps whose checkpoints were passed over.
    """

    state: State
    step: int
    data: Any = None
    new: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    converted: tuple[str, ...] = ()
    damaged: tuple[int, ...] = ()


class Loaded(NamedTuple):
    """What `load` found.

    Attributes:
      state: the leaves as numpy arrays under their paths, in their marks; of keys the words.
      step: how many steps it has done.
      data: what was saved beside it.
    """

    state: dict[str, Any]
    step: int
    data: Any


def latest(path: str | Path) -> int | None:
    """The step of the newest complete checkpoint in a folder; None where there is none.

    Args:
      path: the folder that `save` was given; it may be missing.

    Returns:
      The step. Folders that a killed `save` left behind, and anything else that lies there, do not count. Whether the
      files are still as they were written is looked at by those who read them.

    Example:
      >>> import jaxdist as jd
      >>> jd.checkpoint.latest("nowhere") is None
      True
    """
    return max(_files.steps(_files.root_of(path)), default=None)


def restore(path: str | Path, like: State, *, step: int | None = None) -> State:
    """Reads a state that `save` wrote, for the number of workers that `like` has.

    Agreed leaves come back in every bit. Where the number of workers is another than it was, `Sharded` leaves are cut
    anew and `PerWorker` ones follow their `resize` rule, as in `jd.resize`: residuals keep their mean over workers. A
    leaf that is marked otherwise than it was goes by way of the whole array, as of `jd.consensus`: what was per worker
    is averaged, and what is per worker now is the same for all.

    Args:
      path: the folder that `save` was given.
      like: a state with the same tree and dtypes, as arrays or as `ShapeDtypeStruct`s, on the mesh (or the simulated
        workers) to go on with; its shardings say where the leaves go. `jd.init_state` makes one.
      step: which checkpoint; by default the newest.

    Returns:
      The state. All processes must call it together.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      CheckpointDamagedError: a file is not as it was written; every file is looked at, each by one process.
      ImportError: orbax is not installed (the extra `train`).
      ValueError: other leaves, shapes or dtypes than `like` has; the message says which.

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd, tempfile
      >>> folder = tempfile.mkdtemp()
      >>> _ = jd.checkpoint.save(folder, jd.place({"w": jnp.arange(3.0)}, 4), step=7)
      >>> jd.checkpoint.restore(folder, jd.place({"w": jnp.zeros(3)}, 4))["w"].tolist()
      [0.0, 1.0, 2.0]
    """
    return _taken(path, step, lambda folder, manifest: filled(folder, manifest, like, ()).state)


def resume(path: str | Path, like: State, *, changed: Sequence[str] = (), skip_damaged: bool = False) -> Resumed:
    """Goes on from the newest checkpoint, or begins where there is none: one call for the first start and every other.

    Args:
      path: the folder that `save` was given; it may be missing.
      like: the state to begin with, as of `restore`; arrays, where leaves may be new.
      changed: paths of parts of the state that may be of another method than they were (`("opt",)`). There, what the
        checkpoint lacks, or has in another shape or dtype, stays as it is in `like`, and what it has in excess is left
        out. Leave the parameters out of it, and a wrong model is an error. Make what is new from the parameters of the
        checkpoint, `resume(path, {"params": ...}, changed=("opt",))` before: an anchor of `local_steps` is a model.
      skip_damaged: go back to the newest checkpoint that is whole. Damaged ones are set aside as `<step>.damaged`.

    Returns:
      The state, its step and what was saved beside it; what is new, dropped, converted or was damaged is told by name.
      All processes must call it together.

    Raises:
      CheckpointDamagedError: as of `restore`, unless they are to be skipped.
      ImportError: orbax is not installed (the extra `train`).
      ValueError: other leaves, shapes or dtypes than `like` has, outside of what has changed.

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd, tempfile
      >>> folder = tempfile.mkdtemp()
      >>> plain = {"params": jnp.zeros(3), "opt": {"count": jnp.zeros((), int)}}
      >>> jd.checkpoint.resume(folder, plain).step
      0
      >>> _ = jd.checkpoint.save(folder, {**plain, "params": jnp.arange(3.0)}, step=7, data={"examples": 224})
      >>> more = {**plain, "opt": {**plain["opt"], "residual": jd.PerWorker(jnp.zeros(3))}}
      >>> found = jd.checkpoint.resume(folder, jd.place(more, 4), changed=["opt"])
      >>> found.state["params"].tolist(), found.step, found.data, found.new
      ([0.0, 1.0, 2.0], 7, {'examples': 224}, ('opt.residual',))
    """
    root, damaged = _files.root_of(path), []
    while (step := _agreed(latest(path))) is not None:
        folder = _files.folder_of(root, step)
        try:
            manifest = _opened(folder)
        except CheckpointDamagedError:
            if not skip_damaged:
                raise
            damaged.append(_agreed(step))  # and all have looked, before it goes
            if jax.process_index() == 0:
                _files.set_aside(root, step)
            continue
        found = filled(folder, manifest, like, changed)
        return Resumed(found.state, step, manifest.data, found.new, found.dropped, found.converted, tuple(damaged))
    return Resumed(like, 0, damaged=tuple(damaged))


def load(path: str | Path, *, step: int | None = None) -> Loaded:
    """Reads a state as plain numpy arrays: no mesh, no accelerator, and no program that makes such a state.

    Args:
      path: the folder that `save` was given.
      step: which checkpoint; by default the newest.

    Returns:
      The leaves as they were saved, marks on: one worker's own are all there, and `jd.consensus` makes the one model.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      CheckpointDamagedError: a file is not as it was written.
      ImportError: orbax is not installed (the extra `train`).

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd, tempfile
      >>> folder = tempfile.mkdtemp()
      >>> _ = jd.checkpoint.save(folder, {"params": {"w": jd.PerWorker(jnp.array([[1.0], [3.0]]))}}, step=7)
      >>> jd.consensus(jd.checkpoint.load(folder).state)["params.w"].tolist()
      [2.0]
    """

    def arrays_of(folder: Path, manifest: Manifest) -> Loaded:
        arrays = read_to_host(folder, manifest.leaves)
        state = {name: _manifest.marked(leaf.marks, arrays[name]) for name, leaf in manifest.leaves.items()}
        return Loaded(state, manifest.step, manifest.data)

    return _taken(path, step, arrays_of)


def _taken(path: str | Path, step: int | None, take: Callable[[Path, Manifest], Any]) -> Any:
    """What is read of a checkpoint, all of it of the same one: a writer may drop or replace it meanwhile."""
    for _ in range(_TRIES):
        folder = _found(path, step)
        before = _files.stamp(folder)
        try:
            result = take(folder, _opened(folder))
        except Exception:
            if _stands(folder, before):
                raise
            continue
        if _stands(folder, before):
            return result
    raise FileNotFoundError(f"the checkpoints in {path} go while they are read: let the writer keep more of them")


def _stands(folder: Path, before: bytes | None) -> bool:
    """Whether what was read is still there. Several processes cannot read again: they may not all have seen it go."""
    return jax.process_count() > 1 or (folder.is_dir() and _files.stamp(folder) == before)


def _found(path: str | Path, step: int | None) -> Path:
    """The folder of the newest checkpoint, or of that step."""
    root, newest = _files.root_of(path), step is None
    step = latest(path) if newest else step
    there = step is not None and _files.folder_of(root, step).is_dir()
    if (seen := _agreed(step if there else None)) is None:
        raise FileNotFoundError(f"no checkpoint{'' if newest else f' of step {step}'} in {path}")
    return _files.folder_of(root, seen)


def _opened(folder: Path) -> Manifest:
    """What a checkpoint says of itself, if its files are all as they were written."""
    if file := _damaged(folder):
        raise CheckpointDamagedError(file, int(folder.stem))
    return _manifest.read((folder / _files.MANIFEST).read_text())


def _damaged(folder: Path) -> Path | None:
    """A file that is not as it was written, the same in all processes, also where only one of them sees it so."""
    try:
        files = _files.listed(folder)
        number = _files.first_damaged(folder, files, jax.process_index(), jax.process_count())
    except CheckpointDamagedError:
        files, number = [], _CHECKSUMS
    if jax.process_count() > 1:
        number = int(np.max(multihost_utils.process_allgather(np.int32(number))))
    if number == _CHECKSUMS:
        return folder / _files.SUMS
    return folder / files[number][1] if number >= 0 else None


def _agreed(step: int | None) -> int | None:
    """What process 0 sees: file systems may show a new folder to one process before another."""
    if jax.process_count() == 1:
        return step
    found = int(multihost_utils.broadcast_one_to_all(np.int32(-1 if step is None else step)))
    return None if found < 0 else found
