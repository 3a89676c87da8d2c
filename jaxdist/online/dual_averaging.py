"""Anytime minibatch: dual averaging in rounds of fixed time."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .. import comm as comms
from .._core.checks import NO_PARAMS
from .._core.trees import next_count, tree_where, wide
from .._core.types import Array, AxisNames, Int, PyTree, State, UInt, Updates
from ..comm.over import over
from ..reducers.with_stats import add_bytes
from ..state.marks import PerWorker, bind, with_value
from ..topology.base import Topology
from ..transforms.common import LearningRate, check_per_worker, rate_at, zeros_like
from ..transforms.local_gradients import check_leaves, check_local
from .averaging import Weights, average, check_averaging
from .geometries import Geometry
from .mirror_descent import updates_to


class AnytimeMinibatchState(NamedTuple):
    """The state of `anytime_minibatch`.

    Attributes:
      count: the number of steps (replicated).
      sent: the bytes that one worker has sent on average, as (high, low) words (replicated).
      start: the first model (replicated).
      dual: `z`, the sum of gradients, in float32 or better: per-worker with a topology, replicated without one.
    """

    count: Int[Array, ""]
    sent: UInt[Array, "2"]
    start: Updates
    dual: Updates

    communicates = True


def anytime_minibatch(
    geometry: Geometry,
    learning_rate: LearningRate,
    *,
    topology: Topology | None = None,
    rounds: int = 1,
    weights: Weights = "batch",
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """Anytime Minibatch: mirror descent in rounds of fixed time, in which workers average sums of gradients.

    With `b_i` examples of mean gradient `g_i` on worker `i`:

        z_i = Σ_j W_ij b_j (z_j + g_j) / Σ_j W_ij b_j,     x_i = argmin over x in X of <z_i, x> + D(x, x_1) / η_t

    Every step starts from the first model, so with a decreasing `η_t` old gradients lose weight too: for losses that
    change with time use `mirror_descent`. With non-Euclidean geometries the two differ: the mean of `z` is a geometric
    mean of entropic models.

    *On the wire*: as `mirror_descent`: `rounds` messages of `4` bytes an entry to each neighbor, and with `examples` 4
    bytes more in each; without a topology an all-reduce of the same size.

    *State*: replicated, a count and the first model in float32; `z` in float32, per-worker with a topology.

    Args:
      geometry: as for `mirror_descent`; `D(x, x_1)` takes the place of a regularizer.
      learning_rate: `η = 1/β`, or a schedule from the number of the step; the analysis has `β = K + sqrt(t)`.
      topology: the graph over workers; `None`: an exact mean, and parameters stay replicated.
      rounds: of consensus in each step; the analysis needs several.
      weights: `"batch"`, as in the paper, or `"uniform"`, which is distributed dual averaging.
      axis: the mesh axis of the workers.

    Returns:
      A gradient transformation for local gradients; it needs `params`, and comes last in a chain. With a topology
      parameters differ: `PerWorker(params)` in the train state. Its `update` takes `examples=`.

    Raises:
      ValueError: as for `mirror_descent`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> tx = jd.online.anytime_minibatch(jd.online.euclidean(), 0.5)
      >>> x = jnp.zeros(())
      >>> def one_worker(gradient, examples):
      ...     return tx.update(gradient, tx.init(x), x, examples=examples)[0]
      >>> jax.vmap(one_worker, axis_name="data")(jnp.array([1.0, 3.0]), jnp.array([3, 1])).tolist()  # mean of 1 1 1 3
      [-0.75, -0.75]

    References:
      Ferdinand, Al-Lawati, Draper, Nokleby, "Anytime Minibatch: Exploiting Stragglers in Online Distributed
      Optimization", arXiv:2006.05752, 2019. Duchi, Agarwal, Wainwright, "Dual Averaging for Distributed Optimization",
      arXiv:1005.2012, 2012.
    """
    check_averaging(topology, rounds, weights)
    cfg = _Config(geometry, learning_rate, topology, rounds, weights, axis)
    return optax.GradientTransformationExtraArgs(partial(_init, cfg), partial(_update, cfg))


class _Config(NamedTuple):
    geometry: Geometry
    learning_rate: LearningRate
    topology: Topology | None
    rounds: int
    weights: Weights
    axis: AxisNames


def _init(cfg: _Config, params: PyTree) -> State:
    check_leaves(params)
    cfg.geometry.check(params)
    dual = zeros_like(params)
    return AnytimeMinibatchState(
        count=jnp.zeros((), jnp.int32),
        sent=jnp.zeros(2, jnp.uint32),
        # A copy, since parameters and state may both be donated.
        start=jax.tree.map(jnp.array, wide(params)),
        dual=dual if cfg.topology is None else bind(PerWorker(dual), cfg.axis),
    )


def _update(
    cfg: _Config,
    updates: Updates,
    state: State,
    params: PyTree | None = None,
    *,
    examples: Any = None,
    **extra_args: Any,
) -> tuple[Updates, State]:
    del extra_args
    if params is None:
        raise ValueError(NO_PARAMS)
    check_leaves(updates)
    check_local(updates, cfg.axis)
    if cfg.topology is not None:
        check_per_worker(params, cfg.axis)
    ledger: list[comms.Sent] = []
    comm = comms.counted(over(cfg.axis), ledger)
    with jax.named_scope("anytime_minibatch"):
        # z_i + g_i, or z_i on a worker without examples.
        old = state.dual if cfg.topology is None else state.dual.value
        dual = jax.tree.map(jnp.add, comm.varying(old), wide(updates))
        number = None
        if examples is not None:
            number = comm.varying(jnp.asarray(examples, jnp.float32))
            dual = tree_where(number > 0, dual, old)
        by_examples = number if cfg.weights == "batch" else None
        dual = average(dual, by_examples, old, comm, cfg.topology, cfg.rounds, state.count)
        # x_i = argmin over x in X of <z_i, x> + D(x, x_1) / η_t
        new = cfg.geometry.step(state.start, dual, rate_at(cfg.learning_rate, state.count))
    return updates_to(new, params), AnytimeMinibatchState(
        count=next_count(state.count),
        sent=add_bytes(state.sent, comms.total_bytes(ledger)),
        start=state.start,
        dual=dual if cfg.topology is None else with_value(state.dual, comm.varying(dual)),
    )
