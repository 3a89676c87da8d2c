"""Reads a state: as it was saved, for other workers, for another method, or without devices."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .._core.types import State
from . import _files, _manifest
from ._bucket_run import BucketSource
from ._filling import fill, read_to_host
from ._manifest import Manifest
from ._runs import FolderSource, Location, open_run
from ._together import Share, Together
from .errors import (
    CheckpointDamagedError,
    CheckpointStoreError,
    CheckpointUnreadableError,
    NoCheckpointLeftError,
    number_of,
)

# How often a reader starts over after a writer has deleted the checkpoint that it was reading.
_TRIES = 10


class Resumed(NamedTuple):
    """The result of `resume`.

    Attributes:
      state: the state to continue with.
      step: the number of steps that it has done; 0 if there was no checkpoint.
      data: the caller's data that was saved beside it; None if there was no checkpoint.
      new: leaves that the checkpoint lacks, or has in another shape or dtype; they keep their values in `like`.
      dropped: leaves that only the checkpoint has.
      converted: leaves whose marks have changed.
      damaged: steps whose checkpoints were skipped.
      reasons: the damage of each of them.
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
    """The result of `load`.

    Attributes:
      state: the leaves as NumPy arrays by path, in their marks; keys as their words.
      step: the number of steps that it has done.
      data: the caller's data that was saved beside it.
    """

    state: dict[str, Any]
    step: int
    data: Any


def latest(path: Location) -> int | None:
    """Returns the step of the newest complete checkpoint in a folder, which may be missing, or a bucket; or None.

    Leftovers of a killed `save`, checkpoints that a roll-back abandoned, and other files do not count. Checksums are
    verified only when a checkpoint is read.

    Examples:
      >>> import jaxdist as jd
      >>> jd.checkpoint.latest("nowhere") is None
      True
    """
    return max((step for step, *_ in open_run(path).look()[0]), default=None)


def restore(path: Location, like: State, *, step: int | None = None) -> State:
    """Reads a state that `save` wrote, for the number of workers that `like` has.

    Replicated leaves are restored bit for bit. If the number of workers has changed, `Sharded` leaves are resharded and
    `PerWorker` ones follow their `resize` rule, as in `jd.resize`: residuals keep their mean over workers. A leaf whose
    marks have changed is converted by way of the unsharded array, as by `jd.consensus`: values that were per worker are
    averaged, and values that become per worker are the same on all workers. All processes must call it together.

    Args:
      path: the folder or the bucket that was passed to `save`.
      like: a state with the same tree and dtypes, as arrays or as `ShapeDtypeStruct`s, on the mesh (or the simulated
        workers) to continue with; its shardings place the leaves. `jd.init_state` makes one.
      step: which checkpoint; by default the newest.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      CheckpointDamagedError: a file has changed since it was written (every file is checked, each by one process), or
        the folder is a copy of another step's.
      CheckpointUnreadableError: a file cannot be read.
      CheckpointStoreError: the bucket does not answer or refuses.
      CheckpointPeerError: another process failed.
      ValueError: leaves, shapes or dtypes differ from those of `like`; the message names the first.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd, tempfile
      >>> folder = tempfile.mkdtemp()
      >>> _ = jd.checkpoint.save(folder, jd.place({"w": jnp.arange(3.0)}, 4), step=7)
      >>> jd.checkpoint.restore(folder, jd.place({"w": jnp.zeros(3)}, 4))["w"].tolist()
      [0.0, 1.0, 2.0]
    """
    return _read_one(path, step, lambda folder, name, manifest: fill(folder, name, manifest, like, ()).state)


