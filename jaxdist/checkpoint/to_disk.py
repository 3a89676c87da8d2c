"""Writing a state, now or beside the training that goes on."""

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex

import jax
from jax.sharding import NamedSharding

from .._typing import Array, State
from . import _files, _manifest
from ._orbax import orbax

# All processes save equally often: the number names the barriers of one save.
_saves = itertools.count()
_COMMIT_MILLISECONDS = 20 * 60 * 1000


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
    path on a file system that they share.

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
      ImportError: orbax is not installed (the extra `train`).
      ValueError: a negative step, `keep` below 1, `data` that is not JSON, a `path` that is a URL, two leaves of one
        name (`{"a.b": x, "a": {"b": y}}`), or a leaf that JAX or the format does not hold as it is (64 bits of numpy
        while JAX has 32, `uint4`).

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
    root, step = _files.root_of(path), operator.index(step)
    _check_keep(keep)
    _begin(root, state, step, data, keep)()
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
      ImportError: orbax is not installed (the extra `train`).
      ValueError: as `save` raises it, or another process writes checkpoints into the folder. OSError: it is no folder,
        or cannot be made.

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
    root = _files.root_of(path)
    _check_keep(keep)
    pending: list[Future[None]] = []

    def wait() -> None:
        while pending:
            pending.pop().result()

    def save_beside(state: State, step: SupportsIndex, *, data: Any = None) -> None:
        wait()
        pending.append(pool.submit(_begin(root, state, operator.index(step), data, keep)))

    first = jax.process_index() == 0
    with (
        _files.alone(root) if first else contextlib.nullcontext(),
        ThreadPoolExecutor(1, thread_name_prefix="checkpoint") as pool,
    ):
        try:
            yield Writer(save_beside, wait)
        finally:
            wait()


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


def _begin(root: Path, state: State, step: int, data: Any, keep: int | None) -> Callable[[], None]:
    """Copies the state into host memory and starts to write it. What is returned waits for that and commits."""
    ocp = orbax()
    if step < 0:
        raise ValueError(f"step must not be negative, got {step}")
    named = _manifest.named(state)
    manifest = _manifest.written(named, step, data)
    # Orbax refuses empty leaves, and they hold nothing.
    arrays = {name: _one_copy(leaf) for name, (_, leaf) in named.items() if leaf.size}
    _check_arrays(arrays)
    first = jax.process_index() == 0
    if first:
        _files.begin(root, step)
    prefix = f"jaxdist{next(_saves)}"
    checkpointer = ocp.AsyncCheckpointer(
        ocp.StandardCheckpointHandler(),
        multiprocessing_options=ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=prefix),
    )
    folder = root / f"{step}{_files.UNFINISHED}" / _files.ARRAYS
    checkpointer.save(folder, args=ocp.args.StandardSave(arrays))

    def commit() -> None:
        with _files.or_nothing(root, step) if first else contextlib.nullcontext():
            checkpointer.close()  # once all processes have written
            try:
                if first:
                    _files.commit(root, step, manifest, keep)
            finally:
                if jax.process_count() > 1:
                    barrier = ocp.multihost.get_barrier_sync_fn()
                    barrier(key=f"{prefix}_committed", timeout_ms=_COMMIT_MILLISECONDS)

    return commit


def _one_copy(leaf: Array) -> Array:
    """Of equal copies in one process a single one: orbax compiles a program for each leaf to let all of them write."""
    alone = jax.process_count() == 1 and isinstance(leaf.sharding, NamedSharding) and leaf.is_fully_replicated
    return leaf.addressable_data(0) if alone else leaf
