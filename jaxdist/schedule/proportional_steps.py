"""Numbers of local steps in proportion to the speeds of workers."""

from collections.abc import Sequence

import numpy as np

from .._core.types import Int
from .periods import check_periods


def proportional_steps(
    speeds: Sequence[float | int] | np.ndarray, period: int, *, minimum: int = 1, rounding: str = "nearest"
) -> Int[np.ndarray, " workers"]:
    """The steps that workers of unequal speed take in a round to finish together: `H_i = H v_i / max_j v_j`.

    Worker `i` passes `active = (steps of the round so far) < H_i` to the update. All workers then have equal weight,
    whatever their number of steps, which moves the optimum (Biased Local SGD: quadratic losses with curvatures `a_i`
    are averaged with weights `1 - (1 - γ a_i)^H_i`); pass `examples=` to weigh them by their examples.

    Args:
      speeds: `v_i`, steps per second, or numbers in proportion to them.
      period: `H` of the fastest worker.
      minimum: the fewest steps of a worker. DyLU's notebook has 5.
      rounding: "nearest" (Oscars; ties to even), or "down" (DyLU).

    Examples:
      >>> from jaxdist.schedule import proportional_steps
      >>> proportional_steps([1 / 0.58, 1 / 0.75, 1 / 1.51, 1 / 3.33], 20).tolist()
      [20, 15, 8, 3]
      >>> proportional_steps([1 / 0.58, 1 / 0.75, 1 / 1.51, 1 / 3.33], 20, minimum=5, rounding="down").tolist()
      [20, 15, 7, 5]

    References:
      Huang, "Oscars: Adaptive Semi-Synchronous Parallel Model for Distributed Deep Learning with Global View",
      arXiv:2102.08550, 2021.
      Liu et al., "Asynchronous Local-SGD Training for Language Modeling", arXiv:2401.09135, 2024 (DyLU).
      Lim, Jo, Ko, Go, Hwa, Lee, "Biased Local SGD for Efficient Deep Learning on Heterogeneous Systems",
      arXiv:2508.08540, 2025.
    """
    rates = np.asarray(speeds, np.float64)
    if rates.ndim != 1 or not rates.size or not (np.isfinite(rates) & (rates > 0)).all():
        raise ValueError(f"speeds must be positive numbers, one for each worker, got {speeds}")
    check_periods("period", period)
    check_periods("minimum", minimum)
    if minimum > period:
        raise ValueError(f"minimum must be at most period={period}, got {minimum}")
    if rounding not in ("nearest", "down"):
        raise ValueError(f'rounding must be "nearest" or "down", got {rounding!r}')
    exact = period * rates / np.max(rates)
    # Integers up to rounding errors are not rounded down.
    steps = np.rint(exact) if rounding == "nearest" else np.floor(exact * (1 + 1e-12))
    return np.maximum(steps.astype(np.int64), minimum)
