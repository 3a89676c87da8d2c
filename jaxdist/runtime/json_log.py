"""Writes metrics to a file, one JSON object per line."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np


def json_log(path: str | Path) -> Callable[[Mapping[str, Any]], None]:
    r"""Makes a function that appends metrics to a file, one JSON object per line; only process 0 writes.

    Each line is complete when the function returns, and no file stays open. A resumed run appends to the file, after
    removing an incomplete last line of a killed run; steps that it repeats are in the file twice, the later line
    counts.

    Args:
      path: the file; its folder is created.

    Returns:
      `write(metrics)`, for numbers, text, arrays, and dictionaries of them. Numbers that are not finite become null.
      Reading a metric waits for the step that computes it: write every tenth step, or one step late.

    Examples:
      >>> import pathlib, tempfile, jax.numpy as jnp, jaxdist as jd
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "log.jsonl"
      >>> write = jd.runtime.json_log(path)
      >>> write({"step": 1, "loss": jnp.float32(0.5)})
      >>> path.read_text()
      '{"step": 1, "loss": 0.5}\n'
    """
    path = Path(path)
    if jax.process_index() > 0:
        # Metrics are equal on all workers: one process suffices.
        return lambda metrics: None
    path.parent.mkdir(parents=True, exist_ok=True)
    drop_incomplete_line(path)

    def write(metrics: Mapping[str, Any]) -> None:
        line = json_line(metrics)
        with path.open("a") as file:
            file.write(line)

    return write


def drop_incomplete_line(path: Path) -> None:
    """Removes half a line at the end of a file, if there is one: what is appended would be joined to it.

    A run that was killed inside a write leaves it.
    """
    if not path.exists():
        return
    written = path.read_bytes()
    complete = written.rfind(b"\n") + 1
    if complete < len(written):
        with path.open("r+b") as file:
            file.truncate(complete)


def json_line(values: Mapping[str, Any]) -> str:
    """Formats one line; numbers that are not finite become null, since JSON has none."""
    return json.dumps(_plain(values), allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return _plain(np.asarray(value).tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value
