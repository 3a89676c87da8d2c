"""CHOCO-SGD: gossip of compressed differences to public copies of the models.

`examples/from_scratch/gossip.py` is the method, and D-PSGD, in 100 lines of plain JAX.
"""

from typing import NamedTuple

import jax

from .._core.checks import check_range
from .._core.descriptions import with_description
from .._core.trees import minus, plus
from .._core.types import PyTree
from ..compressors.compressor import Compressor
from ..compressors.scaled import contraction_form
from ..topology.base import Topology
from .exchange import exchange, init_copy
from .method import Method, StepContext, StepResult, check_undirected


@with_description
def choco(compressor: Compressor, *, step_size: float | int) -> Method:
    """Each worker sends the compressed difference between its model and a public copy `x̂` that its neighbors track.

        x_i += u_i;   x_i += γ Σ_j W_ij (x̂_j - x̂_i);   q_i = C(x_i - x̂_i), sent;   x̂_i += q_i

    Compression errors stay in `x - x̂` and are sent later, so any contraction works; unbiased compressors are shrunk to
    one (`compressors.scaled`). The mean of all models changes by the steps `u` alone, whatever the compressor.

    *Topologies*: static, with symmetric weights.

    *On the wire*: the payload of the compressor for each neighbor, in one message of bytes.

    *State*: per-worker, two models in float32: `x̂_i`, and `Σ_j W_ij (x̂_j - x̂_i)`, which sums up all that is needed of
    the neighbors' copies. All workers must start from one model, as `init_state` and `place` make them.

    Args:
      compressor: of one array; it must state its contraction or its variance.
      step_size: `γ` in (0, 1], the step towards the neighbors. Start at 0.5 and halve it if the loss or the distance of
        the models grows: the largest of 10 entries on a ring of 8 workers diverge at .5, and agree fastest at .2. Too
        low is slow: on a ring of 4 that train a language model by the largest tenth, 0.5, 0.2 and 0.1 ended 0.2, 1
        and 2 % above `d_psgd` (`benchmarks/reports/2026-11-starts`). Without compression 1 is plain gossip.

    Examples:
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
    check_range("step_size", step_size, 0, 1, ends="(]")
    choco = _Choco(contraction_form(compressor, closest=True), step_size)
    return Method(choco.prepare, choco.init, choco.step, flattens=True)


class _Choco(NamedTuple):
    compressor: Compressor
    step_size: float | int

    def prepare(self, topology: Topology) -> Topology:
        return check_undirected(topology, "choco")

    def init(self, params: PyTree, topology: Topology) -> dict[str, PyTree]:
        return init_copy("public", params)

    def step(self, context: StepContext) -> StepResult:
        public, pull = context.state["public"], context.state["pull"]
        steps, inner = context.adapt(context.gradients)
        # x_i += u_i + γ Σ_j W_ij (x̂_j - x̂_i). The pull is that of the previous exchange.
        params = plus(plus(context.params, steps), jax.tree.map(lambda x: self.step_size * x, pull))
        # q_i = C(x_i - x̂_i),  x̂_i += q_i
        own, from_neighbors = exchange(context, self.compressor, minus(params, public))
        return StepResult(params, inner, {"public": plus(public, own), "pull": plus(pull, from_neighbors)})
