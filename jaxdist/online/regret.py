"""Regret: the loss of online learning above that of a comparator, from recorded losses, in NumPy."""

import numpy as np
from jaxtyping import Float, Shaped

from .._core.types import Array


def dynamic_regret(
    losses: Shaped[Array | np.ndarray, "rounds workers"], best: Shaped[Array | np.ndarray, " same"]
) -> Float[np.ndarray, " rounds"]:
    """`Reg_T = Σ_t (1/W) Σ_i [f_t(x_i,t) - f_t(x_t*)]` for every `T`: against the best model of each round.

    Args:
      losses: `f_t(x_i,t)`: the loss of each worker's model, before it was updated in round `t`, on the examples of
        *all* workers in the round, not on its own.
      best: `min f_t`, the loss of the best model of each round.

    Returns:
      The regret after each round, in float64. It never decreases, except for errors in `best`.

    Examples:
      >>> import numpy as np, jaxdist as jd
      >>> jd.online.dynamic_regret(np.array([[3.0, 1.0], [1.0, 1.0]]), np.array([1.0, 0.5])).tolist()
      [1.0, 1.5]
    """
    # Σ_t (mean over workers of f_t(x_i,t) - f_t(x_t*))
    _check_rounds(losses, best, 1)
    return np.cumsum(np.asarray(losses, np.float64).mean(1) - np.asarray(best, np.float64))


def static_regret(
    losses: Shaped[Array | np.ndarray, "rounds workers"], fixed: Shaped[Array | np.ndarray, "same models"]
) -> Float[np.ndarray, " rounds"]:
    """The regret for every `T` against the best of some fixed models over the first `T` rounds.

    `Reg_T = Σ_t (1/W) Σ_i f_t(x_i,t) - min_m Σ_t f_t(m)`. For the regret against the best fixed model of all, train one
    on all rounds and pass its losses as a single column.

    Args:
      losses: `f_t(x_i,t)`, as for `dynamic_regret`.
      fixed: `f_t(m)`, a column for each model to compare with.

    Returns:
      The regret after each round, in float64. It may be negative: a model that changes can beat every fixed one.

    Examples:
      >>> import numpy as np, jaxdist as jd
      >>> jd.online.static_regret(np.array([[3.0], [1.0]]), np.array([[1.0, 2.0], [3.0, 0.5]])).tolist()
      [2.0, 1.5]
    """
    _check_rounds(losses, fixed, 2)
    # The best fixed model is chosen anew for every T.
    paid = np.cumsum(np.asarray(losses, np.float64).mean(1))
    return paid - np.cumsum(np.asarray(fixed, np.float64), axis=0).min(1)


def path_length(best: Shaped[Array | np.ndarray, "rounds size"]) -> Float[np.ndarray, " rounds"]:
    """`C_T = Σ_t |x_t+1* - x_t*|`: the length of the path of the best models, with which dynamic regret grows.

    With `η ~ sqrt((1 + C_T) / T)` the regret is `O(sqrt(T (1 + C_T)))`.

    `best` has the best model of each round, flat. The length up to each round is in float64, 0 at the first.

    Examples:
      >>> import numpy as np, jaxdist as jd
      >>> jd.online.path_length(np.array([[0.0, 0.0], [3.0, 4.0], [3.0, 5.0]])).tolist()
      [0.0, 5.0, 6.0]
    """
    moves = np.linalg.norm(np.diff(np.asarray(best, np.float64), axis=0), axis=1)
    return np.concatenate([np.zeros(min(len(best), 1)), np.cumsum(moves)])


def _check_rounds(losses, others, dimensions: int) -> None:
    found = np.ndim(losses), np.ndim(others)
    if found != (2, dimensions):
        raise ValueError(f"losses must have 2 dimensions, and what they are compared with {dimensions}, got {found}")
    if len(losses) != len(others):
        raise ValueError(f"both must have one row for each round, got {len(losses)} and {len(others)} of them")
