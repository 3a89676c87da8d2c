"""One-shot compression: every worker compresses its leaves and sends the payloads once."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import DTypeLike

from .._core.descriptions import with_description
from .._core.dtypes import working_dtype
from .._core.trees import next_count
from .._core.types import Array, Payload, Updates
from ..comm.base import Comm
from ..compressors.base import Compressor
from ..wire.encoded import decode_mean, step_key
from ..wire.flat import stack_by_shape, unstack
from .base import DrawState, Extras, Messages, Protocol, Reduced, Reducer, forms_of, from_generator, init_draws


@with_description
def compressed(compressor: Compressor, *, seed: int = 0) -> Reducer:
    """Averages compressed leaves: `mean = (1/W) Σ_w D(C(x_w))`, `own = D(C(x_w))`.

    *On the wire*: with a summable compressor one all-reduce of the payload, `2(W-1)/W · payload` bytes sent; otherwise
    one all-gather, `(W-1) · payload`: beyond a few workers prefer a two-shot or a hierarchical reducer. All leaves
    share the collective.

    *State* (replicated): a key and a count. The law is exact, up to the rounding of a half-precision sum.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.compressed(jd.top_k(0.5))
      >>> def one_worker(x):
      ...     return reducer.reduce(x, reducer.init(x), jd.comm.over("data"))[0].mean
      >>> jax.vmap(one_worker, axis_name="data")(jnp.array([[1.0, 4.0], [3.0, 2.0]]))[0].tolist()
      [1.5, 2.0]
    """
    forms = forms_of(compressor, lambda contraction: compressed(contraction, seed=seed))
    return from_generator("compressed", partial(init_draws, seed), partial(_messages, compressor), forms=forms)


def _messages(compressor: Compressor, updates: Updates, state: DrawState, comm: Comm, extras: Extras) -> Protocol:
    leaves, tree = jax.tree.flatten(updates)
    key = step_key(state.key, state.count, comm, shared=compressor.shared_key)
    # Leaves of one shape are compressed by one program, each with the key of its position in the tree.
    groups, stacks = stack_by_shape(leaves)
    keys = [jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.array(members)) for members in groups]
    payloads = [jax.vmap(compressor.compress)(stack, key) for stack, key in zip(stacks, keys)]
    arrays, payload_tree = jax.tree.flatten(payloads)
    if compressor.summable:
        # The mean of the payloads is the payload of the mean.
        received = yield Messages(mean=arrays)
        arrived = payload_tree.unflatten(received.mean)
        means = [_decode(compressor, payload, stack) for payload, stack in zip(arrived, stacks)]
    else:
        # mean = (1/W) Σ_w D(C(x_w))
        received = yield Messages(gather=arrays)
        arrived = payload_tree.unflatten(received.gather)
        means = [_mean_of_decoded(compressor, payload, stack) for payload, stack in zip(arrived, stacks)]
    # own = D(C(x_w))
    owns = [_decode(compressor, payload, stack) for payload, stack in zip(payloads, stacks)]
    mean, own = (tree.unflatten(unstack(groups, stacks)) for stacks in (means, owns))
    return Reduced(mean, own), state._replace(count=next_count(state.count))


def _decode(compressor: Compressor, payloads: Payload, stack: Array, *, dtype: DTypeLike | None = None) -> Array:
    like = jax.ShapeDtypeStruct(stack.shape[1:], dtype or stack.dtype)
    return jax.vmap(lambda payload: compressor.decompress(payload, like))(payloads)


def _mean_of_decoded(compressor: Compressor, payloads: Payload, stack: Array) -> Array:
    """The mean over payloads `[W, k, ...]` of `k` leaves, summed in float32 or better."""
    wide = working_dtype(stack.dtype)
    return decode_mean(lambda payload: _decode(compressor, payload, stack, dtype=wide), payloads).astype(stack.dtype)
