"""The outer optimizer of SlowMo; Local SGD and DiLoCo use `optax.sgd`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._core.checks import check_range
from .._core.dtypes import working_dtype
from .._core.types import Updates


class SlowMomentumState(NamedTuple):
    """`momentum` is `u`, shaped like the anchor, in float32 or better (replicated)."""

    momentum: Updates


def slow_momentum(
    *, learning_rate: float | int = 1.0, momentum: float | int = 0.5
) -> optax.GradientTransformationExtraArgs:
    """The outer step of SlowMo: `u = β u + Δ/γ`, `x -= α γ u`, with the drift `Δ` and the inner rate `γ` of the round.

    Dividing by `γ` keeps `u` in units of the inner direction: when the inner rate drops, the stored momentum drops
    with it. With a constant rate this is heavy-ball SGD on the drift.

    `β = 0, α = 1` is Local SGD; `β > 0, α = 1` BMUF; one worker with `β = 0, α < 1` Lookahead.

    *On the wire*: nothing.

    *State*: `u`, float32, replicated.

    Args:
      learning_rate: `α`. The paper always has 1.
      momentum: `β`. More helps when there are many workers: start at 0.2 with 4, 0.5 with 8, 0.6 with 16 or more; too
        much diverges when rounds are long.

    Returns:
      An outer optimizer for `local_steps`. Its `update` needs `learning_rate=`, the inner rate `γ`; where that is 0
      nothing moves.

    Raises:
      ValueError: `momentum` is outside [0, 1) or `learning_rate` is not positive; at trace time, no rate is passed.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdist.local_sgd import slow_momentum
      >>> outer = slow_momentum(momentum=0.5)
      >>> state = outer.init(jnp.ones(1))
      >>> updates, state = outer.update(jnp.array([0.1]), state, learning_rate=0.1)
      >>> round(float(updates[0]), 6), round(float(state.momentum[0]), 6)
      (-0.1, 1.0)

    References:
      Wang, Tantia, Ballas, Rabbat, "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum",
      arXiv 1910.00643, 2020.
    """
    check_range("momentum", momentum, 0, 1)
    if not learning_rate > 0:
        raise ValueError(f"learning_rate must be positive, got {learning_rate}")

    def init_fn(params):
        return SlowMomentumState(jax.tree.map(lambda x: jnp.zeros(x.shape, working_dtype(x.dtype)), params))

    def update_fn(updates, state, params=None, **extra_args):
        del params
        rate = extra_args.get("learning_rate")
        if rate is None:
            raise ValueError(
                "slow_momentum divides the drift by the rate of the inner steps, and none was passed; pass "
                "learning_rate= to the update, or use slowmo(..., learning_rate=)"
            )
        rate = jnp.asarray(rate, jnp.float32)
        # u = β u + Δ/γ, unchanged where γ is 0.
        divisor = jnp.where(rate > 0, rate, 1)
        u = jax.tree.map(
            lambda u, drift: jnp.where(rate > 0, momentum * u + drift.astype(u.dtype) / divisor.astype(u.dtype), u),
            state.momentum,
            updates,
        )
        # x -= α γ u
        steps = jax.tree.map(lambda x, u: (-learning_rate * rate.astype(u.dtype) * u).astype(x.dtype), updates, u)
        return steps, SlowMomentumState(u)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
