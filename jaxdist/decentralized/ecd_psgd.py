"""ECD-PSGD: gossip of compressed extrapolations of the models."""

from typing import NamedTuple

import jax

from .._core.descriptions import with_description
from .._core.dtypes import widest_float
from .._core.trees import plus, wide
from .._core.types import Array, PyTree
from ..compressors.compressor import Compressor, check_compressor
from ..topology.base import Topology
from .exchange import exchange
from .method import Method, StepContext, StepResult, check_undirected


@with_description
def ecd_psgd(compressor: Compressor) -> Method:
    """Each worker averages its neighbors' decoded models over time, so that compression noise fades.

    In step `t = 2, 3, ...`, with the neighbors' estimates `x̃`:

        x_i' = Σ_j W_ij x̃_j + u_i;   z_i = (1 - t/2) x_i + (t/2) x_i', its code sent;
        x̃_i <- (1 - 2/t) x̃_i + (2/t) C(z_i)

    `z` is extrapolated by `t/2` steps and encoded as a whole, not as a difference: for unbiased compressors of high
    precision.

    *Topologies*: static, with symmetric weights.

    *On the wire*: the payload of the compressor for each neighbor, in one message of bytes.

    *State*: per-worker, one model in float32, `Σ_j W_ij x̃_j`. All workers must start from one model, as `init_state`
    and `place` make them.

    Args:
      compressor: an unbiased compressor of one array.

    Examples:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = jd.gossip(optax.sgd(0.1), jd.topology.ring(4), method=jd.decentralized.ecd_psgd(jd.qsgd(8)))
      >>> tx.init(jnp.ones(3)).method.value.mixed.tolist()
      [1.0, 1.0, 1.0]

    References:
      Tang, Gan, Zhang, Zhang, Liu, "Communication Compression for Decentralized Training", arXiv:1803.06443, 2018, as
      `dcd_psgd`.
    """
    check_compressor(compressor)
    if compressor.variance is None:
        raise ValueError(
            "ecd_psgd averages the compression noise over time, so it needs an unbiased compressor (variance ω): use "
            "qsgd, or choco with any compressor"
        )
    ecd = _ECD(compressor)
    return Method(ecd.prepare, ecd.init, ecd.step, flattens=True)


class EstimateState(NamedTuple):
    """The state of `ecd_psgd` of one worker: `Σ_j W_ij x̃_j`, where its next step starts from."""

    mixed: PyTree

    keeps_apart = "estimates, from which the next step starts in place of the parameters"


class _ECD(NamedTuple):
    compressor: Compressor

    def prepare(self, topology: Topology) -> Topology:
        return check_undirected(topology, "ecd_psgd")

    def init(self, params: PyTree, topology: Topology) -> EstimateState:
        return EstimateState(params)

    def step(self, context: StepContext) -> StepResult:
        mixed = context.state.mixed
        steps, inner = context.adapt(context.gradients)
        # x' = Σ_j W_ij x̃_j + u
        params = plus(mixed, steps)
        # The count starts at 0, and the formula's `t` at 2.
        t = context.count.astype(widest_float()) + 2

        # z = (1 - t/2) x + (t/2) x' = x' + (t/2 - 1) (x' - x)
        def extrapolate(old: Array, new: Array) -> Array:
            return new + (t / 2 - 1).astype(new.dtype) * (new - old)

        z = jax.tree.map(extrapolate, wide(context.params), params)
        own, from_neighbors = exchange(context, self.compressor, z)
        # Σ_j W_ij x̃_j <- (1 - 2/t) Σ_j W_ij x̃_j + (2/t) Σ_j W_ij C(z_j)
        mixed = jax.tree.map(lambda s, c: s + (2 / t).astype(s.dtype) * (c - s), mixed, plus(own, from_neighbors))
        return StepResult(params, inner, EstimateState(mixed))
