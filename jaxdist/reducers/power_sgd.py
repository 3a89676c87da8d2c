"""PowerSGD: low-rank approximation by a warm-started power iteration; its factors are averaged by all-reduces.

This is Algorithm 1 of the paper; `error_feedback` around it is Algorithm 2. `examples/from_scratch/power_sgd.py` is the
method in 100 lines of plain JAX.
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .. import comm as comms
from .._core.checks import check_count, check_range
from .._core.descriptions import with_description
from .._core.dtypes import widen
from .._core.trees import next_count
from .._core.types import Array, Bool, Int, Like, PyTree, Updates
from ..comm.base import Comm
from ..wire.low_rank import (
    LEFT,
    RIGHT,
    MatrixGroup,
    View,
    draw_factors,
    group_leaves,
    orthonormal,
    overflow_scale,
    pack_factors,
    stack_factors,
    stack_indices,
    stack_matrices,
    unpack_factors,
    view_of,
    write_factors,
    write_products,
)
from .exact import exact
from .messages import for_real_numbers, from_generator, run
from .reducer import NO_EXTRAS, Extras, Forms, Messages, Protocol, Reduced, Reducer, Result, Use
from .reducer_schedule import reducer_schedule

Own = Literal["local", "paper"]


class PowerSGDState(NamedTuple):
    """Replicated. `q` has a right factor `[m, r]` for each compressed leaf and a scalar zero for the others."""

    count: Int[Array, ""]
    q: PyTree


class OneSidedState(NamedTuple):
    """Replicated. `left` has `[n, r]` and `right` `[m, r]` for each compressed leaf, a scalar zero for the others.

    `from_right`: the right factor was renewed last, and is what the next step projects on.
    """

    from_right: Bool[Array, ""]
    left: PyTree
    right: PyTree


_NO_PARTS = "power_sgd factorizes matrices and sends vectors whole; use a code of entries, such as two_shot(qsgd(4))"


@with_description
def power_sgd(
    rank: int,
    *,
    one_sided: bool = False,
    min_compression_rate: float | int = 2.0,
    start_step: int = 0,
    warm_start: bool = True,
    own: Own = "local",
    seed: int = 0,
) -> Reducer:
    """Approximates the mean of matrices `M_w [n, m]`: `P = qr(mean(M_w Q))`, `Q = mean(M_wᵀ P)`, `mean = P Qᵀ`.

    `Q` is kept for the next step, so that consecutive steps form one long power iteration. Use it inside
    `error_feedback`: alone it is biased. `own = P Q_wᵀ` with this worker's `Q_w`: its mean over workers is the mean.
    Gradients may have any scale.

    `one_sided=True` does half of an iteration in each step: `P = mean(M_w Q)`, `mean = P Qᵀ` with orthonormal `Q`, then
    `Q = mean(M_wᵀ P)`, `mean = P Qᵀ` with orthonormal `P`.

    *On the wire* for leaves `[n, m]`: two all-reduces, of `r·n` floats for each matrix, then of `r·m` and every
    uncompressed leaf; together `4·(r·Σ(n+m) + Σ rest)` bytes, of which a worker sends `2(W-1)/W`, in float32 (float64
    leaves in float64). One-sided: one all-reduce, of `4·(r·Σn + Σ rest)` and `4·(r·Σm + Σ rest)` bytes alternately.

    *State* (replicated): a count, and `Q [m, r]` for each compressed leaf; one-sided: the side to project on, `P`, `Q`.

    Args:
      rank: `r`, at most `min(n, m)`. Higher is more accurate and sends more: 1 for the fewest bytes, 4 for language
        models, 2 for convolutional nets; double it if the loss is worse than with `exact`.
      one_sided: for links with high latency. Use twice the rank, which costs the same bytes.
      min_compression_rate: a leaf is compressed if `(n+m)·r·rate < n·m`. Lower compresses more leaves; 0 compresses all
        matrices.
      start_step: the number of steps with exact means before compression: try 10 % of training if the loss suffers.
      warm_start: keep `Q`. Without it each step draws a new one, and accuracy is lower.
      own: what error feedback subtracts; `"paper"`, the mean, is for comparison.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.power_sgd(rank=1, min_compression_rate=0.0)
      >>> w = jnp.outer(jnp.arange(3.0), jnp.arange(4.0))  # of rank 1: lossless
      >>> reduced, _ = jax.jit(lambda w: reducer.reduce(w, reducer.init(w), jd.comm.alone()))(w)
      >>> bool(jnp.allclose(reduced.mean, w, atol=1e-5))
      True

    References:
      Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
      arXiv:1905.13727, 2019. The local residual, and one side in each step: Vogels, Karimireddy, Jaggi, "Practical
      low-rank communication compression in decentralized deep learning", arXiv:2008.01425, 2020.
    """
    check_count("rank", rank, 1)
    check_count("start_step", start_step, 0)
    check_range("min_compression_rate", min_compression_rate, 0, ends="[]")
    if own not in ("local", "paper"):
        raise ValueError(f'own must be "local" or "paper", got {own!r}')
    if one_sided and not warm_start:
        raise ValueError("one_sided=True needs warm_start=True: each of its steps is half an iteration")
    method = _PowerSGD(view_of(rank, min_compression_rate), own, warm_start, seed)
    # A projection: δ of ‖mean - M‖² ≤ (1 - δ) ‖M‖² depends on the matrix, and may be 0.
    forms, limits = Forms(biased=lambda shape: 0.0), {Use.PARTS: _NO_PARTS}
    if one_sided:
        init = for_real_numbers(method.init_one_sided)
        reducer = Reducer(init, method.reduce_one_sided, forms=forms, limits=limits)
    else:
        reducer = from_generator("power_sgd", method.init, method.messages, forms=forms, limits=limits)
    return reducer_schedule(exact(), reducer, start_step) if start_step else reducer


class _PowerSGD(NamedTuple):
    view: View
    own: Own
    warm_start: bool
    seed: int

    def init(self, like: PyTree[Like]) -> PowerSGDState:
        return PowerSGDState(jnp.zeros((), jnp.int32), self._draw_right(like, 0))

    def _draw_right(self, like: PyTree[Like], count: Array | int) -> PyTree:
        """Gaussian right factors, the same on all workers: from the seed and the count, which are replicated."""
        return draw_factors(like, self.view, RIGHT, jax.random.fold_in(jax.random.key(self.seed), count))

    def messages(self, updates: Updates, state: PowerSGDState, comm: Comm, extras: Extras) -> Protocol:
        """Algorithm 1. Each `yield` sends arrays, and what comes back is their mean over workers.

        Matrices of similar shape are a group: a stack `[k, n, m]`, whose products are one operation and one array on
        the wire. So `M_w`, `P` and `Q` are lists with a stack for each group; vectors and small leaves are the `rest`.
        """
        leaves, structure = jax.tree.flatten(updates)
        groups, rest = group_leaves(leaves, self.view)
        matrices = [stack_matrices(leaves, group) for group in groups]
        last = structure.flatten_up_to(state.q if self.warm_start else self._draw_right(updates, state.count))

        # P_w = M_w Q. Deviation: the paper multiplies by Q itself, which has the norm of the last gradient; the product
        # would have its square. Its basis is known before the gradient is. Bases are rows, [k, r, m].
        right = orthonormal([stack_factors(last, group) for group in groups])
        # Scales are powers of two: nothing is rounded, and sums over entries and workers do not overflow.
        right = [basis * overflow_scale(basis.shape[2], comm.size) for basis in right]
        p_w = [jnp.einsum("knm,krm->knr", m, basis) for m, basis in zip(matrices, right)]
        received = yield Messages(mean=pack_factors(groups, p_w, LEFT))
        # P = qr(mean(P_w)). The scale of the mean does not matter to its basis.
        bases = orthonormal(unpack_factors(groups, received.mean, LEFT))
        # The barrier: XLA:CPU would fold the transposition into the products below, which are then slower.
        p = lax.optimization_barrier([jnp.swapaxes(basis, 1, 2) for basis in bases])

        # Q_w = M_wᵀ P, as its transpose Pᵀ M_w [k, r, m]: XLA:CPU would transpose the whole of M_w for the former.
        scales = [overflow_scale(basis.shape[2], comm.size) for basis in bases]
        q_w = [jnp.einsum("knr,knm->krm", left * scale, m) for left, scale, m in zip(p, scales, matrices)]
        packed = pack_factors(groups, q_w, RIGHT)
        # The rest goes with the second factors: a message of its own would be one more latency.
        received = yield Messages(mean=[*packed, *(widen(leaves[i]) for i in rest)])
        # Q = mean(Q_w)
        q = unpack_factors(groups, received.mean, RIGHT)

        # mean = P Qᵀ, own = P Q_wᵀ. Both Q are too small by the scale; that goes into P, and into the Q that is kept.
        p = [left / scale for left, scale in zip(p, scales)]
        # Always true, and not a constant: `stack_indices` hides indices from XLA:CPU, which then compiles faster.
        at = stack_indices(groups, state.count >= 0)
        own = q if self.own == "paper" else q_w
        reduced = _write(updates, groups, rest, [p, p], [q, own], received.mean[len(packed) :], at, comm)
        kept = write_factors(last, groups, [jnp.swapaxes(new, 1, 2) for new in q], at, scales)
        return reduced, PowerSGDState(next_count(state.count), structure.unflatten(kept))

    def init_one_sided(self, like: PyTree[Like]) -> OneSidedState:
        key = jax.random.key(self.seed)
        left, right = (draw_factors(like, self.view, side, jax.random.fold_in(key, side)) for side in (LEFT, RIGHT))
        return OneSidedState(jnp.ones((), bool), left, right)

    def reduce_one_sided(
        self, updates: Updates, state: OneSidedState, comm: Comm, extras: Extras = NO_EXTRAS
    ) -> Result:
        with jax.named_scope("power_sgd"):
            from_right, from_left = (partial(self._half_iteration, side) for side in (True, False))
            return comms.cond(state.from_right, from_right, from_left, comm, updates, state)

    def _half_iteration(self, from_right: bool, comm: Comm, updates: Updates, state: OneSidedState) -> Result:
        # True in this branch, but not a constant: for `stack_indices`, as above.
        always = state.from_right == from_right
        fixed, renewed = (state.right, state.left) if from_right else (state.left, state.right)
        reduced, renewed = run(self._half_messages(from_right, updates, fixed, renewed, always, comm), comm)
        left, right = (renewed, state.right) if from_right else (state.left, renewed)
        return reduced, OneSidedState(~state.from_right, left, right)

    def _half_messages(
        self, from_right: bool, updates: Updates, fixed: PyTree, renewed: PyTree, always: Array, comm: Comm
    ) -> Protocol:
        """Projects the updates on the `fixed` factors and renews the others."""
        leaves, structure = jax.tree.flatten(updates)
        groups, rest = group_leaves(leaves, self.view)
        matrices = [stack_matrices(leaves, group) for group in groups]
        fixed_factors, factors = structure.flatten_up_to(fixed), structure.flatten_up_to(renewed)

        # P = mean(M Q) or Q = mean(Mᵀ P), with a basis that is known before the gradient is.
        side = LEFT if from_right else RIGHT
        bases = orthonormal([stack_factors(fixed_factors, group) for group in groups])
        scales = [overflow_scale(basis.shape[2], comm.size) for basis in bases]
        product = "knm,krm->knr" if from_right else "knm,krn->krm"
        local = [jnp.einsum(product, m, basis * scale) for m, basis, scale in zip(matrices, bases, scales)]
        packed = pack_factors(groups, local, side)
        received = yield Messages(mean=[*packed, *(widen(leaves[i]) for i in rest)])
        mean = unpack_factors(groups, received.mean, side)

        # mean = P Qᵀ, with one of the two orthonormal
        bases = [basis / scale for basis, scale in zip(bases, scales)]
        own = mean if self.own == "paper" else local
        if from_right:
            left, right = [mean, own], [bases, bases]
        else:
            bases = [jnp.swapaxes(p, 1, 2) for p in bases]
            left, right = [bases, bases], [mean, own]
        at = stack_indices(groups, always)
        reduced = _write(updates, groups, rest, left, right, received.mean[len(packed) :], at, comm)
        columns = mean if from_right else [jnp.swapaxes(q, 1, 2) for q in mean]
        return reduced, structure.unflatten(write_factors(factors, groups, columns, at, scales))


def _write(
    updates: Updates,
    groups: Sequence[MatrixGroup],
    rest: Sequence[int],
    left: Sequence[Sequence[Array]],
    right: Sequence[Sequence[Array]],
    means: Sequence[Array],
    at: Sequence[Array],
    comm: Comm,
) -> Reduced:
    """The trees `mean` and `own` of the products of their factors, `left` and `right`, and of the other `means`."""
    leaves, structure = jax.tree.flatten(updates)
    mean, own = (write_products(leaves, groups, p, q, at) for p, q in zip(left, right, strict=True))
    for i, whole in zip(rest, means, strict=True):
        mean[i] = whole.astype(leaves[i].dtype)
    # `own` is typed as different on each worker, as the residual is, also where it is the mean.
    return Reduced(structure.unflatten(mean), comm.varying(structure.unflatten(own)))
