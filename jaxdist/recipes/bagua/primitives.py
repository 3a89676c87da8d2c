"""BAGUA's four primitives: centralized or decentralized, in full or low precision."""

from ..._core.types import AxisNames
from ...compressors.base import Compressor
from ...compressors.blocks import min_max_uint8
from ...decentralized.d_psgd import d_psgd
from ...decentralized.difference import dcd_psgd
from ...decentralized.method import Method
from ...reducers.base import Reducer
from ...reducers.bucketed import bucketed
from ...reducers.exact import exact
from ...reducers.feedback import error_feedback
from ...reducers.hierarchical import hierarchical as on_two_levels
from ...reducers.two_shot import two_shot

# The default of the public implementation.
BUCKET_BYTES = 10 << 20


def c_fp_s(*, hierarchical: bool = False, bucket_bytes: int | None = None) -> Reducer:
    """Centralized, full precision, synchronous: `x'_i = (1/W) Σ_j x_j`.

    *On the wire* for `n` entries of float32: an all-reduce, `2(W-1)/W · 4n` bytes. With two levels, on the fast axis of
    `L` a reduce-scatter and an all-gather, `2(L-1)/L · 4n`, and between `M` nodes `2(M-1)/M · 4n/L` for each worker.

    *State*: none.

    Args:
      hierarchical: reduce-scatter within nodes, run the primitive across nodes on each worker's shard, gather: for two
        axes, slow first.
      bucket_bytes: the size of a bucket; each has its collective, which can start while earlier layers compute.

    Returns:
      A reducer, for `jd.all_reduce` and other transformations.

    Raises:
      ValueError: `bucket_bytes` is not positive; at trace time, there are not two levels.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.recipes.bagua.c_fp_s()
      >>> def one_worker(x):
      ...     return reducer.reduce(x, reducer.init(x), jd.comm.over("data"))[0].mean
      >>> jax.vmap(one_worker, axis_name="data")(jnp.array([1.0, 2.0, 6.0])).tolist()
      [3.0, 3.0, 3.0]

    References:
      Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", arXiv:2107.01499, 2021.
    """
    return _arrange(exact(), hierarchical, bucket_bytes)


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

    Args:
      compressor: `Q`; by default `min_max_uint8()`, a byte an entry.
      feedback: use error feedback. Needed below 8 bits; at 8 bits rarely.
      hierarchical: reduce-scatter within nodes, run the primitive across nodes on each worker's shard, gather: for two
        axes, slow first. Shards are encoded, so the numbers differ from those of one level.
      bucket_bytes: each chunk of a bucket has its own range. Smaller is more precise and pays latency more often;
        `None`: one bucket.

    Returns:
      A reducer, for `jd.all_reduce` and other transformations.

    Raises:
      ValueError: feedback for a compressor without a known error, or `bucket_bytes` is not positive; at trace time,
        there are not two levels.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.recipes.bagua.c_lp_s()
      >>> def one_worker(x):
      ...     return reducer.reduce(x, reducer.init(x), jd.comm.over("data"))[0].mean
      >>> x = jnp.linspace(-1.0, 1.0, 400).reshape(4, 100)
      >>> bool(jnp.allclose(jax.vmap(one_worker, axis_name="data")(x)[0], x.mean(0), atol=0.002))
      True

    References:
      Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", arXiv:2107.01499, 2021.
    """
    code = min_max_uint8() if compressor is None else compressor
    reducer = error_feedback(two_shot(code)) if feedback else two_shot(code, server_feedback=False)
    return _arrange(reducer, hierarchical, bucket_bytes)


def d_fp_s(*, interval: int = 1) -> Method:
    """Decentralized, full precision, synchronous: `x_i <- u_i + Σ_j W_ij x_j`.

    It sends the parameters at the start of a step, so messages may be sent while the gradient is computed.

    *On the wire*: one model for each neighbor; on the complete graph one all-reduce.

    *State*: none.

    Args:
      interval: neighbors communicate in every `interval`-th step.

    Returns:
      A method, for `jd.gossip` over any doubly stochastic topology.

    Raises:
      ValueError: `interval` is not positive.

    Example:
      >>> import optax, jaxdist as jd
      >>> tx = jd.gossip(optax.sgd(0.1), jd.topology.ring(8), method=jd.recipes.bagua.d_fp_s())

    References:
      Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", arXiv:2107.01499, 2021.
    """
    return d_psgd(order="combine_then_adapt", interval=interval)


def d_lp_s(compressor: Compressor | None = None, *, interval: int = 1, replicas: bool = True) -> Method:
    """Decentralized, low precision, synchronous: neighbors send compressed steps.

    With the replicas `w_j` of its own model and its neighbors' on each worker:

        c_i = Q(x_i + u_i - w_i + Σ_j W_ij (w_j - w_i));   w_j += c_j for all of them;   x_i = w_i

    *On the wire*: the payload of one model for each neighbor, by default `n + 8` bytes for each leaf of `n`.

    *State*: per-worker, its model and that of each neighbor in float32; without `replicas` two models.

    Args:
      compressor: `Q`; by default `min_max_uint8()`. It must be accurate, about 8 bits.
      interval: neighbors communicate in every `interval`-th step.
      replicas: as in `jd.decentralized.dcd_psgd`; `False` keeps the weighted sum of the neighbors in place of each.

    Returns:
      A method, for `jd.gossip` over a static topology with symmetric weights.

    Raises:
      ValueError: `interval` is not positive; by `gossip`, the topology is directed or changes.

    Example:
      >>> import optax, jaxdist as jd
      >>> tx = jd.gossip(optax.sgd(0.1), jd.topology.ring(8), method=jd.recipes.bagua.d_lp_s())

    References:
      Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", arXiv:2107.01499, 2021.
    """
    return dcd_psgd(min_max_uint8() if compressor is None else compressor, interval=interval, replicas=replicas)


def levels(axis: AxisNames) -> tuple[AxisNames, str]:
    """Splits axes in the slow ones and the fast one."""
    if not isinstance(axis, tuple) or len(axis) < 2:
        raise ValueError(f'hierarchical=True needs two axes, the slow one first, axis=("pod", "chip"), got {axis!r}')
    return axis[0] if len(axis) == 2 else axis[:-1], axis[-1]


def _arrange(reducer: Reducer, hierarchical: bool, bucket_bytes: int | None) -> Reducer:
    if hierarchical:
        reducer = on_two_levels(inner=exact(), outer=reducer)
    return reducer if bucket_bytes is None else bucketed(reducer, bucket_bytes=bucket_bytes, first_bucket_bytes=None)
