"""Orbax, which writes and reads the arrays; imported late, since the core of the library does not need it."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def orbax() -> Any:
    """The module, or how to get it."""
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError("checkpoints need orbax: pip install 'jaxdist[train]'") from error
    return orbax.checkpoint


def path_of(folder: Path) -> Any:
    """A folder in the type of orbax."""
    from etils import epath  # comes with orbax

    return epath.Path(folder)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine returns; it has a thread of its own, since a notebook's runs a loop already."""

    def complete() -> Any:
        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(coroutine)
        finally:
            loop.close()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(complete).result()
