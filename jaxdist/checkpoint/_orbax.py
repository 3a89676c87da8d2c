"""Orbax, which writes and reads the arrays; imported late, since the core of the library does not need it."""

from typing import Any


def orbax() -> Any:
    """The module, or how to get it."""
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError("checkpoints need orbax: pip install 'jaxdist[train]'") from error
    return orbax.checkpoint
