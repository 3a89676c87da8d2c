"""Distributed any-batch mirror descent: a mirror step on each worker, and an average of models."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .. import comm as comms
from .._core.checks import NO_PARAMS
from .._core.trees import choose, next_count
from .._core.types import Array, AxisNames, Int, PyTree, State, UInt, Updates
from ..comm.over import over
from ..reducers.with_stats import add_bytes
from ..state.marks import PerWorker, bind, with_value
from ..topology.base import Topology
from ..transforms.common import LearningRate, check_per_worker, rate_at
from ..transforms.local_gradients import check_leaves, check_local
from .averaging import Weights, average, check_averaging
from .geometries import Geometry, wide

Order = Literal["adapt_then_combine", "combine_then_adapt"]


class MirrorDescentState(NamedTuple):
    """`count` of steps and the bytes `sent` by one worker on average, as (high, low) words (agreed).

    Per worker, with `combine_then_adapt` and weights by batch: the `examples` behind the last step, which is what the
    next message counts for.
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
    """Any-batch mirror descent: workers learn from however many examples they got through, and average their models.

    In round `t` worker `i` has got through `b_i` examples in a fixed time, all at its model `x_i`, mean gradient `g_i`:

        z_i = argmin over x in X of <g_i, x> + D(x, x_i) / η_t,     x_i = Σ_j W_ij b_j z_j / Σ_j W_ij b_j

    Nobody waits for slow workers: they count for less. A worker with `b_i = 0` takes no step and counts for nothing; if
    nobody that it hears of has an example, it stays. `weights="uniform"` averages with `W` alone. With
    `"combine_then_adapt"` the step follows the average, from it, with the gradient at `x_i` as before; the message then
    is ready before the gradient is, and may travel meanwhile.

    *On the wire*: with a topology `rounds` messages of `4` bytes an entry to each neighbor, and with `examples` 4
    bytes more in each; without one, an all-reduce of as much. They do not depend on `b`.

    *State*: agreed, a count; per worker at most one number.

    Args:
      geometry: `euclidean(...)`, `entropy(...)`, `p_norm(...)`, `diagonal(...)`, or your own.
      learning_rate: `η`, or a schedule from the number of the step. Noise falls with `Σ b`, so that a rate tuned at one
        speed of the workers is not the best at another. `η/√t` for a comparator that stays.
      topology: who talks to whom, also changing with the step. `None`: an exact mean, and parameters stay agreed.
      rounds: of consensus in each step. More bring workers closer, by the factor `ρ` of the topology each.
      weights: `"batch"` pools all examples: least variance when workers draw from the same source. `"uniform"` counts
        workers alike: unbiased for the mean of their losses when their sources differ.
      order: `"adapt_then_combine"` or `"combine_then_adapt"`.
      axis: the mesh axis of the workers.

    Returns:
      A gradient transformation for local gradients; it needs `params`, comes last in a chain, and its updates lead to
      `x` of the set. With a topology, or `combine_then_adapt`, parameters differ: `PerWorker(params)` in the train
      state, and `jd.consensus` for the one to evaluate. Its `update` takes `examples=`, this worker's `b`; without it
      all count alike.

    Raises:
      ValueError: an argument is out of range, or the topology not doubly stochastic; at trace time, if it is for
        another number of workers, `params` are missing or not marked `PerWorker`, or the geometry cannot serve them.

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
      Dynamic Environments Using Mirror Descent", arXiv 1609.02845, 2018.
    """
    check_averaging(topology, rounds, weights)
    if order not in ("adapt_then_combine", "combine_then_adapt"):
        raise ValueError(f'order must be "adapt_then_combine" or "combine_then_adapt", got {order!r}')
    combine_first = order == "combine_then_adapt"
    remembers = combine_first and weights == "batch"

    def init(params) -> State:
        check_leaves(params)
        geometry.check(params)
        examples = bind(PerWorker(jnp.ones((), jnp.float32)), axis) if remembers else None
        return MirrorDescentState(jnp.zeros((), jnp.int32), jnp.zeros(2, jnp.uint32), examples)

    def update(updates, state, params=None, *, examples: Any = None, **extra_args) -> tuple[Updates, State]:
        del extra_args
        if params is None:
            raise ValueError(NO_PARAMS)
        check_leaves(updates)
        check_local(updates, axis)
        if topology is not None or combine_first:
            check_per_worker(params, axis)
        ledger: list[comms.Sent] = []
        comm = comms.counted(over(axis), ledger)
        heard = None if examples is None else comm.varying(jnp.asarray(examples, jnp.float32))
        some = None if heard is None else heard > 0
        weigh = weights == "batch"

        def combine(models: PyTree, counts: Array | None, stay: PyTree) -> PyTree:
            return average(models, counts, stay, comm, topology, rounds, state.count)

        def adapt(models: PyTree) -> PyTree:
            moved = geometry.step(models, wide(updates), rate_at(learning_rate, state.count))
            return moved if some is None else choose(some, moved, models)

        with jax.named_scope("mirror_descent"):
            old = wide(params)
            if combine_first:
                new = adapt(combine(old, state.examples.value if remembers else None, old))
            else:
                new = combine(adapt(comm.varying(old)), heard if weigh else None, old)
        counted = comm.varying(jnp.ones((), jnp.float32)) if heard is None else heard
        return leading_to(new, params), MirrorDescentState(
            count=next_count(state.count),
            sent=add_bytes(state.sent, comms.total_bytes(ledger)),
            examples=with_value(state.examples, counted) if remembers else None,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def leading_to(new: PyTree, params: PyTree) -> Updates:
    """The updates from `params` to `new`, in the dtype of the parameters."""
    return jax.tree.map(lambda x, p: (x - p.astype(x.dtype)).astype(p.dtype), new, params)
