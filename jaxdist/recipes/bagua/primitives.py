"""The four primitives: to all workers or to neighbors, in full precision or in a code."""

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

# What public code starts with.
BUCKET_BYTES = 10 << 20


def c_fp_s(*, hierarchical: bool = False, bucket_bytes: int | None = None) -> Reducer:
    """Centralized, full precision, synchronous: `x'_i = (1/W) Σ_j x_j`.

    *On the wire* for `n` entries of float32: an all-reduce, `2(W-1)/W · 4n` bytes. With two levels, on the fast axis of
    `L` a reduce-scatter and an all-gather, `2(L-1)/L · 4n`, and between `M` nodes `2(M-1)/M · 4n/L` for each worker.

    *State*: none.

    Args:
      hierarchical: reduce-scatter within nodes, the primitive across nodes on what each worker owns, gather: for two
        axes, slow first.
      bucket_bytes: one collective for each bucket of so many bytes, which can start while earlier layers compute.

    Returns:
      A reducer, for `jd.all_reduce` or whatever takes one.

    Raises:
      ValueError: the bucket has no bytes; at trace time, there are not two levels.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.recipes.bagua.c_fp_s()
      >>> def one_worker(x):
      ...     return reducer.reduce(x, reducer.init(x), jd.comm.over("data"))[0].mean
      >>> jax.vmap(one_worker, axis_name="data")(jnp.array([1.0, 2.0, 6.0])).tolist()
      [3.0, 3.0, 3.0]

    References:
      Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", arXiv 2107.01499, 2021.
    """
    return _arranged(exact(), hierarchical, bucket_bytes)


def c_lp_s(
    compressor: Compressor | None = None,
    *,
    feedback: bool = False,
    hierarchical: bool = False,
    bucket_bytes: int | None = BUCKET_BYTES,
) -> Reducer:
    """Centralized, low precision, synchronous: code each chunk for its owner, average, code again, gather.

        u_j = Q(x_j + δ_j), δ_j += x_j - u_j;   s = (1/W) Σ_j u_j;   x' = Q(s + ε), ε += s - x'

    with the errors `δ` of the workers and `ε` of the owners of chunks for `feedback=True`, and without them as ByteGrad
    does it. (The paper prints both errors with the other sign, which would not telescope.)

    *On the wire* for a bucket of `n` entries: one all-to-all and one all-gather of chunks of `c = 8⌈n / 8W⌉`,
    `2(W-1) · (8 + c)` bytes with the default code. With two levels: on the fast axis of `L` what `c_fp_s` sends, and
    between `M` nodes these for `n/L` entries and `M` workers.

    *State*: none without feedback (a key and a count); with it, `δ` of `n` per worker and `ε` of `n`, cut over workers.

    Args:
      compressor: `Q`; by default `min_max_uint8()`, a byte an entry.
      feedback: keep what codes lose. Needed below 8 bits; at 8 bits rarely.
      hierarchical: reduce-scatter within nodes, the primitive across nodes on what each worker owns, gather: for two
        axes, slow first. Codes and residuals then are those of shards: the numbers differ from those of one level.
      bucket_bytes: each chunk of a bucket has a range of its own. Smaller is more precise and pays latency more often;
        `None` is one bucket of everything.

    Returns:
      A reducer, for `jd.all_reduce` or whatever takes one.

    Raises:
      ValueError: feedback for a code without known error, the bucket has no bytes; at trace time, there are not two
        levels.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.recipes.bagua.c_lp_s()
      >>> def one_worker(x):
      ...     return reducer.reduce(x, reducer.init(x), jd.comm.over("data"))[0].mean
      >>> x = jnp.linspace(-1.0, 1.0, 400).reshape(4, 100)
      >>> bool(jnp.allclose(jax.vmap(one_worker, axis_name="data")(x)[0], x.mean(0), atol=0.002))
      True

    References:
      Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", arXiv 2107.01499, 2021.
    """
    code = min_max_uint8() if compressor is None else compressor
    reducer = error_feedback(two_shot(code)) if feedback else two_shot(code, server_feedback=False)
    return _arranged(reducer, hierarchical, bucket_bytes)


def d_fp_s(*, interval: int = 1) -> Method:
    """Decentralized, full precision, synchronous: `x_i <- u_i + Σ_j W_ij x_j`.

    What is sent are the parameters that a step starts from, so the messages may travel while the gradient is computed.

    *On the wire*: one model for each neighbor; on the complete graph one all-reduce.

    *State*: none.

    Args:
      interval: neighbors talk in every so many steps.

    Returns:
      A method, for `jd.gossip` over any doubly stochastic topology.

    Raises:
      ValueError: the interval is not positive.

    Example:
      >>> import optax, jaxdist as jd
      >>> tx = jd.gossip(optax.sgd(0.1), jd.topology.ring(8), method=jd.recipes.bagua.d_fp_s())

    References:
      Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", arXiv 2107.01499, 2021.
    """
    return d_psgd(order="combine_then_adapt", interval=interval)


def d_lp_s(compressor: Compressor | None = None, *, interval: int = 1, replicas: bool = True) -> Method:
    """Decentralized, low precision, synchronous: neighbors send codes of how far they have moved.

    With the replicas `w_j` that a worker has of itself and its neighbors:

        c_i = Q(x_i + u_i - w_i + Σ_j W_ij (w_j - w_i));   w_j += c_j for all of them;   x_i = w_i

    *On the wire*: the code of one model for each neighbor, with the default one `n + 8` bytes for each leaf of `n`.

    *State*: per worker a model in float32 for itself and for each neighbor; without `replicas` two models.

    Args:
      compressor: `Q`; by default `min_max_uint8()`. It must be a good one, 8 bits or so.
      interval: neighbors talk in every so many steps.
      replicas: as in `jd.decentralized.dcd_psgd`; `False` keeps the weighted sum of the neighbors in place of each.

    Returns:
      A method, for `jd.gossip` over a static topology with symmetric weights.

    Raises:
      ValueError: the interval is not positive; by `gossip`, the topology is directed or changes.

    Example:
      >>> import optax, jaxdist as jd
      >>> tx = jd.gossip(optax.sgd(0.1), jd.topology.ring(8), method=jd.recipes.bagua.d_lp_s())

    References:
      Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", arXiv 2107.01499, 2021.
    """
    return dcd_psgd(min_max_uint8() if compressor is None else compressor, interval=interval, replicas=replicas)


def levels(axis: AxisNames) -> tuple[AxisNames, str]:
    """The slow axis or axes, and the fast one."""
    if not isinstance(axis, tuple) or len(axis) < 2:
        raise ValueError(f'hierarchical=True needs the names of both, slow first, axis=("pod", "chip"), got {axis!r}')
    return axis[0] if len(axis) == 2 else axis[:-1], axis[-1]


def _arranged(reducer: Reducer, hierarchical: bool, bucket_bytes: int | None) -> Reducer:
    if hierarchical:
        reducer = on_two_levels(inner=exact(), outer=reducer)
    return reducer if bucket_bytes is None else bucketed(reducer, bucket_bytes=bucket_bytes, first_bucket_bytes=None)
