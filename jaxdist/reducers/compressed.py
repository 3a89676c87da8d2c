"""One-shot compression: every worker compresses its leaves and sends the payloads once."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import DTypeLike

from .._core.dtypes import working_dtype
from .._core.trees import next_count
from .._core.types import Array, Int, Key, Payload
from ..compressors.base import Compressor
from ..wire.encoded import decode_mean, step_key
from ..wire.flat import stack_by_shape, unstack
from .base import Messages, Reduced, Reducer, forms_of, from_generator


class CompressedState(NamedTuple):
    """Replicated: the key of all draws and the number of reductions so far."""

    key: Key[Array, ""]
    count: Int[Array, ""]


def compressed(compressor: Compressor, *, seed: int = 0) -> Reducer:
    """Averages compressed leaves: `mean = (1/W) Σ_w D(C(x_w))`, `own = D(C(x_w))`.

    *On the wire*: with a summable compressor one all-reduce of the payload, `2(W-1)/W · payload` bytes sent; otherwise
    one all-gather, `(W-1) · payload`: beyond a few workers prefer a two-shot or a hierarchical reducer. All leaves
    share the collective.

    *State* (replicated): a key and a count. Keys differ by step, leaf and, unless the
    compressor shares its key, worker.

    Args:
      compressor: compresses one array.
      seed: the seed of the key.

    Returns:
      The reducer. Its law is exact, up to the rounding of a half-precision sum.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.compressed(jd.top_k(0.5))
      >>> def one_worker(x):
      ...     return reducer.reduce(x, reducer.init(x), jd.comm.over("data"))[0].mean
      >>> jax.vmap(one_worker, axis_name="data")(jnp.array([[1.0, 4.0], [3.0, 2.0]]))[0].tolist()
      [1.5, 2.0]

    References:
      Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", arXiv 1610.02132,
      2017.
    """

    def init(like):
        del like
        return CompressedState(jax.random.key(seed), jnp.zeros((), jnp.int32))

    def messages(updates, state, comm, extras):
        del extras
        leaves, tree = jax.tree.flatten(updates)
        key = step_key(state.key, state.count, comm, shared=compressor.shared_key)
        groups, stacks = stack_by_shape(leaves)
        keys = [jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.array(members)) for members in groups]
        payloads = [jax.vmap(compressor.compress)(stack, key) for stack, key in zip(stacks, keys)]
        arrays, payload_tree = jax.tree.flatten(payloads)
        if compressor.summable:
            received = yield Messages(mean=arrays)
            arrived = payload_tree.unflatten(received.mean)
            means = [_decode(compressor, payload, stack) for payload, stack in zip(arrived, stacks)]
        else:
            received = yield Messages(gather=arrays)
            arrived = payload_tree.unflatten(received.gather)
            means = [_mean_of_decoded(compressor, payload, stack) for payload, stack in zip(arrived, stacks)]
        own = [_decode(compressor, payload, stack) for payload, stack in zip(payloads, stacks)]
        reduced = Reduced(*(tree.unflatten(unstack(groups, stacks)) for stacks in (means, own)))
        return reduced, state._replace(count=next_count(state.count))

    forms = forms_of(compressor, lambda contraction: compressed(contraction, seed=seed))
    return from_generator("compressed", init, messages, forms=forms)


def _decode(compressor: Compressor, payloads: Payload, stack: Array, *, dtype: DTypeLike | None = None) -> Array:
    like = jax.ShapeDtypeStruct(stack.shape[1:], dtype or stack.dtype)
    return jax.vmap(lambda payload: compressor.decompress(payload, like))(payloads)


def _mean_of_decoded(compressor: Compressor, payloads: Payload, stack: Array) -> Array:
    """Payloads `[W, k, ...]` of `k` leaves."""
    wide = working_dtype(stack.dtype)
    return decode_mean(lambda payload: _decode(compressor, payload, stack, dtype=wide), payloads).astype(stack.dtype)
