"""EF21: each worker sends the compressed difference to an estimate of its gradient."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._core.checks import check_range
from .._core.descriptions import with_description
from .._core.dtypes import widen_like
from .._core.types import State, Updates
from ..state.marks import PerWorker, with_value
from .feedback import wide_zeros
from .messages import as_generator, from_generator
from .reducer import HAS_FEEDBACK, Law, Reduced, Reducer, Use, contraction_of, forward_limits
from .trees import cast_like


class EF21State(NamedTuple):
    """`own` is the estimate of this worker's gradient that the others have, `mean` its replicated mean over workers."""

    reducer: State
    own: PerWorker
    mean: Updates
    momentum: PerWorker


@with_description
def ef21(reducer: Reducer, *, eta: float | int = 1.0) -> Reducer:
    """Sends the compressed *change* of each worker's gradient: `c = C(v - h)`, `h += c`; the mean is that of `h`.

    With `v = (1-eta) v + eta x`; `eta=1` is EF21 and `eta<1` EF21-SGDM, which needs no large batches. Workers and their
    agreed mean advance only by what was transmitted, decoded. `own` is `h`.

    *On the wire*: what the reducer sends.

    *State*: per worker `h` (and `v` when `eta<1`), agreed the mean of all `h`; float32 or better, as large as the
    updates.

    Args:
      reducer: compresses the change; a contraction, as in `error_feedback`. Around unbiased codes it loses.
      eta: the weight of the new gradient, in (0, 1]. Lower averages more noise away and follows more slowly; start at
        0.3 with small batches, 1 with full gradients. In a small language model 0.3 ended 8 to 9 % above `exact`, 1 and
        0.1 10 to 15 % (`benchmarks/reports/2026-11-starts`).

    Raises:
      ValueError: `eta` is outside (0, 1], the reducer is no contraction, or its law is `Law.UNBIASED`.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.reducers.ef21(jd.compressed(jd.top_k(0.5)))
      >>> state, x = reducer.init(jnp.zeros(2)), jnp.array([1.0, 4.0])
      >>> reduce = jax.jit(lambda x, state: reducer.reduce(x, state, jd.comm.alone()))
      >>> for _ in range(2):
      ...     reduced, state = reduce(x, state)
      >>> reduced.mean.tolist()
      [1.0, 4.0]

    References:
      Richtárik, Sokolov, Fatkhullin, "EF21: A New, Simpler, Theoretically Better, and Practically Faster Error
      Feedback", arXiv:2106.05203, 2021. Fatkhullin, Tyurin, Richtárik, "Momentum Provably Improves Error Feedback!",
      arXiv:2305.15155, 2023.
    """
    check_range("eta", eta, 0, 1, ends="(]")
    inner = contraction_of(reducer)
    if inner.law == Law.UNBIASED:
        raise ValueError(
            "ef21 adds what arrives to its mean, and the noise of a reducer of Law.UNBIASED would pile up in it: "
            "keep it in a server residual, two_shot(..., server_feedback=True)"
        )

    def init(like):
        # Separate buffers: states may be donated.
        own, mean, momentum = wide_zeros(like), wide_zeros(like), wide_zeros(like) if eta < 1 else ()
        return EF21State(inner.init(jax.tree.map(widen_like, like)), PerWorker(own), mean, PerWorker(momentum))

    def messages(updates, state, comm, extras):
        target, momentum = cast_like(updates, state.mean), state.momentum
        if eta < 1:
            # v = (1-η) v + η x
            target = jax.tree.map(lambda v, x: (1 - eta) * v + eta * x, momentum.value, target)
            momentum = with_value(momentum, target)
        # c = C(v - h), h = h + c; the mean of all h advances by the mean of what was sent.
        change = jax.tree.map(jnp.subtract, target, state.own.value)
        reduced, inner_state = yield from as_generator(inner, change, state.reducer, comm, extras)
        own = jax.tree.map(jnp.add, state.own.value, reduced.own)
        mean = jax.tree.map(jnp.add, state.mean, reduced.mean)
        state = EF21State(inner_state, with_value(state.own, own), mean, momentum)
        return Reduced(cast_like(mean, updates), own), state

    # A server residual is missing from `mean` once, not from each step: that is weaker than Law.TELESCOPING.
    law = Law.EXACT if inner.law <= Law.EXACT else Law.NONE
    limits = forward_limits(inner) | {Use.FEEDBACK: HAS_FEEDBACK}
    return from_generator("ef21", init, messages, law=law, limits=limits)
