"""SlowMo: slow momentum of the drift between two averages."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._core.checks import check_range
from .._core.dtypes import working_dtype
from .._core.options import takes_options_of
from .._core.types import Updates
from ..transforms.common import LearningRate
from .buffers import Buffers
from .fragments import SyncPeriod
from .local_steps import local_steps, with_rate


class SlowMomentumState(NamedTuple):
    """`momentum` is `u`, shaped like the anchor, in float32 or better (replicated)."""

    momentum: Updates


def slow_momentum(
    *, learning_rate: float | int = 1.0, momentum: float | int = 0.5
) -> optax.GradientTransformationExtraArgs:
    """The outer step of SlowMo: `u = β u + Δ/γ`, `x -= α γ u`, with the drift `Δ` and the inner rate `γ` of the round.

    Dividing by `γ` keeps `u` in units of the inner direction: when the inner rate drops, the stored momentum drops
    with it. With a constant rate this is heavy-ball SGD on the drift. `update` needs `learning_rate=`, the inner rate
    `γ`; where that is 0 nothing moves. The state is `u`, replicated, in float32.

    `β = 0, α = 1` is Local SGD; `β > 0, α = 1` BMUF; one worker with `β = 0, α < 1` Lookahead.

    Args:
      learning_rate: `α`. The paper always has 1.
      momentum: `β`. More helps when there are many workers; too much diverges when rounds are long. FairScale's
        documentation has 0.2 with 4 nodes, 0.5 with 8 and 0.6 with 16 for a translation model.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxdist.local_sgd import slow_momentum
      >>> outer = slow_momentum(momentum=0.5)
      >>> state = outer.init(jnp.ones(1))
      >>> updates, state = outer.update(jnp.array([0.1]), state, learning_rate=0.1)
      >>> round(float(updates[0]), 6), round(float(state.momentum[0]), 6)
      (-0.1, 1.0)
    """
    check_range("momentum", momentum, 0, 1)
    check_range("learning_rate", learning_rate, 0, ends="(]")

    def init_fn(params):
        return SlowMomentumState(jax.tree.map(lambda x: jnp.zeros(x.shape, working_dtype(x.dtype)), params))

    def update_fn(updates, state, params=None, **extra_args):
        del params
        if extra_args.get("learning_rate") is None:
            raise ValueError(
                "slow_momentum divides the drift by the rate of the inner steps, and none was passed; pass "
                "learning_rate= to the update, or use slowmo(..., learning_rate=)"
            )
        rate = jnp.asarray(extra_args["learning_rate"], jnp.float32)
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


@takes_options_of(local_steps)
def slowmo(
    inner: optax.GradientTransformation,
    *,
    sync_period: SyncPeriod,
    learning_rate: LearningRate,
    slow_learning_rate: float | int = 1.0,
    momentum: float | int = 0.5,
    buffers: Buffers = "reset",
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """SlowMo: Local SGD whose drifts, divided by the learning rate, accumulate in a slow momentum.

    BMUF is `slow_learning_rate=1`; Lookahead is one worker with `momentum=0` and `slow_learning_rate < 1`.

    *On the wire*: as `local_sgd`. *State*: as `local_steps`, with a momentum in float32.

    Args:
      inner: the optimizer of each worker; with `gossip` and `sgp()` this is SGP-SlowMo, with `osgp()` OSGP-SlowMo.
      sync_period: `τ`, the steps of a round; the paper has 12, and 48 around gossip.
      learning_rate: that of `inner`, a number or a schedule. `update(..., learning_rate=)` overrides it.
      slow_learning_rate: `α`; leave it at 1.
      momentum: `β`, 0.4 to 0.8; more for more workers.
      buffers: as in `local_steps`; the paper resets those of SGD and maintains those of Adam.
      **options: other arguments: those of `local_steps`.

    Examples:
      >>> import optax, jaxdist as jd
      >>> tx = jd.local_sgd.slowmo(optax.sgd(0.1, momentum=0.9), sync_period=12, learning_rate=0.1, momentum=0.6)

    References:
      Wang, Tantia, Ballas, Rabbat, "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum",
      arXiv:1910.00643, 2019.
    """
    outer = slow_momentum(learning_rate=slow_learning_rate, momentum=momentum)
    tx = local_steps(inner, outer, sync_period=sync_period, buffers=buffers, **options)
    # The rate of each inner step, whose mean over the round is γ.
    return with_rate(tx, learning_rate)
