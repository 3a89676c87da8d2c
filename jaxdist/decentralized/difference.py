"""DCD and ECD: all that anybody uses of a model is what its code says."""

import jax
import jax.numpy as jnp

from .._core.trees import minus, plus, wide
from .._core.types import PyTree
from ..compressors.base import Compressor
from ..wire.mixing import times, weight_of
from .encoded import check_graph, exchange, exchange_rows
from .method import Method, Turn, Turned, check_interval, in_turns


def dcd_psgd(compressor: Compressor, *, interval: int = 1, replicas: bool = False) -> Method:
    """Each worker is where its neighbors think it is: it sends the code of its step, and takes the decoded one itself.

        q_i = C(Σ_j W_ij x_j + u_i - x_i), sent;   x_i += q_i

    On a ring this is the low-precision decentralized algorithm of BAGUA.

    *On the wire*: the payload of the code for each neighbor, in one message of bytes; steps between two talks send
    nothing.

    *State*: per worker two models in float32: `x_i` as it is known to others, and `Σ_j W_ij (x_j - x_i)`. With
    `replicas`, `x_i` and one model for each neighbor. All workers must start from one model, as `init_state` and
    `place` make them.

    Args:
      compressor: the code of one array. It must be a good one, 8 bits or so: what is lost in a step is never sent, and
        coarse codes (a few bits, top-k) diverge where `choco` does not.
      interval: neighbors talk at the end of every so many steps, of all that has happened since. More sends less, and
        workers drift further apart.
      replicas: keep the neighbors' models apart, as public code does, instead of their weighted sum. They stay equal
        to the neighbors' own in every bit, and no rounding adds up over a million steps, for the memory of as many
        models as there are neighbors, less one.

    Returns:
      The method, for static topologies with symmetric weights.

    Raises:
      ValueError: the interval is not positive; by `gossip`, the topology is directed or changes.

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
      Tang, Gan, Zhang, Zhang, Liu, "Communication Compression for Decentralized Training", arXiv 1803.06443, 2018. Gan
      et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", arXiv 2107.01499, 2021.
    """
    check_interval(interval)

    def init(params, topology):
        if replicas:
            rows = 1 + len(topology.rounds[0].messages)
            return {"replicas": jax.tree.map(lambda x: jnp.stack([x] * rows), params)}
        return {"known": params, "pull": jax.tree.map(jnp.zeros_like, params)}

    def step(turn: Turn) -> Turned:
        steps, inner = turn.adapt(turn.gradients)

        def talk(turn, params, state):
            known, pull = _seen(turn, state["replicas"]) if replicas else (state["known"], state["pull"])
            # Where rounding has moved the parameters off what is known of them, that is sent too.
            news = plus(minus(params, known), pull)
            if replicas:
                rows = plus(state["replicas"], exchange_rows(turn, compressor, news))
                return jax.tree.map(lambda x: x[0], rows), {"replicas": rows}
            own, change = exchange(turn, compressor, news)
            known = plus(known, own)
            return known, {"known": known, "pull": plus(pull, change)}

        def silent(comm, params, state):
            return comm.varying(params), comm.varying(state)

        params, state = in_turns(turn, interval, talk, silent, plus(turn.params, steps), turn.state)
        return Turned(params, inner, state)

    return Method(lambda topology: check_graph(topology, "dcd_psgd"), init, step)


def _seen(turn: Turn, replicas: PyTree) -> tuple[PyTree, PyTree]:
    """`x_i` and `Σ_j W_ij (x_j - x_i)` from the copies that this worker has of all of them."""
    (one,) = turn.topology.rounds
    weights = [weight_of(turn.comm, message.weights) for message in one.messages]

    def pull(x):
        return sum((times(x[k] - x[0], weight) for k, weight in enumerate(weights, start=1)), jnp.zeros_like(x[0]))

    return jax.tree.map(lambda x: x[0], replicas), jax.tree.map(pull, replicas)


def ecd_psgd(compressor: Compressor) -> Method:
    """Neighbors average what they hear of each other over time, so that the noise of codes fades.

    In step `t = 2, 3, ...`, with the neighbors' estimates `x̃`:

        x_i' = Σ_j W_ij x̃_j + u_i;   z_i = (1 - t/2) x_i + (t/2) x_i', its code sent;
        x̃_i <- (1 - 2/t) x̃_i + (2/t) C(z_i)

    The extrapolation lies `t/2` steps ahead, and the code is of all of it, not of a difference: for unbiased codes of
    high precision.

    *On the wire*: the payload of the code for each neighbor, in one message of bytes.

    *State*: per worker one model in float32, `Σ_j W_ij x̃_j`. All workers must start from one model, as `init_state`
    and `place` make them.

    Args:
      compressor: an unbiased code of one array.

    Returns:
      The method, for static topologies with symmetric weights.

    Raises:
      ValueError: the code is biased; by `gossip`, the topology is directed or changes.

    Example:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = jd.gossip(optax.sgd(0.1), jd.topology.ring(4), method=jd.decentralized.ecd_psgd(jd.qsgd(8)))
      >>> tx.init(jnp.ones(3)).method.value["mixed"].tolist()
      [1.0, 1.0, 1.0]

    References:
      Tang, Gan, Zhang, Zhang, Liu, "Communication Compression for Decentralized Training", arXiv 1803.06443, 2018.
    """
    if compressor.variance is None:
        raise ValueError(
            "ecd_psgd averages the compression noise over time, so it needs an unbiased compressor (variance ω): use "
            "qsgd, or choco with any code"
        )

    def init(params, topology):
        del topology
        return {"mixed": params}

    def step(turn: Turn) -> Turned:
        around = turn.state["mixed"]
        steps, inner = turn.adapt(turn.gradients)
        params = plus(around, steps)
        t = turn.count.astype(jnp.float32) + 2

        def ahead(old, new):
            return new + (t / 2 - 1).astype(new.dtype) * (new - old)

        own, change = exchange(turn, compressor, jax.tree.map(ahead, wide(turn.params), params))
        around = jax.tree.map(lambda s, z: s + (2 / t).astype(s.dtype) * (z - s), around, plus(own, change))
        return Turned(params, inner, {"mixed": around})

    return Method(lambda topology: check_graph(topology, "ecd_psgd"), init, step)
