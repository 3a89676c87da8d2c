"""Data parallelism by name: DDP as in PyTorch, and Adam on each worker before a compressed mean."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import optax
from jaxtyping import DTypeLike

from .._core.dtypes import widen
from .._core.types import AxisNames, Like, PyTree
from ..compressors.cast import cast
from ..optimizers.frozen_adam import check_adam
from ..reducers.bucketed import bucketed
from ..reducers.compressed import compressed
from ..reducers.exact import exact
from ..reducers.per_leaf import per_leaf
from ..reducers.reducer import Reducer
from ..reducers.trees import list_named_leaves
from ..transforms.all_reduce import all_reduce
from ..transforms.common import LearningRate, zeros_like
from ..transforms.local_gradients import per_worker


def ddp(
    reducer: Reducer | None = None,
    *,
    bucket_bytes: int = 25 << 20,
    first_bucket_bytes: int | None = 1 << 20,
    reduce_dtype: DTypeLike | None = None,
    unused: PyTree | Callable[[str, Like], bool] | None = None,
    normalize_by: Literal["active", "workers"] = "active",
    layers: Sequence[Any] | None = None,
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """DDP: averages the gradients of all workers in buckets, last layers first. Put it before the optimizer.

    It equals `all_reduce(per_leaf(unused, bucketed(reducer)))`. Each bucket has its own collectives, which a compiler
    can start while earlier layers still compute; on CPU it merges them again. PyTorch observes in the first step in
    which order gradients become ready; here the order comes from a traced loss, `layers=`.

    *On the wire*: what the reducer sends for the leaves of each bucket; the mean of `n` parameters
    `2(W-1)/W · itemsize · n` bytes, with a `reduce_dtype` of 16 bits half of that in float32. Unused leaves: nothing.

    *State*: that of the reducer, for each bucket.

    Args:
      reducer: the communication hook: `error_feedback(power_sgd(rank=4))`, `compressed(qsgd(4))`, or another. It sees
        the leaves of one bucket. By default the mean.
      bucket_bytes: the maximum size of a bucket; PyTorch's 25 MiB. Smaller starts earlier and pays more latency.
      first_bucket_bytes: the maximum size of the bucket that is ready last; PyTorch's 1 MiB.
      reduce_dtype: sends the mean in `jnp.bfloat16` or `jnp.float16`. Gradients are divided by `W` before they are
        added, so that float16 does not overflow; values below 6e-5 lose digits there, so scale the loss
        (`dynamic_loss_scale`) or use bfloat16.
      unused: leaves whose gradients are zero or not wanted, as a tree of booleans like the parameters
        (`transforms.find_unused_parameters` finds those that the loss does not reach) or a function `(path, leaf)`.
        Their updates are zero; put the optimizer in `optax.masked` if it decays weights.
      normalize_by: as in `all_reduce`; PyTorch's `join` has `"workers"`.
      layers: the top-level entries of the parameters in forward order, `schedule.forward_order(loss, params, batch)`:
        pass it if they are a dict. `None`: see `bucketed`.

    Raises:
      ValueError: both a reducer and a `reduce_dtype`; at trace time, an `unused` tree that lacks a leaf, and whatever
        `bucketed` and `all_reduce` refuse.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, jaxdist as jd
      >>> tx = optax.chain(jd.recipes.ddp(unused={"w": False, "head": True}), optax.sgd(0.5))
      >>> params = {"w": jnp.zeros(()), "head": jnp.zeros(())}
      >>> def step(gradient):
      ...     return tx.update({"w": gradient, "head": gradient}, tx.init(params), params)[0]
      >>> updates = jax.jit(jax.vmap(step, axis_name="data"))(jnp.array([1.0, 3.0]))
      >>> updates["w"].tolist(), updates["head"].tolist()
      ([-1.0, -1.0], [-0.0, -0.0])

    References:
      Li et al., arXiv:2006.15704, 2020.
    """
    if reducer is not None and reduce_dtype is not None:
        raise ValueError("reduce_dtype is the dtype of the default mean; with reducer=, leave it out")
    if reducer is None:
        # A cast can be summed as it is: one all-reduce in that dtype.
        reducer = exact() if reduce_dtype is None else compressed(cast(reduce_dtype))
    # Whole leaves, since a reducer may need matrices.
    buckets = bucketed(
        reducer, bucket_bytes=bucket_bytes, first_bucket_bytes=first_bucket_bytes, flat=False, layers=layers
    )
    if unused is None:
        return all_reduce(buckets, axis=axis, normalize_by=normalize_by)
    return all_reduce(per_leaf(_label(unused), {True: None, False: buckets}), axis=axis, normalize_by=normalize_by)


def _label(unused: PyTree | Callable[[str, Like], bool]) -> Callable[[str, Like], Any]:
    if callable(unused):
        return lambda path, leaf: bool(unused(path, leaf))
    flags = {path: bool(flag) for path, flag in list_named_leaves(unused)}

    def label(path, leaf):
        if path not in flags:
            raise ValueError(f"unused has no entry for the leaf {path!r}; it must be a tree like the parameters")
        return flags[path]

    return label


def compressed_adam(
    learning_rate: LearningRate,
    reducer: Reducer,
    *,
    b1: float | int = 0.9,
    b2: float | int = 0.999,
    eps: float | int = 1e-8,
    weight_decay: float | int = 0.0,
    axis: AxisNames = "data",
) -> optax.GradientTransformationExtraArgs:
    """Adam of each worker's own gradients, whose updates are then averaged by a compressing reducer.

        m_w = β₁ m_w + (1-β₁) g_w,  v_w = β₂ v_w + (1-β₂) g_w²;   u = reduce(m̂_w / (√v̂_w + ε));   x -= η (u + λ x)

    With sparse or one-bit codes, Adam *after* the mean sees a gradient of rare spikes: the variance of an entry that
    arrives once in a hundred steps is that of the spike, and its steps are far too short. Here the moments see every
    local gradient, and the code selects among updates of one scale. In float32 it equals
    `chain(per_worker(scale_by_adam()), all_reduce(reducer), add_decayed_weights(λ), scale_by_learning_rate(η))`; for
    parameters in half precision the moments are float32, since `v` would not fall in bfloat16. Low-rank, dense and
    unbiased codes do not need it: use Adam after the mean, which averages the noise of the workers before it divides. A
    worker that passes `examples=0` keeps its moments.

    *On the wire*: what the reducer sends for the gradients. *State*: per worker, `m` and `v` of the size of the
    model, in float32 or better, and two counts; the state of the reducer.

    Args:
      learning_rate: `η`, a number or a schedule. Start at twice the rate of `exact()` or at the same; in our runs 2e-3.
      reducer: `error_feedback(compressed(top_k(0.01)))`, `error_feedback(two_shot(scaled_sign()))`, or another with
        feedback: what is left out of an update is sent later. The residual has no learning rate in it yet.
      b1: `β₁`.
      b2: `β₂`.
      eps: `ε`.
      weight_decay: `λ`, decoupled and not compressed, as in AdamW.

    Raises:
      ValueError: a moment's decay or a weight decay outside of its range, and whatever `all_reduce` refuses.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> tx = jd.recipes.compressed_adam(0.1, jd.error_feedback(jd.compressed(jd.top_k(0.5))), axis=None)
      >>> gradient, state = jnp.array([4.0, -1.0, 0.0, 0.0]), tx.init(jnp.zeros(4))
      >>> updates, _ = jax.jit(tx.update)(gradient, state, jnp.zeros(4))
      >>> [round(float(x), 4) for x in updates]
      [-0.1, 0.1, -0.0, -0.0]

    References:
      Chen, Shen, Huang, Liu, "Quantized Adam with Error Feedback", arXiv:2004.14180, 2020 (with one scale for all
      entries of a quantizer, and a server).
    """
    check_adam(b1, b2, eps, weight_decay)
    return optax.chain(
        per_worker(_in_working_dtype(optax.scale_by_adam(b1=b1, b2=b2, eps=eps)), axis=axis),
        all_reduce(reducer, axis=axis),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )


def _in_working_dtype(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """The transformation in float32 or better; its updates have the dtypes of the gradients."""

    def update_fn(updates, state, params=None):
        wide, state = tx.update(jax.tree.map(widen, updates), state, params)
        return jax.tree.map(lambda u, g: u.astype(g.dtype), wide, updates), state

    return optax.GradientTransformation(lambda params: tx.init(zeros_like(params)), update_fn)
