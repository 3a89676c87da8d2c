"""Online learning with uneven batches: mirror descent and dual averaging, with averages over workers or neighbors."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .. import comm as comms
from .._core.checks import NO_PARAMS, check_count
from .._core.dtypes import working_dtype
from .._core.trees import next_count, plus, tree_where, wide
from .._core.types import Array, AxisNames, Int, PyTree, State, UInt, Updates
from ..comm.base import Comm, add_bytes
from ..comm.over import over
from ..state.marks import PerWorker, bind, with_value
from ..topology.base import Topology, check_topology
from ..topology.spectrum import is_doubly_stochastic
from ..transforms.common import LearningRate, check_per_worker, rate_at, zeros_like
from ..transforms.local_gradients import check_leaves, check_local
from ..transforms.local_value_and_grad import local_value_and_grad
from ..transforms.weights import weight_of_worker
from ..wire.flat import fuse
from ..wire.mixing import change_at
from .geometries import Geometry

Order = Literal["adapt_then_combine", "combine_then_adapt"]
Weights = Literal["batch", "uniform"]


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

    Returns:
      A gradient transformation for local gradients; it needs `params`, comes last in a chain, and its updates lead to
      an `x` of the set. With a topology, or `combine_then_adapt`, parameters differ: `PerWorker(params)` in the train
      state, and `jd.consensus` for the model to evaluate. Its `update` takes `examples=`, this worker's `b`; without it
      all workers have the same weight, but those with `active=False`, whose `b` is 0.

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
      ICML 2020 (the weights and the two orders are ours). Shahrampour, Jadbabaie, "Distributed Online Optimization in
      Dynamic Environments Using Mirror Descent", arXiv:1609.02845, 2018.
    """
    if order not in ("adapt_then_combine", "combine_then_adapt"):
        raise ValueError(f'order must be "adapt_then_combine" or "combine_then_adapt", got {order!r}')
    _check_averaging(geometry, topology, rounds, weights)
    cfg = _Config(geometry, learning_rate, topology, rounds, weights, order == "combine_then_adapt", axis)
    return optax.GradientTransformationExtraArgs(partial(_init_descent, cfg), partial(_descend, cfg))


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


def _init_descent(cfg: _Config, params: PyTree) -> State:
    check_leaves(params)
    cfg.geometry.check(params)
    # The first message is weighted before any examples were counted: all workers alike.
    examples = bind(PerWorker(jnp.ones((), jnp.float32)), cfg.axis) if cfg.keeps_examples else None
    return MirrorDescentState(jnp.zeros((), jnp.int32), jnp.zeros(2, jnp.uint32), examples)


