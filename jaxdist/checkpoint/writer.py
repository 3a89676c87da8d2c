"""Writes a state, blocking or concurrently with training."""

import asyncio
import contextlib
import operator
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex

import jax
from jax.sharding import NamedSharding

from .._core.checks import check_range
from .._core.trees import is_key
from .._core.types import Array, State
from ..state.marks import check_usable
from . import _manifest
from ._bucket_run import BucketRun, BucketTarget
from ._manifest import orbax, path_of
from ._runs import FolderRun, FolderTarget, Location, open_run
from ._together import LONGEST_PAUSE, SETTLE_SECONDS, Together
from .errors import FULL, CheckpointFullError, CheckpointStoreError, number_of


class Writer(NamedTuple):
    """Saves concurrently with training; made by `writing`. All processes must call its functions together.

    Attributes:
      save: `save(state, step, *, data=None)`, like the function `save`, but returns as soon as the arrays are in host
        memory and the state may be donated. It first waits for the previous save.
      wait: `wait()` returns once the last save is complete, and raises its error if it failed.
    """

    save: Callable[..., None]
    wait: Callable[[], None]


def save(path: Location, state: State, step: SupportsIndex, *, data: Any = None, keep: int | None = None) -> Path | str:
    """Writes a state to `path/<step>` atomically and returns that folder: `latest` and `restore` never see a part.

    Every process writes its parts of the leaves, with a checksum of every file, and process 0 commits once all have
    written. All processes must call it together, with a path that all see. If one fails, the others raise within
    seconds.

    The run continues from this checkpoint: those of later steps are set aside as `<step>.abandoned`.

    Args:
      path: the folder of a run's checkpoints, created if it is missing; or a bucket: a URL (`s3://`, `gs://`, `az://`,
        `memory:///`), a store of obstore, or an `islands.SharedStore`. Of a bucket the result is the
        checkpoint's name there.
      state: any pytree of arrays and typed keys, marks included.
      step: the number of steps that the state has done. A checkpoint of the same step is replaced once the new one is
        complete.
      data: what else a restart needs, such as the position in the data set: any JSON value (keys of dicts are text),
        the same on all processes.
      keep: how many checkpoints to keep, including this one, and at least two, in case one is damaged; the oldest are
        deleted. None keeps all.

    Raises:
      CheckpointFullError: no space is left; the part that was written is deleted.
      OSError: other errors of the disk.
      CheckpointPeerError: another process failed.
      CheckpointStoreError: the bucket does not answer or refuses.
      ImportError: orbax (the extra `train`) or, for a bucket, obstore (the extra `islands`) is not installed.
      ValueError: a negative step, `keep` below 1, `data` that is not JSON, two leaves with one name, a leaf that JAX or
        the format would convert (64 bits of NumPy while JAX has 32, `uint4`), that was donated or not placed; or
        another process, or `writing` around the call, writes there.

    Examples:
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
    # The lock is taken inside `_begin`, in process 0 alone, and held until the commit.
    with contextlib.ExitStack() as held:
        with together:
            run, step = open_run(path), operator.index(step)
            _check_keep(keep)
        return _begin(together, run, state, step, data, keep, lambda: held.enter_context(run.lock()))()


@contextlib.contextmanager
def writing(path: Location, *, keep: int | None = None) -> Iterator[Writer]:
    """Writes checkpoints concurrently with training. Leaving the block waits for the last one, also after an exception.

    A save interrupts training only for the copy into host memory. Writing, checksums, the upload into a bucket and the
    commit run in a thread. Until the commit, host memory holds an additional copy of the state.

    Args:
      path: the folder of a run's checkpoints or a bucket, as for `save`; a folder is created at once if it is missing,
        and leftovers of killed processes are deleted. One writer at a time.
      keep: how many checkpoints to keep, as for `save`.

    Raises:
      CheckpointPeerError: process 0 cannot write into the folder.
      CheckpointStoreError: as for `save`.
      OSError: the path is not a folder, or the folder cannot be created. Other errors are those of `save`.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd, tempfile
      >>> folder = tempfile.mkdtemp()
      >>> with jd.checkpoint.writing(folder, keep=2) as writer:
      ...     for step in (10, 20, 30):
      ...         writer.save({"w": jnp.full(3, step)}, step, data={"examples": 32 * step})
      >>> jd.checkpoint.latest(folder), jd.checkpoint.load(folder).data
      (30, {'examples': 960})
    """
    together = Together("begin to write checkpoints")
    pending: list[Future[Any]] = []

    def wait_for_last() -> None:
        while pending:
            pending.pop().result()

    def save_beside(state: State, step: SupportsIndex, *, data: Any = None) -> None:
        together = Together(f"save step {step}")
        with together:
            # One save at a time: each holds a copy of the state in host memory.
            wait_for_last()
            step = operator.index(step)
        pending.append(pool.submit(_begin(together, run, state, step, data, keep, lambda: None)))

    with contextlib.ExitStack() as held:
        with together:
            run = open_run(path)
            _check_keep(keep)
            together.first(lambda: held.enter_context(run.lock()))
        # A single thread, so that saves are committed in their order.
        pool = held.enter_context(ThreadPoolExecutor(1, thread_name_prefix="checkpoint"))
        try:
            yield Writer(save_beside, wait_for_last)
        finally:
            wait_for_last()


def _check_keep(keep: int | None) -> None:
    if keep is not None and (not isinstance(keep, SupportsIndex) or keep < 1):
        raise ValueError(f"keep must be a whole number of at least 1, or None to keep all, got {keep}")


def _check_arrays(arrays: dict[str, Array]) -> None:
    """Checks dtypes and places, since orbax would refuse them without the name of the leaf, dtypes in the thread."""
    import tensorstore  # comes with orbax

    if not arrays:
        raise ValueError("the state contains no non-empty arrays: there is nothing to save")
    for name, array in arrays.items():
        if jax.process_count() > 1 and array.is_fully_addressable:
            raise ValueError(
                f"leaf `{name}` is an array of each process, not of all together: place the state with "
                "jd.place(state, mesh), or make it with jd.init_state"
            )
        if not is_key(array):
            try:
                tensorstore.dtype(array.dtype.name)
            except ValueError as error:
                raise ValueError(
                    f"leaf `{name}` is {array.dtype}, which checkpoints do not support: cast it"
                ) from error


def _begin(
    together: Together,
    run: FolderRun | BucketRun,
    state: State,
    step: int,
    data: Any,
    keep: int | None,
    lock: Callable[[], Any],
) -> Callable[[], Path | str]:
    """Copies the state into host memory and starts to write it; returns a function that waits for that and commits."""

    def prepare() -> Any:
        lock()
        return run.begin(step)

    with together, _translate_errors(run.place, step):
        ocp = orbax()
        check_range("step", step, 0, ends="[]")
        check_usable(state)
        named = _manifest.name_leaves(state)
        manifest = _manifest.dump(named, step, data)
        # Orbax refuses empty leaves; the manifest suffices to restore them.
        arrays = {name: _one_copy(leaf) for name, (_, leaf) in named.items() if leaf.size}
        _check_arrays(arrays)
        # After this exchange no process is still writing for an earlier save that failed.
        steps = set(together.all(step))
        if len(steps) > 1:
            raise ValueError(
                f"the processes save different steps, {sorted(steps)}: call save with the same step in all"
            )
        target = run.target(step, together.first(prepare))
    # Not orbax's checkpointer, which would rename the folder itself, after barriers in which the other processes would
    # wait for one that has failed.
    handler = ocp.StandardCheckpointHandler()
    # `async_save` returns futures of the writes once the arrays are in host memory.
    with _all_or_nothing(together, target, step):
        target.prepare()
        written = run_to_end(handler.async_save(path_of(target.arrays), args=ocp.args.StandardSave(arrays)))

    # Runs in process 0 alone, once all processes have written their parts.
    def finish(sent: list[Any]) -> None:
        target.join(sent)
        handler.finalize(path_of(target.arrays))
        target.commit(sent, manifest, keep)

    def commit() -> Path | str:
        with _all_or_nothing(together, target, step), contextlib.closing(handler):
            _wait(written, together)
            sent = together.all(target.send())
            together.first(lambda: finish(sent))
        target.close()
        return target.name

    return commit


def run_to_end(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine to its end, in a separate thread, since that of a notebook has a running loop already."""

    def complete() -> Any:
        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(coroutine)
        finally:
            loop.close()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(complete).result()


