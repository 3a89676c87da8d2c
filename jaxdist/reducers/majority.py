"""Majority vote: workers vote on the sign of each entry, one bit in both directions."""

import jax
import jax.numpy as jnp

from .._core.types import Array, UInt
from ..compressors.packing import pack, unpack
from ..wire.flat import concatenate
from .base import Law, Messages, Reduced, Reducer, from_generator


def majority_vote() -> Reducer:
    """The sign that most workers see: `mean = sgn(Σ_w sgn(x_w))` with `sgn(0) = +1`, so ties give +1; `own = sgn(x)`.

    The magnitude is gone: an entry that most workers see slightly negative and one of them hugely positive moves down,
    against the mean. For `f(x) = x / 4` with gradients 4 (a quarter of the time) and -1, the mean is 1/4 and the mean
    sign -1/2: it climbs. Use it as in Signum, for averages over many steps, and with a small learning rate:
    `chain(per_worker(ema(0.9)), all_reduce(majority_vote()), scale(-1e-4))`. No error feedback: the contribution
    of a worker to a vote is undefined. An entry that is always zero still gets +1 every step, NaN votes -1.

    *On the wire* for all `n` entries together: an all-to-all of packed signs and a gather of packed votes,
    `2 (W-1) ⌈n / 8W⌉` bytes sent.

    *State*: none.

    Returns:
      The reducer; its law is `Law.NONE`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.reducers.majority_vote()
      >>> def one_worker(x):
      ...     return reducer.reduce(x, (), jd.comm.over("data"))[0].mean
      >>> jax.vmap(one_worker, axis_name="data")(jnp.array([[9.0, -1.0], [-1.0, -1.0], [-1.0, 2.0]]))[0].tolist()
      [-1.0, -1.0]

    References:
      Bernstein, Wang, Azizzadenesheli, Anandkumar, "signSGD: Compressed Optimization for Non-Convex Problems", arXiv
      1802.04434, 2018. Bernstein, Zhao, Azizzadenesheli, Anandkumar, "signSGD with Majority Vote is Communication
      Efficient and Fault Tolerant", arXiv 1810.05291, 2018.
    """

    def messages(updates, state, comm, extras):
        del extras
        leaves, tree = jax.tree.flatten(updates)
        if not leaves:
            return Reduced(updates, updates), state
        bits = concatenate([(leaf >= 0).astype(jnp.uint8) for leaf in leaves])
        chunk = -(-bits.size // (8 * comm.size)) * 8
        rows = jnp.pad(bits, (0, comm.size * chunk - bits.size)).reshape(comm.size, chunk)
        received = yield Messages(exchange=[pack(rows, 1)])
        ayes = jnp.sum(unpack(received.exchange[0], 1, chunk), axis=0, dtype=jnp.int32)
        received = yield Messages(gather=[pack((2 * ayes >= comm.size).astype(jnp.uint8), 1)])
        votes = unpack(received.gather[0], 1, chunk).ravel()
        return Reduced(tree.unflatten(_signs(votes, leaves)), tree.unflatten(_signs(bits, leaves))), state

    return from_generator("majority_vote", lambda like: (), messages, law=Law.NONE)


def _signs(bits: UInt[Array, " n"], leaves: list[Array]) -> list[Array]:
    out, start = [], 0
    for leaf in leaves:
        part = bits[start : start + leaf.size].reshape(leaf.shape)
        out.append(jnp.where(part == 1, 1, -1).astype(leaf.dtype))
        start += leaf.size
    return out
