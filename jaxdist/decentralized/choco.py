"""CHOCO-SGD: gossip with any compressor, by sending differences from a copy that the neighbors already have."""

from functools import partial

import jax
import jax.numpy as jnp

from .._core.trees import minus, plus
from .._core.types import PyTree
from ..compressors.base import Compressor
from ..topology.base import Topology
from ..wire.encoded import contraction_form
from .encoded import check_graph, exchange
from .method import Method, StepContext, StepResult


def choco(compressor: Compressor, *, step_size: float | int) -> Method:
    """Each worker sends the compressed difference between its model and a public copy `x̂` that its neighbors track.

        x_i += u_i;   x_i += γ Σ_j W_ij (x̂_j - x̂_i);   q_i = C(x_i - x̂_i), sent;   x̂_i += q_i

    Compression errors stay in `x - x̂` and are sent later, so any contraction works; unbiased compressors are scaled by
    `1/(1+ω)`. The mean of all models changes by the steps `u` alone, whatever the compressor.

    *On the wire*: the payload of the compressor for each neighbor, in one message of bytes.

    *State*: per-worker, two models in float32: `x̂_i`, and `Σ_j W_ij (x̂_j - x̂_i)`, which sums up all that is needed of
    the neighbors' copies. All workers must start from one model, as `init_state` and `place` make them.

    Args:
      compressor: of one array.
      step_size: `γ`, the step towards the neighbors. Too high diverges: with the largest of 10 entries on a ring of 8
        workers .5 does, .2 reaches consensus fastest, and .1 and .05 are slower. Start near the share of entries that
        are sent, or at 0.5 with 4 to 8 bits; without compression 1 is plain gossip.

    Returns:
      The method, for static topologies with symmetric weights.

    Raises:
      ValueError: `step_size` is outside (0, 1], or the compressor states neither contraction nor variance; by `gossip`,
        the topology is directed or changes.

    Example:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> method = jd.decentralized.choco(jd.top_k(0.5), step_size=0.4)
      >>> tx = jd.gossip(optax.sgd(0.1), jd.topology.ring(4), method=method)
      >>> def step(state, target):
      ...     updates, opt_state = tx.update(state["x"] - target, state["opt"], state["x"])
      ...     return {"x": state["x"] + updates, "opt": opt_state}, {}
      >>> state = jd.place({"x": jd.PerWorker(jnp.zeros(1)), "opt": tx.init(jnp.zeros(1))}, 4)
      >>> run = jd.simulate(step, workers=4)
      >>> for _ in range(100):
      ...     state, _ = run(state, jnp.arange(4.0))
      >>> round(float(jd.consensus(state["x"])[0]), 3)
      1.5

    References:
      Koloskova, Stich, Jaggi, "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
      Communication", arXiv:1902.00340, 2019. Koloskova, Lin, Stich, Jaggi, "Decentralized Deep Learning with Arbitrary
      Communication Compression", arXiv:1907.09356, 2020 (the order of the steps).
    """
    if not 0 < step_size <= 1:
        raise ValueError(f"step_size must be in (0, 1], got {step_size}")
    contraction = contraction_form(compressor)

    def step_fn(context: StepContext) -> StepResult:
        public, pull = context.state["public"], context.state["pull"]
        steps, inner = context.adapt(context.gradients)
        # Eq.: x_i += u_i + γ Σ_j W_ij (x̂_j - x̂_i). The pull is that of the previous exchange.
        params = plus(plus(context.params, steps), jax.tree.map(lambda x: step_size * x, pull))
        own, from_neighbors = exchange(context, contraction, minus(params, public))
        return StepResult(params, inner, {"public": plus(public, own), "pull": plus(pull, from_neighbors)})

    return Method(partial(check_graph, method="choco"), _init, step_fn)


def _init(params: PyTree, topology: Topology) -> dict[str, PyTree]:
    del topology
    # All workers start from one model, so that public copies are equal and pull nowhere.
    return {"public": params, "pull": jax.tree.map(jnp.zeros_like, params)}
