"""Distributed any-batch mirror descent: uneven batches, averages over workers or neighbors."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .. import comm as comms
from .._core.dtypes import factor_dtype
from .._core.trees import next_count, tree_where, wide
from .._core.types import Array, AxisNames, Int, PyTree, State, UInt, Updates
from ..comm.base import add_bytes
from ..state.marks import PerWorker, bind, with_value
from ..topology.base import Topology
from ..transforms.common import LearningRate, rate_at
from ..transforms.local_gradients import check_leaves
from .averaging import Averaging, Weights, check_averaging, updates_to
from .geometry import Geometry

Order = Literal["adapt_then_combine", "combine_then_adapt"]


class MirrorDescentState(NamedTuple):
    """The state of `mirror_descent`; replicated but for `examples`.

    Attributes:
      count: the number of steps.
      sent: the bytes that one worker has sent on average, as (high, low) words.
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

    In round `t` worker `i` processes `b_i` examples in a fixed time, with mean gradient `g_i` at its model `x_i`:

        z_i = argmin over x in X of <g_i, x> + D(x, x_i) / η_t,     x_i = Σ_j W_ij b_j z_j / Σ_j W_ij b_j

    A worker with `b_i = 0` takes no step and has no weight.

    *On the wire*: with a topology `rounds` messages of `4` bytes an entry to each neighbor, and with `examples` 4 bytes
    more in each; without one, an all-reduce of the same size.

    *State*: replicated, a count; per-worker, at most one number.

    Args:
      geometry: `euclidean(...)`, `entropy(...)`, `p_norm(...)`, `diagonal(...)`, or another `Geometry`.
      learning_rate: `η`, or a schedule from the number of the step; `η/√t` for a fixed comparator.
      topology: the graph over workers; it may change. `None`: an exact mean.
      rounds: of consensus in each step, each by the factor `ρ` of the topology.
      weights: `"batch"` pools all examples, for workers with one source. `"uniform"` averages with `W` alone, without
        bias when sources differ.
      order: `"combine_then_adapt"` steps from the average, with the gradient at `x_i`, and may send while it is
        computed.

    Returns:
      A gradient transformation for local gradients; it needs `params` and comes last in a chain. With a topology, or
      `combine_then_adapt`, parameters differ: `PerWorker(params)` in the train state, and `jd.consensus` for the model
      to evaluate. Its `update` takes `examples=`, this worker's `b`; without it all workers have the same weight, but
      those with `active=False`, whose `b` is 0.

    Raises:
      ValueError: the topology is not doubly stochastic; at trace time, the topology has another number of workers,
        `params` are missing or not marked `PerWorker`, or the geometry does not support them.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> tx = jd.online.mirror_descent(jd.online.euclidean(), 0.5)
      >>> x = jnp.zeros(())
      >>> def one_worker(gradient, examples):
      ...     return tx.update(gradient, tx.init(x), x, examples=examples)[0]
      >>> updates = jax.jit(jax.vmap(one_worker, axis_name="data"))(jnp.array([1.0, 3.0]), jnp.array([3, 1]))
      >>> updates.tolist()  # the mean of 1, 1, 1 and 3
      [-0.75, -0.75]

    References:
      Eshraghi, Liang, "Distributed Online Optimization over a Heterogeneous Network with Any-Batch Mirror Descent",
      ICML, 2020 (the weights and the two orders are ours). Shahrampour, Jadbabaie, "Distributed Online Optimization in
      Dynamic Environments Using Mirror Descent", arXiv:1609.02845, 2018.
    """
    if order not in ("adapt_then_combine", "combine_then_adapt"):
        raise ValueError(f'order must be "adapt_then_combine" or "combine_then_adapt", got {order!r}')
    check_averaging(geometry, topology, rounds, weights)
    averaging = Averaging(geometry, learning_rate, topology, rounds, weights, order == "combine_then_adapt", axis)
    tx = _MirrorDescent(averaging)
    return optax.GradientTransformationExtraArgs(tx.init, tx.update)


class _MirrorDescent(NamedTuple):
    """The checked arguments of `mirror_descent`."""

    averaging: Averaging

    def init(self, params: PyTree) -> State:
        check_leaves(params)
        averaging = self.averaging
        averaging.geometry.check(params)
        # The first message is weighted before any examples were counted: all workers alike.
        examples = (
            bind(PerWorker(jnp.ones((), factor_dtype(params))), averaging.axis) if averaging.keeps_examples else None
        )
        return MirrorDescentState(jnp.zeros((), jnp.int32), jnp.zeros(2, jnp.uint32), examples)

    def update(
        self,
        updates: Updates,
        state: State,
        params: PyTree | None = None,
        *,
        examples: Any = None,
        active: Any = None,
        **extra: Any,
    ) -> tuple[Updates, State]:
        averaging = self.averaging
        comm, ledger, number = averaging.begin_step(updates, params, examples, active)
        with jax.named_scope("mirror_descent"):
            old = wide(params)
            # Either order of z_i = argmin ... (adapt) and x_i = Σ_j W_ij b_j z_j / Σ_j W_ij b_j (combine).
            if averaging.combine_first:
                # Models are weighted by the examples of the step that made them.
                last = state.examples.value if averaging.keeps_examples else None
                new = averaging.average_over_workers(old, last, old, comm, state.count)
                new = self._mirror_step(new, updates, number, state.count)
            else:
                new = self._mirror_step(comm.varying(old), updates, number, state.count)
                new = averaging.average_over_workers(new, number, old, comm, state.count)
        weight = comm.varying(jnp.ones((), factor_dtype(params))) if number is None else number
        return updates_to(new, params), MirrorDescentState(
            count=next_count(state.count),
            sent=add_bytes(state.sent, comms.total_bytes(ledger)),
            examples=with_value(state.examples, weight) if averaging.keeps_examples else None,
        )

    def _mirror_step(self, model: PyTree, gradients: Updates, number: Array | None, count: Int[Array, ""]) -> PyTree:
        """`argmin over x in X of <g, x> + D(x, model) / η_t`; a worker without examples takes no step."""
        new = self.averaging.geometry.step(model, wide(gradients), rate_at(self.averaging.learning_rate, count))
        return new if number is None else tree_where(number > 0, new, model)
