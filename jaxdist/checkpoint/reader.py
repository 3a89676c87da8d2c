"""Reading a state: as it was saved, for other workers, by another method, or without devices."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from .._core.types import State
from . import _files, _manifest
from ._filling import filled, read_to_host
from ._manifest import Manifest
from ._together import Together
from .errors import CheckpointDamagedError, CheckpointUnreadableError, NoCheckpointLeftError, number_of

# How often a reader begins anew where a writer took away what it read.
_TRIES = 10


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
      reasons: for each of them, what is wrong with it.
    """

    state: State
    step: int
    data: Any = None
    new: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    converted: tuple[str, ...] = ()
    damaged: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()


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
      The step. Folders that a killed `save` left behind, checkpoints of a future that was given up, and anything else
      in the folder, do not count. Whether the files are still as they were written is looked at by those who read them.

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
      CheckpointDamagedError: a file is not as it was written (every file is looked at, each by one process), or the
        folder is a copy of another step's.
      CheckpointUnreadableError: the system does not let a file be read.
      CheckpointPeerError: another process could not do its part.
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


def resume(
    path: str | Path,
    like: State,
    *,
    changed: Sequence[str] = (),
    skip_damaged: bool = False,
    allow_fresh_start: bool = False,
) -> Resumed:
    """Goes on from the newest checkpoint, or begins where there is none: one call for the first start and every other.

    Args:
      path: the folder that `save` was given; it may be missing.
      like: the state to begin with, as of `restore`; arrays, where leaves may be new.
      changed: paths of parts of the state that may be of another method than they were (`("opt",)`). There, what the
        checkpoint lacks, or has in another shape or dtype, stays as it is in `like`, and what it has in excess is left
        out. Leave the parameters out of it, and a wrong model is an error. Make what is new from the parameters of the
        checkpoint, `resume(path, {"params": ...}, changed=("opt",))` before: an anchor of `local_steps` is a model.
      skip_damaged: go back to the newest checkpoint that is whole. Damaged ones are set aside as `<step>.damaged`, once
        there is something to go on from.
      allow_fresh_start: begin anew also where a run has damaged checkpoints and no whole one. Without, that is an
        error: weeks of work may be in one of them.

    Returns:
      The state, its step and what was saved beside it; what is new, dropped, converted or was damaged is told by name.
      All processes must call it together.

    Raises:
      CheckpointDamagedError: as of `restore`, unless they are to be skipped.
      NoCheckpointLeftError: there are damaged checkpoints and no whole one; also where they were set aside before.
      CheckpointUnreadableError: as of `restore`. What cannot be read may be whole: it is never skipped.
      CheckpointPeerError: another process could not do its part.
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
    damaged: list[CheckpointDamagedError] = []
    with Together(f"resume from {path}") as together:
        root = _files.root_of(path)
        steps, before = together.first(lambda: (_files.steps(root), _files.damaged_steps(root)))
        for step in reversed(steps):
            try:
                folder = _files.folder_of(root, step)
                manifest = _opened(folder, together)
            except CheckpointDamagedError as error:
                if not skip_damaged:
                    raise
                damaged.append(error)
                continue
            with _readable(folder):
                state, new, dropped, converted = filled(folder, manifest, like, changed)
            found = Resumed(state, step, manifest.data, new, dropped, converted)
            together.all()  # have read it
            break
        else:
            if not allow_fresh_start and (damaged or before):
                told = (damaged[0].file, damaged[0].what) if damaged else (root, "has it set aside as damaged")
                raise NoCheckpointLeftError(told[0], (steps or before)[-1], told[1])
            found = Resumed(like, 0)
        if damaged:
            together.first(lambda: _set_aside(root, [error.step for error in damaged]))
    reasons = tuple(f"{error.file} {error.what}" for error in damaged)
    return found._replace(damaged=tuple(error.step for error in damaged), reasons=reasons)


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
    with Together(f"read a checkpoint in {path}") as together:
        for _ in range(_TRIES):
            folder = _found(path, step, together)
            before = _files.stamp(folder)
            try:
                manifest = _opened(folder, together)
                with _readable(folder):
                    result = take(folder, manifest)
            except Exception:
                if _stands(folder, before):
                    raise
                continue
            together.all()
            if _stands(folder, before):
                return result
    raise FileNotFoundError(f"the checkpoints in {path} go while they are read: let the writer keep more of them")


def _stands(folder: Path, before: bytes | None) -> bool:
    """Whether what was read is still there. Several processes cannot read again: they may not all have seen it go."""
    return jax.process_count() > 1 or (_files.is_folder(folder) and _files.stamp(folder) == before)


def _found(path: str | Path, step: int | None, together: Together) -> Path:
    """The folder of the newest checkpoint, or of that step.

    As process 0 sees it: file systems may show a new folder to one process before another.
    """
    root = _files.root_of(path)

    def look() -> int | None:
        number = latest(path) if step is None else step
        return number if number is not None and _files.is_folder(_files.folder_of(root, number)) else None

    if (seen := together.first(look)) is None:
        raise FileNotFoundError(f"no checkpoint{'' if step is None else f' of step {step}'} in {path}")
    return _files.folder_of(root, seen)


def _opened(folder: Path, together: Together) -> Manifest:
    """What a checkpoint says of itself, if its files are all as they were written.

    All processes raise the same, also where only one of them sees the damage.
    """
    manifest = wrong = None
    try:
        with _readable(folder):
            manifest = _checked(folder)
    except CheckpointDamagedError as error:
        wrong = [False, error.file.name == _files.SUMS, os.path.relpath(error.file, folder), error.what]
    except CheckpointUnreadableError as error:
        wrong = [True, False, os.path.relpath(error.file, folder), error.errno]
    if found := [one for one in together.all(wrong) if one]:
        unreadable, _, name, what = max(found, key=lambda one: one[:2])
        file = Path(os.path.normpath(folder / name))
        raise (CheckpointUnreadableError if unreadable else CheckpointDamagedError)(file, int(folder.stem), what)
    assert manifest is not None
    return manifest


def _checked(folder: Path) -> Manifest:
    """The manifest, after this process's share of the files was found as it was written."""
    step = int(folder.stem)
    try:
        _files.check(folder, _files.listed(folder), jax.process_index(), jax.process_count())
        return _manifest.read(folder / _files.MANIFEST, step)
    except (FileNotFoundError, NotADirectoryError) as error:  # it has gone since we looked
        raise CheckpointDamagedError(Path(error.filename), step, _files.GONE) from error


@contextlib.contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Where the system does not let a file be read, it says so: nothing is known of what the file holds."""
    try:
        yield
    except CheckpointUnreadableError:
        raise
    except (OSError, ValueError) as error:
        number = number_of(error)
        if number is None or number in _files.MISSING:
            raise
        file = getattr(error, "filename", None) or folder
        raise CheckpointUnreadableError(Path(file), int(folder.stem), number) from error


def _set_aside(root: Path, steps: Sequence[int]) -> None:
    with _files.alone_or_inside(root):
        for step in steps:
            _files.set_aside(root, step, _files.DAMAGED)
