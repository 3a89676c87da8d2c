"""Anytime minibatch: dual averaging of as many gradients as fit into a fixed time."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .. import comm as comms
from .._core.trees import next_count, tree_where, wide
from .._core.types import Array, AxisNames, Int, PyTree, State, UInt, Updates
from ..comm.base import add_bytes
from ..state.marks import PerWorker, bind, with_value
from ..topology.base import Topology
from ..transforms.common import LearningRate, rate_at, zeros_like
from ..transforms.local_gradients import check_leaves
from .averaging import Averaging, Weights, check_averaging, updates_to
from .geometry import Geometry


class AnytimeMinibatchState(NamedTuple):
    """The state of `anytime_minibatch`, as that of `mirror_descent`.

    Attributes:
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
      topology: as for `mirror_descent`.
      rounds: of consensus in each step; the analysis needs several.
      weights: `"batch"`, as in the paper, or `"uniform"`, which is distributed dual averaging.

    Returns:
      A gradient transformation, to be used as that of `mirror_descent`.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> tx = jd.online.anytime_minibatch(jd.online.euclidean(), 0.5, axis=None)
      >>> x = jnp.zeros(())
      >>> state = tx.init(x)
      >>> for gradient in (jnp.array(1.0), jnp.array(2.0)):
      ...     update, state = tx.update(gradient, state, x)
      ...     x = x + update
      >>> x.item()  # the first model, 0, minus 0.5 times the sum of the gradients
      -1.5

    References:
      Ferdinand, Al-Lawati, Draper, Nokleby, "Anytime Minibatch: Exploiting Stragglers in Online Distributed
      Optimization", arXiv:2006.05752, 2019. Duchi, Agarwal, Wainwright, "Dual Averaging for Distributed Optimization",
      arXiv:1005.2012, 2012.
    """
    check_averaging(geometry, topology, rounds, weights)
    averaging = Averaging(geometry, learning_rate, topology, rounds, weights, False, axis)
    tx = _AnytimeMinibatch(averaging)
    return optax.GradientTransformationExtraArgs(tx.init, tx.update)


class _AnytimeMinibatch(NamedTuple):
    """The checked arguments of `anytime_minibatch`."""

    averaging: Averaging

    def init(self, params: PyTree) -> State:
        check_leaves(params)
        self.averaging.geometry.check(params)
        dual = zeros_like(params)
        return AnytimeMinibatchState(
            count=jnp.zeros((), jnp.int32),
            sent=jnp.zeros(2, jnp.uint32),
            # A copy, since parameters and state may both be donated.
            start=jax.tree.map(jnp.array, wide(params)),
            dual=dual if self.averaging.topology is None else bind(PerWorker(dual), self.averaging.axis),
        )

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
        with jax.named_scope("anytime_minibatch"):
            # z_i + g_i, or z_i on a worker without examples.
            old = state.dual if averaging.topology is None else state.dual.value
            dual = jax.tree.map(jnp.add, comm.varying(old), wide(updates))
            dual = dual if number is None else tree_where(number > 0, dual, old)
            # z_i = Σ_j W_ij b_j (z_j + g_j) / Σ_j W_ij b_j
            dual = averaging.average_over_workers(dual, number, old, comm, state.count)
            # x_i = argmin over x in X of <z_i, x> + D(x, x_1) / η_t
            new = averaging.geometry.step(state.start, dual, rate_at(averaging.learning_rate, state.count))
        return updates_to(new, params), AnytimeMinibatchState(
            count=next_count(state.count),
            sent=add_bytes(state.sent, comms.total_bytes(ledger)),
            start=state.start,
            dual=dual if averaging.topology is None else with_value(state.dual, comm.varying(dual)),
        )
