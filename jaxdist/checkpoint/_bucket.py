"""The objects of a bucket for checkpoints, with one policy for errors and retries."""

import functools
import time
from collections.abc import Callable
from typing import Any

from .._stores.opening import Objects, open_objects
from .._stores.problems import diagnose
from .errors import CheckpointStoreError

# A failing request is repeated for so long; those of obstore have been repeated by obstore before.
PATIENCE_SECONDS = 60.0
SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 10.0


def open_patiently(place: Any) -> Objects:
    """Opens a place; its requests are repeated when they fail, and raise `CheckpointStoreError` in the end."""
    try:
        objects = open_objects(place)
    except PermissionError as error:
        raise _error_of(str(place), error) from error
    requests = {name: field for name, field in objects._asdict().items() if callable(field)}
    return objects._replace(
        **{name: functools.partial(_repeat, objects.url, request) for name, request in requests.items()}
    )


def _repeat(url: str, request: Callable[..., Any], *arguments: Any) -> Any:
    until, pause = time.monotonic() + PATIENCE_SECONDS, SHORTEST_PAUSE
    while True:
        try:
            return request(*arguments)
        # Each library for stores has its own exceptions.
        except Exception as error:
            if diagnose(error)[1] or time.monotonic() + pause > until:
                raise _error_of(url, error) from error
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def _error_of(url: str, error: Exception) -> CheckpointStoreError:
    said, cure = diagnose(error)
    cure = cure or "check the network and the endpoint, and start again"
    return CheckpointStoreError(url, f"{type(error).__name__}: {said}", cure)
