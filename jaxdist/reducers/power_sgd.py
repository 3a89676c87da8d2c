"""PowerSGD: low-rank approximation by a warm-started power iteration, which a plain all-reduce can carry."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .. import comm as comms
from .._core.trees import next_count
from .._core.types import Array, Bool, Int, PyTree, Shape
from ..wire.low_rank import (
    View,
    draw,
    group_leaves,
    orthonormal,
    outer,
    places,
    put_back,
    put_back_factors,
    received,
    room,
    stack,
    stack_factors,
    to_send,
    view_of,
    wide,
)
from ..wire.low_rank import squarest_view as squarest_view
from .base import NO_EXTRAS, Messages, Reduced, Reducer, from_generator, run
from .exact import exact
from .reducer_schedule import reducer_schedule


class PowerSGDState(NamedTuple):
    """Agreed. `q` has a right factor `[m, r]` for each compressed leaf and a scalar zero for the others."""

    count: Int[Array, ""]
    q: PyTree


def power_sgd(
    rank: int,
    *,
    one_sided: bool = False,
    min_compression_rate: float | int = 2.0,
    start_step: int = 0,
    warm_start: bool = True,
    own: Literal["local", "paper"] = "local",
    matrix_view: Callable[[Shape], tuple[int, int]] = squarest_view,
    seed: int = 0,
) -> Reducer:
    """Approximates the mean of matrices `M_w [n, m]`: `P = qr(mean(M_w Q))`, `Q = mean(M_wᵀ P)`, `mean = P Qᵀ`.

    `Q` is carried to the next step, so that a few steps are one long power iteration. Put it inside `error_feedback`:
    alone it is biased and loses accuracy. `own = P Q_wᵀ` with this worker's `Q_w`: its mean over workers is the mean,
    and residuals stay bounded as long as noise turns the column space of the mean: what a worker has outside of that
    space is sent when the space comes by. If it stands still (full batches of data that differ between workers), the
    residuals drift apart. The paper's `own="paper"` (every worker subtracts the mean) lets them drift apart for ever in
    any case, which float32 does not survive on unlike data.

    Gradients of any scale: `P` and `Q` are made of orthonormal bases of the carried factors (the paper multiplies by
    `Q` as it is, which has the norm of the last gradient, and overflows from 1e19 on).

    `one_sided=True` does half of that in a step, and the other half in the next one: `P = mean(M_w Q)`,
    `mean = P Qᵀ` with orthonormal `Q`, then `Q = mean(M_wᵀ P)`, `mean = P Qᵀ` with orthonormal `P`. Half the bytes,
    half the latency and fewer products, for an approximation by a factor that is one gradient older.

    *On the wire* for leaves `[m, n]`: two all-reduces, of `r·n` floats for each matrix, then of `r·m` for each matrix
    and every uncompressed leaf whole; together `4·(r·Σ(n+m) + Σ rest)` bytes, of which a worker sends `2(W-1)/W`. All
    in float32 (float64 leaves in float64). One-sided: one all-reduce, of `4·(r·Σn + Σ rest)` bytes and of
    `4·(r·Σm + Σ rest)` bytes in turns.

    *State* (agreed): a count, and `Q [m, r]` for each compressed leaf; one-sided: whose turn it is, `P` and `Q`.

    Args:
      rank: `r`, cut to `min(n, m)`. Higher is more accurate and sends more: 1 is for when bytes are everything, 4 for
        language models, 2 for convolutional nets; double it when the loss falls behind.
      one_sided: see above. For links whose latency decides. Take twice the rank, which costs the same bytes: at equal
        rank it is less accurate, and at rank 1 it may stay far behind.
      min_compression_rate: a leaf is compressed if `(n+m)·r·rate < n·m`. Lower compresses more leaves; 0 compresses all
        matrices.
      start_step: plain means before it. Early gradients are the hardest to compress: try 10 % of training if the loss
        suffers. The same as `reducer_schedule(exact(), power_sgd(rank), start_step)`: it keeps both programs in the
        step.
      warm_start: keep `Q`. Without it each step draws a new one, and accuracy falls.
      own: see above.
      matrix_view: from the shape of a leaf of two or more dimensions to `(n, m)`.
      seed: of the first `Q`, equal on all workers.

    Returns:
      The reducer.

    Raises:
      ValueError: an argument is out of range.

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.power_sgd(rank=1, min_compression_rate=0.0)
      >>> w = jnp.outer(jnp.arange(3.0), jnp.arange(4.0))  # of rank 1: nothing is lost
      >>> reduced, _ = reducer.reduce(w, reducer.init(w), jd.comm.alone())
      >>> bool(jnp.allclose(reduced.mean, w, atol=1e-5))
      True

    References:
      Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
      arXiv 1905.13727, 2019. The local residual: Vogels, Karimireddy, Jaggi, "PowerGossip", arXiv 2008.01425, 2020.
    """
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}")
    if min_compression_rate < 0:
        raise ValueError(f"min_compression_rate must not be negative, got {min_compression_rate}")
    if start_step < 0:
        raise ValueError(f"start_step must not be negative, got {start_step}")
    if own not in ("local", "paper"):
        raise ValueError(f'own must be "local" or "paper", got {own!r}')
    if one_sided and not warm_start:
        raise ValueError("one_sided=True needs warm_start=True: its steps are halves of one iteration")
    view = view_of(rank, min_compression_rate, matrix_view)
    reducer = one_sided_power_sgd(view, own, seed) if one_sided else _two_sided(view, own, warm_start, seed)
    return reducer_schedule(exact(), reducer, start_step) if start_step else reducer


def _two_sided(view: View, own: Literal["local", "paper"], warm_start: bool, seed: int) -> Reducer:
    def draw_right(like, count):
        return draw(like, view, 1, jax.random.fold_in(jax.random.key(seed), count))

    def init(like):
        return PowerSGDState(jnp.zeros((), jnp.int32), draw_right(like, 0))

    def messages(updates, state, comm, extras):
        del extras
        leaves, structure = jax.tree.flatten(updates)
        factors = structure.flatten_up_to(state.q if warm_start else draw_right(updates, state.count))
        groups, rest = group_leaves(leaves, view)
        matrices = [stack(leaves, group) for group in groups]
        # The paper multiplies by Q, which has the norm of the last gradient; the product would have its square. A basis
        # is known before the gradient is. Powers of two round nothing.
        right = orthonormal([stack_factors(factors, group) for group in groups])
        rights = [q * room(q.shape[2], comm.size) for q in right]
        left = [jnp.einsum("knm,krm->knr", m, q) for m, q in zip(matrices, rights)]
        arrived = yield Messages(mean=to_send(groups, left, 0))
        bases = orthonormal(received(groups, arrived.mean, 0))  # the mean's scale does not matter
        # The barrier: XLA:CPU would fold the transposition into the products and do those slower.
        columns = lax.optimization_barrier([jnp.swapaxes(basis, 1, 2) for basis in bases])
        scales = [room(basis.shape[2], comm.size) for basis in bases]
        # Pᵀ M rather than Mᵀ P: XLA:CPU would transpose the whole of M for the latter.
        local = [jnp.einsum("knr,knm->krm", p * scale, m) for p, scale, m in zip(columns, scales, matrices)]
        sent = to_send(groups, local, 1)
        arrived = yield Messages(mean=[*sent, *(wide(leaves[i]) for i in rest)])
        mean = received(groups, arrived.mean, 1)

        means, owns, new_factors = list(leaves), list(leaves), list(factors)
        lefts = [p / scale for p, scale in zip(columns, scales)]
        approximations = [outer(p, q) for p, q in zip(lefts, mean)]
        at = places(groups, state.count >= 0)
        put_back(means, groups, approximations, at)
        owned = approximations if own == "paper" else [outer(p, q) for p, q in zip(lefts, local)]
        put_back(owns, groups, owned, at)
        for i, whole in zip(rest, arrived.mean[len(sent) :], strict=True):
            means[i] = whole.astype(leaves[i].dtype)
        put_back_factors(new_factors, groups, [jnp.swapaxes(q, 1, 2) for q in mean], at, scales)
        reduced = Reduced(structure.unflatten(means), comm.varying(structure.unflatten(owns)))
        return reduced, PowerSGDState(next_count(state.count), structure.unflatten(new_factors))

    return from_generator("power_sgd", init, messages)


class OneSidedState(NamedTuple):
    """Agreed. `left` has `[n, r]` and `right` `[m, r]` for each compressed leaf, a scalar zero for the others.

    `from_right` says which one was renewed last, and is what the next step projects on.
    """

    from_right: Bool[Array, ""]
    left: PyTree
    right: PyTree


def one_sided_power_sgd(view: View, own: Literal["local", "paper"], seed: int) -> Reducer:
    """The reducer that `power_sgd(one_sided=True)` stands for."""

    def init(like):
        left, right = (draw(like, view, side, jax.random.fold_in(jax.random.key(seed), side)) for side in (0, 1))
        return OneSidedState(jnp.ones((), bool), left, right)

    def step(from_right: bool) -> Callable:
        def messages(updates, old, new, always, comm):
            """`old` is what to project on, `new` the factors to renew; `always` is true."""
            leaves, structure = jax.tree.flatten(updates)
            groups, rest = group_leaves(leaves, view)
            fixed, renewed = structure.flatten_up_to(old), structure.flatten_up_to(new)
            matrices = [stack(leaves, group) for group in groups]
            sought = 0 if from_right else 1
            # Known before the gradient is: it needs nothing from this step.
            bases = orthonormal([stack_factors(fixed, group) for group in groups])
            scales = [room(basis.shape[2], comm.size) for basis in bases]
            product = "knm,krm->knr" if from_right else "knm,krn->krm"
            local = [jnp.einsum(product, m, b * scale) for m, b, scale in zip(matrices, bases, scales)]
            sent = to_send(groups, local, sought)
            arrived = yield Messages(mean=[*sent, *(wide(leaves[i]) for i in rest)])
            mean = received(groups, arrived.mean, sought)

            def approximate(factors):
                pairs = [(f, b / scale) for f, b, scale in zip(factors, bases, scales)]
                return [outer(f, b) if from_right else outer(jnp.swapaxes(b, 1, 2), f) for f, b in pairs]

            means, owns = list(leaves), list(leaves)
            approximations = approximate(mean)
            at = places(groups, always)
            put_back(means, groups, approximations, at)
            put_back(owns, groups, approximations if own == "paper" else approximate(local), at)
            for i, whole in zip(rest, arrived.mean[len(sent) :], strict=True):
                means[i] = whole.astype(leaves[i].dtype)
            columns = mean if from_right else [jnp.swapaxes(q, 1, 2) for q in mean]
            put_back_factors(renewed, groups, columns, at, scales)
            reduced = Reduced(structure.unflatten(means), comm.varying(structure.unflatten(owns)))
            return reduced, structure.unflatten(renewed)

        def reduce(comm, updates, state):
            always = state.from_right == from_right
            sides = (state.right, state.left) if from_right else (state.left, state.right)
            reduced, renewed = run(messages(updates, *sides, always, comm), comm)
            left, right = (renewed, state.right) if from_right else (state.left, renewed)
            return reduced, OneSidedState(~state.from_right, left, right)

        return reduce

    def reduce(updates, state, comm, extras=NO_EXTRAS):
        del extras
        with jax.named_scope("power_sgd"):
            return comms.cond(state.from_right, step(True), step(False), comm, updates, state)

    return Reducer(init, reduce)
