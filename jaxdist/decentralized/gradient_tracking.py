"""Gradient tracking: besides the models workers average their gradients, and step along the mean of all."""

import jax
import jax.numpy as jnp

from .._core.trees import choose, minus, plus, wide
from .d_psgd import Order, check_order, doubly_stochastic
from .method import Method, Turn, Turned
from .mixing import mix


def gradient_tracking(*, order: Order = "adapt_then_combine") -> Method:
    """A tracker `y` follows the mean gradient of all workers, and the inner optimizer steps along it.

        adapt_then_combine:  y <- W (y + g - g'),   x <- W (x + u(y))
        combine_then_adapt:  y <- W y + g - g',     x <- W x + u(y)

    with the steps `u` of the inner optimizer and the gradient `g'` of the step before (both 0 at first). The mean of
    all `y` is that of all `g` in every step, so there is no bias of data that differ, at a constant rate.

    *On the wire*: two models for each neighbor; in `"combine_then_adapt"` as one message, before the gradient is
    known.

    *State*: per worker two models, the tracker and the last gradient, in float32.

    Args:
      order: `"adapt_then_combine"` takes larger rates. The other is DIGing, which diverges sooner: at a rate of .1 on a
        torus of 8 workers and losses of curvature 1 to 4, where .02 works.

    Returns:
      The method, for any doubly stochastic topology, those that change included.

    Raises:
      ValueError: there is no such order.

    Example:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> method = jd.decentralized.gradient_tracking()
      >>> tx = jd.gossip(optax.sgd(0.1), jd.topology.one_peer_exponential(4), method=method)
      >>> def step(state, target):
      ...     updates, opt_state = tx.update(state["x"] - target[0], state["opt"], state["x"])
      ...     return {"x": state["x"] + updates, "opt": opt_state}, {}
      >>> state = jd.place({"x": jd.PerWorker(jnp.zeros(())), "opt": tx.init(jnp.zeros(()))}, 4)
      >>> run = jd.simulate(step, workers=4)
      >>> for _ in range(200):
      ...     state, _ = run(state, jnp.arange(4.0))
      >>> state["x"].value.round(4).tolist()
      [1.5, 1.5, 1.5, 1.5]

    References:
      Nedić, Olshevsky, Shi, "Achieving Geometric Convergence for Distributed Optimization over Time-Varying Graphs"
      (DIGing), arXiv 1607.03218, 2017. Di Lorenzo, Scutari, "NEXT: In-Network Nonconvex Optimization", arXiv
      1602.00591, 2016 (the adapt-then-combine form).
    """
    check_order(order)

    def init(params, topology):
        del topology
        return {"tracker": jax.tree.map(jnp.zeros_like, params), "gradient": jax.tree.map(jnp.zeros_like, params)}

    def step(turn: Turn) -> Turned:
        tracker, old = turn.state["tracker"], turn.state["gradient"]
        gradient = wide(turn.gradients)
        if turn.active is not None:  # who takes no step has no news
            gradient = choose(turn.active, gradient, old)
        news = minus(gradient, old)
        if order == "adapt_then_combine":
            tracker = mix(turn, plus(tracker, news))
            steps, inner = turn.adapt(_as(tracker, turn.gradients))
            params = mix(turn, plus(turn.params, steps), like=turn.params)
        else:
            params, tracker = mix(turn, (wide(turn.params), tracker), like=(turn.params, tracker))
            tracker = plus(tracker, news)
            steps, inner = turn.adapt(_as(tracker, turn.gradients))
            params = plus(params, steps)
        return Turned(params, inner, {"tracker": tracker, "gradient": gradient})

    return Method(doubly_stochastic, init, step)


def _as(tree, like):
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, like)
