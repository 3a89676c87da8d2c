"""OSGP: SGP whose messages arrive one round later."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._core.descriptions import with_description
from .._core.dtypes import factor_dtype, widest_float
from .._core.trees import plus, wide
from .._core.types import Array, Float, PyTree, Updates
from ..topology.base import Topology
from .method import Method, StepContext, StepResult, mixing_delta
from .sgp import check_columns, scale_models


class OverlappedState(NamedTuple):
    """The state of `osgp` of one worker: its push-sum weight, and the model and weight of which a share is under way.

    `share` is `1 - P_ii`, that of `outgoing` and `outgoing_weight` which other workers will receive.
    """

    weight: Float[Array, ""]
    outgoing: Updates
    outgoing_weight: Float[Array, ""]
    share: Float[Array, ""]

    keeps_apart = "push-sum weights, and messages that are under way"

    def weigh_drift(self, anchor: Updates, drift: Updates) -> Updates:
        """`w (a - z) + (1 - P_ii) (w' a - x')`: models and weights that are stored or under way keep their sums."""
        under_way = jax.tree.map(
            lambda a, x: self.outgoing_weight.astype(a.dtype) * a - x.astype(a.dtype), anchor, self.outgoing
        )
        return plus(scale_models(drift, self.weight), scale_models(under_way, self.share))


@with_description
def osgp() -> Method:
    """Overlapped stochastic gradient push: the messages of a step arrive one step later, so no gradient waits for them.

    With push-sum weights `w_i = 1` at first and the parameters that the user sees, `z = x / w`; a prime marks the
    previous step:

        x_i = w_i z_i + u_i,   x_i <- P_ii x_i + Σ_{j≠i} P'_ij x'_j,   w_i <- P_ii w_i + Σ_{j≠i} P'_ij w'_j

    What a step sends is part of the state, so the compiler may send it while the gradient is computed. The weights
    differ from 1 on every graph, since a part of each model is always under way; models and weights that are stored
    or under way keep their sums.

    *Topologies*: column-stochastic and strongly connected.

    *On the wire*: as `sgp`, one model and 4 bytes for each neighbor, always with the 4 bytes.

    *State*: per-worker, one model in float32 and two numbers.

    Raises:
      ValueError: at trace time, `round=` was passed: the messages belong to the round before.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = jd.gossip(optax.sgd(1.0), jd.topology.one_peer_exponential(4), method=jd.decentralized.osgp())
      >>> def run(x, steps):
      ...     def step(_, carry):
      ...         updates, opt_state = tx.update(jnp.zeros(()), carry[1], carry[0])
      ...         return carry[0] + updates, opt_state
      ...     return jax.lax.fori_loop(0, steps, step, (x, tx.init(x)))[0]
      >>> x, run_all = jnp.array([0.0, 4.0, 8.0, 12.0]), jax.jit(jax.vmap(run, in_axes=(0, None), axis_name="data"))
      >>> run_all(x, 1).tolist()  # the messages of the first step are under way
      [0.0, 4.0, 8.0, 12.0]
      >>> bool(jnp.allclose(run_all(x, 30), 6, atol=1e-2))
      True

    References:
      Assran, Loizou, Ballas, Rabbat, "Stochastic Gradient Push for Distributed Deep Learning", arXiv:1811.10792, 2019
      (OSGP, with messages one step late).
    """
    return Method(check_columns, _init_osgp, _osgp_step)


def _init_osgp(params: PyTree, topology: Topology) -> OverlappedState:
    del topology
    zero = jnp.zeros((), factor_dtype(params))
    return OverlappedState(zero + 1, jax.tree.map(jnp.zeros_like, params), zero, zero)


def _osgp_step(context: StepContext) -> StepResult:
    if context.static_round:
        raise ValueError("osgp sends the messages of the previous round, so round= cannot select them; leave round out")
    state: OverlappedState = context.state
    # Σ_{j≠i} P'_ij x'_j: it depends on the state only, not on the gradient.
    before = context._replace(count=jnp.maximum(context.count - 1, 0))
    sent = state.outgoing, state.outgoing_weight
    delta = mixing_delta(before, sent, like=(context.params, state.weight))
    arrived = _add_scaled(delta, sent, 1 - _self_weight(before).astype(state.share.dtype))

    steps, inner = context.adapt(context.gradients)
    # x = w z + u, of which P_ii stays; the rest is sent in the next step, as the wire rounds it.
    x = plus(scale_models(wide(context.params), state.weight), steps)
    outgoing = jax.tree.map(lambda x, p: x.astype(p.dtype).astype(x.dtype), x, context.params)
    leaves = _self_weight(context).astype(state.share.dtype) - 1
    x = jax.tree.map(jnp.add, _add_scaled(x, outgoing, leaves), arrived[0])
    weight = state.weight + leaves * state.weight + arrived[1]
    params = jax.tree.map(lambda x: x / weight.astype(x.dtype), x)
    return StepResult(params, inner, OverlappedState(weight, outgoing, state.weight, -leaves))


def _self_weight(context: StepContext) -> Array:
    """Returns `P_ii` of this worker in the round of a step."""
    weights = jnp.asarray([round.self_weights for round in context.topology.rounds], widest_float())
    order = jnp.asarray(context.topology.order, jnp.int32)
    return weights[order[context.count % len(context.topology.order)], context.comm.index]


def _add_scaled(tree: PyTree, other: PyTree, factor: Array) -> PyTree:
    """Returns `tree + factor · other`."""
    return jax.tree.map(lambda x, y: x + factor.astype(y.dtype) * y, tree, other)
