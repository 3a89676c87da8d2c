"""A train state on disk and back, by orbax: whole or not at all, in every bit, onto any number of workers.

A checkpoint is a folder `path/<step>` that orbax fills under another name and renames at the end, so that one that was
interrupted is never seen. Marks decide what becomes of a leaf where the number of workers has changed
(`placement.resize`).
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from ._hashing import hashes
from ._marks import map_marked_with_path
from ._typing import Array, Like, Shape, State
from .placement import refit

HASHES = "jaxdist_hashes"


def save(path: str | Path, state: State, step: int) -> Path:
    """Writes a state to `path/<step>`: all of it, or nothing that `latest` and `restore` would ever see.

    Every leaf is written under its path in the tree, by the processes that hold it, with a hash of its bits. All
    processes must call it together, with a path on a file system that they share.

    Args:
      path: the folder of a run's checkpoints; made where it is missing.
      state: any pytree of arrays and typed keys, marks included.
      step: how many steps the state has done. A checkpoint of the same step is replaced, earlier ones stay.

    Returns:
      The folder `path/<step>`, once it is complete.

    Raises:
      ImportError: orbax is not installed (the extra `train`).
      ValueError: a negative step, or two leaves of one name (`{"a.b": x, "a": {"b": y}}`).

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
    ocp = _orbax()
    if step < 0:
        raise ValueError(f"step must not be negative, got {step}")
    # Orbax refuses empty leaves, and they hold nothing.
    leaves = {name: _one_copy(leaf) for name, leaf in _named(state).items() if leaf.size}
    folder = Path(path).absolute() / str(step)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, leaves, force=True, custom_metadata={HASHES: hashes(leaves)})
    return folder


def latest(path: str | Path) -> int | None:
    """The step of the newest complete checkpoint in a folder; None where there is none.

    Args:
      path: the folder that `save` was given; it may be missing.

    Returns:
      The step. Folders that a killed `save` left behind, and anything else that lies there, do not count.

    Example:
      >>> import jaxdist as jd
      >>> jd.checkpoint.latest("nowhere") is None
      True
    """
    finalized = _orbax().path.step.is_path_finalized
    path = Path(path).absolute()
    found = [one for one in path.iterdir() if one.name.isdecimal()] if path.is_dir() else []
    return max((int(one.name) for one in found if finalized(one)), default=None)


def restore(path: str | Path, like: State, *, step: int | None = None) -> State:
    """Reads a state that `save` wrote, for the number of workers that `like` has.

    Agreed leaves come back in every bit. Where the number of workers is another than it was, `Sharded` leaves are cut
    anew and `PerWorker` ones follow their `resize` rule, as in `jd.resize`: residuals keep their mean over workers.

    Args:
      path: the folder that `save` was given.
      like: a state with the same tree and dtypes, as arrays or as `ShapeDtypeStruct`s, on the mesh (or the simulated
        workers) to go on with; its shardings say where the leaves go. `jd.init_state` makes one.
      step: which checkpoint; by default the newest.

    Returns:
      The state. All processes must call it together.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      ImportError: orbax is not installed (the extra `train`).
      ValueError: other leaves, shapes or dtypes than `like` has, or a leaf or file that is damaged; the message says
        which.

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd, tempfile
      >>> folder = tempfile.mkdtemp()
      >>> _ = jd.checkpoint.save(folder, jd.place({"w": jnp.arange(3.0)}, 4), step=7)
      >>> jd.checkpoint.restore(folder, jd.place({"w": jnp.zeros(3)}, 4))["w"].tolist()
      [0.0, 1.0, 2.0]
    """
    ocp = _orbax()
    step = latest(path) if step is None else step
    folder = Path(path).absolute() / str(step)
    if step is None or not folder.is_dir():
        raise FileNotFoundError(f"no checkpoint{'' if step is None else f' of step {step}'} in {path}")
    wanted = _named(like)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        with _reading(folder):
            metadata = checkpointer.metadata(folder)
            stored, saved_hashes = metadata.item_metadata.tree, metadata.custom_metadata[HASHES]
        shapes = _stored_shapes(wanted, stored, folder)

        def read(target: dict[str, Like], restore_args: dict[str, Any]) -> dict[str, Any]:
            """Some of the leaves, as they were written."""
            arguments = ocp.args.PyTreeRestore(item=target, restore_args=restore_args, partial_restore=True)
            with _reading(folder):
                found = checkpointer.restore(folder, args=arguments) if target else {}
            for name, value in hashes(found).items():
                if value != saved_hashes[name]:
                    raise ValueError(f"leaf `{name}` of {folder} is damaged: its bits are not those that were saved")
            return found

        target = {name: _struct(wanted[name]) for name, shape in shapes.items() if shape == wanted[name].shape}
        unchanged = read(target, ocp.checkpoint_utils.construct_restore_args(target))

        def one(marks: tuple[Any, ...], path: Any, _: Any) -> Array:
            name = _name(path)
            leaf = wanted[name]
            if not leaf.size:
                return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
            if name in unchanged:
                return unchanged[name]
            # One by one and in host memory: the leaves of more workers than there are now may not fit into theirs.
            found = read({name: 0}, {name: ocp.RestoreArgs(restore_type=np.ndarray)})[name]
            return _refitted(marks, found, leaf, name)

        return map_marked_with_path(one, like)


