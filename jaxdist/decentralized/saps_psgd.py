"""SAPS-PSGD: gossip with one neighbor at a time, of the same few random entries."""

import jax

from .._core.descriptions import with_description
from .._core.trees import plus
from ..compressors.compressor import Compressor, check_compressor
from ..wire.buffers import unstack
from .exchange import compress_leaves, decode_leaves
from .method import Method, StepContext, StepResult, check_doubly_stochastic, mix


@with_description
def saps_psgd(compressor: Compressor) -> Method:
    """Neighbors exchange a few entries of their models, which all workers draw alike, and average only these.

        x_i += u_i;   x_i += Σ_j W_ij (C(x_j) - C(x_i))

    C keeps some entries as they are, so this compresses the *differences* between neighbors without a memory of them.
    It works on graphs that change in every step, where `choco` and `dcd_psgd` have no neighbors to remember. The mean
    of all models changes by the steps `u` alone. Where a step of plain gossip leaves a share σ² of the expected square
    of the consensus error, this leaves `1 - ρ (1 - σ²)`, with a share ρ of the entries: about the same for the bytes.

    *Topologies*: doubly stochastic; all that change. The paper pairs workers by the speed of their links.

    *On the wire*: the payload of the compressor for each neighbor, one message for each dtype.

    *State*: none.

    Args:
      compressor: a linear one whose draws all workers share and that keeps entries as they are: `random_k(0.1)`. A
        higher density keeps workers closer together.

    Raises:
      ValueError: another compressor.

    Examples:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> method = jd.decentralized.saps_psgd(jd.compressors.random_k(0.25))
      >>> tx = jd.gossip(optax.sgd(0.1), jd.topology.random_matchings(4), method=method)
      >>> def step(state, target):
      ...     updates, opt_state = tx.update(state["x"] - target, state["opt"], state["x"])
      ...     return {"x": state["x"] + updates, "opt": opt_state}, {}
      >>> state = jd.place({"x": jd.PerWorker(jnp.zeros(8)), "opt": tx.init(jnp.zeros(8))}, 4)
      >>> run = jd.simulate(step, workers=4)
      >>> for _ in range(100):
      ...     state, _ = run(state, jnp.arange(4.0))
      >>> [round(x, 3) for x in jd.consensus(state["x"]).tolist()]
      [1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5]

    References:
      Tang, Shi, Chu, "Communication-Efficient Decentralized Learning with Sparsification and Adaptive Peer Selection",
      arXiv:2002.09692, 2020.
    """
    check_compressor(compressor)
    if not (compressor.summable and compressor.shared_key) or compressor.contraction is None:
        raise ValueError(
            f"saps_psgd needs a compressor that keeps the same entries on all workers, got {compressor}: use random_k "
            "without unbiased=True, or choco on a static graph"
        )

    def step(context: StepContext) -> StepResult:
        steps, inner = context.adapt(context.gradients)
        params = plus(context.params, steps)
        leaves, structure = jax.tree.flatten(params)
        groups, stacks, payloads = compress_leaves(context, compressor, leaves)
        # C is linear: Σ_j W_ij C(x_j) is the code whose entries are averages.
        mixed = mix(context, payloads)
        pairs = zip(*(decode_leaves(compressor, codes, stacks) for codes in (mixed, payloads)), strict=True)
        changes = structure.unflatten(unstack(groups, [new - old for new, old in pairs]))
        return StepResult(plus(params, changes), inner, ())

    return Method(check_doubly_stochastic, lambda params, topology: (), step, flattens=True)
