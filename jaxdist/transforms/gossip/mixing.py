"""One step of gossip: each worker's average of its own model and those of its neighbours."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ... import comm as comms
from ..._typing import Array, Int, PyTree
from ...comm import Comm
from ...compressors.base import working_dtype
from ...reducers._fused import fused
from ...topology import Round, Topology, is_doubly_stochastic, is_symmetric
from .method import Turn, plus


def mix(turn: Turn, tree: PyTree, *, like: PyTree | None = None) -> PyTree:
    """`x_i <- Σ_j W_ij x_j` with the matrix of this step, in float32 or better.

    One message for each dtype and neighbour, however many leaves. What is sent has the dtypes of `like`, those of
    `tree` if it is left out; the mean over workers stays even if that is rounded.

    Args:
      turn: what the `step` of a method was given.
      tree: that of this worker; a tuple of trees travels as one message.
      like: the dtypes on the wire.

    Returns:
      The average, typed as differing between workers.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jaxdist as jd
      >>> from jaxdist.transforms import Method, Turned, mix
      >>> def step(turn):  # no step at all
      ...     return Turned(mix(turn, turn.params), turn.adapt(turn.gradients)[1], ())
      >>> method = Method(lambda topology: topology, lambda params, topology: (), step)
      >>> tx = jd.gossip(optax.identity(), jd.topology.ring(3), method=method)
      >>> jax.vmap(lambda x: tx.update(x, tx.init(x), x)[0], axis_name="data")(jnp.array([0.0, 3.0, 6.0])).tolist()
      [3.0, 0.0, -3.0]

    References:
      Xiao, Boyd, "Fast linear iterations for distributed averaging", 2004.
    """
    return plus(tree, change(turn, tree, like=like))


def change(turn: Turn, tree: PyTree, *, like: PyTree | None = None) -> PyTree:
    """What `mix` adds to this worker's tree, `Σ_j W_ij (x_j - x_i)`.

    Of differences, since weights like 1/3 are rounded and would let models drift where they agree; with the rounded
    own model in them, so that low precision on the wire keeps the mean.
    """
    return change_at(turn.comm, turn.topology, turn.count, tree, like=like)


def change_at(
    comm: Comm, topology: Topology, count: Int[Array, ""], tree: PyTree, *, like: PyTree | None = None
) -> PyTree:
    """`change` for step `count` of a topology, outside a method."""
    leaves, structure = jax.tree.flatten(tree)
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(tree if like is None else like)]
    branches = [_one_round(one, topology.workers, dtypes) for one in topology.rounds]
    if len(branches) == 1:
        return structure.unflatten(branches[0](comm, leaves))
    which = jnp.asarray(topology.order, jnp.int32)[count % len(topology.order)]
    return structure.unflatten(comms.switch(which, branches, comm, leaves))


def _one_round(one: Round, workers: int, dtypes: Sequence[jnp.dtype]) -> Callable[[Comm, list[Array]], list[Array]]:
    left = _row_sums(one, workers) - 1  # push-sum alone has rows that sum to something else

    def talk(comm: Comm, leaves: list[Array]) -> list[Array]:
        sent = [leaf.astype(dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
        if is_mean(one, workers):
            means = fused(comm.mean, sent)
            return [_wide(comm.varying(mean)) - _wide(x) for mean, x in zip(means, sent, strict=True)]
        out = [comm.varying(jnp.zeros(leaf.shape, working_dtype(leaf.dtype))) for leaf in leaves]
        if np.abs(left).max() > 1e-9:
            out = [times(_wide(leaf), weight_of(comm, left.tolist())) for leaf in leaves]
        for message in one.messages:
            weight = weight_of(comm, message.weights)
            arrived = fused(lambda x, pairs=message.pairs: comm.ppermute(x, pairs), sent)
            out = [
                total + times(_wide(theirs) - _wide(mine), weight)
                for total, theirs, mine in zip(out, arrived, sent, strict=True)
            ]
        return out

    return talk


def _row_sums(one: Round, workers: int) -> np.ndarray:
    return np.sum([one.self_weights, *(message.weights for message in one.messages)], axis=0).reshape(workers)


def is_mean(one: Round, workers: int) -> bool:
    """Whether a round is the mean of all, for an all-reduce. Two workers exchange instead, for the same bytes."""
    weights = {*one.self_weights, *(weight for message in one.messages for weight in message.weights)}
    return (
        workers > 2 and len(one.messages) == workers - 1 and all(abs(weight * workers - 1) < 1e-9 for weight in weights)
    )


def weight_of(comm: Comm, weights: Sequence[float]) -> Array | float:
    """The entry of this worker; a plain number where all have the same."""
    if len(set(weights)) == 1:
        return weights[0]
    return jnp.asarray(np.array(weights, np.float32))[comm.index]


def _wide(x: Array) -> Array:
    return x.astype(working_dtype(x.dtype))


def times(x: Array, weight: Array | float) -> Array:
    """In the dtype of `x`."""
    return x * (weight if isinstance(weight, float | int) else weight.astype(x.dtype))


def check_doubly_stochastic(topology: Topology) -> None:
    """Raises unless mixing keeps the mean and ends in it."""
    if not is_doubly_stochastic(topology):
        raise ValueError(
            f"the weights of {topology.name} do not sum to 1 in both directions, so workers would not agree on their "
            "mean: use method=sgp() for graphs that are directed and irregular"
        )


def check_static(topology: Topology, what: str) -> None:
    """Raises if the graph changes with the step."""
    if len(topology.rounds) > 1:
        raise ValueError(
            f"{what} needs the same neighbours in every step, got {topology.name}, which has {len(topology.rounds)} "
            "different rounds: use a static topology, such as ring, torus or hypercube"
        )


def check_symmetric(topology: Topology, what: str) -> None:
    """Raises unless both ends of each link give each other the same weight."""
    check_doubly_stochastic(topology)
    if not is_symmetric(topology):
        raise ValueError(
            f"{what} needs symmetric weights, and those of {topology.name} are not: use ring, torus, hypercube, or "
            "another undirected graph"
        )
