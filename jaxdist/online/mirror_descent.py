"""Distributed any-batch mirror descent: a mirror step on each worker, and an average of models."""

from functools import partial
from typing import Any, Literal, NamedTuple

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
from ..transforms.common import LearningRate, check_per_worker, rate_at
from ..transforms.local_gradients import check_leaves, check_local
from .averaging import Weights, average, check_averaging
from .geometries import Geometry

Order = Literal["adapt_then_combine", "combine_then_adapt"]


class MirrorDescentState(NamedTuple):
    """The state of `mirror_descent`.

    Attributes:
      count: the number of steps (replicated).
      sent: the bytes that one worker has sent on average, as (high, low) words (replicated).
      examples: with `combine_then_adapt` and weights by batch, the number of examples of the last step, which weighs
        the next message (per-worker).
    """

    count: Int[Array, ""]
    sent: UInt[Array, "2"]
    examples: PerWorker | None

    communicates = True


def mirror_descent(
    geometry: Geometry,
    learning_rate: LearningRate,
    *,
    topology: Topology | None = None,
    rounds: int = 1,
    weights: Weights = "batch",
    order: Order = "adapt_then_combine",
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """Any-batch mirror descent: workers process different numbers of examples per round, and average their models.

    In round `t` worker `i` processes `b_i` examples in a fixed time, all at its model `x_i`, with mean gradient `g_i`:

        z_i = argmin over x in X of <g_i, x> + D(x, x_i) / η_t,     x_i = Σ_j W_ij b_j z_j / Σ_j W_ij b_j

    No worker waits for slow ones: they have less weight. A worker with `b_i = 0` takes no step and has no weight; if
    its neighbors have no examples either, its model does not change. `weights="uniform"` averages with `W` alone. With
    `"combine_then_adapt"` the step starts from the average, with the gradient at `x_i` as before; the message does not
    depend on the gradient and may be sent while that is computed.

    *On the wire*: with a topology `rounds` messages of `4` bytes an entry to each neighbor, and with `examples` 4
    bytes more in each; without one, an all-reduce of the same size. They do not depend on `b`.

    *State*: replicated, a count; per-worker, at most one number.

    Args:
      geometry: `euclidean(...)`, `entropy(...)`, `p_norm(...)`, `diagonal(...)`, or another `Geometry`.
      learning_rate: `η`, or a schedule from the number of the step. Noise falls with `Σ b`, so a rate tuned at one
        speed of the workers is not the best at another. `η/√t` for a fixed comparator.
      topology: the graph over workers; it may change with the step. `None`: an exact mean, and parameters stay
        replicated.
      rounds: of consensus in each step. Each brings workers closer by the factor `ρ` of the topology.
      weights: `"batch"` pools all examples: least variance when workers draw from the same source. `"uniform"` counts
        workers alike: unbiased for the mean of their losses when their sources differ.
      order: `"adapt_then_combine"` or `"combine_then_adapt"`.
      axis: the mesh axis of the workers.

    Returns:
      A gradient transformation for local gradients; it needs `params`, comes last in a chain, and its updates lead to
      an `x` of the set. With a topology, or `combine_then_adapt`, parameters differ: `PerWorker(params)` in the train
      state, and `jd.consensus` for the model to evaluate. Its `update` takes `examples=`, this worker's `b`; without it
      all workers have the same weight.

    Raises:
      ValueError: an argument is out of range, or the topology is not doubly stochastic; at trace time, the topology has
        another number of workers, `params` are missing or not marked `PerWorker`, or the geometry does not support
        them.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> tx = jd.online.mirror_descent(jd.online.euclidean(), 0.5)
      >>> x = jnp.zeros(())
      >>> def one_worker(gradient, examples):
      ...     return tx.update(gradient, tx.init(x), x, examples=examples)[0]
      >>> jax.vmap(one_worker, axis_name="data")(jnp.array([1.0, 3.0]), jnp.array([3, 1])).tolist()  # mean of 1 1 1 3
      [-0.75, -0.75]

    References:
      Eshraghi, Liang, "Distributed Online Optimization over a Heterogeneous Network with Any-Batch Mirror Descent",
      ICML 2020 (the weights and the two orders are ours). Shahrampour, Jadbabaie, "Distributed Online Optimization in
      Dynamic Environments Using Mirror Descent", arXiv:1609.02845, 2018.
    """
    check_averaging(topology, rounds, weights)
    if order not in ("adapt_then_combine", "combine_then_adapt"):
        raise ValueError(f'order must be "adapt_then_combine" or "combine_then_adapt", got {order!r}')
    cfg = _Config(geometry, learning_rate, topology, rounds, weights, order == "combine_then_adapt", axis)
    return optax.GradientTransformationExtraArgs(partial(_init, cfg), partial(_update, cfg))


class _Config(NamedTuple):
    geometry: Geometry
    learning_rate: LearningRate
    topology: Topology | None
    rounds: int
    weights: Weights
    combine_first: bool
    axis: AxisNames

    @property
    def keeps_examples(self) -> bool:
        """Whether the next message is weighted by the examples of this step."""
        return self.combine_first and self.weights == "batch"


def _init(cfg: _Config, params: PyTree) -> State:
    check_leaves(params)
    cfg.geometry.check(params)
    examples = bind(PerWorker(jnp.ones((), jnp.float32)), cfg.axis) if cfg.keeps_examples else None
    return MirrorDescentState(jnp.zeros((), jnp.int32), jnp.zeros(2, jnp.uint32), examples)


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
    if cfg.topology is not None or cfg.combine_first:
        check_per_worker(params, cfg.axis)
    ledger: list[comms.Sent] = []
    comm = comms.counted(over(cfg.axis), ledger)
    number = None if examples is None else comm.varying(jnp.asarray(examples, jnp.float32))
    with jax.named_scope("mirror_descent"):
        old = wide(params)
        # Either order of z_i = argmin ... (adapt) and x_i = Σ_j W_ij b_j z_j / Σ_j W_ij b_j (combine).
        if cfg.combine_first:
            # Models are weighted by the examples of the step that made them.
            last = state.examples.value if cfg.keeps_examples else None
            new = average(old, last, old, comm, cfg.topology, cfg.rounds, state.count)
            new = _mirror_step(cfg, new, updates, number, state.count)
        else:
            new = _mirror_step(cfg, comm.varying(old), updates, number, state.count)
            by_examples = number if cfg.weights == "batch" else None
            new = average(new, by_examples, old, comm, cfg.topology, cfg.rounds, state.count)
    weight = comm.varying(jnp.ones((), jnp.float32)) if number is None else number
    return updates_to(new, params), MirrorDescentState(
        count=next_count(state.count),
        sent=add_bytes(state.sent, comms.total_bytes(ledger)),
        examples=with_value(state.examples, weight) if cfg.keeps_examples else None,
    )


def _mirror_step(
    cfg: _Config, model: PyTree, gradients: Updates, number: Array | None, count: Int[Array, ""]
) -> PyTree:
    """`argmin over x in X of <g, x> + D(x, model) / η_t`; a worker without examples takes no step."""
    new = cfg.geometry.step(model, wide(gradients), rate_at(cfg.learning_rate, count))
    return new if number is None else tree_where(number > 0, new, model)


def updates_to(new: PyTree, params: PyTree) -> Updates:
    """The updates from `params` to `new`, in the dtype of the parameters."""
    return jax.tree.map(lambda x, p: (x - p.astype(x.dtype)).astype(p.dtype), new, params)