def _orbax() -> Any:
    """Imported here: the core of the library does not need it."""
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError("checkpoints need orbax: pip install 'jaxdist[train]'") from error
    return orbax.checkpoint


@contextlib.contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Orbax raises whatever comes from below, mostly a bare `Exception`; the first cause knows the file."""
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ValueError(f"{folder} cannot be read, a file is damaged or missing: {cause}") from error


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _named(state: State) -> dict[str, Like]:
    """The leaves under their paths: flat, since orbax knows nothing of our marks."""
    leaves = [(_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)]
    named = {name: leaf if hasattr(leaf, "sharding") else jnp.asarray(leaf) for name, leaf in leaves}
    if len(named) < len(leaves):
        twice = next(name for i, (name, _) in enumerate(leaves) if name in dict(leaves[:i]))
        raise ValueError(f"two leaves have the name `{twice}`: rename an entry of a dict that contains a dot")
    return named


def _one_copy(leaf: Array) -> Array:
    """Of equal copies in one process a single one: orbax compiles a program for each leaf to let all of them write."""
    alone = jax.process_count() == 1 and isinstance(leaf.sharding, NamedSharding) and leaf.is_fully_replicated
    return leaf.addressable_data(0) if alone else leaf


def _stored_shapes(wanted: dict[str, Like], stored: dict[str, Any], folder: Path) -> dict[str, Shape]:
    """The shapes in which the leaves were written; refuses a checkpoint of another state."""
    filled = {name for name, leaf in wanted.items() if leaf.size}
    for what, names in (("lacks", filled - set(stored)), ("also has", set(stored) - filled)):
        if names:
            listed = ", ".join(f"`{name}`" for name in sorted(names))
            raise ValueError(f"{folder} is of another state: it {what} {listed}")
    for name in filled:
        leaf, was = wanted[name], stored[name]
        if was.dtype != leaf.dtype and not _is_key(leaf):
            raise ValueError(f"leaf `{name}` of {folder} is {was.dtype}, the state to fill has {leaf.dtype}")
    return {name: tuple(stored[name].shape)[: -1 if _is_key(wanted[name]) else None] for name in sorted(filled)}


def _is_key(leaf: Like) -> bool:
    """Keys are written as their words, along one more axis."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _struct(leaf: Like) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _refitted(marks: tuple[Any, ...], found: np.ndarray, leaf: Like, name: str) -> Array:
    """The leaf for another number of workers, in its place."""
    words = found.shape[-1:] if _is_key(leaf) else ()
    new = refit(marks, found, (*leaf.shape, *words)) if found.ndim == len(leaf.shape) + len(words) else found
    if new.shape != (*leaf.shape, *words):
        raise ValueError(
            f"leaf `{name}` was saved as {list(found.shape)}, the state to fill has {list(leaf.shape)}, and not only "
            "the number of workers is another"
        )
    if _is_key(leaf):
        return jax.device_put(jax.random.wrap_key_data(jnp.asarray(new), impl=jax.random.key_impl(leaf)), leaf.sharding)
    if leaf.sharding is None:
        return jnp.asarray(new)
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: new[index])
