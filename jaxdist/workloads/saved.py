"""The one checkpoint that a run of the command line leaves, and how the next run goes on from it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .. import checkpoint
from .._typing import State
from .train import Run


def save(directory: str | Path, state: State) -> Path:
    """Writes a state; an older one in the same place is replaced.

    Args:
      directory: a folder to make.
      state: any pytree of arrays and typed keys, marks included.

    Returns:
      The absolute path of the folder.
    """
    return checkpoint.save(directory, state, step=0).parent


@contextmanager
def saving(directory: str | Path) -> Iterator[Callable[[State, int], None]]:
    """As `save`, beside the training, with the number of steps that the state has behind it: `save(state, steps)`."""
    with checkpoint.writing(directory) as writer:
        yield lambda state, steps: writer.save(state, 0, data={"steps": steps})


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


def gone_on(directory: str | Path, run: Run) -> Run:
    """The run from where it was saved, on as many workers as it has now; from its beginning where nothing was."""
    found = checkpoint.resume(directory, run.state)
    return run._replace(state=found.state, first=found.data["steps"] if found.data else run.first)
