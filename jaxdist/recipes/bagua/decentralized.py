"""BAGUA's algorithms with per-worker parameters, which are averaged periodically or with neighbors."""

from typing import Literal

import optax

from ..._core.types import AxisNames
from ...compressors.base import Compressor
from ...decentralized.base import gossip
from ...decentralized.method import Method
from ...local_sgd.base import local_steps
from ...local_sgd.fragments import SyncPeriod
from ...reducers.base import Reducer
from ...reducers.exact import exact
from ...topology.base import Topology
from ...topology.graphs import complete, ring
from ...topology.varying import shift_one
from ...transforms.all_reduce import all_reduce
from .primitives import d_fp_s, d_lp_s, levels

Peers = Literal["all", "shift_one"]


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
      inner: the optimizer of each worker.
      workers: the number of workers along the axis; with `hierarchical` along the slow one.
      peers: `"all"`, or `"shift_one"`: each worker of the first half averages with one of the second half, another one
        each time. Messages do not wait for the gradient. With `"shift_one"` the program chooses among `W/2` messages by
        a condition, which compilers do not overlap with computation: pass `update` the static
        `round=jd.decentralized.due_round(step, graph)`.
      interval: neighbors communicate in every `interval`-th step.
      hierarchical: the workers of a node act as one and each sends a part of the messages; with
        `axis=(slow, fast)`, and `PerWorker(params, axis=slow)`. Gradients are averaged within a node in every step;
        the public implementation averages parameters there when it communicates, which for SGD and `interval=1` is the
        same.
      axis: the mesh axis of the workers, or two.

    Returns:
      A gradient transformation for local gradients; it needs `params`, marked `PerWorker`, and comes last in a chain.

    Raises:
      ValueError: an odd number of workers with `"shift_one"`, unknown `peers`, an `interval` that is not positive, or
        `hierarchical` without two axes; at trace time, as `gossip`.

    Example:
      >>> import optax, jaxdist as jd
      >>> tx = jd.recipes.bagua.decentralized(optax.sgd(0.1), 8, peers="shift_one")

    References:
      Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", arXiv:2107.01499, 2021.
    """
    graphs = {"all": complete, "shift_one": shift_one}
    if peers not in graphs:
        raise ValueError(f'peers must be "all" or "shift_one", got {peers!r}; for other graphs use jd.gossip')
    return _gossip(inner, graphs[peers](workers), d_fp_s(interval=interval), hierarchical, axis)


def low_precision_decentralized(
    inner: optax.GradientTransformation,
    workers: int,
    *,
    compressor: Compressor | None = None,
    interval: int = 1,
    replicas: bool = True,
    hierarchical: bool = False,
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """On a ring, each worker sends its compressed step and applies the decoded step, as its neighbors do.

    With the replicas `w`, `l` and `r` of its own model and its neighbors', after the optimizer's step `u`:

        c = Q(x + u + (l + r)/3 - 5/3 w), sent to both;   l += c_l, r += c_r, w += c;   x <- w

    *On the wire* in every `interval`-th step: `2(n + 8)` bytes for a leaf of `n`, with the default compressor.
    Hierarchically, all-reduced gradients over the fast axis of `L`, and between nodes these bytes divided by `L`.

    *State*: that of the optimizer and three models in float32, per-worker; without `replicas` two models.

    Args:
      inner: the optimizer of each worker.
      workers: the number of workers along the axis; with `hierarchical` along the slow one. With two
        workers, weights are 1/2.
      compressor: `Q`; by default `min_max_uint8()`. It must be accurate, about 8 bits.
      interval: neighbors communicate in every `interval`-th step, all steps since the last time.
      replicas: keep `l` and `r`, as the public implementation does, equal in every bit to the neighbors' models;
        `False` keeps their weighted sum.
      hierarchical: the workers of a node act as one and each sends a part of the payloads; with `axis=(slow, fast)`,
        and `PerWorker(params, axis=slow)`.
      axis: the mesh axis of the workers, or two.

    Returns:
      A gradient transformation for local gradients; it needs `params`, marked `PerWorker`, and comes last in a chain.
      All workers must start from one model.

    Raises:
      ValueError: `interval` is not positive, `hierarchical` without two axes; at trace time, as `gossip`.

    Example:
      >>> import optax, jaxdist as jd
      >>> tx = jd.recipes.bagua.low_precision_decentralized(optax.sgd(0.1), 8)

    References:
      Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", arXiv:2107.01499, 2021. Tang, Gan,
      Zhang, Zhang, Liu, "Communication Compression for Decentralized Training", arXiv:1803.06443, 2018.
    """
    method = d_lp_s(compressor, interval=interval, replicas=replicas)
    return _gossip(inner, ring(workers), method, hierarchical, axis)


def async_model_average(
    inner: optax.GradientTransformation,
    *,
    sync_period: SyncPeriod,
    delay: int = 1,
    warmup_steps: int = 0,
    reducer: Reducer | None = None,
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """Applies the mean of all models some steps late, and keeps the local steps taken meanwhile.

    Every `H` steps a worker stores `x̂ = x`; `d` steps later, `x += mean(x̂) - x̂`. No local step is lost: the mean over
    workers changes by the mean of their steps alone.

    **Bounded staleness, not a clock.** The public implementation averages in a background thread, as often as the
    network allows (every 500 ms), so results depend on its speed. Here a program is a pure function of its inputs: the
    synchronized steps are fixed, and a mean is exactly `d` steps old when it is applied.

    *On the wire* in every `H`-th step, for `n` parameters: one all-reduce of float32, `2(W-1)/W · 4n` bytes, or the
    bytes of the reducer; it does not wait for the gradient of the step in which it runs. Warm-up steps send gradients.

    *State*: that of `local_steps`: per-worker, that of the optimizer and `x̂`, `n` entries; replicated, the mean, `n` in
    float32, `jd.local_sgd.global_params(opt_state)`.

    Args:
      inner: the optimizer of each worker.
      sync_period: `H`, more than `d`, or a schedule.
      delay: `d`, at least 1: with 1 the mean is computed during one step. Longer delays are for studying staleness.
      warmup_steps: the number of first steps, which average gradients instead.
      reducer: of the differences to the last mean; by default `exact()`. `c_lp_s()` sends a quarter.
      axis: the mesh axis of the workers; two for a `hierarchical` reducer.

    Returns:
      A gradient transformation for local gradients; it needs `params`, marked `PerWorker`, and comes last in a chain.

    Raises:
      ValueError: as `local_steps`: a delay below 1 or not below the period.

    Example:
      >>> import optax, jaxdist as jd
      >>> tx = jd.recipes.bagua.async_model_average(optax.sgd(0.1), sync_period=8)

    References:
      Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", arXiv:2107.01499, 2021. Zhou et al.,
      "DaSGD: Squeezing SGD Parallelization Performance in Distributed Training Using Delayed Averaging",
      arXiv:2006.00441, 2020.
    """
    return local_steps(
        inner,
        optax.sgd(1.0),
        sync_period=sync_period,
        delay=delay,
        overlap_correction=True,
        warmup_steps=warmup_steps,
        reducer=reducer,
        axis=axis,
    )


def _gossip(
    inner: optax.GradientTransformation, graph: Topology, method: Method, hierarchical: bool, axis: AxisNames
) -> optax.GradientTransformationExtraArgs:
    """Gossip among all workers, or among nodes whose workers have one model."""
    if not hierarchical:
        return gossip(inner, graph, method=method, axis=axis)
    slow, fast = levels(axis)
    across = gossip(inner, graph, method=method, axis=slow, carriers=fast)
    return optax.with_extra_args_support(optax.chain(all_reduce(exact(), axis=fast), across))