def resume(
    path: Location,
    like: State,
    *,
    changed: Sequence[str] = (),
    skip_damaged: bool = False,
    allow_fresh_start: bool = False,
) -> Resumed:
    """Continues from the newest checkpoint, or starts if there is none: one call for first starts and restarts.

    All processes must call it together.

    Args:
      path: the folder or the bucket that was passed to `save`; it may be missing.
      like: the initial state, as for `restore`; arrays, where leaves may be new.
      changed: paths of sub-states whose method may have changed (`("opt",)`). Leaves in them that the checkpoint lacks,
        or has in another shape, dtype or order, keep their values in `like`, and those that only the checkpoint has are
        dropped. Do not list the parameters, so that a wrong model is an error. To initialize new leaves from the
        restored parameters (an anchor of `local_steps` is a model), first call
        `resume(path, {"params": ...}, changed=("opt",))`.
      skip_damaged: fall back to the newest undamaged checkpoint. Damaged ones are set aside as `<step>.damaged`, once
        there is something to continue from.
      allow_fresh_start: start over even if all checkpoints of the run are damaged. By default that is an error, since
        weeks of work may be in one of them.

    Raises:
      NoCheckpointLeftError: all checkpoints are damaged, or were set aside as damaged before.
      CheckpointUnreadableError, CheckpointStoreError: as for `restore`. An unreadable checkpoint may be undamaged, and
        is never skipped.
      CheckpointDamagedError, CheckpointPeerError, ValueError: as for `restore`, outside of `changed`.

    Examples:
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
        if isinstance(changed, str):
            raise ValueError(f"changed is a sequence of paths, got {changed!r}: write changed=({changed!r},)")
        run = open_run(path)
        complete, before = together.first(run.look)
        # The newest first; every process takes part in checking each of them.
        for one in reversed(complete):
            source = run.source(one)
            with source.open(together) as folder:
                try:
                    manifest = _open(source, folder, together)
                except CheckpointDamagedError as error:
                    if not skip_damaged:
                        raise
                    damaged.append(error)
                    continue
                with _translate_errors(folder, source.step):
                    filled = fill(folder, source.name(""), manifest, like, changed)
                # Until all processes have read it: a writer that starts earlier might delete the files, and several
                # processes may read from the folder of one.
                together.all()
            found = Resumed(filled.state, source.step, manifest.data, filled.new, filled.dropped, filled.converted)
            break
        else:
            if not allow_fresh_start and (damaged or before):
                file, what = (
                    (damaged[0].file, damaged[0].what) if damaged else (run.place, "has it set aside as damaged")
                )
                raise NoCheckpointLeftError(file, damaged[0].step if damaged else before[-1], what)
            found = Resumed(like, 0)
        if damaged:
            together.first(lambda: run.set_aside([error.step for error in damaged]))
    reasons = tuple(f"{error.file} {error.what}" for error in damaged)
    return found._replace(damaged=tuple(error.step for error in damaged), reasons=reasons)


def load(path: Location, *, step: int | None = None) -> Loaded:
    """Reads a state as plain NumPy arrays, without a mesh, an accelerator, or the program that made the state.

    The leaves are those that were saved, in their marks: per-worker values of all workers, of which `jd.consensus`
    makes one model. `path`, `step` and the errors are those of `restore`.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd, tempfile
      >>> folder = tempfile.mkdtemp()
      >>> _ = jd.checkpoint.save(folder, {"params": {"w": jd.PerWorker(jnp.array([[1.0], [3.0]]))}}, step=7)
      >>> jd.consensus(jd.checkpoint.load(folder).state)["params.w"].tolist()
      [2.0]
    """

    def arrays_of(folder: Path, name: Path | str, manifest: Manifest) -> Loaded:
        del name
        arrays = read_to_host(folder, manifest.leaves)
        state = {name: _manifest.wrap(leaf.marks, arrays[name]) for name, leaf in manifest.leaves.items()}
        return Loaded(state, manifest.step, manifest.data)

    return _read_one(path, step, arrays_of)


def _read_one(path: Any, step: int | None, take: Callable[[Path, Path | str, Manifest], Any]) -> Any:
    """Reads one checkpoint with `take`. Starts over if a writer deletes or replaces it meanwhile."""
    with Together(f"read a checkpoint in {path}") as together:
        for _ in range(_TRIES):
            source = _find(path, step, together)
            try:
                with source.open(together) as folder:
                    manifest = _open(source, folder, together)
                    with _translate_errors(folder, source.step):
                        result = take(folder, source.name(""), manifest)
                    # Until all processes have read it: several may read from one folder.
                    together.all()
            except Exception:
                # Only if the checkpoint itself is at fault: a deleted one fails in many ways.
                if source.is_unchanged():
                    raise
                continue
            if source.is_read():
                return result
    raise FileNotFoundError(
        f"a checkpoint in {path} was deleted while being read; increase the number of checkpoints to keep"
    )


def _find(path: Any, step: int | None, together: Together) -> FolderSource | BucketSource:
    """Returns the newest checkpoint, or that of a step."""
    run = open_run(path)

    def look() -> list[Any] | None:
        if step is not None:
            return run.find(step)
        complete, _ = run.look()
        return complete[-1] if complete else None

    # Process 0 decides: a file system may show a new folder to one process before another.
    if (found := together.first(look)) is None:
        raise FileNotFoundError(f"no checkpoint{'' if step is None else f' of step {step}'} in {path}")
    return run.source(found)


def _open(source: FolderSource | BucketSource, folder: Path, together: Together) -> Manifest:
    """Returns the manifest after checking all files."""
    share = source.share(folder, together)
    # No process checks a file before the others have fetched what they do of it.
    _run_part(source, folder, together, lambda: source.fetch(folder, share))
    return _run_part(source, folder, together, lambda: _check_files(folder, source.step, share))


def _run_part(source: FolderSource | BucketSource, folder: Path, together: Together, part: Callable[[], Any]) -> Any:
    """Returns what a part of all processes returns; the damage that one process finds is an error in all."""
    # As JSON, sorted by how much it counts: whether unreadable, whether of the checksums, the file, and the damage.
    result = wrong = None
    try:
        with _translate_errors(folder, source.step):
            result = part()
    except CheckpointDamagedError as error:
        wrong = [False, Path(error.file).name == _files.SUMS, os.path.relpath(error.file, folder), error.what]
    except CheckpointUnreadableError as error:
        wrong = [True, False, os.path.relpath(error.file, folder), error.errno]
    # Unreadable counts more than damaged, and damaged checksums more than any other file.
    if found := [report for report in together.all(wrong) if report]:
        unreadable, _, name, what = max(found, key=lambda report: report[:2])
        if unreadable:
            raise CheckpointUnreadableError(Path(os.path.normpath(folder / name)), source.step, what)
        raise CheckpointDamagedError(source.name(os.path.normpath(name)), source.step, what)
    return result


def _check_files(folder: Path, step: int, share: Share) -> Manifest:
    """Checks this process's part of the files and returns the manifest."""
    try:
        _files.check(folder, _files.read_sums(folder), share.part, share.parts)
        return _manifest.read(folder / _files.MANIFEST, step)
    except (FileNotFoundError, NotADirectoryError) as error:
        # Deleted since it was listed.
        raise CheckpointDamagedError(Path(error.filename), step, _files.GONE) from error


@contextlib.contextmanager
def _translate_errors(folder: Path, step: int) -> Iterator[None]:
    """Turns errors of the system into `CheckpointUnreadableError`; a missing file is left to the caller."""
    try:
        yield
    except (CheckpointUnreadableError, CheckpointStoreError):
        raise
    except (OSError, ValueError) as error:
        number = number_of(error)
        if number is None or number in _files.MISSING:
            raise
        file = getattr(error, "filename", None) or folder
        raise CheckpointUnreadableError(Path(file), step, number) from error
