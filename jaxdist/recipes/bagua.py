"""BAGUA's four primitives and its six algorithms, each a composition of a few lines.

Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", arXiv:2107.01499, 2021. The primitives are
reducers (`c_fp_s`, `c_lp_s`) and methods of gossip (`d_fp_s`, `d_lp_s`): centralized or decentralized, in full or low
precision, synchronous. Many arguments are common to them:

- `compressor`: of a chunk or a step; by default `min_max_uint8()`, a byte an entry.
- `feedback`: use error feedback, as the paper does; the public implementation does not. Needed below 8 bits.
- `hierarchical`: the workers of a node act as one. For two axes, the slow one first: `axis=(slow, fast)`.
- `bucket_bytes`: the size of a bucket, which has collectives of its own; `None`: one bucket.
- `interval`: neighbors communicate in every `interval`-th step.
- `workers`: the number of workers along the axis; with `hierarchical` along the slow one.

The algorithms are gradient transformations for local gradients. Those without replicated parameters need `params`,
marked `PerWorker` (with `hierarchical` `PerWorker(params, axis=slow)`), and come last in a chain.
"""

from functools import partial
from typing import Any, Literal

import optax

from .. import optimizers
from .._core.descriptions import with_description
from .._core.options import takes_options_of
from .._core.types import AxisNames, PyTree, State, Updates
from ..comm.over import over
from ..compressors.compressor import Compressor
from ..compressors.min_max_uint8 import min_max_uint8
from ..decentralized.d_psgd import d_psgd
from ..decentralized.dcd_psgd import dcd_psgd
from ..decentralized.gossip import gossip
from ..decentralized.method import Method
from ..local_sgd.fragments import SyncPeriod
from ..local_sgd.local_steps import local_steps
from ..reducers.bucketed import bucketed
from ..reducers.error_feedback import error_feedback
from ..reducers.exact import exact
from ..reducers.hierarchical import hierarchical as on_two_levels
from ..reducers.reducer import Reducer
from ..reducers.two_shot import two_shot
from ..topology.base import Topology
from ..topology.graphs import complete, ring
from ..topology.varying import shift_one
from ..transforms.all_reduce import all_reduce
from ..transforms.common import LearningRate
from ..transforms.extra_args import with_extra_args
from ..transforms.local_gradients import check_leaves, check_local, check_shapes, reduce_weighted
from ..transforms.weights import weight_of_worker

# The default of the public implementation.
BUCKET_BYTES = 10 << 20

Peers = Literal["all", "shift_one"]


@with_description
def c_fp_s(*, hierarchical: bool = False, bucket_bytes: int | None = None) -> Reducer:
    """Centralized, full precision, synchronous: `x'_i = (1/W) Σ_j x_j`.

    *On the wire* for `n` entries of float32: an all-reduce, `2(W-1)/W · 4n` bytes. With two levels, on the fast axis of
    `L` a reduce-scatter and an all-gather, `2(L-1)/L · 4n`, and between `M` nodes `2(M-1)/M · 4n/L` for each worker.

    With `hierarchical` each worker runs the primitive across nodes on its shard, between a reduce-scatter and a gather
    within nodes.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.recipes.bagua.c_fp_s()
      >>> def one_worker(x):
      ...     return reducer.reduce(x, reducer.init(x), jd.comm.over("data"))[0].mean
      >>> jax.jit(jax.vmap(one_worker, axis_name="data"))(jnp.array([1.0, 2.0, 6.0])).tolist()
      [3.0, 3.0, 3.0]
    """
    return _arrange(exact(), hierarchical, bucket_bytes)


