"""Access to orbax, which reads and writes the arrays; imported late, since the core of the library does not need it."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def orbax() -> Any:
    """Returns the module; without it, raises an error that says how to install it."""
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError("checkpoints need orbax: pip install 'jaxdist[train]'") from error
    return orbax.checkpoint


def path_of(folder: Path) -> Any:
    """Converts a path to the type that orbax takes."""
    from etils import epath  # comes with orbax

    return epath.Path(folder)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine to its end, in a separate thread, since that of a notebook has a running loop already."""

    def complete() -> Any:
        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(coroutine)
        finally:
            loop.close()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(complete).result()
