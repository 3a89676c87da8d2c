"""The objects of a bucket for checkpoints, with one policy for errors and retries."""

import functools
from collections.abc import Callable
from typing import Any

from .._stores.opening import Objects, open_objects
from .._stores.patience import repeat
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
    try:
        return repeat(
            functools.partial(request, *arguments),
            seconds=PATIENCE_SECONDS,
            pauses=(SHORTEST_PAUSE, LONGEST_PAUSE),
            is_final=lambda error: bool(diagnose(error)[1]),
        )
    except Exception as error:
        raise _error_of(url, error) from error


def _error_of(url: str, error: Exception) -> CheckpointStoreError:
    said, cure = diagnose(error)
    cure = cure or "check the network and the endpoint, and start again"
    return CheckpointStoreError(url, f"{type(error).__name__}: {said}", cure)
