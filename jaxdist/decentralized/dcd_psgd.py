"""DCD-PSGD: gossip of compressed differences, with replicas of the neighbors' models."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._core.descriptions import with_description
from .._core.trees import minus, plus
from .._core.types import Array, PyTree
from ..comm.base import Comm
from ..compressors.compressor import Compressor, check_compressor
from ..topology.base import Topology
from ..wire.mixing import multiply_in_dtype, weight_of
from .exchange import exchange, exchange_rows, init_copy
from .method import Method, StepContext, StepResult, check_interval, check_undirected, every_n_steps


@with_description
def dcd_psgd(compressor: Compressor, *, interval: int = 1, replicas: bool = False) -> Method:
    """Each worker sends its compressed step and applies the decoded step to its own model, as its neighbors do.

        q_i = C(Σ_j W_ij x_j + u_i - x_i), sent;   x_i += q_i

    On a ring this is the low-precision decentralized algorithm of BAGUA.

    *Topologies*: static, with symmetric weights.

    *On the wire*: the payload of the compressor for each neighbor, in one message of bytes; with an interval, only in
    every `interval`-th step.

    *State*: per-worker, two models in float32: the decoded `x_i`, and `Σ_j W_ij (x_j - x_i)`. With `replicas`, `x_i`
    and one model for each neighbor. All workers must start from one model, as `init_state` and `place` make them.

    Args:
      compressor: of one array. It must be accurate, about 8 bits: the error of a step is never sent, and coarse
        compressors (a few bits, top-k) diverge where `choco` does not.
      interval: neighbors communicate at the end of every `interval` steps, and send all steps since the last time. More
        sends less, and workers drift further apart.
      replicas: keep the model of each neighbor, as public implementations do, instead of their weighted sum. The copies
        stay equal to the neighbors' own models in every bit, and no rounding adds up over a million steps, for the
        memory of one model per neighbor, less one.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, jaxdist as jd
      >>> method = jd.decentralized.dcd_psgd(jd.compressors.int8())
      >>> tx = jd.gossip(optax.sgd(0.5), jd.topology.ring(4), method=method)
      >>> def one_worker(gradient):
      ...     return tx.update(gradient, tx.init(jnp.zeros(())), jnp.zeros(()))[0]
      >>> steps = jax.jit(jax.vmap(one_worker, axis_name="data"))(jnp.arange(4.0))
      >>> [round(step, 3) for step in steps.tolist()]  # each worker's decoded step
      [0.0, -0.5, -1.0, -1.5]

    References:
      Tang, Gan, Zhang, Zhang, Liu, "Communication Compression for Decentralized Training", arXiv:1803.06443, 2018. Gan
      et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", arXiv:2107.01499, 2021.
    """
    check_compressor(compressor)
    check_interval(interval)
    dcd = _DCD(compressor, interval)
    if replicas:
        return Method(dcd.prepare, dcd.init_replicas, dcd.step_with_replicas, flattens=True)
    return Method(dcd.prepare, dcd.init, dcd.step, flattens=True)


class _DCD(NamedTuple):
    compressor: Compressor
    interval: int

    def prepare(self, topology: Topology) -> Topology:
        return check_undirected(topology, "dcd_psgd")

    def init(self, params: PyTree, topology: Topology) -> dict[str, PyTree]:
        return init_copy("known", params)

    def init_replicas(self, params: PyTree, topology: Topology) -> dict[str, PyTree]:
        # This worker's model is in row 0, and the source of message k in row k + 1.
        rows = 1 + len(topology.rounds[0].messages)
        return {"replicas": jax.tree.map(lambda x: jnp.stack([x] * rows), params)}

    def step(self, context: StepContext) -> StepResult:
        return self._adapt_and_communicate(context, self._exchange_sum)

    def step_with_replicas(self, context: StepContext) -> StepResult:
        return self._adapt_and_communicate(context, self._exchange_replicas)

    def _adapt_and_communicate(
        self, context: StepContext, communicate: Callable[..., tuple[PyTree, PyTree]]
    ) -> StepResult:
        steps, inner = context.adapt(context.gradients)
        params = plus(context.params, steps)
        params, state = every_n_steps(context, self.interval, communicate, _keep, params, context.state)
        return StepResult(params, inner, state)

    def _exchange_sum(
        self, context: StepContext, params: PyTree, state: dict[str, PyTree]
    ) -> tuple[PyTree, dict[str, PyTree]]:
        known, pull = state["known"], state["pull"]
        # q_i = C(Σ_j W_ij (x_j - x_i) + u_i),  x_i += q_i. Where rounding has moved the parameters off their decoded
        # form, that difference is sent too.
        own, from_neighbors = exchange(context, self.compressor, plus(minus(params, known), pull))
        known = plus(known, own)
        return known, {"known": known, "pull": plus(pull, from_neighbors)}

    def _exchange_replicas(
        self, context: StepContext, params: PyTree, state: dict[str, PyTree]
    ) -> tuple[PyTree, dict[str, PyTree]]:
        rows = state["replicas"]
        weights = [weight_of(context.comm, message.weights) for message in context.topology.rounds[0].messages]

        # Σ_j W_ij (x_j - x_i) from this worker's copies of the models.
        def pull_of(x: Array) -> Array:
            return sum(
                (multiply_in_dtype(x[k] - x[0], weight) for k, weight in enumerate(weights, start=1)),
                jnp.zeros_like(x[0]),
            )

        known, pull = jax.tree.map(lambda x: x[0], rows), jax.tree.map(pull_of, rows)
        # Every row moves by the decoded step of its worker: x_j += q_j.
        rows = plus(rows, exchange_rows(context, self.compressor, plus(minus(params, known), pull)))
        return jax.tree.map(lambda x: x[0], rows), {"replicas": rows}


def _keep(comm: Comm, params: PyTree, state: dict[str, PyTree]) -> tuple[PyTree, dict[str, PyTree]]:
    return comm.varying(params), comm.varying(state)
