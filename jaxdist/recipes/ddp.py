"""Data parallelism as in PyTorch's DDP."""

from collections.abc import Callable, Sequence
from typing import Any

import optax
from jaxtyping import DTypeLike

from .._core.options import takes_options_of
from .._core.types import Like, PyTree
from ..compressors.cast import cast
from ..reducers.bucketed import bucketed
from ..reducers.compressed import compressed
from ..reducers.exact import exact
from ..reducers.per_leaf import per_leaf
from ..reducers.reducer import Reducer
from ..reducers.trees import list_named_leaves
from ..transforms.all_reduce import all_reduce


@takes_options_of(all_reduce)
def ddp(
    reducer: Reducer | None = None,
    *,
    bucket_bytes: int = 25 << 20,
    first_bucket_bytes: int | None = 1 << 20,
    reduce_dtype: DTypeLike | None = None,
    unused: PyTree | Callable[[str, Like], bool] | None = None,
    layers: Sequence[Any] | None = None,
    **options: Any,
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
      layers: the top-level entries of the parameters in forward order, `schedule.forward_order(loss, params, batch)`:
        pass it if they are a dict. `None`: see `bucketed`.
      **options: other arguments: those of `all_reduce`. PyTorch's `join` has `normalize_by="workers"`.

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
      Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", arXiv:2006.15704, 2020.
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
        return all_reduce(buckets, **options)
    return all_reduce(per_leaf(_label(unused), {True: None, False: buckets}), **options)


def _label(unused: PyTree | Callable[[str, Like], bool]) -> Callable[[str, Like], Any]:
    if callable(unused):
        return lambda path, leaf: bool(unused(path, leaf))
    flags = {path: bool(flag) for path, flag in list_named_leaves(unused)}

    def label(path, leaf):
        if path not in flags:
            raise ValueError(f"unused has no entry for the leaf {path!r}; it must be a tree like the parameters")
        return flags[path]

    return label
