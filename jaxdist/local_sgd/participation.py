"""The random subset of workers that takes part in a round."""

import jax
import jax.numpy as jnp

from .._core.types import Array, AxisNames, Float, Int, Key
from ..comm.over import over
from ..transforms.local_gradients import varies_somewhere


def participation(
    key: Key[Array, ""], round_number: Int[Array, ""] | int, *, count: int, axis: AxisNames = "data"
) -> Float[Array, ""]:
    """Draws `count` of the workers for a round, without replacement; 1 if this worker is one of them, else 0.

    Call it inside the step and pass `examples=`, the number of this worker's examples times the result, to the update
    of `local_steps`: with `S` the workers drawn and `n_w` their examples, a round is

        a += outer(Σ_(w in S) n_w Δ_w / Σ_(w in S) n_w)

    which is FedAvg for `outer=optax.sgd(1.0)`. All other workers take no step in the round, contribute nothing, keep
    their residual of `error_feedback` or `loco` for a round in which they are drawn, and continue from the new global
    parameters. Momentum of the inner optimizer stays with its worker; for clients without memory pass
    `buffers="reset"`. `ef21` and `dgc` keep sending what they have accumulated: use `error_feedback` instead.

    *On the wire*: nothing. A round sends as much as with all workers, since a collective has fixed members; in a
    system whose clients come and go, `count / W` of it. To save the time of those that are not drawn, simulate `count`
    workers and pass them the data of the clients that the host draws.

    Args:
      key: a replicated key, the same in all steps.
      round_number: the number of the round, replicated: `opt_state.rounds[0]` of `local_steps`, or the number of the
        step divided by `sync_period`. It must not change within a round.
      count: the number of workers to draw.
      axis: the axis or axes of the workers; `None` is a single worker.

    Raises:
      ValueError: at trace time, `count` is not between 1 and the number of workers; the key or the round differs
        between workers; the axis is not bound.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> def weight(_):
      ...     return jd.local_sgd.participation(jax.random.key(0), 3, count=2)
      >>> jax.jit(jax.vmap(weight, axis_name="data"))(jnp.arange(5)).tolist()
      [0.0, 1.0, 0.0, 0.0, 1.0]

    References:
      McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from
      Decentralized Data", arXiv:1602.05629, 2016 (FedAvg).
    """
    comm = over(axis)
    if not 1 <= count <= comm.size:
        raise ValueError(f"count must be between 1 and the {comm.size} workers of axis {axis!r}, got {count}")
    # Workers that draw from different keys would not agree on the participants.
    if varies_somewhere(key, axis) or varies_somewhere(jnp.asarray(round_number), axis):
        raise ValueError(
            "key and round_number must be equal on all workers: keep them in the state without a PerWorker mark"
        )
    places = jax.random.permutation(jax.random.fold_in(key, round_number), comm.size)
    return (places[comm.index] < count).astype(jnp.float32)
