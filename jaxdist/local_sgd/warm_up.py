"""The warm-up of `local_steps`: synchronous steps, and the anchor that they leave."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._core.types import Array, Flag, PyTree, State, Updates
from .._core.xla_quirks import largest_entry
from ..comm.base import Comm
from ..transforms.local_gradients import reduce_weighted
from .rounds import cond_or_static, exact_mean, round_like


def warm_mean(
    comm: Comm, warm: Flag, updates: Updates, weight: Array | None, value: Any = None
) -> tuple[Updates, Array | None, Array | None]:
    """Returns the mean gradient during the warm-up, this worker's own gradient afterwards.

    Also returns whether there is one, for this worker or in the warm-up for any: one boolean or `[leaves]`; `None`
    without weights. And the loss `value`, by which an inner optimizer may change its step, in the same way.
    """

    def average_gradients(comm, updates, weight, value):
        # The loss counts as the leaf with the most examples.
        weights = weight
        if value is not None and weight is not None and weight.ndim:
            weights = jnp.concatenate([weight, largest_entry(weight, keepdims=True)])
        together, _, used = reduce_weighted(partial(_mean, comm), (updates, value), (), comm, weights, plain=True)
        if weight is not None and weight.ndim:
            used = jnp.asarray(used)[: weight.size]
        return *comm.varying(together), None if weight is None else comm.varying(used)

    def keep_own(comm, updates, weight, value):
        return *comm.varying((updates, value)), None if weight is None else comm.varying(weight > 0)

    value = None if value is None else jnp.asarray(value)
    mean, value, used = cond_or_static(warm, average_gradients, keep_own, comm, updates, weight, value)
    return mean, used, value


def set_anchor(comm: Comm, due: Flag, anchor: Updates, params: PyTree, steps: Updates) -> Updates:
    """Returns the mean of the models after `steps` as the first anchor; the warm-up has kept them equal."""

    def average_models(comm, anchor, params, steps):
        local = optax.apply_updates(params, steps)
        # Differences again, as in a round: the mean of what the warm-up added to the anchor.
        ahead = jax.tree.map(lambda a, p: p.astype(a.dtype) - comm.varying(round_like(a, p)), anchor, local)
        return optax.apply_updates(anchor, exact_mean(comm, ahead))

    return cond_or_static(due, average_models, lambda comm, anchor, *_: anchor, comm, anchor, params, steps)


def _mean(comm: Comm, updates: Updates, state: State) -> tuple[Updates, State]:
    return exact_mean(comm, updates), state
