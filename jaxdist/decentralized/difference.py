"""DCD-PSGD and ECD-PSGD: every worker, its owner included, uses the decoded form of a model."""

from functools import partial

import jax
import jax.numpy as jnp

from .._core.trees import minus, plus, wide
from .._core.types import Array, PyTree
from ..comm.base import Comm
from ..compressors.base import Compressor
from ..topology.base import Topology
from ..wire.mixing import times, weight_of
from .encoded import check_graph, exchange, exchange_rows
from .method import Method, StepContext, StepResult, check_interval, every_n_steps


def dcd_psgd(compressor: Compressor, *, interval: int = 1, replicas: bool = False) -> Method:
    """Each worker sends its compressed step and applies the decoded step to its own model, as its neighbors do.

        q_i = C(Σ_j W_ij x_j + u_i - x_i), sent;   x_i += q_i

    On a ring this is the low-precision decentralized algorithm of BAGUA.

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

    Returns:
      The method, for static topologies with symmetric weights.

    Raises:
      ValueError: `interval` is not positive; by `gossip`, the topology is directed or changes.

    Example:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> method = jd.decentralized.dcd_psgd(jd.compressors.int8())
      >>> tx = jd.gossip(optax.sgd(0.1), jd.topology.ring(4), method=method)
      >>> def step(state, target):
      ...     updates, opt_state = tx.update(state["x"] - target, state["opt"], state["x"])
      ...     return {"x": state["x"] + updates, "opt": opt_state}, {}
      >>> state = jd.place({"x": jd.PerWorker(jnp.zeros(1)), "opt": tx.init(jnp.zeros(1))}, 4)
      >>> run = jd.simulate(step, workers=4)
      >>> for _ in range(100):
      ...     state, _ = run(state, jnp.arange(4.0))
      >>> round(float(jd.consensus(state["x"])[0]), 1)
      1.5

    References:
      Tang, Gan, Zhang, Zhang, Liu, "Communication Compression for Decentralized Training", arXiv:1803.06443, 2018. Gan
      et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", arXiv:2107.01499, 2021.
    """
    check_interval(interval)
    init, exchange_steps = (_init_replicas, _exchange_replicas) if replicas else (_init_sum, _exchange_sum)

    def step_fn(context: StepContext) -> StepResult:
        steps, inner = context.adapt(context.gradients)
        params = plus(context.params, steps)
        communicate = partial(exchange_steps, compressor)
        params, state = every_n_steps(context, interval, communicate, _keep, params, context.state)
        return StepResult(params, inner, state)

    return Method(partial(check_graph, method="dcd_psgd"), init, step_fn)


def _init_sum(params: PyTree, topology: Topology) -> dict[str, PyTree]:
    del topology
    return {"known": params, "pull": jax.tree.map(jnp.zeros_like, params)}


def _init_replicas(params: PyTree, topology: Topology) -> dict[str, PyTree]:
    rows = 1 + len(topology.rounds[0].messages)
    return {"replicas": jax.tree.map(lambda x: jnp.stack([x] * rows), params)}


def _exchange_sum(
    compressor: Compressor, context: StepContext, params: PyTree, state: dict[str, PyTree]
) -> tuple[PyTree, dict[str, PyTree]]:
    known, pull = state["known"], state["pull"]
    # q_i = C(Σ_j W_ij (x_j - x_i) + u_i). Where rounding has moved the parameters off their decoded form, that
    # difference is sent too.
    own, from_neighbors = exchange(context, compressor, plus(minus(params, known), pull))
    known = plus(known, own)
    return known, {"known": known, "pull": plus(pull, from_neighbors)}


def _exchange_replicas(
    compressor: Compressor, context: StepContext, params: PyTree, state: dict[str, PyTree]
) -> tuple[PyTree, dict[str, PyTree]]:
    known, pull = _own_and_pull(context, state["replicas"])
    rows = plus(state["replicas"], exchange_rows(context, compressor, plus(minus(params, known), pull)))
    return jax.tree.map(lambda x: x[0], rows), {"replicas": rows}