@with_description
def c_lp_s(
    compressor: Compressor | None = None,
    *,
    feedback: bool = False,
    hierarchical: bool = False,
    bucket_bytes: int | None = BUCKET_BYTES,
) -> Reducer:
    """Centralized, low precision, synchronous: encode each chunk for its owner, average, encode again, gather.

        u_j = Q(x_j + δ_j), δ_j += x_j - u_j;   s = (1/W) Σ_j u_j;   x' = Q(s + ε), ε += s - x'

    with the errors `δ` of the workers and `ε` of the owners of chunks for `feedback=True`, and without them in
    ByteGrad. (The paper prints both errors with the opposite sign, which would not telescope.)

    *On the wire* for a bucket of `n` entries: one all-to-all and one all-gather of chunks of `c = 8⌈n / 8W⌉`,
    `2(W-1) · (8 + c)` bytes with the default compressor. With two levels: on the fast axis of `L` those of `c_fp_s`,
    and between `M` nodes these for `n/L` entries and `M` workers.

    *State*: none without feedback (a key and a count); with it, `δ` of `n` per worker and `ε` of `n`, sharded.

    Two levels encode shards of node means, so the numbers differ from those of one. Each chunk of a bucket has its own
    range: smaller buckets are more precise and pay latency more often.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.recipes.bagua.c_lp_s()
      >>> def one_worker(x):
      ...     return reducer.reduce(x, reducer.init(x), jd.comm.over("data"))[0].mean
      >>> x = jnp.linspace(-1.0, 1.0, 400).reshape(4, 100)
      >>> bool(jnp.allclose(jax.jit(jax.vmap(one_worker, axis_name="data"))(x)[0], x.mean(0), atol=0.002))
      True
    """
    code = min_max_uint8() if compressor is None else compressor
    # ByteGrad leaves the bias of the second code in the mean.
    reducer = error_feedback(two_shot(code)) if feedback else two_shot(code, server_feedback=False)
    return _arrange(reducer, hierarchical, bucket_bytes)


def d_fp_s(*, interval: int = 1) -> Method:
    """Decentralized, full precision, synchronous: `x_i <- u_i + Σ_j W_ij x_j`.

    It sends the parameters at the start of a step, so messages may be sent while the gradient is computed.

    *On the wire*: one model for each neighbor; on the complete graph one all-reduce.

    Returns:
      A method, for `jd.gossip` over any doubly stochastic topology.

    Examples:
      >>> import optax, jaxdist as jd
      >>> tx = jd.gossip(optax.sgd(0.1), jd.topology.ring(8), method=jd.recipes.bagua.d_fp_s())
    """
    # Full precision: the mean of the neighbors' models, to which each adds its own step.
    return d_psgd(order="combine_then_adapt", interval=interval)


def d_lp_s(compressor: Compressor | None = None, *, interval: int = 1, replicas: bool = True) -> Method:
    """Decentralized, low precision, synchronous: neighbors send compressed steps.

    With the replicas `w_j` of its own model and its neighbors' on each worker:

        c_i = Q(x_i + u_i - w_i + Σ_j W_ij (w_j - w_i));   w_j += c_j for all of them;   x_i = w_i

    *On the wire*: the payload of one model for each neighbor, by default `n + 8` bytes for each leaf of `n`.

    *State*: per-worker, its model and that of each neighbor in float32; without `replicas` two models.

    Args:
      compressor: `Q`; it must be accurate, about 8 bits.
      replicas: as in `jd.decentralized.dcd_psgd`; `False` keeps the weighted sum of the neighbors in place of each.

    Returns:
      A method, for `jd.gossip` over a static topology with symmetric weights.

    Examples:
      >>> import optax, jaxdist as jd
      >>> tx = jd.gossip(optax.sgd(0.1), jd.topology.ring(8), method=jd.recipes.bagua.d_lp_s())
    """
    # Neighbors apply the decoded step that the sender applies itself, so replicas stay equal bit for bit.
    return dcd_psgd(min_max_uint8() if compressor is None else compressor, interval=interval, replicas=replicas)