def _descend(
    cfg: _Config,
    updates: Updates,
    state: State,
    params: PyTree | None = None,
    *,
    examples: Any = None,
    active: Any = None,
    **extra: Any,
) -> tuple[Updates, State]:
    comm, ledger, number = _begin(cfg, updates, params, examples, active)
    with jax.named_scope("mirror_descent"):
        old = wide(params)
        # Either order of z_i = argmin ... (adapt) and x_i = Σ_j W_ij b_j z_j / Σ_j W_ij b_j (combine).
        if cfg.combine_first:
            # Models are weighted by the examples of the step that made them.
            last = state.examples.value if cfg.keeps_examples else None
            new = _average(cfg, old, last, old, comm, state.count)
            new = _mirror_step(cfg, new, updates, number, state.count)
        else:
            new = _mirror_step(cfg, comm.varying(old), updates, number, state.count)
            new = _average(cfg, new, number, old, comm, state.count)
    weight = comm.varying(jnp.ones((), jnp.float32)) if number is None else number
    return _updates_to(new, params), MirrorDescentState(
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


def _begin(
    cfg: _Config, updates: Updates, params: PyTree | None, examples: Any, active: Any
) -> tuple[Comm, list[comms.Sent], Array | None]:
    """Checks what a step was given; returns the workers, the list of what they will send, and this worker's `b`."""
    if params is None:
        raise ValueError(NO_PARAMS)
    check_leaves(updates)
    check_local(updates, cfg.axis)
    # Models differ between workers, unless each step ends with an exact mean.
    if cfg.topology is not None or cfg.combine_first:
        check_per_worker(params, cfg.axis)
    ledger: list[comms.Sent] = []
    comm = comms.count_sent(over(cfg.axis), ledger)
    number = weight_of_worker(examples, active, name="any-batch mirror descent")
    return comm, ledger, None if number is None else comm.varying(number)


def _updates_to(new: PyTree, params: PyTree) -> Updates:
    """The updates from `params` to `new`, in float32 or better: rounded to bfloat16 they would lead elsewhere."""
    return jax.tree.map(lambda x, p: x - p.astype(x.dtype), new, params)


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
    _check_averaging(geometry, topology, rounds, weights)
    cfg = _Config(geometry, learning_rate, topology, rounds, weights, False, axis)
    return optax.GradientTransformationExtraArgs(partial(_init_anytime, cfg), partial(_step_anytime, cfg))


def _init_anytime(cfg: _Config, params: PyTree) -> State:
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


def _step_anytime(
    cfg: _Config,
    updates: Updates,
    state: State,
    params: PyTree | None = None,
    *,
    examples: Any = None,
    active: Any = None,
    **extra: Any,
) -> tuple[Updates, State]:
    comm, ledger, number = _begin(cfg, updates, params, examples, active)
    with jax.named_scope("anytime_minibatch"):
        # z_i + g_i, or z_i on a worker without examples.
        old = state.dual if cfg.topology is None else state.dual.value
        dual = jax.tree.map(jnp.add, comm.varying(old), wide(updates))
        dual = dual if number is None else tree_where(number > 0, dual, old)
        # z_i = Σ_j W_ij b_j (z_j + g_j) / Σ_j W_ij b_j
        dual = _average(cfg, dual, number, old, comm, state.count)
        # x_i = argmin over x in X of <z_i, x> + D(x, x_1) / η_t
        new = cfg.geometry.step(state.start, dual, rate_at(cfg.learning_rate, state.count))
    return _updates_to(new, params), AnytimeMinibatchState(
        count=next_count(state.count),
        sent=add_bytes(state.sent, comms.total_bytes(ledger)),
        start=state.start,
        dual=dual if cfg.topology is None else with_value(state.dual, comm.varying(dual)),
    )


def _check_averaging(geometry: Any, topology: Any, rounds: int, weights: str) -> None:
    """Checks the geometry, and how workers are averaged."""
    if not isinstance(geometry, Geometry):
        raise TypeError(f"expected a geometry, such as euclidean(), got {geometry!r}")
    if topology is not None:
        check_topology(topology)
    if weights not in ("batch", "uniform"):
        raise ValueError(f'weights must be "batch" or "uniform", got {weights!r}')
    check_count("rounds", rounds, 1)
    if topology is None and rounds > 1:
        raise ValueError(f"without a topology the mean is exact after one round, so rounds must be 1, got {rounds}")
    if topology is not None and not is_doubly_stochastic(topology):
        raise ValueError(
            f"the mixing matrices of {topology.name} are not doubly stochastic, so workers would not converge to the "
            "mean: use an undirected graph, or a directed one in which all workers have the same number of neighbors"
        )


def _average(
    cfg: _Config, tree: PyTree, number: Array | None, fallback: PyTree, comm: Comm, count: Int[Array, ""]
) -> PyTree:
    """The mean of all workers' trees in float32, exact or, with a topology, after `rounds` rounds of consensus.

    `number` is `b`, the number of examples that a worker's tree counts for; `None`: all count alike. Where a worker
    receives none at all the result is `fallback`; it is replicated if that is, and the mean is exact.
    """
    topology = cfg.topology
    if topology is not None and topology.workers != comm.size:
        raise ValueError(
            f"the topology {topology.name} has {topology.workers} workers, but the axis has {comm.size}: make the "
            f"topology for {comm.size}"
        )
    examples = number if cfg.weights == "batch" else None
    # Pairs (b z, b) are averaged and divided: Σ_j W_ij b_j z_j / Σ_j W_ij b_j, the pooled mean if W is exact.
    message = tree if examples is None else (jax.tree.map(lambda x: _times(x, examples), tree), examples)
    if topology is None:
        # All leaves and the count in one all-reduce.
        leaves, structure = jax.tree.flatten(message)
        message = structure.unflatten(fuse(comm, comm.mean, leaves))
    else:
        for k in range(cfg.rounds):
            # x_i + Σ_j W_ij (x_j - x_i); round k of this step is step count · rounds + k of a graph that changes.
            message = plus(message, change_at(comm, topology, count * cfg.rounds + k, message))
    if examples is None:
        return message
    tree, total = message
    has_examples = total > 0

    def divide(x, otherwise):
        return jnp.where(has_examples, x / jnp.where(has_examples, total, 1).astype(x.dtype), otherwise)

    return jax.tree.map(divide, tree, fallback)


def _times(x: Array, examples: Array) -> Array:
    # Selected and not only multiplied, since 0 times NaN is NaN.
    return jnp.where(examples > 0, x * examples.astype(x.dtype), 0)


def any_batch(losses: Callable[..., Any], *, axis: AxisNames = "data") -> Callable[..., tuple[Any, PyTree]]:
    """The mean loss and gradient of the first `b` examples of a batch of fixed size `B`: an any-batch worker, masked.

    All workers of a mesh run one program, so `b`, which differs between workers and steps, cannot be a shape. The
    examples from `b` on are computed and left out: the statistics are those of a worker that stopped after `b`
    examples, the time is that of `B`. Pass the same `b` to the update as `examples=`.

    To choose `b` without bias, draw examples before they are timed, and finish or drop the last one by a fixed rule.
    Where costly examples differ from cheap ones (long sequences), fewer of them fit: the gradient is then biased
    towards the cheap ones, more so if the last is dropped. All gradients are taken at the same parameters.

    *On the wire*: nothing.

    Args:
      losses: `losses(params, batch) -> [B]`, the loss of each example.

    Returns:
      A function `(params, batch, examples) -> (mean, gradient)`, gradient in the dtype of the parameters. With
      `examples` 0 both are 0; above `B` it counts as `B`. Examples that are left out have no influence, even if they
      contain NaN.

    Raises:
      ValueError: at trace time, if `losses` returns anything but one number for each example.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> value_and_grad = jd.online.any_batch(lambda w, x: w * x)
      >>> value, gradient = value_and_grad(jnp.array(2.0), jnp.array([1.0, 3.0, 50.0]), 2)
      >>> float(value), float(gradient)
      (4.0, 2.0)

    References:
      Ferdinand et al., "Anytime Minibatch", arXiv:2006.05752, 2019.
    """
    value_and_grad = local_value_and_grad(partial(_average_masked, losses), axis=axis)

    def mask_value_and_grad(params: PyTree, batch: PyTree, examples: Any) -> tuple[Any, PyTree]:
        # Without examples the mean is that of the first one, which must not count.
        has_examples = jnp.asarray(examples) > 0
        value_and_gradient = value_and_grad(params, batch, jnp.asarray(examples))
        return jax.tree.map(lambda x: jnp.where(has_examples, x, jnp.zeros_like(x)), value_and_gradient)

    return mask_value_and_grad


def _average_masked(losses: Callable[..., Any], params: PyTree, batch: PyTree, examples: Array) -> Array:
    """The mean loss of the first `examples` examples."""
    size = jax.tree.leaves(batch)[0].shape[0]
    is_used = jnp.arange(size) < examples
    # The first example replaces those left out: their gradient may be NaN, and 0 times NaN is NaN.
    batch = jax.tree.map(lambda x: jnp.where(is_used.reshape(-1, *[1] * (x.ndim - 1)), x, x[:1]), batch)
    values = losses(params, batch)
    if values.shape != (size,):
        raise ValueError(f"losses must return the loss of each of the {size} examples, got shape {values.shape}")
    number = jnp.clip(examples, 1, size).astype(working_dtype(values.dtype))
    return jnp.sum(jnp.where(is_used, values.astype(number.dtype), 0)) / number
