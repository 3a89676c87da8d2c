"""Writing a state, now or beside the training that goes on."""

import contextlib
import operator
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex

import jax
from jax.sharding import NamedSharding

from .._core.types import Array, State
from . import _files, _manifest
from ._orbax import orbax, path_of, run
from ._together import LONGEST_PAUSE, SETTLE_SECONDS, Together
from .errors import FULL, CheckpointFullError, number_of

SEEN_SECONDS = 60.0  # NFS may show a new folder so much later


class Writer(NamedTuple):
    """Saves beside the training, from `writing`.

    Attributes:
      save: `save(state, step, *, data=None)`, as the function `save`, but returns as soon as the arrays are in host
        memory and the state may be donated. It first waits for the one before; all processes must call it together.
      wait: `wait()` returns once the last save is complete, and raises what went wrong with it; together as well.
    """

    save: Callable[..., None]
    wait: Callable[[], None]


def save(path: str | Path, state: State, step: SupportsIndex, *, data: Any = None, keep: int | None = None) -> Path:
    """Writes a state to `path/<step>`: all of it, or nothing that `latest` and `restore` would ever see.

    Every leaf is written under its path in the tree, by the processes that hold it, with a checksum of every file.
    Process 0 commits: it renames the folder once all have written theirs. All processes must call it together, with a
    path on a file system that they share. What one of them cannot write, all hear of within seconds.

    The run then goes on from this checkpoint: after a roll-back (`restore(path, like, step=10)`, then steps and a save
    of step 15), later ones are of a future that was given up. They are set aside as `<step>.abandoned`, where nothing
    finds or deletes them.

    Args:
      path: the folder of a run's checkpoints; made where it is missing.
      state: any pytree of arrays and typed keys, marks included.
      step: how many steps the state has done. A checkpoint of the same step is replaced once the new one is whole.
      data: what else it takes to go on, such as the place in the data: anything that JSON holds (keys of dicts are
        text), the same on all processes. Count examples of the whole run, not of a worker, and it holds for any number
        of workers.
      keep: how many checkpoints to keep, this one included; the oldest go. None keeps all. Each takes the room of the
        state; at least two outlast a disk that damages one.

    Returns:
      The folder `path/<step>`, once it is complete.

    Raises:
      CheckpointFullError: there is no room; what was written of it is taken away. OSError: other errors of the disk.
      CheckpointPeerError: another process could not do its part.
      ImportError: orbax is not installed (the extra `train`).
      ValueError: a negative step, `keep` below 1, `data` that is not JSON, a `path` that is a URL, two leaves of one
        name (`{"a.b": x, "a": {"b": y}}`), or a leaf that JAX or the format does not hold as it is (64 bits of numpy
        while JAX has 32, `uint4`); or checkpoints are being written into the folder, by another process or by
        `writing` around the call.

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd, tempfile
      >>> folder = tempfile.mkdtemp()
      >>> state = jd.place({"w": jnp.arange(3.0), "e": jd.PerWorker(jnp.ones(2))}, 4)
      >>> jd.checkpoint.save(folder, state, step=100).name
      '100'
      >>> like = jd.place({"w": jnp.zeros(3), "e": jd.PerWorker(jnp.zeros(2))}, 2)  # half as many workers
      >>> found = jd.checkpoint.restore(folder, like)
      >>> found["w"].tolist(), found["e"].value.shape
      ([0.0, 1.0, 2.0], (2, 2))
    """
    together = Together(f"save step {step}")
    with contextlib.ExitStack() as held:
        with together:
            root, step = _files.root_of(path), operator.index(step)
            _check_keep(keep)
        _begin(together, root, state, step, data, keep, lambda: held.enter_context(_files.alone(root)))()
    return root / str(step)


@contextlib.contextmanager
def writing(path: str | Path, *, keep: int | None = None) -> Iterator[Writer]:
    """Checkpoints that are written while training goes on; leaving waits for the last one, whatever was raised inside.

    A save costs the training the copy into host memory. The rest, orbax's writing, the checksums and the commit, runs
    in a thread. Host memory holds the state once more until then.

    Args:
      path: the folder of a run's checkpoints, as of `save`; made at once where it is missing, and what killed processes
        left in it is taken away. One writer at a time.
      keep: how many checkpoints to keep, as of `save`.

    Yields:
      A `Writer`.

    Raises:
      CheckpointPeerError: process 0 could not begin to write into the folder.
      ImportError: orbax is not installed (the extra `train`).
      ValueError: as `save` raises it, or checkpoints are being written into the folder, by another process or by this
        one. OSError: it is no folder, or cannot be made.

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd, tempfile
      >>> folder = tempfile.mkdtemp()
      >>> with jd.checkpoint.writing(folder, keep=2) as writer:
      ...     for step in (10, 20, 30):
      ...         writer.save({"w": jnp.full(3, step)}, step, data={"examples": 32 * step})
      >>> jd.checkpoint.latest(folder), jd.checkpoint.load(folder).data
      (30, {'examples': 960})
      >>> import pathlib
      >>> sorted(one.name for one in pathlib.Path(folder).glob("[0-9]*"))
      ['20', '30']
    """
    together = Together("begin to write checkpoints")
    pending: list[Future[None]] = []

    def wait_for_last() -> None:
        while pending:
            pending.pop().result()

    def save_beside(state: State, step: SupportsIndex, *, data: Any = None) -> None:
        together = Together(f"save step {step}")
        with together:
            wait_for_last()
            step = operator.index(step)
        pending.append(pool.submit(_begin(together, root, state, step, data, keep, lambda: None)))

    with contextlib.ExitStack() as held:
        with together:
            root = _files.root_of(path)
            _check_keep(keep)
            together.first(lambda: held.enter_context(_files.alone(root)))
        pool = held.enter_context(ThreadPoolExecutor(1, thread_name_prefix="checkpoint"))
        try:
            yield Writer(save_beside, wait_for_last)
        finally:
            wait_for_last()


