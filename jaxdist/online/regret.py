"""Regret: what online learning has lost beside a comparator. numpy only, over recorded losses."""

import numpy as np
from jaxtyping import Float, Shaped

from .._core.types import Array


def dynamic_regret(
    losses: Shaped[Array | np.ndarray, "rounds workers"], best: Shaped[Array | np.ndarray, " same"]
) -> Float[np.ndarray, " rounds"]:
    """`Reg_T = Σ_t (1/W) Σ_i [f_t(x_i,t) - f_t(x_t*)]` for every `T`: beside the best model of each round.

    Args:
      losses: `f_t(x_i,t)`: every worker's model, from before it learnt of round `t`, on the loss of *all* workers'
        examples of the round, not on its own.
      best: `min f_t`, what the best model of each round loses.

    Returns:
      The regret so far, in float64. It falls nowhere, up to how well `best` was found.

    Raises:
      ValueError: the numbers of rounds differ.

    Example:
      >>> import numpy as np, jaxdist as jd
      >>> jd.online.dynamic_regret(np.array([[3.0, 1.0], [1.0, 1.0]]), np.array([1.0, 0.5])).tolist()
      [1.0, 1.5]

    References:
      Eshraghi, Liang, "Distributed Online Optimization over a Heterogeneous Network with Any-Batch Mirror Descent",
      ICML 2020.
    """
    _check_rounds(losses, best)
    return np.cumsum(np.asarray(losses, np.float64).mean(1) - np.asarray(best, np.float64))


def static_regret(
    losses: Shaped[Array | np.ndarray, "rounds workers"], fixed: Shaped[Array | np.ndarray, "same models"]
) -> Float[np.ndarray, " rounds"]:
    """The regret for every `T` beside the one of some fixed models that was best until then.

    `Reg_T = Σ_t (1/W) Σ_i f_t(x_i,t) - min_m Σ_t f_t(m)`; the best of all models is found by training on all rounds,
    and a single column then is the regret beside it.

    Args:
      losses: `f_t(x_i,t)`, as for `dynamic_regret`.
      fixed: `f_t(m)`, a column for each model to compare with.

    Returns:
      The regret so far, in float64. It may be negative: a model that moves can beat every fixed one.

    Raises:
      ValueError: the numbers of rounds differ.

    Example:
      >>> import numpy as np, jaxdist as jd
      >>> jd.online.static_regret(np.array([[3.0], [1.0]]), np.array([[1.0, 2.0], [3.0, 0.5]])).tolist()
      [2.0, 1.5]

    References:
      Zinkevich, "Online Convex Programming and Generalized Infinitesimal Gradient Ascent", 2003.
    """
    _check_rounds(losses, fixed)
    paid = np.cumsum(np.asarray(losses, np.float64).mean(1))
    return paid - np.cumsum(np.asarray(fixed, np.float64), axis=0).min(1)


def path_length(best: Shaped[Array | np.ndarray, "rounds size"]) -> Float[np.ndarray, " rounds"]:
    """`C_T = Σ_t |x_t+1* - x_t*|`: how far the best models have moved, which dynamic regret grows with.

    With `η ~ sqrt((1 + C_T) / T)` the regret is `O(sqrt(T (1 + C_T)))`.

    Args:
      best: the best model of each round, flat.

    Returns:
      The length until each round, in float64, 0 at the first.

    Example:
      >>> import numpy as np, jaxdist as jd
      >>> jd.online.path_length(np.array([[0.0, 0.0], [3.0, 4.0], [3.0, 5.0]])).tolist()
      [0.0, 5.0, 6.0]

    References:
      Zinkevich, "Online Convex Programming and Generalized Infinitesimal Gradient Ascent", 2003.
    """
    moves = np.linalg.norm(np.diff(np.asarray(best, np.float64), axis=0), axis=1)
    return np.concatenate([np.zeros(min(len(best), 1)), np.cumsum(moves)])


def _check_rounds(losses, others) -> None:
    if len(losses) != len(others):
        raise ValueError(f"both must have one row for each round, got {len(losses)} and {len(others)} of them")
