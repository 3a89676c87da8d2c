"""One-shot compression: every worker compresses its leaves and sends the payloads once."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.descriptions import with_description
from .._core.trees import next_count
from .._core.types import Array, Float, Like, PyTree, Updates
from .._core.xla_quirks import largest_entry
from ..comm.base import Comm
from ..compressors.codecs import decode_all, encode_all
from ..compressors.compressor import Codec, Compressor, check_compressor
from ..wire.buffers import group_by_shape, stack_by_shape, unstack
from ..wire.codec import TreeCodec, step_key
from .messages import from_generator
from .reducer import DrawState, Extras, Messages, Protocol, Reduced, Reducer, Use, forms_of, init_draws, limits_of
from .trees import tree_norm

DIVIDES = (
    "compressed(divide_by_inflation=True) shortens steps, and error feedback would send later what it leaves out: use "
    "one of the two"
)


@with_description
def compressed(compressor: Compressor, *, seed: int = 0, divide_by_inflation: bool = False) -> Reducer:
    """Averages compressed leaves: `mean = (1/W) Σ_w D(C(x_w))`, `own = D(C(x_w))`.

    *On the wire*: with a summable compressor one all-reduce of the payload, `2(W-1)/W · payload` bytes sent; otherwise
    one all-gather, `(W-1) · payload`: beyond a few workers prefer a two-shot or a hierarchical reducer. All leaves
    share the collective. Islands send the code of the payload instead, if the compressor has a codec.

    *State* (replicated): a key and a count. The law is exact, up to the rounding of a half-precision sum.

    Args:
      compressor: of one array.
      seed: of its draws.
      divide_by_inflation: divide the mean, and `own`, by the measured growth `Σ_w |D(C(x_w))|² / Σ_w |x_w|²` of the
        squared gradients, as Wangni et al. divide their step size: noisy steps become shorter, by `1 + ω` at most in
        expectation. For unbiased compressors under plain SGD; Adam divides by that growth anyway. A gather of 8 bytes
        more, and no codec.

    Raises:
      ValueError: `divide_by_inflation` with a compressor that states no variance, or whose payloads are summed.
        Error feedback around it is refused.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.compressed(jd.top_k(0.5))
      >>> def one_worker(x):
      ...     return reducer.reduce(x, reducer.init(x), jd.comm.over("data"))[0].mean
      >>> jax.jit(jax.vmap(one_worker, axis_name="data"))(jnp.array([[1.0, 4.0], [3.0, 2.0]]))[0].tolist()
      [1.5, 2.0]

    References:
      Wangni et al., "Gradient Sparsification for Communication-Efficient Distributed Optimization", arXiv:1710.09854,
      2017 (the step size).
    """
    check_compressor(compressor)
    if divide_by_inflation and (compressor.variance is None or compressor.summable):
        raise ValueError(
            f"divide_by_inflation is for unbiased compressors whose payloads are gathered, got {compressor}: use it "
            "with qsgd, nuqsgd, gspar, natural or terngrad(clip=None), or leave it out"
        )
    forms = forms_of(compressor, lambda contraction: compressed(contraction, seed=seed))
    limits = limits_of(compressor)
    if divide_by_inflation:
        forms = forms._replace(contraction=None)
        limits[Use.FEEDBACK] = DIVIDES
    elif compressor.codec is not None:
        forms = forms._replace(codec=_message_codec(compressor, compressor.codec))
    messages = partial(_messages, compressor, divide_by_inflation)
    return from_generator("compressed", partial(init_draws, seed), messages, forms=forms, limits=limits)


def _messages(
    compressor: Compressor, divide: bool, updates: Updates, state: DrawState, comm: Comm, extras: Extras
) -> Protocol:
    leaves, tree = jax.tree.flatten(updates)
    key = step_key(state.key, state.count, comm, shared=compressor.shared_key)
    code = TreeCodec(compressor)
    groups, stacks = stack_by_shape(leaves)
    payloads = code.encode(groups, stacks, key)
    arrays, payload_tree = jax.tree.flatten(payloads)
    # own = D(C(x_w))
    owns = code.decode(payloads, stacks)
    if compressor.summable:
        # The mean of the payloads is the payload of the mean.
        received = yield Messages(mean=arrays)
        means = code.decode(payload_tree.unflatten(received.mean), stacks)
    else:
        # mean = (1/W) Σ_w D(C(x_w))
        norms = [jnp.stack([tree_norm(owns), tree_norm(stacks)])] if divide else []
        received = yield Messages(gather=[*arrays, *norms])
        means = code.decode_mean(payload_tree.unflatten(received.gather[: len(arrays)]), stacks)
    if divide:
        factor = _inverse_inflation(received.gather[-1])
        means, owns = ([x * factor.astype(x.dtype) for x in stacks] for stacks in (means, owns))
    mean, own = (tree.unflatten(unstack(groups, stacks)) for stacks in (means, owns))
    return Reduced(mean, own), state._replace(count=next_count(state.count))


def _inverse_inflation(norms: Float[Array, "workers 2"]) -> Float[Array, ""]:
    """`Σ_w |x_w|² / Σ_w |D(C(x_w))|²`, or 1 where nothing was sent."""
    # Squares of quotients of the largest norm neither vanish nor overflow.
    largest = largest_entry(norms)
    after, before = jnp.sum(jnp.square(norms / jnp.where(largest > 0, largest, 1.0)), axis=0)
    return jnp.where(after > 0, before / jnp.where(after > 0, after, 1.0), 1.0)


def _message_codec(compressor: Compressor, codec: Codec) -> Codec:
    """The codec of the arrays of `_messages`: the codes of all leaves, each after its length."""
    return Codec(
        partial(_encode_message, compressor, codec),
        partial(_decode_message, compressor, codec),
        partial(_message_bits, compressor, codec),
        codec.name,
    )


def _encode_message(compressor: Compressor, codec: Codec, arrays: Sequence[Any], like: PyTree[Like]) -> bytes:
    return encode_all(codec, *_unstack_payloads(compressor, arrays, like))


def _decode_message(compressor: Compressor, codec: Codec, body: bytes, like: PyTree[Like]) -> list[np.ndarray]:
    leaves = jax.tree.leaves(like)
    groups = group_by_shape(leaves)
    payloads = iter(decode_all(codec, body, [leaves[i] for members in groups for i in members]))
    stacked = [[jax.tree.leaves(next(payloads)) for _ in members] for members in groups]
    return [np.stack(parts) for members in stacked for parts in zip(*members)]


def _message_bits(compressor: Compressor, codec: Codec, arrays: Sequence[Any], like: PyTree[Like]) -> Float[Array, ""]:
    pairs = zip(*_unstack_payloads(compressor, arrays, like), strict=True)
    return sum((codec.expected_bits(payload, leaf) for payload, leaf in pairs), jnp.zeros(()))


def _unstack_payloads(
    compressor: Compressor, arrays: Sequence[Any], like: PyTree[Like]
) -> tuple[list[Any], list[Like]]:
    """The payload of each leaf and the leaf, in the order in which the arrays are stacked."""
    leaves, rest, payloads, likes = jax.tree.leaves(like), list(arrays), [], []
    for members in group_by_shape(leaves):
        leaf = leaves[members[0]]
        structure = jax.tree.structure(jax.eval_shape(compressor.compress, leaf, jax.random.key(0)))
        stacked, rest = rest[: structure.num_leaves], rest[structure.num_leaves :]
        payloads += [structure.unflatten([x[i] for x in stacked]) for i in range(len(members))]
        likes += [leaf] * len(members)
    return payloads, likes
