"""The one checkpoint that a run of the command line leaves."""

from pathlib import Path

from .. import checkpoint
from .._typing import State


def save(directory: str | Path, state: State) -> Path:
    """Writes a state; an older one in the same place is replaced.

    Args:
      directory: a folder to make.
      state: any pytree of arrays and typed keys, marks included.

    Returns:
      The absolute path of the folder.
    """
    return checkpoint.save(directory, state, step=0).parent


def restore(directory: str | Path, like: State) -> State:
    """Reads a state that `save` wrote.

    Args:
      directory: the folder.
      like: a state with the same tree and dtypes, as arrays or as `ShapeDtypeStruct`s; its shardings say where the
        leaves go.

    Returns:
      The state, equal in every bit.
    """
    return checkpoint.restore(directory, like)