def _wait(written: Sequence[Any], together: Together) -> None:
    """Waits until this process has written everything; cancels the rest if another process fails."""
    # Wait in a thread, to look for failures of the other processes meanwhile.
    pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writes")
    done = pool.submit(lambda: [write.result() for write in written])
    try:
        while not wait([done], LONGEST_PAUSE).done:
            together.check()
        done.result()
    except BaseException:
        for write in written:
            write.cancel()
        wait([done], SETTLE_SECONDS)
        raise
    finally:
        pool.shutdown(wait=False)


@contextlib.contextmanager
def _all_or_nothing(together: Together, target: FolderTarget | BucketTarget, step: int) -> Iterator[None]:
    """Deletes what a failed save has written, once no process writes there: a full disk would else stay full."""
    try:
        with together, _translate_errors(target.root, step):
            yield
    except BaseException:
        try:
            if jax.process_index() == 0:
                together.settle()
                target.discard()
        finally:
            target.close()
        raise


@contextlib.contextmanager
def _translate_errors(place: Path | str, step: int) -> Iterator[None]:
    """Raises errors of the system with their own types: tensorstore raises ValueError for each of them."""
    try:
        yield
    except CheckpointStoreError:
        raise
    except (OSError, ValueError) as error:
        number = number_of(error)
        if number in FULL:
            raise CheckpointFullError(place, step, number) from error
        if number is None or isinstance(error, OSError):
            raise
        raise OSError(number, f"{os.strerror(number)}: checkpoint {step} cannot be written: {error}") from error


def _one_copy(leaf: Array) -> Array:
    """Picks one of several equal copies in a process: orbax would compile a program per leaf to divide the writing."""
    alone = jax.process_count() == 1 and isinstance(leaf.sharding, NamedSharding) and leaf.is_fully_replicated
    return leaf.addressable_data(0) if alone else leaf