def _check_keep(keep: int | None) -> None:
    if keep is not None and keep < 1:
        raise ValueError(f"keep must be at least 1, or None to keep all, got {keep}")


def _check_arrays(arrays: dict[str, Array]) -> None:
    """What orbax would say in the thread, and not of which leaf."""
    import tensorstore  # comes with orbax

    if not arrays:
        raise ValueError("the state has no arrays, or empty ones alone: there is nothing to save")
    for name, array in arrays.items():
        if not _manifest.is_key(array):
            try:
                tensorstore.dtype(array.dtype.name)
            except ValueError as error:
                raise ValueError(f"leaf `{name}` is {array.dtype}, which no checkpoint holds: cast it") from error


def _begin(
    together: Together,
    root: Path,
    state: State,
    step: int,
    data: Any,
    keep: int | None,
    lock: Callable[[], Any],
) -> Callable[[], None]:
    """Copies the state into host memory and starts to write it. What is returned waits for that and commits.

    Orbax's handler writes; its checkpointers would add the rename, and barriers in which the others wait for a process
    that has failed.
    """

    def prepare() -> None:
        lock()
        _files.begin(root, step)

    with together, _typed(root, step):
        ocp = orbax()
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}")
        named = _manifest.named(state)
        manifest = _manifest.written(named, step, data)
        # Orbax refuses empty leaves, and they hold nothing.
        arrays = {name: _one_copy(leaf) for name, (_, leaf) in named.items() if leaf.size}
        _check_arrays(arrays)
        steps = set(together.all(step))  # and none still writes for a save that failed
        if len(steps) > 1:
            raise ValueError(f"the processes save different steps, {sorted(steps)}: let all save together")
        together.first(prepare)
    folder = root / f"{step}{_files.UNFINISHED}" / _files.ARRAYS
    handler = ocp.StandardCheckpointHandler()
    with _all_or_nothing(together, root, step):
        _see(folder)
        written = run(handler.async_save(path_of(folder), args=ocp.args.StandardSave(arrays)))

    def finish() -> None:
        handler.finalize(path_of(folder))
        _files.commit(root, step, manifest, keep)

    def commit() -> None:
        with _all_or_nothing(together, root, step), contextlib.closing(handler):
            _wait(written, together)
            together.all()
            together.first(finish)

    return commit


def _see(folder: Path) -> None:
    """Returns once this process finds the folder that process 0 has made."""
    until = time.monotonic() + SEEN_SECONDS
    while not _files.is_folder(folder):
        if time.monotonic() > until:
            raise ValueError(
                f"process {jax.process_index()} does not see {folder}, which process 0 has made: checkpoints need a "
                "file system that all processes share"
            )
        time.sleep(LONGEST_PAUSE)


def _wait(written: Sequence[Any], together: Together) -> None:
    """Returns when this process has written; what it still writes is cancelled when another has failed."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writes")
    done = pool.submit(lambda: [one.result() for one in written])
    try:
        while not wait([done], LONGEST_PAUSE).done:
            together.check()
        done.result()
    except BaseException:
        for one in written:
            one.cancel()
        wait([done], SETTLE_SECONDS)
        raise
    finally:
        pool.shutdown(wait=False)


@contextlib.contextmanager
def _all_or_nothing(together: Together, root: Path, step: int) -> Iterator[None]:
    """A save that fails gives back the room that it took, once no process writes there: a full disk would stay full."""
    try:
        with together, _typed(root, step):
            yield
    except BaseException:
        if jax.process_index() == 0:
            together.settle()
            _files.discard(root, step)
        raise


@contextlib.contextmanager
def _typed(root: Path, step: int) -> Iterator[None]:
    """Errors of the system as what they are: orbax hands on tensorstore's, where each is a ValueError."""
    try:
        yield
    except (OSError, ValueError) as error:
        number = number_of(error)
        if number in FULL:
            raise CheckpointFullError(root, step, number) from error
        if number is None or isinstance(error, OSError):
            raise
        raise OSError(number, f"{os.strerror(number)}: checkpoint {step} cannot be written: {error}") from error


def _one_copy(leaf: Array) -> Array:
    """Of equal copies in one process a single one: orbax compiles a program for each leaf to let all of them write."""
    alone = jax.process_count() == 1 and isinstance(leaf.sharding, NamedSharding) and leaf.is_fully_replicated
    return leaf.addressable_data(0) if alone else leaf
