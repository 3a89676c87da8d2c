"""The mean of the workers' models, and how far they are from it."""

from typing import Any

import jax
import jax.numpy as jnp

from .._core.dtypes import widen
from .._core.trees import wide
from .._core.types import Array, Float, PyTree, State
from ..state.marks import PerWorker, with_value
from ..state.placement import consensus
from .gossip import GossipState


def mean_params(params: PerWorker, opt_state: State) -> PyTree:
    """The model that gossip would agree on without further steps: the mean over workers that its mixing keeps.

    Usually that is `jd.consensus(params)`. With push-sum weights (`sgp` on a graph whose rows do not sum to 1, `osgp`)
    or messages under way (`osgp`, `relay_sgd`) it is not: workers do not count alike there, and a part of each model
    is in the state. It costs an all-reduce of one model.

    Args:
      params: placed parameters, as a distributed or simulated step returned them.
      opt_state: the optimizer state beside them, with one `gossip` anywhere inside.

    Returns:
      A tree like the parameters of one worker, in float32 or better.

    Raises:
      ValueError: there is no `gossip` in the state, or there are several.

    Examples:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> graph = jd.topology.digraph(3, [(0, 1), (1, 2), (2, 0), (0, 2)])
      >>> tx = jd.gossip(optax.sgd(1.0), graph, method=jd.decentralized.sgp())
      >>> def step(state, target):
      ...     updates, opt = tx.update(state["x"] - target[0], state["opt"], state["x"])
      ...     return {"x": state["x"] + updates, "opt": opt}, {}
      >>> state = jd.place({"x": jd.PerWorker(jnp.zeros(())), "opt": tx.init(jnp.zeros(()))}, 3)
      >>> state, _ = jd.simulate(step, workers=3)(state, jnp.array([0.0, 6.0, 0.0]))
      >>> round(float(jd.decentralized.mean_params(state["x"], state["opt"])), 5)  # the mean of all steps
      2.0
      >>> round(float(jd.consensus(state["x"])), 5)  # after one exchange
      1.95
    """
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, GossipState))
    states = [node for node in nodes if isinstance(node, GossipState)]
    if len(states) != 1:
        raise ValueError(
            f"mean_params needs an optimizer state with one gossip inside, got {len(states)}; without any, the model "
            "is jd.consensus(params)"
        )
    method = states[0].method.value
    # Momentum may keep the state of another method inside.
    while not hasattr(method, "weigh_drift") and hasattr(method, "method"):
        method = method.method
    models = wide(params.value)
    if hasattr(method, "weigh_drift"):
        # What this worker has of the sum: minus its drift from zero.
        def held(x: PyTree, state: Any) -> PyTree:
            drift = state.weigh_drift(jax.tree.map(jnp.zeros_like, x), jax.tree.map(jnp.negative, x))
            return jax.tree.map(jnp.negative, drift)

        models = (held if params.axis == () else jax.vmap(held))(models, method)
    return consensus(with_value(params, models))


def consensus_distance(params: PerWorker) -> Float[Array, ""]:
    """The distance between workers: `√(mean_i |x_i - mean x|²)` over all parameters.

    One number in float32, of placed parameters `[W, ...]` as a distributed or simulated step returned them.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> float(jd.decentralized.consensus_distance(jd.PerWorker(jnp.array([[1.0, 0.0], [3.0, 0.0]]))))
      1.0

    References:
      Kong, Lin, Koloskova, Jaggi, Stich, "Consensus Control for Decentralized Deep Learning", arXiv:2102.04828, 2021.
    """

    def mean_square(x: Array) -> Array:
        # Differences in the dtype of the models: those of float64 may be far smaller than float32 resolves.
        x = widen(x)
        return (jnp.sum(jnp.square(x - x.mean(0, keepdims=True))) / x.shape[0]).astype(jnp.float32)

    return jnp.sqrt(sum(map(mean_square, jax.tree.leaves(params.value)), jnp.zeros(())))