@takes_options_of(all_reduce)
def gradient_allreduce(
    optimizer: optax.GradientTransformation,
    *,
    hierarchical: bool = False,
    bucket_bytes: int | None = BUCKET_BYTES,
    axis: AxisNames = "data",
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Averages gradients in full precision: `c_fp_s`, then the optimizer.

    *On the wire*: the bytes of `c_fp_s`. *State*: that of the optimizer.

    Args:
      **options: other arguments: those of `all_reduce`.

    Examples:
      >>> import optax, jaxdist as jd
      >>> tx = jd.recipes.bagua.gradient_allreduce(optax.adam(1e-3))
    """
    reducer = c_fp_s(hierarchical=hierarchical, bucket_bytes=bucket_bytes)
    return _average_gradients(reducer, optimizer, hierarchical, axis, options)


@takes_options_of(all_reduce)
def bytegrad(
    optimizer: optax.GradientTransformation,
    *,
    compressor: Compressor | None = None,
    feedback: bool = False,
    hierarchical: bool = False,
    bucket_bytes: int | None = BUCKET_BYTES,
    axis: AxisNames = "data",
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """ByteGrad: averages gradients in 8 bits in both directions: `c_lp_s`, then the optimizer.

    The error of an entry of the mean is at most half a step of the first code, averaged over workers, and half a step
    of the second; a step is the range of a chunk divided by 255.

    *On the wire*: the bytes of `c_lp_s`, a quarter of an all-reduce of float32. *State*: that of the optimizer, with
    feedback that of `c_lp_s` too.

    Args:
      **options: other arguments: those of `all_reduce`.

    Examples:
      >>> import optax, jaxdist as jd
      >>> tx = jd.recipes.bagua.bytegrad(optax.sgd(0.1, momentum=0.9))
    """
    reducer = c_lp_s(compressor, feedback=feedback, hierarchical=hierarchical, bucket_bytes=bucket_bytes)
    return _average_gradients(reducer, optimizer, hierarchical, axis, options)


@takes_options_of(optimizers.qadam, fixed=["reducer"])
def qadam(
    learning_rate: LearningRate,
    *,
    warmup_steps: int = 100,
    compressor: Compressor | None = None,
    feedback: bool = False,
    hierarchical: bool = False,
    bucket_bytes: int | None = BUCKET_BYTES,
    axis: AxisNames = "data",
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """QAdam: Adam in full precision for `warmup_steps`, then momenta in 8 bits with a frozen variance.

    `jd.optimizers.qadam` with `c_lp_s` for the momentum. It differs from the public implementation in two ways, as its
    docstring says: the bias correction of the variance is frozen with the variance (there it continues, and steps
    become up to `1/√(1-β₂^warmup_steps)`, 3.2 times, longer), and the gradient of the last warm-up step counts.

    *On the wire*: in the warm-up `2(W-1)/W · 4n` bytes for `n` entries, not hierarchical; then the bytes of `c_lp_s`.

    *State*: replicated, a count, momentum and variance, 8 bytes an entry; with feedback that of `c_lp_s`.

    Args:
      warmup_steps: at least 1; the variance is frozen after them.
      compressor: of a chunk of momentum. For one bit, as in BAGUA's tutorial: `jd.compressors.scaled_sign()` with
        `feedback=True`.
      **options: other arguments: those of `jd.optimizers.qadam`.

    Examples:
      >>> import jaxdist as jd
      >>> tx = jd.recipes.bagua.qadam(1e-3, warmup_steps=100)
    """
    _check_levels(hierarchical, axis)
    # The first steps average gradients in full precision, so `c_lp_s` is asked for momenta alone.
    return optimizers.qadam(
        learning_rate,
        warmup_steps=warmup_steps,
        reducer=c_lp_s(compressor, feedback=feedback, hierarchical=hierarchical, bucket_bytes=bucket_bytes),
        axis=axis,
        **options,
    )


def decentralized(
    inner: optax.GradientTransformation,
    workers: int,
    *,
    peers: Peers = "all",
    interval: int = 1,
    hierarchical: bool = False,
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """Averages the parameters at the start of a step while its gradient is computed: `x_i <- u_i + Σ_j W_ij x_j`.

    *On the wire* in every `interval`-th step, for `n` parameters of float32: with `"all"` one all-reduce,
    `2(W-1)/W · 4n` bytes; with `"shift_one"` `4n`, to one other worker. Hierarchically, all-reduced gradients over the
    fast axis of `L`, and between nodes these bytes divided by `L`.

    *State*: that of the optimizer, per-worker.

    Args:
      peers: `"all"`, or `"shift_one"`: each worker of the first half averages with one of the second half, another one
        each time. Messages do not wait for the gradient. With `"shift_one"` the program chooses among `W/2` messages by
        a condition, which compilers do not overlap with computation: pass `update` the static
        `round=jd.decentralized.due_round(step, graph)`.
      hierarchical: each worker of a node sends a part of the messages. Gradients are averaged within a node in every
        step, with `active=` those of its active workers; the public implementation averages parameters there when it
        communicates, which for SGD and `interval=1` is the same.

    Raises:
      ValueError: an odd number of workers with `"shift_one"`.

    Examples:
      >>> import optax, jaxdist as jd
      >>> tx = jd.recipes.bagua.decentralized(optax.sgd(0.1), 8, peers="shift_one")
    """
    # Models are combined first, so a message does not wait for the gradient of its step.
    graphs = {"all": complete, "shift_one": shift_one}
    if peers not in graphs:
        raise ValueError(f'peers must be "all" or "shift_one", got {peers!r}; for other graphs use jd.gossip')
    return _gossip(inner, graphs[peers](workers), d_fp_s(interval=interval), hierarchical, axis)


@takes_options_of(gossip, fixed=["method", "carriers"])
def low_precision_decentralized(
    inner: optax.GradientTransformation,
    workers: int,
    *,
    compressor: Compressor | None = None,
    interval: int = 1,
    replicas: bool = True,
    hierarchical: bool = False,
    axis: AxisNames = "data",
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """On a ring, each worker sends its compressed step and applies the decoded step, as its neighbors do.

    With the replicas `w`, `l` and `r` of its own model and its neighbors', after the optimizer's step `u`:

        c = Q(x + u + (l + r)/3 - 5/3 w), sent to both;   l += c_l, r += c_r, w += c;   x <- w

    *On the wire* in every `interval`-th step: `2(n + 8)` bytes for a leaf of `n`, with the default compressor.
    Hierarchically, all-reduced gradients over the fast axis of `L`, and between nodes these bytes divided by `L`.

    *State*: that of the optimizer and three models in float32, per-worker; without `replicas` two models.

    Args:
      workers: with two, weights are 1/2.
      compressor: `Q`; it must be accurate, about 8 bits.
      interval: the payload has all steps since the last time.
      replicas: keep `l` and `r`, as the public implementation does, equal in every bit to the neighbors' models;
        `False` keeps their weighted sum.
      **options: other arguments: those of `gossip`, but for `method` and `carriers`.

    All workers must start from one model.

    Examples:
      >>> import optax, jaxdist as jd
      >>> tx = jd.recipes.bagua.low_precision_decentralized(optax.sgd(0.1), 8)

    References:
      Tang, Gan, Zhang, Zhang, Liu, "Communication Compression for Decentralized Training", arXiv:1803.06443, 2018.
    """
    method = d_lp_s(compressor, interval=interval, replicas=replicas)
    return _gossip(inner, ring(workers), method, hierarchical, axis, **options)


@takes_options_of(local_steps, fixed=["overlap_correction"])
def async_model_average(
    inner: optax.GradientTransformation,
    *,
    sync_period: SyncPeriod,
    delay: int = 1,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Applies the mean of all models some steps late, and keeps the local steps taken meanwhile.

    Every `H` steps a worker stores `x̂ = x`; `d` steps later, `x += mean(x̂) - x̂`. No local step is lost: the mean over
    workers changes by the mean of their steps alone.

    **Bounded staleness, not a clock.** The public implementation averages in a background thread, as often as the
    network allows (every 500 ms), so results depend on its speed. Here a program is a pure function of its inputs: the
    synchronized steps are fixed, and a mean is exactly `d` steps old when it is applied. The rule
    `jaxdist.asynchronous.rules.lasgd(interval=)` has the clock, on real processes and on the virtual one.

    *On the wire* in every `H`-th step, for `n` parameters: one all-reduce of float32, `2(W-1)/W · 4n` bytes, or the
    bytes of the reducer; it does not wait for the gradient of the step in which it runs. Warm-up steps send gradients.

    *State*: that of `local_steps`: per-worker, that of the optimizer and `x̂`, `n` entries; replicated, the mean, `n` in
    float32, `jd.local_sgd.global_params(opt_state)`.

    Args:
      sync_period: `H`, more than `d`, or a schedule.
      delay: `d`, at least 1: with 1 the mean is computed during one step. Longer delays are for studying staleness.
      **options: other arguments: those of `local_steps`. `reducer=` is for the differences to the last mean; `c_lp_s()`
        sends a quarter of `exact()`.

    Examples:
      >>> import optax, jaxdist as jd
      >>> tx = jd.recipes.bagua.async_model_average(optax.sgd(0.1), sync_period=8)

    References:
      Zhou et al., "DaSGD: Squeezing SGD Parallelization Performance in Distributed Training Using Delayed Averaging",
      arXiv:2006.00441, 2020.
    """
    return local_steps(
        inner,
        # The outer step applies all of the mean: x += mean(x̂) - x̂.
        optax.sgd(1.0),
        sync_period=sync_period,
        delay=delay,
        overlap_correction=True,
        **options,
    )


def _average_gradients(
    reducer: Reducer,
    optimizer: optax.GradientTransformation,
    hierarchical: bool,
    axis: AxisNames,
    options: dict[str, Any],
) -> optax.GradientTransformationExtraArgs:
    _check_levels(hierarchical, axis)
    return with_extra_args(optax.chain(all_reduce(reducer, axis=axis, **options), optimizer))


def _check_levels(hierarchical: bool, axis: AxisNames) -> None:
    if hierarchical:
        _levels(axis)


def _gossip(
    inner: optax.GradientTransformation,
    graph: Topology,
    method: Method,
    hierarchical: bool,
    axis: AxisNames,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Gossip among all workers, or among nodes whose workers have one model."""
    if not hierarchical:
        return gossip(inner, graph, method=method, axis=axis, **options)
    slow, fast = _levels(axis)
    # All workers of a node take the same step: they keep one model, of which each sends a part.
    across = gossip(inner, graph, method=method, axis=slow, carriers=fast, **options)
    return optax.GradientTransformationExtraArgs(across.init, partial(_update_node, across, fast))


def _update_node(
    across: optax.GradientTransformationExtraArgs,
    fast: str,
    updates: Updates,
    state: State,
    params: PyTree | None = None,
    *,
    active: Any = None,
    **extra_args: Any,
) -> tuple[Updates, State]:
    """Takes the step of a node, with the mean gradient of its active workers; it is active if one of them is."""
    check_leaves(updates)
    check_shapes(updates, params)
    check_local(updates, fast)
    comm = over(fast)
    number = weight_of_worker(None, active, name="decentralized")

    def reduce(updates: Updates, nothing: State) -> tuple[Updates, State]:
        return exact().reduce(updates, nothing, comm)[0].mean, nothing

    mean, _, some = reduce_weighted(reduce, updates, (), comm, number, plain=True)
    if active is not None:
        extra_args["active"] = some
    return across.update(mean, state, params, **extra_args)


def _levels(axis: AxisNames) -> tuple[AxisNames, str]:
    """Splits axes in the slow ones and the fast one."""
    if not isinstance(axis, tuple) or len(axis) < 2:
        raise ValueError(f'hierarchical=True needs two axes, the slow one first, axis=("pod", "chip"), got {axis!r}')
    return axis[0] if len(axis) == 2 else axis[:-1], axis[-1]


def _arrange(reducer: Reducer, hierarchical: bool, bucket_bytes: int | None) -> Reducer:
    if hierarchical:
        # Only the shard that crosses the slow links is compressed.
        reducer = on_two_levels(inner=exact(), outer=reducer)
    return reducer if bucket_bytes is None else bucketed(reducer, bucket_bytes=bucket_bytes, first_bucket_bytes=None)