def _keep(comm: Comm, params: PyTree, state: dict[str, PyTree]) -> tuple[PyTree, dict[str, PyTree]]:
    return comm.varying(params), comm.varying(state)


def _own_and_pull(context: StepContext, replicas: PyTree) -> tuple[PyTree, PyTree]:
    """`x_i` and `Σ_j W_ij (x_j - x_i)` from this worker's copies of the models, its own in row 0."""
    (static_round,) = context.topology.rounds
    weights = [weight_of(context.comm, message.weights) for message in static_round.messages]

    def pull_of(x: Array) -> Array:
        return sum((times(x[k] - x[0], weight) for k, weight in enumerate(weights, start=1)), jnp.zeros_like(x[0]))

    return jax.tree.map(lambda x: x[0], replicas), jax.tree.map(pull_of, replicas)


def ecd_psgd(compressor: Compressor) -> Method:
    """Each worker averages its neighbors' decoded models over time, so that compression noise fades.

    In step `t = 2, 3, ...`, with the neighbors' estimates `x̃`:

        x_i' = Σ_j W_ij x̃_j + u_i;   z_i = (1 - t/2) x_i + (t/2) x_i', its code sent;
        x̃_i <- (1 - 2/t) x̃_i + (2/t) C(z_i)

    `z` is extrapolated by `t/2` steps and encoded as a whole, not as a difference: for unbiased compressors of high
    precision.

    *On the wire*: the payload of the compressor for each neighbor, in one message of bytes.

    *State*: per-worker, one model in float32, `Σ_j W_ij x̃_j`. All workers must start from one model, as `init_state`
    and `place` make them.

    Args:
      compressor: an unbiased compressor of one array.

    Returns:
      The method, for static topologies with symmetric weights.

    Raises:
      ValueError: the compressor is biased; by `gossip`, the topology is directed or changes.

    Example:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = jd.gossip(optax.sgd(0.1), jd.topology.ring(4), method=jd.decentralized.ecd_psgd(jd.qsgd(8)))
      >>> tx.init(jnp.ones(3)).method.value["mixed"].tolist()
      [1.0, 1.0, 1.0]

    References:
      Tang, Gan, Zhang, Zhang, Liu, "Communication Compression for Decentralized Training", arXiv:1803.06443, 2018.
    """
    if compressor.variance is None:
        raise ValueError(
            "ecd_psgd averages the compression noise over time, so it needs an unbiased compressor (variance ω): use "
            "qsgd, or choco with any compressor"
        )
    return Method(partial(check_graph, method="ecd_psgd"), _init_mixed, partial(_ecd_step, compressor))


def _init_mixed(params: PyTree, topology: Topology) -> dict[str, PyTree]:
    del topology
    return {"mixed": params}


def _ecd_step(compressor: Compressor, context: StepContext) -> StepResult:
    mixed = context.state["mixed"]
    steps, inner = context.adapt(context.gradients)
    params = plus(mixed, steps)
    # The count starts at 0, and the formula's `t` at 2.
    t = context.count.astype(jnp.float32) + 2
    # z = (1 - t/2) x + (t/2) x' = x' + (t/2 - 1) (x' - x)
    extrapolated = jax.tree.map(
        lambda old, new: new + (t / 2 - 1).astype(new.dtype) * (new - old), wide(context.params), params
    )
    own, from_neighbors = exchange(context, compressor, extrapolated)
    # Σ_j W_ij x̃_j <- (1 - 2/t) Σ_j W_ij x̃_j + (2/t) Σ_j W_ij C(z_j)
    mixed = jax.tree.map(lambda s, z: s + (2 / t).astype(s.dtype) * (z - s), mixed, plus(own, from_neighbors))
    return StepResult(params, inner, {"mixed": mixed})
