"""A train state on disk and back, by orbax."""

from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from .._typing import Array, State


def save(directory: str | Path, state: State) -> Path:
    """Writes a state, every leaf under its path in the tree; an older one in the same place is replaced.

    Args:
      directory: a folder to make.
      state: any pytree of arrays and typed keys, marks included.

    Returns:
      The absolute path of the folder.
    """
    directory = Path(directory).absolute()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory, _named_leaves(state), force=True)
    return directory


def restore(directory: str | Path, like: State) -> State:
    """Reads a state that `save` wrote.

    Args:
      directory: the folder.
      like: a state with the same tree, shapes and dtypes, as arrays or as `ShapeDtypeStruct`s; its shardings say
        where the leaves go.

    Returns:
      The state, equal in every bit.
    """
    wanted = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        for name, leaf in _named_leaves(like).items()
    }
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(Path(directory).absolute(), wanted)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: found[_name(path)] if leaf.size else jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding),
        like,
    )


def _name(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _named_leaves(state: State) -> dict[str, Array]:
    """Flat, since orbax knows nothing of our marks, and without empty leaves, which it refuses to write."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {_name(path): leaf for path, leaf in leaves if leaf.size}
