"""Range checks on arguments, with one wording each."""

import math

NO_PARAMS = "this optimizer needs the parameters: tx.update(gradients, state, params)"


def check_range(name: str, value: float | int, low: float | int, high: float | int = math.inf) -> None:
    """Raises unless `low <= value < high`."""
    if not low <= value < high:
        raise ValueError(f"{name} must be in [{low}, {high}), got {value}")
