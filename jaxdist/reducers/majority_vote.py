"""Majority vote: the sign of the sum of the workers' signs."""

import jax
import jax.numpy as jnp

from .._core.descriptions import with_description
from ..compressors.packing import pack, unpack
from ..wire.buffers import concatenate, from_vectors, rows_of_workers
from .messages import from_generator
from .reducer import NO_MAGNITUDES, Law, Messages, Reduced, Reducer, Use


@with_description
def majority_vote() -> Reducer:
    """The sign that most workers see: `mean = sgn(Σ_w sgn(x_w))` with `sgn(0) = +1`, so ties give +1; `own = sgn(x)`.

    The magnitude is gone: an entry that most workers see slightly negative and one of them hugely positive moves down,
    against the mean. For `f(x) = x / 4` with gradients 4 (a quarter of the time) and -1, the mean is 1/4 and the mean
    sign -1/2: it climbs. Use it as in Signum, for averages over many steps, and with a small learning rate:
    `chain(per_worker(ema(0.9)), all_reduce(majority_vote()), scale(-1e-4))`. No error feedback: the contribution
    of a worker to a vote is undefined. An entry that is always zero still gets +1 every step, NaN votes -1. All workers
    vote, with one vote each, so that `examples=` is refused.

    *On the wire* for all `n` entries together: an all-to-all of packed signs and a gather of packed votes,
    `2 (W-1) ⌈n / 8W⌉` bytes sent.

    *State*: none. The law is `Law.NONE`.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.reducers.majority_vote()
      >>> def one_worker(x):
      ...     return reducer.reduce(x, (), jd.comm.over("data"))[0].mean
      >>> x = jnp.array([[9.0, -1.0], [-1.0, -1.0], [-1.0, 2.0]])
      >>> jax.jit(jax.vmap(one_worker, axis_name="data"))(x)[0].tolist()
      [-1.0, -1.0]

    References:
      Bernstein, Wang, Azizzadenesheli, Anandkumar, "signSGD: Compressed Optimization for Non-Convex Problems",
      arXiv:1802.04434, 2018; Bernstein, Zhao, Azizzadenesheli, Anandkumar, "signSGD with Majority Vote is Communication
      Efficient and Fault Tolerant", arXiv:1810.05291, 2018.
    """

    def messages(updates, state, comm, extras):
        leaves, tree = jax.tree.flatten(updates)
        if not leaves:
            return Reduced(updates, updates), state
        signs = [(leaf >= 0).astype(jnp.uint8) for leaf in leaves]
        # Row `j` has the entries whose votes worker `j` counts; rows end with a whole byte.
        ballots = rows_of_workers(concatenate(signs), comm.size)
        received = yield Messages(exchange=[pack(ballots, 1)])
        ayes = jnp.sum(unpack(received.exchange[0], 1, ballots.shape[1]), axis=0, dtype=jnp.int32)
        # sgn(Σ_w sgn(x_w)): at least half of the workers.
        received = yield Messages(gather=[pack((2 * ayes >= comm.size).astype(jnp.uint8), 1)])
        votes = unpack(received.gather[0], 1, ballots.shape[1]).ravel()
        mean, own = (
            [jnp.where(bit == 1, 1, -1).astype(leaf.dtype) for bit, leaf in zip(bits, leaves, strict=True)]
            for bits in (from_vectors([votes], signs), signs)
        )
        return Reduced(tree.unflatten(mean), tree.unflatten(own)), state

    limits = {Use.EXAMPLES: NO_MAGNITUDES}
    return from_generator("majority_vote", lambda like: (), messages, law=Law.NONE, limits=limits)
